"""Causal language models: load them, tell them apart by their weights, check them, and measure
memory.
"""

import hashlib
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, cast, get_args
from weakref import WeakKeyDictionary

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from draftsmith.core.devices import resolve_device
from draftsmith.core.errors import InputError, ran_out, require_package
from draftsmith.core.hidden_states import some_tokens, without_layers
from draftsmith.core.hub import offline_if_unreachable, quiet, why_not
from draftsmith.core.io import JsonObject, canonical_json, read_json
from draftsmith.core.large_target import (
    INSTEAD,
    divided,
    in_parts,
    is_divided,
    own_share,
    spread,
    values_of,
    whole,
)
from draftsmith.core.model_configs import Loading, read_config
from draftsmith.core.ranks import from_each
from draftsmith.core.records import check_weights
from draftsmith.core.settings import Quantize as Quantize
from draftsmith.core.sources import check_source, no_model
from draftsmith.core.tokenization import Tokenizer
from draftsmith.core.transformers_api import AutoHfQuantizer, cached_file

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FINGERPRINT_VALUES = 2**22
_NOT_ARCHITECTURE = (
    "transformers_version",
    "dtype",
    "torch_dtype",
    "use_cache",
    "architectures",
    "quantization_config",
    "distributed_config",
)


@quiet()
def load_model(
    name: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    trust_remote_code: bool = False,
    quantize: Quantize | None = None,
    revision: str | None = None,
    layers: bool = True,
    target_parallel: int = 1,
    target_device_map: str | None = None,
) -> PreTrainedModel:
    """A causal LM in eval mode from a local directory or the hub, tried on a few tokens. Pickled
    weights are read with `weights_only=True`, which runs no code.

    dtype `auto` is fp32 on a CPU and the checkpoint's own on an accelerator. `quantize="nf4"` keeps
    the linear layers but the output projection in 4 bits with doubly quantised scales (QLoRA, arXiv
    2305.14314, section 3), all else and all arithmetic in `dtype`, where `auto` is then bf16 on an
    accelerator. Such a model stays on its device.
    revision: branch, tag or commit on the hub. layers: False for embedding, final norm and output
    projection alone, in 16 bits where the layers have fewer; hidden states then come from files.
    target_parallel: how many neighbouring processes hold the model together; all must call this.
    target_device_map: how its layers are spread over devices and disk (`core.large_target`).
    Raise InputError for a name that is not a loadable model, missing weights, and values that are
    not finite.
    """
    target_device = resolve_device(device)
    if quantize not in (None, *get_args(Quantize)):
        raise InputError(f"quantize: expected none or nf4, got {quantize!r}")
    options: Loading = {
        "dtype": weights_dtype(dtype, target_device),
        "trust_remote_code": trust_remote_code,
        "revision": revision or "main",
        "weights_only": True,
        # Weights of another shape are then listed in `info`, and refused below by name.
        "ignore_mismatched_sizes": True,
        "output_loading_info": True,
    }
    if quantize == "nf4":
        options |= _in_four_bits(options["dtype"], target_device)
    check_source(name)
    check_weights(Path(name))
    if Path(name).is_dir() and (lacks := no_model(Path(name))):
        raise InputError(f"{name}: {lacks}")
    count = 0
    try:
        with offline_if_unreachable(name):
            if target_parallel > 1:
                options["distributed_config"] = divided(name, target_parallel, options)
            if target_device_map is not None:
                options |= spread(name, target_device_map, target_device, options)
            if not layers:
                count = _leave_out_layers(name, options)
            loaded: Any = AutoModelForCausalLM.from_pretrained(name, **options)
        model, info = loaded
        if not getattr(model, "is_quantized", False) and not in_parts(model):
            model.to(target_device)
    except InputError:
        raise
    except Exception as error:
        if ran_out(error):
            more = "divide a target over (more) processes by --target_parallel N"
            raise InputError(f"{name}: does not fit into memory; {more}; {INSTEAD}") from None
        raise InputError(
            f"{name}: no causal language model could be loaded: {why_not(name, error)}"
        ) from None
    if not layers:
        info["unexpected_keys"] = []
        without_layers(model, count)
    _check_weights(name, type(model).__name__, info)
    _check_codes(name, model)
    model.eval()
    _check_values(name, model)
    return cast(PreTrainedModel, model)


def _in_four_bits(dtype: torch.dtype | str, device: torch.device) -> Loading:
    require_package("bitsandbytes", "--quantize nf4", "use --quantize none")
    if dtype == "auto":
        dtype = torch.bfloat16
    configuration = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"dtype": dtype, "device_map": {"": device}, "quantization_config": configuration}


def _check_values(name: str, model: Any) -> None:
    for module in model.modules():
        # This fast path of bitsandbytes rounds to bf16 and fails on widths that are no multiple of
        # 32.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    check_causal(model)
    if is_divided(model):
        from_each(lambda: check_finite(name, model))
        # Later, some processes may need it alone.
        _fingerprints[model] = fingerprint(model)
    else:
        check_finite(name, model)
    _check_logits(name, model)


def _leave_out_layers(name: str, options: Loading) -> int:
    """Add a configuration with no layers to the options; return how many the model has."""
    config = read_config(name, **options)
    text = config.get_text_config(decoder=True)
    count = int(text.num_hidden_layers)
    text.num_hidden_layers = 0
    # What is loaded here is not quantised.
    vars(config).pop("quantization_config", None)
    options["config"] = config
    return count


def weights_dtype(dtype: str, device: torch.device) -> torch.dtype | str:
    """The dtype that a model is loaded in; "auto" is the checkpoint's own."""
    called = str(dtype).removeprefix("torch.")
    if called == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if called not in DTYPES:
        raise InputError(f"--dtype {dtype}: use auto, {', '.join(DTYPES)}")
    return DTYPES[called]


def _check_weights(name: str, class_name: str, info: Mapping[str, Any]) -> None:
    """Raise InputError for missing or mismatched weights, which transformers draws at random; warn
    of unused ones.
    """
    missing = sorted(info["missing_keys"])
    mismatched = sorted(info["mismatched_keys"], key=str)
    unused = sorted(info["unexpected_keys"])
    if missing:
        raise InputError(
            f"{name}: lacks weights of a {class_name} ({len(missing)}, such as {missing[0]}); it "
            "is a head or an incomplete copy"
        )
    if mismatched:
        key, in_file, by_config = mismatched[0]
        shapes = f"{list(in_file)} in the file, {list(by_config)} by the config"
        raise InputError(
            f"{name}: its weights do not fit its config.json ({len(mismatched)}, such as {key}: "
            f"{shapes})"
        )
    if unused:
        several = f"{len(unused)}, such as {unused[0]}"
        log.warning("%s: holds weights that a %s does not use (%s)", name, class_name, several)


# In headers of safetensors.
_CODES = ("F8_E4M3", "F8_E5M2", "I8", "U8")


def _check_codes(name: str, model: PreTrainedModel) -> None:
    """Raise InputError for weights of 8 bits whose scales transformers does not read: it takes them
    for values.
    """
    directory = Path(name)
    if not directory.is_dir():
        config = cached_file(
            name, "config.json", revision=getattr(model.config, "_commit_hash", None)
        )
        directory = Path(config or name).parent
    values = read_json(directory / "config.json", "the config of a model")
    quantization = {"quant_method": "none"} | (values.get("quantization_config") or {})
    if AutoHfQuantizer.supports_quant_method(quantization):
        return
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118
                dtype = opened.get_slice(key).get_dtype()
                if key.endswith("weight") and dtype in _CODES:
                    raise InputError(
                        f"{file}: '{key}' is {dtype}, and transformers reads no scales for it "
                        f"('quantization_config' in config.json: {quantization['quant_method']}); "
                        "use the model in 16 bits"
                    )


@torch.inference_mode()
def check_finite(name: str, model: nn.Module) -> None:
    """Raise InputError that names the first weight with NaN or inf; attention can turn a NaN into a
    finite number.
    """
    for key, weight in model.named_parameters():
        if not weight.is_floating_point():
            continue
        # A sum is NaN or inf when one of its terms is, and needs one pass and no memory; it can
        # also overflow.
        share = own_share(values_of(model, key, weight))
        total = share.sum(dtype=torch.float32)
        if not total.isfinite() and not share.isfinite().all():
            raise InputError(
                f"{name}: its weight {key} holds NaN or inf; the checkpoint is damaged, copy it "
                "again"
            )


# By how much later tokens may change a logit, as a share of the largest.
_AHEAD = 1e-3
_READS_AHEAD = "reads tokens ahead, as encoders do; name a causal model"


@torch.inference_mode()
def _check_logits(name: str, model: PreTrainedModel) -> None:
    ids = some_tokens(model, rows=1, tokens=4)
    logits_1TV = model(input_ids=ids, use_cache=False).logits
    if not logits_1TV.isfinite().all():
        raise InputError(
            f"{name}: its logits are not finite in {dtype_name(model)}; try --dtype bfloat16 or "
            "float32"
        )
    if model.dtype != torch.float32:
        return  # rounding of 16 bits would look alike
    first_12V = model(input_ids=ids[:, :2], use_cache=False).logits
    apart = (logits_1TV[:, :2] - first_12V).abs().max()
    if apart > _AHEAD * logits_1TV.abs().max():
        raise InputError(f"{name}: {type(model).__name__} {_READS_AHEAD}")


# They have the key `is_decoder` and do not read it.
_DECODERS = ("gpt_neox", "gpt_neox_japanese")


def check_causal(model: PreTrainedModel) -> None:
    """Raise InputError for an encoder (BERT), which transformers loads as a causal model too."""
    is_decoder = getattr(model.config, "is_decoder", None)
    if is_decoder is False and model.config.model_type not in _DECODERS:
        name = f"{model.name_or_path}: " if model.name_or_path else ""
        raise InputError(f"{name}{type(model).__name__} {_READS_AHEAD}")


def quantization(model: nn.Module) -> Quantize:
    """How the linear layers of a model are kept, as `--quantize` takes it."""
    is_packed = any(hasattr(parameter, "quant_state") for parameter in model.parameters())
    return "nf4" if is_packed else "none"


def _scales(parameter: Tensor) -> dict[str, Tensor]:
    if not hasattr(parameter, "quant_state"):
        return {}
    values = parameter.quant_state.as_dict()
    names = ("absmax", "nested_absmax", "nested_offset")
    return {name: torch.as_tensor(values[name]) for name in names if name in values}


def parameter_count(model: nn.Module) -> int:
    """Parameters of a model, 4-bit ones counted one by one although two share a byte."""
    whole = [getattr(parameter, "quant_state", parameter) for parameter in model.parameters()]
    return sum(math.prod(parameter.shape) for parameter in whole)


def read_per_token(model: nn.Module) -> int:
    """Parameters that a forward of one token reads: no embedding that is only looked up, and of a
    mixture the experts of one token.

    All experts, where the config does not say how many a token has.
    """
    output = None
    if isinstance(model, PreTrainedModel):
        output = model.get_output_embeddings()
    projected = getattr(output, "weight", None)
    chosen = experts_per_token(model)
    unread = 0
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.weight is not projected:
            unread += module.weight.numel()
        for experts, size in _experts(name, module) if chosen else ():
            unread += size * max(0, experts - chosen) // experts
    return parameter_count(model) - unread


def experts_per_token(model: nn.Module) -> int:
    """How many routed experts a token has; 0 without experts, or if unknown."""
    config: Any = text_config(model) if isinstance(model, PreTrainedModel) else model.config
    for key in ("num_experts_per_tok", "numexperts_per_token", "moe_topk", "top_k_experts"):
        value = getattr(config, key, None)
        if value:
            return max(value) if isinstance(value, list) else int(value)
    return 0


def _experts(name: str, module: nn.Module) -> Iterator[tuple[int, int]]:
    """The number of routed experts and their parameters: in a list, or as tensors `[experts, ...]`;
    shared ones are not among them.
    """
    is_named = "experts" in name.split(".")[-2:]
    own = list(module.parameters(recurse=False))
    if is_named and isinstance(module, nn.ModuleList):
        yield len(module), parameter_count(module)
    elif (is_named or hasattr(module, "num_experts")) and any(each.ndim == 3 for each in own):
        for parameter in own:
            yield len(parameter), parameter.numel()


def memory_bytes(model: nn.Module) -> int:
    """Bytes that the tensors of a loaded model take: parameters, buffers and the scales of 4-bit
    parameters.
    """
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    for parameter in model.parameters():
        tensors += _scales(parameter).values()
    return sum(tensor.nbytes for tensor in tensors)


def architecture(config: JsonObject) -> JsonObject:
    """The values of a config.json that decide what a model computes."""
    return {
        key: value
        for key, value in config.items()
        if not key.startswith("_") and key not in _NOT_ARCHITECTURE
    }


_fingerprints: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def fingerprint(model: PreTrainedModel) -> str:
    """16 hex digits that change with the architecture or the weights.

    Hash the architecture and every parameter, read as fp32; of a 4-bit parameter its codes and
    scales, so that a quantised model has a fingerprint of its own. Of a parameter with more than 4
    M values take every n-th, about 4 M of them: a change to a few values of a large matrix can go
    unseen, and a 70B model takes minutes instead of an hour.
    """
    if model in _fingerprints:
        return _fingerprints[model]
    config = architecture(model.config.to_dict())
    names = [name for name, _ in model.named_parameters()]
    # Read one by one through their modules, because decoders keep weights packed
    # (`decode.packed_weights`).
    tensors = ((name, values_of(model, name, attrgetter(name)(model))) for name in sorted(names))
    return hash_tensors(config, tensors)


@torch.no_grad()
def hash_tensors(config: JsonObject, tensors: Iterable[tuple[str, Tensor]]) -> str:
    """16 hex digits of a configuration and named tensors, sampled as `fingerprint` says."""
    digest = hashlib.sha256(canonical_json(config).encode())
    for name, tensor in tensors:
        parts = {name: whole(tensor.data)}
        parts |= {f"{name}.{key}": value for key, value in _scales(tensor).items()}
        for part, values in parts.items():
            heading = f"{part}{tuple(values.shape)}"
            digest.update(heading.encode())
            flat = values.reshape(-1)
            # Odd, so that it does not step through a matrix column by column.
            stride = flat.numel() // _FINGERPRINT_VALUES | 1
            sample = flat[::stride].float().cpu()
            digest.update(sample.numpy().tobytes())
    return digest.hexdigest()[:16]


def dtype_name(model: PreTrainedModel) -> str:
    """The dtype of a model as `--dtype` takes it; of a 4-bit model that of its arithmetic."""
    return str(model.dtype).removeprefix("torch.")


def eos_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """The tokens that end a generation: the generation config's, else the model config's. May be
    empty.
    """
    eos = getattr(model.generation_config, "eos_token_id", None)
    if eos is None:
        eos = getattr(model.config, "eos_token_id", None)
    return end_tokens(str(model.name_or_path), eos)


def end_tokens(name: str, eos: object) -> tuple[int, ...]:
    """The ids in a config's `eos_token_id`, which is one id, several or None."""
    if eos is None:
        return ()
    ids = tuple(eos) if isinstance(eos, list | tuple) else (eos,)
    if not all(isinstance(token, int) for token in ids):
        raise InputError(f"{name}: its eos_token_id is {eos!r}; write token ids")
    return ids


def text_config(model: PreTrainedModel) -> Any:
    """The language model's part of a configuration."""
    return model.config.get_text_config(decoder=True)


def of_all_layers(config: Any, key: str) -> Any:
    """An option of a configuration; None if it has none or layers differ in it."""
    try:
        value = getattr(config, key, None)
    except RuntimeError:
        # Transformers' error for an option that has a value per layer (Gemma 4).
        return None
    return None if isinstance(value, list) else value


def context_length(model: PreTrainedModel) -> int | None:
    """How many tokens the model's positions reach, or None if its config does not say.

    For longrope, whose frequencies change beyond the pretrained context, it is that context: cached
    keys would have to be computed again.
    """
    text = model.config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    keys = ("max_position_embeddings", "n_positions")
    values = [getattr(model.config, key, None) for key in keys]
    if rope.get("rope_type") == "longrope":
        values.insert(0, rope.get("original_max_position_embeddings"))
    return next((value for value in values if isinstance(value, int)), None)


def vocabulary_size(model: PreTrainedModel) -> int:
    """How many logits the model gives per position."""
    text = model.config.get_text_config()
    return int(text.vocab_size)


def check_tokenizer(name: str, model: PreTrainedModel, tokenizer: Tokenizer) -> None:
    """Raise InputError if the tokenizer knows tokens that the model `name` does not."""
    if len(tokenizer) > vocabulary_size(model):
        sizes = f"{vocabulary_size(model)} tokens, fewer than the tokenizer's {len(tokenizer)}"
        raise InputError(
            f"{name}: its vocabulary has {sizes}; use the tokenizer that the model was trained with"
        )
