"""Heads and language models of 8-bit weights: their scales are read, or they are refused."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.core.models import load_model
from draftsmith.drafts.heads import load_head, save_head
from draftsmith.drafts.heads.eagle3 import Eagle3Head
from tests.tiny_models import random_llama, stirred

FP8 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def target():
    return random_llama(1, 64, hidden=160, heads=2)


def coded(weight, block, dtype):
    """Codes, and one scale for each block of the weight."""
    most = 127.0 if dtype == torch.int8 else 448.0
    rows, columns = (math.ceil(size / step) for size, step in zip(weight.shape, block, strict=True))
    scales = torch.empty(rows, columns)
    codes = torch.empty(weight.shape, dtype=dtype)
    for i in range(rows):
        for j in range(columns):
            part = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scales[i, j] = weight[part].abs().max() / most
            values = weight[part] / scales[i, j]
            codes[part] = (values.round() if dtype == torch.int8 else values).to(dtype)
    return codes, scales


# Block, dtype, name of the scale, its shape in the file, and `weight_block_size` of the config.
WAYS = {
    "FP8 of a tensor": ((10**4, 10**4), FP8, "_scale", (), None),
    "FP8 of rows, flat": ((1, 10**4), FP8, "_scale", (-1,), None),
    "FP8 of rows": ((1, 10**4), FP8, "_scale", None, None),
    "int8 of rows": ((1, 10**4), torch.int8, "_scale", None, None),
    "int8 of groups": ((1, 32), torch.int8, "_scale", None, None),
    "FP8 of blocks": ((128, 128), FP8, "_scale_inv", None, None),
    "FP8 of other blocks": ((48, 64), FP8, "_scale_inv", None, [48, 64]),
}


@pytest.mark.parametrize("way", WAYS)
def test_scales_are_read(way, target, tmp_path):
    block, dtype, ending, shape, size = WAYS[way]
    head = stirred(Eagle3Head.fresh(target), 0.02)
    save_head(head, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    expected = dict(tensors)
    for name, weight in list(tensors.items()):
        if weight.dim() < 2 or "proj" not in name:
            continue
        codes, scales = coded(weight, block, dtype)
        tensors[name] = codes
        tensors[name + ending] = scales if shape is None else scales.reshape(shape)
        tensors[name.replace("weight", "input_scale")] = torch.tensor(0.5)
        whole = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        expected[name] = codes.float() * whole[: weight.shape[0], : weight.shape[1]]
        assert (expected[name] - weight).abs().max() < 0.07 * weight.abs().max()
    save_file(tensors, tmp_path / "model.safetensors")
    if size is not None:
        config = json.loads((tmp_path / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": size}
        (tmp_path / "config.json").write_text(json.dumps(config))
    found = load_head(tmp_path, target).state_dict()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "method", "beside"),
    [
        (FP8, None, {}),
        (torch.int8, "compressed-tensors", {}),
        (torch.uint8, "modelopt", {"_scale": torch.ones(160, 20)}),
        (torch.int8, None, {"_scale": torch.tensor(0.1), "_zero_point": torch.tensor(3)}),
        (FP8, "fp8", {"_scale_inv": torch.ones(7, 3)}),
    ],
)
def test_weights_without_scales_are_refused(dtype, method, beside, target, tmp_path, golden):
    save_head(Eagle3Head.fresh(target), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "midlayer.mlp.down_proj.weight"
    tensors[name] = tensors[name].to(dtype)
    tensors |= {name + ending: tensor for ending, tensor in beside.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"quantization_config": {"quant_method": method}} if method else {}
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = f"'{name}' is {str(dtype).removeprefix('torch.')}"
    if method:
        said += f" of 'quantization_config' {method}"
    with golden.raises():
        load_head(tmp_path, target)


@pytest.mark.parametrize("method", [None, "modelopt"])
@pytest.mark.parametrize("dtype", [FP8, torch.int8])
def test_a_language_model_of_eight_bits_without_scales_is_refused(
    dtype, method, target, tmp_path, golden
):
    target.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = (tensors[name] * 100).to(dtype)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"quantization_config": {"quant_method": method}} if method else {}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with golden.raises():
        load_model(str(tmp_path), device="cpu")


def four_bits(weight, group):
    """Codes, one scale for each group in fp32, and the values that they stand for."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    parts = weight.unflatten(-1, (-1, group))
    scales = torch.exp2((parts.abs().amax(-1) / 6).log2().ceil())
    scaled = parts / scales[..., None]
    codes = (scaled.abs()[..., None] - table).abs().argmin(-1)
    values = (table[codes] * scaled.sign() * scales[..., None]).flatten(-2)
    codes = (codes + 8 * (scaled < 0)).flatten(-2).to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, scales, values


@pytest.mark.parametrize("by", ["modelopt", "compressed-tensors", "MXFP4"])
def test_four_bits_are_read(by, target, tmp_path):
    """Both ways in which NVFP4 is published, and MXFP4."""
    save_head(stirred(Eagle3Head.fresh(target), 0.02), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    expected = dict(tensors)
    for name, weight in list(tensors.items()):
        if weight.dim() < 2 or "proj" not in name:
            continue
        codes, scales, expected[name] = four_bits(weight, 32 if by == "MXFP4" else 16)
        assert (expected[name] - weight).abs().max() < 0.4 * weight.abs().max()
        del tensors[name]
        if by == "MXFP4":
            tensors |= {f"{name}_packed": codes}
            tensors |= {f"{name}_scale": (scales.log2() + 127).to(torch.uint8)}
        elif by == "modelopt":
            tensors |= {name: codes, f"{name}_scale_2": torch.tensor(2.0**-6)}
            tensors |= {f"{name}_scale": (scales * 2**6).to(FP8)}
        else:
            tensors |= {f"{name}_packed": codes, f"{name}_global_scale": torch.tensor([2.0**6])}
            tensors |= {f"{name}_scale": (scales * 2**6).to(FP8)}
            tensors[name.replace("weight", "input_global_scale")] = torch.tensor([0.5])
    save_file(tensors, tmp_path / "model.safetensors")
    found = load_head(tmp_path, target).state_dict()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], atol=0, rtol=0)
