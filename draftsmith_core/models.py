"""Causal language models: load them, tell them apart by their weights, and check that a draft fits its target."""

import hashlib
import importlib
import logging
import math
import os
from collections.abc import Iterable
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from draftsmith_core.errors import InputError, first_line
from draftsmith_core.io import canonical_json
from draftsmith_core.model_options import Quantize as Quantize
from draftsmith_core.packages import require_package
from draftsmith_core.sources import announce_remote_code, check_source, quiet, why_not
from draftsmith_core.tokenization import Tokenizer

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FINGERPRINT_VALUES = 2**22
_NOT_ARCHITECTURE = frozenset({"transformers_version", "dtype", "torch_dtype", "use_cache", "architectures"}) | {
    "quantization_config"
}


def resolve_device(device: str) -> torch.device:
    """The device of an option; `auto` is this process's CUDA device, or the CPU without one or if the launcher asks."""
    if device == "auto":
        if not torch.cuda.is_available() or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true"):
            return torch.device("cpu")
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    try:
        resolved = torch.device(device)
    except RuntimeError:
        raise InputError(f"--device {device}: not a device; use auto, cpu, cuda or cuda:N") from None
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"--device {device}: this machine has no CUDA device; use auto or cpu")
    try:
        torch.zeros(1, device=resolved).item()
    except (RuntimeError, NotImplementedError, AssertionError):
        raise InputError(f"--device {device}: this machine has no such device; use auto or cpu") from None
    return resolved


def load_model(
    name: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    trust_remote_code: bool = False,
    quantize: Quantize | None = None,
) -> PreTrainedModel:
    """A causal LM in eval mode from a local directory or the hub, tried on a few tokens. Weights are safetensors where
    it has them, else pickles read with `weights_only=True`, which builds tensors and runs no code.

    dtype `auto` is fp32 on a CPU (half precision is slow there and its ties differ) and the checkpoint's own on an
    accelerator. `quantize="nf4"` keeps the linear layers but the output projection in 4 bits with doubly quantised
    scales (QLoRA, arXiv 2305.14314, section 3) through bitsandbytes; everything else, and all arithmetic, is in
    `dtype`, where `auto` is then bf16 on an accelerator. Such a model stays on the device that it was loaded on.
    Raises InputError, one line, for a name that is not a loadable model, a device that cannot do it, a checkpoint that
    does not fit its config, and logits that are not finite.
    """
    place = resolve_device(device)
    if dtype != "auto" and dtype not in DTYPES:
        raise InputError(f"--dtype {dtype}: use auto, {', '.join(DTYPES)}")
    if quantize not in (None, "none", "nf4"):
        raise InputError(f"--quantize {quantize}: use none or nf4")
    wanted: Any = DTYPES.get(dtype, torch.float32 if place.type == "cpu" else "auto")
    options: dict[str, Any] = {}
    if quantize == "nf4":
        wanted = torch.bfloat16 if wanted == "auto" else wanted
        options = {"device_map": {"": place}, "quantization_config": _nf4(place, wanted)}
    quiet()
    # For a checkpoint on the hub without safetensors transformers would ask a service to convert it, in a thread.
    os.environ["DISABLE_SAFETENSORS_CONVERSION"] = "1"
    check_source(name)
    if trust_remote_code:
        announce_remote_code(name)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=wanted,
            trust_remote_code=trust_remote_code,
            weights_only=True,
            # Weights of another shape are then listed in `told`, and refused below by name.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **options,
        )
        model, told = loaded
    except Exception as error:
        how = " in nf4" if options else ""
        reason = why_not(name, error, "model")
        raise InputError(f"{name}: no causal language model could be loaded from it{how}: {reason}") from None
    _check_weights(name, type(model).__name__, told)
    if getattr(model, "is_quantized", False):
        _exact_on_cpu(model)
    else:
        model.to(place)
    model.eval()
    check_finite(name, model)
    check_logits(name, model)
    return cast(PreTrainedModel, model)


def _check_weights(name: str, kind: str, told: dict[str, Any]) -> None:
    """InputError for weights that are missing or have the wrong shape, which transformers draws at random instead;
    a warning for weights that the model does not use. told: what `from_pretrained` says of the loading.
    """
    if missing := sorted(told["missing_keys"]):
        raise InputError(
            f"{name}: lacks {len(missing)} weights of a {kind} (such as {missing[0]}); "
            f"it is another kind of model (a head?) or an incomplete copy"
        )
    if mismatched := sorted(told["mismatched_keys"], key=str):
        key, there, wanted = mismatched[0]
        raise InputError(
            f"{name}: {len(mismatched)} weights have another shape than its config.json gives them (such as {key}: "
            f"{list(there)} in the file, {list(wanted)} by the config); take both from one checkpoint"
        )
    if unused := sorted(told["unexpected_keys"]):
        log.warning("%s: %d of its weights have no place in a %s (such as %s)", name, len(unused), kind, unused[0])


@torch.inference_mode()
def check_finite(name: str, model: nn.Module) -> None:
    """InputError, naming the first, for weights that hold NaN or inf.

    A forward alone would not show them all: attention kernels can turn a NaN into a finite number.
    """
    for key, weight in model.named_parameters():
        # A sum is NaN or inf when one of its terms is, and needs one pass and no memory; it can also overflow.
        if weight.is_floating_point() and not (weight.sum(dtype=torch.float32).isfinite() or weight.isfinite().all()):
            raise InputError(f"{name}: its weight {key} holds NaN or inf; the checkpoint is damaged, copy it again")


@torch.inference_mode()
def check_logits(name: str, model: PreTrainedModel) -> None:
    """InputError, naming the model, unless a forward of a few tokens runs, gives finite logits, and reads no token
    ahead, as encoders (BERT) do, which transformers loads as causal models too.
    """
    size = vocabulary_size(model)
    # From inside the vocabulary: at its ends are padding, and markers of images and sound that need an input.
    first, second, third = size // 7, size // 5, size // 3
    ids = torch.tensor([[first, second, third, size // 2], [first, second, third, second]], device=model.device)
    try:
        logits = model(input_ids=ids, use_cache=False).logits
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"{name}: fails on a forward of four tokens ({what})") from None
    if not logits.isfinite().all():
        raise InputError(
            f"{name}: its logits are not finite although its weights are; {dtype_name(model)} may be too narrow for "
            f"it, try --dtype bfloat16 or float32"
        )
    # The rows differ in their last token alone; far more than rounding, so that no causal model is refused.
    before = logits[:, :3].float()
    if (before[0] - before[1]).abs().max() > 0.1 * before.std():
        raise InputError(
            f"{name}: {type(model).__name__} reads the tokens behind a place to say what stands there (an encoder, "
            f"trained on masks?), so it cannot continue a text; use a causal language model"
        )


def _nf4(place: torch.device, compute: torch.dtype) -> BitsAndBytesConfig:
    """What asks transformers for nf4; InputError where bitsandbytes is missing or does not know the device."""
    require_package("bitsandbytes", "--quantize nf4", "use --quantize none")
    known = importlib.import_module("bitsandbytes").supported_torch_devices
    if place.type not in known:
        raise InputError(
            f"--quantize nf4: bitsandbytes does not run on {place.type} (only {', '.join(sorted(known))}); "
            f"use --quantize none"
        )
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=compute
    )


def _exact_on_cpu(model: PreTrainedModel) -> None:
    """Turn off the fast path that bitsandbytes has for 4-bit layers on AVX-512 CPUs.

    It rounds to bf16 whatever the dtype is, rewrites the weights at the first call and fails on widths that are no
    multiple of 32, so decoding and what it is compared with would use different weights.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def quantization(model: nn.Module) -> Quantize:
    """How the linear layers of a model are kept, as `--quantize` takes it."""
    return "nf4" if any(_quant_state(parameter) is not None for parameter in model.parameters()) else "none"


def _quant_state(parameter: Tensor) -> Any:
    """bitsandbytes' scales and true shape of a 4-bit parameter; None for any other."""
    return getattr(parameter, "quant_state", None)


def _scales(state: Any) -> dict[str, Tensor]:
    """The tensors of a quantisation state that differ from weight to weight."""
    values: dict[str, Any] = state.as_dict()
    names = ("absmax", "nested_absmax", "nested_offset")
    return {name: torch.as_tensor(values[name]) for name in names if name in values}


def parameter_count(model: nn.Module) -> int:
    """Parameters of a model, 4-bit ones counted one by one although two share a byte."""
    states = [(parameter, _quant_state(parameter)) for parameter in model.parameters()]
    return sum(parameter.numel() if state is None else math.prod(state.shape) for parameter, state in states)


def memory_bytes(model: nn.Module) -> int:
    """Bytes that the tensors of a loaded model take: parameters, buffers and the scales of 4-bit parameters."""
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    for parameter in model.parameters():
        if (state := _quant_state(parameter)) is not None:
            tensors += _scales(state).values()
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def fingerprint(model: PreTrainedModel) -> str:
    """16 hex digits that change with the architecture or the weights.

    Hashes the configuration (less where it was loaded from, by which version, and as what) and every parameter, read
    as fp32; of a 4-bit parameter its codes and scales, so that a quantised model has another fingerprint than the
    checkpoint that it came from. Of a parameter with more than 4 M values it takes every n-th, about 4 M of them: a
    change to a few values of a large matrix can go unseen, and a 70B model takes minutes instead of an hour.
    """
    config = {k: v for k, v in model.config.to_dict().items() if not k.startswith("_") and k not in _NOT_ARCHITECTURE}
    names = sorted(name for name, _ in model.named_parameters())
    # Read one by one through their modules, because decoders keep weights packed (`decode.packed_weights`).
    return hash_tensors(config, ((name, attrgetter(name)(model)) for name in names))


@torch.no_grad()
def hash_tensors(config: dict[str, Any], tensors: Iterable[tuple[str, Tensor]]) -> str:
    """16 hex digits of a configuration and named tensors, sampled as `fingerprint` says."""
    digest = hashlib.sha256(canonical_json(config).encode())
    for name, tensor in tensors:
        state = _quant_state(tensor)
        scales = {} if state is None else _scales(state)
        for part, values in ((name, tensor.data), *((f"{name}.{key}", value) for key, value in scales.items())):
            flat = values.reshape(-1)
            # Odd, so that it does not step through a matrix column by column.
            stride = flat.numel() // _FINGERPRINT_VALUES | 1
            digest.update(f"{part}{tuple(values.shape)}".encode())
            digest.update(flat[::stride].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def dtype_name(model: PreTrainedModel) -> str:
    """The dtype of a model as `--dtype` takes it; of a 4-bit model that of its arithmetic."""
    return str(model.dtype).removeprefix("torch.")


def eos_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """The tokens that end a generation: the generation config's, else the model config's. May be empty."""
    eos = getattr(model.generation_config, "eos_token_id", None)
    if eos is None:
        eos = getattr(model.config, "eos_token_id", None)
    return end_tokens(str(model.name_or_path), eos)


def end_tokens(name: str, eos: Any) -> tuple[int, ...]:
    """What a config's `eos_token_id` names: one id, several or None. InputError where that is something else."""
    ids = () if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (eos,)
    if wrong := [each for each in ids if isinstance(each, bool) or not isinstance(each, int)]:
        raise InputError(f"{name}: its eos_token_id names {wrong[0]!r}, which is no token id; write ids")
    return ids


def text_config(model: PreTrainedModel) -> Any:
    """The language model's part of a configuration."""
    return model.config.get_text_config(decoder=True)


def context_length(model: PreTrainedModel) -> int | None:
    """How many tokens the model's positions reach, or None when its config does not say.

    Where rotary frequencies change once a text is longer than the pretrained context (longrope), it is that context:
    beyond it every cached key would have to be computed again.
    """
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope" and isinstance(rope.get("original_max_position_embeddings"), int):
        return int(rope["original_max_position_embeddings"])
    for key in ("max_position_embeddings", "n_positions"):
        value = getattr(model.config, key, None)
        if isinstance(value, int):
            return value
    return None


def vocabulary_size(model: PreTrainedModel) -> int:
    """How many logits the model gives per position."""
    size = model.config.get_text_config().vocab_size
    assert isinstance(size, int)
    return size


def check_tokenizer(name: str, model: PreTrainedModel, tokenizer: Tokenizer) -> None:
    """InputError when the tokenizer knows tokens that the model `name` does not."""
    if len(tokenizer) > vocabulary_size(model):
        raise InputError(
            f"{name}: its vocabulary has {vocabulary_size(model)} tokens, fewer than the tokenizer's "
            f"{len(tokenizer)}; use the tokenizer that the model was trained with"
        )
