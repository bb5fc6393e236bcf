"""Heads on disk: which directory holds one, loading it onto a target, saving it. safetensors only."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from drafts.heads.eagle import EagleConfig, EagleHead
from drafts.heads.eagle3 import Eagle3Config, Eagle3Head
from drafts.heads.hydra import HydraConfig, HydraHeads
from drafts.heads.medusa import MedusaConfig, MedusaHeads
from draftsmith_core.errors import InputError
from draftsmith_core.io import atomic_dir, read_json, write_json_atomic

Head = EagleHead | Eagle3Head | MedusaHeads | HydraHeads

HEADS: dict[str, type[Head]] = {
    "eagle": EagleHead,
    "eagle3": Eagle3Head,
    "medusa": MedusaHeads,
    "hydra": HydraHeads,
}

_EMBEDDING = "embed_tokens.weight"
_COMPARED_ROWS = 1024


def head_kind(path: str | Path) -> str | None:
    """The kind of head in a directory, None for an ordinary language model or anything that is not a directory.

    A kind that is not in `HEADS` is that of a head which cannot be loaded; `load_head` then says so.
    """
    directory = Path(path)
    record, config = directory / "draftsmith.json", directory / "config.json"
    if record.is_file():
        kind = read_json(record, "the record of a draft checkpoint").get("kind")
        if isinstance(kind, str):
            return None if kind == "draft-lm" else kind
    return _kind_of_config(directory, read_json(config, "the config of a draft")) if config.is_file() else None


def _kind_of_config(directory: Path, values: Mapping[str, Any]) -> str | None:
    if "speculators_model_type" in values:
        return f"speculators {values['speculators_model_type']}"
    if "medusa_num_heads" in values:
        return "medusa"
    if "hydra_num_heads" in values:
        return "hydra"
    architectures = values.get("architectures") or []
    if "draft_vocab_size" in values or any("Eagle3" in str(name) for name in architectures):
        return "eagle3"
    if any("Eagle" in str(name) for name in architectures):
        return "eagle"
    if values.get("num_hidden_layers") != 1 or values.get("model_type", "llama") != "llama":
        return None
    # An EAGLE head's config is that of a Llama of one layer; only the key `bias` and its tensors tell them apart.
    names = _names(directory)
    if any(name.startswith("midlayer.") for name in names):
        return "eagle3"
    return "eagle" if "bias" in values or "fc.weight" in names else None


def _names(directory: Path) -> set[str]:
    """Names of all tensors in a directory's safetensors files, without reading the tensors."""
    names: set[str] = set()
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                names |= set(opened.keys())
        except (SafetensorError, OSError) as error:
            raise InputError(f"{file}: cannot be read ({error}); copy it again") from None
    return names


def _tensors(directory: Path) -> tuple[Path, dict[str, Tensor]]:
    """All tensors of a head, and the file to name in errors."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        pickles = [file.name for ending in ("*.bin", "*.pt", "*.pth") for file in sorted(directory.glob(ending))]
        if pickles:
            raise InputError(
                f"{directory / pickles[0]}: is a pickle, which can run code when it is read; "
                f"convert it to {directory / 'model.safetensors'} where you trust it"
            )
        raise InputError(f"{directory / 'model.safetensors'}: no such file; a head's tensors are expected in it")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (it is no dict)
                    if name in tensors:
                        raise InputError(f"{file}: holds the tensor '{name}' as another file there does; delete one")
                    tensors[name] = opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{file}: cannot be read ({error}); copy it again") from None
    return files[0], tensors


def _build(kind: str, values: Mapping[str, Any], where: str, target: PreTrainedModel) -> Head:
    match kind:
        case "eagle":
            return EagleHead(EagleConfig.from_json(values, where, target), target)
        case "eagle3":
            return Eagle3Head(Eagle3Config.from_json(values, where, target), target)
        case "medusa":
            return MedusaHeads(MedusaConfig.from_json(values, where, target), target)
        case "hydra":
            return HydraHeads(HydraConfig.from_json(values, where, target), target)
    raise InputError(f"{where}: is of kind '{kind}'; heads that can be loaded are {', '.join(HEADS)}")


def load_head(path: str | Path, target: PreTrainedModel) -> Head:
    """The head in a directory, on the target's device, in its dtype, in eval mode.

    Raises InputError, one line naming file and key, for a directory that holds no head or one that does not fit.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise InputError(
            f"{directory}: no such directory; a head is a directory with config.json and model.safetensors"
        )
    config = directory / "config.json"
    values = read_json(config, "the config of a head")
    kind = head_kind(directory)
    if kind is None:
        raise InputError(f"{config}: describes no head ({', '.join(HEADS)}) but a language model; use it as a draft LM")
    try:
        head = _build(kind, values, str(config), target)
    except InputError as error:
        message = str(error)
        raise InputError(message if str(config) in message else f"{config}: {message}") from None
    file, tensors = _tensors(directory)
    _drop_embedding(head, file, tensors)
    if isinstance(head, Eagle3Head) and not head.reduced:
        # With the whole vocabulary the maps are the identity; some exporters write them all the same.
        tensors = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    _check_tensors(head, file, config, tensors)
    head.load_state_dict(tensors)
    if isinstance(head, Eagle3Head):
        head.check_loaded(str(file))
    head.to(device=target.device, dtype=target.dtype)
    head.eval()
    return head


def _drop_embedding(head: Head, file: Path, tensors: dict[str, Tensor]) -> None:
    """Take out the copy of the target's embedding that EAGLE heads carry; InputError when it is another target's."""
    if not isinstance(head, EagleHead | Eagle3Head) or _EMBEDDING not in tensors:
        return
    there, here = tensors.pop(_EMBEDDING), head.borrowed.embedding_weight.detach()
    if there.shape != here.shape:
        raise InputError(
            f"{file}: '{_EMBEDDING}' is {list(there.shape)} and the target's embedding is {list(here.shape)}; "
            f"use the target it was trained for"
        )
    step = max(1, len(here) // _COMPARED_ROWS)
    a, b = there[::step].float(), here[::step].float().cpu()
    # Rounding to bf16 changes it by 0.4 %, fine-tuning by a few percent; another model's embedding is unrelated.
    if (a - b).norm() > 0.5 * b.norm():
        raise InputError(f"{file}: '{_EMBEDDING}' is not the target's embedding; use the target it was trained for")


def _check_tensors(head: Head, file: Path, config: Path, tensors: Mapping[str, Tensor]) -> None:
    wanted = head.state_dict()
    missing = sorted(wanted.keys() - tensors.keys())
    if missing:
        raise InputError(f"{file}: lacks the tensor '{missing[0]}' ({len(missing)} missing) that {config} asks for")
    surplus = sorted(tensors.keys() - wanted.keys())
    if surplus:
        raise InputError(
            f"{file}: holds the tensor '{surplus[0]}' ({len(surplus)} too many) that {config} does not ask for; "
            f"correct the config, or use a head without it"
        )
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            raise InputError(
                f"{file}: '{name}' is {list(tensor.shape)}; by {config} it must be {list(wanted[name].shape)}"
            )
        if tensor.is_floating_point() != wanted[name].is_floating_point():
            raise InputError(f"{file}: '{name}' is {tensor.dtype}; it must be like {wanted[name].dtype}")


def write_head(head: Head, directory: Path, state: Mapping[str, Tensor] | None = None) -> None:
    """Write `model.safetensors`, then `config.json`, into a directory that exists.

    `state` is the head's state dict where the head itself holds only a shard of it.
    """
    tensors = dict(head.state_dict() if state is None else state)
    if isinstance(head, EagleHead):
        # The authors' loader requires a copy of the target's embedding.
        tensors[_EMBEDDING] = head.borrowed.embedding_weight
    # Cloned, because safetensors refuses tensors that share memory, as views of one buffer do.
    with torch.no_grad():
        owned = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    save_file(owned, directory / "model.safetensors", metadata={"format": "pt"})
    write_json_atomic(directory / "config.json", head.config.to_json())


def save_head(head: Head, directory: str | Path, state: Mapping[str, Tensor] | None = None) -> None:
    """Write a head's directory whole or not at all; what was there before is replaced."""
    with atomic_dir(Path(directory)) as temporary:
        write_head(head, temporary, state)
