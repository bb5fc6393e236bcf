"""Heads on disk: recognise the directory of one, in our layout or another's; load it onto a target; save it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from drafts.heads.borrowed import borrow
from drafts.heads.eagle import EagleHead
from drafts.heads.eagle3 import Eagle3Head
from drafts.heads.hydra import HydraHeads
from drafts.heads.medusa import MedusaHeads
from drafts.layouts.files import read_tensors, write_tensors
from drafts.layouts.table import HeadFiles, layout_of, may_be_head, renamed
from draftsmith_core.errors import InputError, first_line
from draftsmith_core.hub import cached, is_hub_name, snapshot
from draftsmith_core.io import atomic_dir, read_json
from draftsmith_core.runs import read_record

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
    """The kind of head in a directory or on the hub; None for an ordinary language model, or a name of neither.

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

    Raises InputError naming file and key if there is no head, or if it does not fit the target.
    """
    directory = head_directory(path)
    config = directory / "config.json"
    values = read_json(config, "the config of a head")
    kind = head_kind(directory)
    if kind not in HEADS:
        what = "a language model; use it as a draft LM" if kind is None else f"a head of kind '{kind}'"
        raise InputError(f"{config}: describes {what}; heads that can be loaded are {', '.join(HEADS)}")
    file, tensors = read_tensors(directory)
    layout = layout_of(directory, values)
    head_class: Any = HEADS[kind]
    try:
        if layout is not None and layout.kind == kind:
            tensors = renamed(tensors, layout.names, layout.prefix)
            files = HeadFiles(values=values, tensors=tensors, lm_head_VH=borrow(target).projection.weight_VH)
            layout.read(files)
            values, tensors = files.values, files.tensors
        head: Head = head_class(head_class.config_type.from_json(values, target), target)
    except InputError as error:
        raise InputError(f"{config}: {error}") from None
    except (KeyError, TypeError, ValueError) as error:
        # A key that is missing, or a value that transformers does not know, such as a type of rope.
        raise InputError(f"{config}: describes no head ({type(error).__name__}: {first_line(error)})") from None
    if isinstance(head, EagleHead | Eagle3Head) and _EMBEDDING in tensors and _EMBEDDING not in head.state_dict():
        _check_embedding(head, file, tensors.pop(_EMBEDDING))
    if mismatch := _mismatch(head.state_dict(), tensors):
        raise InputError(f"{file}: {mismatch} by {config}")
    head.load_state_dict(tensors)
    if isinstance(head, Eagle3Head):
        head.read_draft_vocab()
    head.to(device=target.device, dtype=target.dtype)
    head.eval()
    return head


def _check_embedding(head: EagleHead | Eagle3Head, file: Path, copy: Tensor) -> None:
    """Raise InputError if the copy of the target's embedding that EAGLE heads carry is another target's."""
    table = head.borrowed.embedding_table
    step = max(1, len(table) // _COMPARED_ROWS)
    # Rounding to bf16 changes it by 0.4 %, fine-tuning by a few percent; another model's embedding is unrelated.
    # Older files of ours hold the bare table of a target that scales it.
    tables = [each.detach()[::step].float().cpu() for each in (table, head.borrowed.embedding_weight)]
    if copy.shape == table.shape:
        rows = copy[::step].float()
        if any((rows - known).norm() <= 0.5 * known.norm() for known in tables):
            return
    raise InputError(f"{file}: '{_EMBEDDING}' is not the target's embedding; use the target it was trained for")


def _mismatch(wanted: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> str | None:
    if missing := sorted(wanted.keys() - tensors.keys()):
        return f"lacks the tensor '{missing[0]}' ({len(missing)} missing) that it must have"
    if surplus := sorted(tensors.keys() - wanted.keys()):
        return f"holds the tensor '{surplus[0]}' ({len(surplus)} too many) that it must not have"
    for name, tensor in tensors.items():
        own = wanted[name]
        if tensor.shape != own.shape or tensor.is_floating_point() != own.is_floating_point():
            return f"'{name}' is {list(tensor.shape)} {tensor.dtype}; it must be {list(own.shape)} {own.dtype}"
    return None


def write_head(head: Head, directory: Path) -> None:
    """Write `model.safetensors`, then `config.json`, into a directory that exists."""
    tensors = head.state_dict()
    if isinstance(head, EagleHead):
        # The authors' loader requires a copy of the target's embedding, and multiplies nothing.
        tensors[_EMBEDDING] = head.borrowed.embedding_table
    write_tensors(directory, tensors, head.config.to_json())


def save_head(head: Head, directory: str | Path) -> None:
    """Write a head's directory whole or not at all; what was there before is replaced."""
    with atomic_dir(Path(directory)) as temporary:
        write_head(head, temporary)
