"""Causal language models: load them, tell them apart, and check that a draft fits its target."""

import hashlib
import os
from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftsmith.errors import InputError
from draftsmith.io import canonical_json
from draftsmith.text import Tokenizer, check_source, quiet

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FINGERPRINT_VALUES = 2**22
_NOT_ARCHITECTURE = frozenset({"transformers_version", "dtype", "torch_dtype", "use_cache", "architectures"})


def resolve_device(device: str) -> torch.device:
    """`auto` is this process's CUDA device where there is one, unless the launcher was told to use the CPU."""
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
    name: str, *, device: str = "auto", dtype: str = "auto", trust_remote_code: bool = False
) -> PreTrainedModel:
    """A causal LM in eval mode from a local directory or the hub, safetensors only.

    dtype `auto` is fp32 on a CPU (half precision is slow there and its ties differ) and the checkpoint's own on an
    accelerator. Raises InputError, one line, for a name that is not a loadable model.
    """
    place = resolve_device(device)
    if dtype != "auto" and dtype not in DTYPES:
        raise InputError(f"--dtype {dtype}: use auto, {', '.join(DTYPES)}")
    wanted: Any = DTYPES.get(dtype, torch.float32 if place.type == "cpu" else "auto")
    quiet()
    check_source(name)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            name, dtype=wanted, trust_remote_code=trust_remote_code, use_safetensors=True
        )
    except Exception as error:
        # from_pretrained raises a dozen kinds of error for a missing, torn or foreign checkpoint.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"{name}: no causal language model could be loaded from it ({reason})") from None
    model.to(place)  # type: ignore[arg-type]
    return cast(PreTrainedModel, model.eval())


@torch.no_grad()
def fingerprint(model: PreTrainedModel) -> str:
    """16 hex digits that change with the architecture or the weights.

    Hashes the configuration (less where it was loaded from, by which version and as what dtype) and every parameter,
    read as fp32. Of a parameter with more than 4 M values it takes every n-th, about 4 M of them: a change to a few
    values of a large matrix can go unseen, and a 70B model takes minutes instead of an hour.
    """
    config = {k: v for k, v in model.config.to_dict().items() if not k.startswith("_") and k not in _NOT_ARCHITECTURE}
    digest = hashlib.sha256(canonical_json(config).encode())
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().reshape(-1)
        # Odd, so that it does not step through a matrix column by column.
        stride = flat.numel() // _FINGERPRINT_VALUES | 1
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(flat[::stride].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def dtype_name(model: PreTrainedModel) -> str:
    """The dtype of a model as `--dtype` takes it."""
    return str(model.dtype).removeprefix("torch.")


def eos_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """The tokens that end a generation: the generation config's, else the model config's. May be empty."""
    eos = getattr(model.generation_config, "eos_token_id", None)
    if eos is None:
        eos = getattr(model.config, "eos_token_id", None)
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)


def context_length(model: PreTrainedModel) -> int | None:
    """How many tokens the model's positions reach, or None when its config does not say."""
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


def check_same_vocabulary(target: PreTrainedModel, drafts: Sequence[tuple[str, PreTrainedModel]]) -> None:
    """InputError unless every draft scores exactly the target's vocabulary."""
    size = vocabulary_size(target)
    for name, draft in drafts:
        if vocabulary_size(draft) != size:
            raise InputError(
                f"{name}: its vocabulary has {vocabulary_size(draft)} tokens and the target's has {size}; "
                f"use a draft that was trained with the target's tokenizer"
            )
