"""Heads on disk: which directory holds one, in our layout or another's; loading it onto a target, saving it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from drafts.heads.borrowed import borrow
from drafts.heads.eagle import EagleHead
from drafts.heads.eagle3 import Eagle3Head
from drafts.heads.hydra import HydraHeads
from drafts.heads.medusa import MedusaHeads
from drafts.layouts.published import Found, layout_of, may_be_head, read_tensors
from draftsmith_core.errors import InputError
from draftsmith_core.hub import is_hub_name
from draftsmith_core.io import atomic_dir, read_json, write_json_atomic
from draftsmith_core.provenance import read_record
from draftsmith_core.sources import cached, snapshot

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
    """The kind of head in a directory or on the hub, None for an ordinary language model or a name of neither.

    A kind that is not in `HEADS` is that of a head which cannot be loaded; `load_head` then says so.
    """
    directory = head_directory(path)
    config, kind = directory / "config.json", read_record(directory).get("kind")
    if isinstance(kind, str):
        return None if kind == "draft-lm" else kind
    if not config.is_file():
        return None
    values = read_json(config, "the config of a draft")
    layout = layout_of(directory, values)
    if layout is None and "speculators_model_type" in values:
        return f"speculators {values['speculators_model_type']}"
    return None if layout is None else layout.kind


def head_directory(path: str | Path) -> Path:
    """Where a head lies: the path itself, or the hub's cache for a name on the hub whose config may be a head's."""
    if not is_hub_name(str(path)) or (config := cached(str(path), "config.json")) is None:
        return Path(path)
    return snapshot(str(path)) if may_be_head(read_json(config, "the config of a draft")) else Path(path)


def load_head(path: str | Path, target: PreTrainedModel) -> Head:
    """The head in a directory or on the hub, on the target's device, in its dtype, in eval mode.

    Raises InputError, one line naming file and key, for a directory that holds no head or one that does not fit.
    """
    directory = head_directory(path)
    if not directory.is_dir():
        raise InputError(
            f"{directory}: no such directory; a head is a directory with config.json and model.safetensors"
        )
    config = directory / "config.json"
    values = read_json(config, "the config of a head")
    kind = head_kind(directory)
    if kind is None:
        raise InputError(f"{config}: describes no head ({', '.join(HEADS)}) but a language model; use it as a draft LM")
    if kind not in HEADS:
        raise InputError(f"{config}: is of kind '{kind}'; heads that can be loaded are {', '.join(HEADS)}")
    file, tensors = read_tensors(directory)
    layout = layout_of(directory, values)
    if layout is not None and layout.kind == kind:
        found = Found(
            config_file=str(config),
            tensor_file=file,
            values=values,
            tensors=tensors,
            lm_head_VH=borrow(target).projection.weight_VH,
        )
        found = layout.read(found)
        values, tensors = found.values, found.tensors
    try:
        made: Any = HEADS[kind]
        head: Head = made(made.config_type.from_json(values, str(config), target), target)
    except InputError as error:
        message = str(error)
        raise InputError(message if str(config) in message else f"{config}: {message}") from None
    _drop_embedding(head, file, tensors)
    _check_tensors(head, file, config, tensors)
    head.load_state_dict(tensors)
    if isinstance(head, Eagle3Head):
        head.check_loaded(str(file))
    head.to(device=target.device, dtype=target.dtype)
    head.eval()
    return head


def _drop_embedding(head: Head, file: Path, tensors: dict[str, Tensor]) -> None:
    """Take out the copy of the target's embedding that EAGLE heads carry; InputError when it is another target's."""
    if _EMBEDDING in head.state_dict() or not isinstance(head, EagleHead | Eagle3Head) or _EMBEDDING not in tensors:
        return
    there, here = tensors.pop(_EMBEDDING), head.borrowed.embedding_table
    if there.shape != here.shape:
        raise InputError(
            f"{file}: '{_EMBEDDING}' is {list(there.shape)} and the target's embedding is {list(here.shape)}; "
            f"use the target it was trained for"
        )
    step = max(1, len(here) // _COMPARED_ROWS)
    a, b = there[::step].float(), here[::step].float().cpu()
    # Rounding to bf16 changes it by 0.4 %, fine-tuning by a few percent; another model's embedding is unrelated.
    # Older files of ours hold the bare table where the target scales it.
    bare = head.borrowed.embedding_weight.detach()[::step].float().cpu()
    if (a - b).norm() > 0.5 * b.norm() and (a - bare).norm() > 0.5 * bare.norm():
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


def write_head(head: Head, directory: Path) -> None:
    """Write `model.safetensors`, then `config.json`, into a directory that exists."""
    tensors = head.state_dict()
    if isinstance(head, EagleHead):
        # The authors' loader requires a copy of the target's embedding, and multiplies nothing.
        tensors[_EMBEDDING] = head.borrowed.embedding_table
    write_tensors(directory, tensors, head.config.to_json())


def write_tensors(directory: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write `model.safetensors`, then `config.json`, into a directory that exists."""
    # Cloned, because safetensors refuses tensors that share memory, as views of one buffer do.
    owned = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    save_file(owned, directory / "model.safetensors", metadata={"format": "pt"})
    write_json_atomic(directory / "config.json", dict(config))


def save_head(head: Head, directory: str | Path) -> None:
    """Write a head's directory whole or not at all; what was there before is replaced."""
    with atomic_dir(Path(directory)) as temporary:
        write_head(head, temporary)
