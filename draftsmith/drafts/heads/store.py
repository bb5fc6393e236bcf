"""Heads on disk: recognise the directory of one, in our layout or another's; load it onto a target;
save it.
"""

import itertools
import logging
import pickle
import zipfile
from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.core.devices import generators_kept
from draftsmith.core.errors import InputError, first_line, one_line, warn_once
from draftsmith.core.hub import cached, lfs_pointer, snapshot
from draftsmith.core.io import JsonObject, atomic_dir, read_json, write_json_atomic
from draftsmith.core.records import check_weights, read_record
from draftsmith.core.sources import check_source, is_hub_name
from draftsmith.drafts.draft_sources import NATIVE
from draftsmith.drafts.draft_vocabulary import DraftVocabulary
from draftsmith.drafts.heads.block import BlockHead, DFlashHead, DSparkHead, JetSpecHead
from draftsmith.drafts.heads.borrowed import Borrowed, borrow
from draftsmith.drafts.heads.dequantise import dequantised
from draftsmith.drafts.heads.eagle import EagleHead
from draftsmith.drafts.heads.eagle3 import Eagle3Head
from draftsmith.drafts.heads.feature_head import FeatureHead
from draftsmith.drafts.heads.medusa import HydraHeads, MedusaHeads
from draftsmith.drafts.heads.mtp import MtpHead
from draftsmith.drafts.layouts.layout import EMBEDDING, HeadFiles, Layout, renamed
from draftsmith.drafts.layouts.mtp import find_layers
from draftsmith.drafts.layouts.table import NATIVE_MTP, foreign, layout_of, may_be_head

Head = EagleHead | Eagle3Head | MtpHead | MedusaHeads | HydraHeads | BlockHead

HEADS: dict[str, type[Head]] = {
    "eagle": EagleHead,
    "eagle3": Eagle3Head,
    "mtp": MtpHead,
    "medusa": MedusaHeads,
    "hydra": HydraHeads,
    "dflash": DFlashHead,
    "dspark": DSparkHead,
    "jetspec": JetSpecHead,
}

log = logging.getLogger(__name__)
_COMPARED_ROWS = 1024
# Frequencies that older versions of transformers saved; they follow from the config.
_COMPUTED = "rotary_emb.inv_freq"
_NOT_WEIGHTS = ("training_args", "training_state", "optimizer", "scheduler", "scaler", "rng_state")


def head_kind(path: str | Path) -> str | None:
    """The kind of head in a directory or on the hub; None for an ordinary language model, or a name
    of neither.

    A kind that is not in `HEADS` is that of a head which cannot be loaded; `load_head` then says
    so. Raise InputError for a kind of draft that is known and that nothing here runs.
    """
    if _is_native(path):
        return MtpHead.kind
    directory = _directory(path)
    config = directory / "config.json"
    kind = read_record(directory).get("kind")
    if isinstance(kind, str):
        return None if kind == "draft-lm" else kind
    if not config.is_file():
        return None
    values = read_json(config, "the config of a draft")
    if str(values.get("model_type")).endswith("_assistant"):
        return None
    if what := foreign(values):
        raise InputError(f"{config}: describes {what}")
    layout = _layout(directory, values)
    if layout is None and "speculators_model_type" in values:
        return f"speculators {values['speculators_model_type']}"
    return None if layout is None else layout.kind


def _is_native(path: str | Path) -> bool:
    return str(path) == NATIVE or str(path).startswith(f"{NATIVE}:")


def _directory(path: str | Path) -> Path:
    """Where a head lies: the path itself, or the hub's cache for a name on the hub whose config may
    be a head's.
    """
    config = cached(str(path), "config.json") if is_hub_name(str(path)) else None
    if config is not None and may_be_head(read_json(config, "the config of a draft")):
        return snapshot(str(path))
    return Path(path)


def _layout(directory: Path, values: JsonObject) -> Layout | None:
    def names() -> set[str]:
        found: set[str] = set()
        for file in _tensor_files(directory):
            found.update(_load(file, names_only=True))
        return found

    return layout_of(values, cache(names))


@generators_kept()
def load_head(path: str | Path, target: PreTrainedModel) -> Head:
    """The head in a directory or on the hub, on the target's device, in its dtype, in eval mode.

    path: `mtp` is the MTP layer in the target's own checkpoint, `mtp:CHECKPOINT` that in another.
    Raises InputError naming file and key if there is no head, or if it does not fit the target.
    """
    if _is_native(path):
        return _loaded(MtpHead.kind, NATIVE_MTP, _native_files(str(path), target), target)
    directory = _directory(path)
    config = directory / "config.json"
    values = read_json(config, "the config of a head")
    kind = head_kind(directory)
    if kind not in HEADS:
        what = (
            "a language model; use it as a draft LM" if kind is None else f"a head of kind '{kind}'"
        )
        raise InputError(
            f"{config}: describes {what}; heads that can be loaded are {', '.join(HEADS)}"
        )
    file, tensors = _read_tensors(directory, values)
    layout = _layout(directory, values)
    return _loaded(kind, layout, _Files(config, file, values, tensors), target)


@dataclass(frozen=True)
class _Files:
    """Values and tensors of a head on disk; `config` and `file` are named in errors."""

    config: Path
    file: Path
    values: JsonObject
    tensors: dict[str, Tensor]


def _loaded(kind: str, layout: Layout | None, on_disk: _Files, target: PreTrainedModel) -> Head:
    config = on_disk.config
    values = on_disk.values
    tensors = on_disk.tensors
    head_class: Any = HEADS[kind]
    try:
        if layout is not None and layout.kind == kind:
            tensors = renamed(tensors, layout.names, layout.prefix)
            files = HeadFiles(
                values=values, tensors=tensors, lm_head_VH=borrow(target).projection.weight_VH
            )
            layout.read(files)
            values = files.values
            tensors = files.tensors
        head: Head = head_class(head_class.config_type.from_json(values, target), target)
    except InputError as error:
        raise InputError(f"{config}: {error}") from None
    except (KeyError, TypeError, ValueError) as error:
        # A key that is missing, or a value that transformers does not know, such as a type of rope.
        raise InputError(
            f"{config}: describes no head ({type(error).__name__}: {first_line(error)})"
        ) from None
    embeds = isinstance(head, FeatureHead | BlockHead)
    if embeds and EMBEDDING in tensors.keys() - head.state_dict().keys():
        _check_embedding(head.borrowed, on_disk.file, tensors.pop(EMBEDDING))
    try:
        if isinstance(head, MtpHead) and layout is NATIVE_MTP:
            tensors = head.of_checkpoint(tensors)
        head.load_state_dict(tensors)
    except RuntimeError as error:
        raise InputError(f"{on_disk.file}: does not fit {config}: {one_line(error)}") from None
    if isinstance(head, DraftVocabulary):
        head.read_draft_vocab()
    head.to(target.device, target.dtype)
    head.eval()
    return head


def checkpoint_directory(target: PreTrainedModel) -> Path:
    """Where the files of a target are: its directory, or the hub's cache."""
    name = str(target.name_or_path or "")
    if not name:
        raise InputError("the target was loaded from no checkpoint; write mtp:CHECKPOINT")
    revision: str | None = getattr(target.config, "_commit_hash", None)
    return snapshot(name, revision) if is_hub_name(name) else Path(name)


def _native_files(name: str, target: PreTrainedModel) -> _Files:
    """The MTP layer in the checkpoint of a target. Its facts follow from the names of tensors."""
    if name == NATIVE:
        directory = checkpoint_directory(target)
    else:
        source = name.removeprefix(f"{NATIVE}:")
        check_source(source)
        directory = snapshot(source) if is_hub_name(source) else Path(source)
    names_of = {file: set(_load(file, names_only=True)) for file in _tensor_files(directory)}
    found = find_layers(itertools.chain.from_iterable(names_of.values()))
    if found is None:
        family = target.config.model_type.partition("_")[0]
        apart = foreign({"model_type": f"{family}_assistant"})
        raise InputError(
            f"{directory}: has no MTP layer; "
            + (f"its own is {apart}" if apart else "train one with draftsmith train --kind mtp")
        )
    if (count := len(found.starts)) > 1:
        warn_once(f"{directory}: has {count} MTP layers; the first serves all depths")
    tensors: dict[str, Tensor] = {}
    for file, names in names_of.items():
        if wanted := found.first(names):
            tensors |= _load(file, wanted=wanted)
    config = read_json(directory / "config.json", "the config of a model")
    return _Files(directory / "config.json", directory, {}, dequantised(directory, tensors, config))


def _check_embedding(borrowed: Borrowed, file: Path, copy: Tensor) -> None:
    """Raise InputError if the file's copy of the target's embedding is another target's."""
    table = borrowed.embedding_table
    step = max(1, len(table) // _COMPARED_ROWS)
    # Rounding to bf16 changes it by 0.4 %, fine-tuning by a few percent; another model's embedding
    # is unrelated. Older files of ours hold the bare table of a target that scales it.
    rows = copy[::step].float()
    is_another = copy.shape != table.shape
    if not is_another:
        known = [table[::step].float().cpu(), borrowed.embedding_weight[::step].float().cpu()]
        is_another = all((rows - each).norm() > 0.5 * each.norm() for each in known)
    if is_another:
        raise InputError(
            f"{file}: '{EMBEDDING}' is not the target's embedding; use the target it was "
            "trained for"
        )


def write_head(head: Head, directory: Path) -> None:
    """Write `model.safetensors`, then `config.json`, into a directory that exists."""
    tensors = head.state_dict()
    if isinstance(head, EagleHead):
        # The authors' loader requires a copy of the target's embedding, and multiplies nothing.
        tensors[EMBEDDING] = head.borrowed.embedding_table
    write_tensors(directory, tensors, head.config.to_json())


def save_head(head: Head, directory: str | Path) -> None:
    """Write a head's directory whole or not at all; what was there before is replaced."""
    with atomic_dir(Path(directory)) as temporary:
        write_head(head, temporary)


def _tensor_files(directory: Path) -> list[Path]:
    """The files that hold a directory's tensors: safetensors if there are any, else pickles."""
    if safetensors := sorted(directory.glob("*.safetensors")):
        return safetensors
    pickles = []
    for ending in ("*.bin", "*.pt", "*.pth"):
        pickles += sorted(directory.glob(ending))
    return [file for file in pickles if not file.name.startswith(_NOT_WEIGHTS)]


def _read_tensors(directory: Path, config: JsonObject) -> tuple[Path, dict[str, Tensor]]:
    """All tensors of a head with this config, and the file to name in errors."""
    check_weights(directory)
    files = _tensor_files(directory)
    if not files:
        raise InputError(
            f"{directory / 'model.safetensors'}: no such file; a head's tensors are expected in it"
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in _load(file).items():
            if not name.endswith(_COMPUTED):
                tensors[name] = tensor
    return files[0], dequantised(files[0], tensors, config)


def _load(file: Path, names_only: bool = False, wanted: Set[str] | None = None) -> dict[str, Any]:
    """Tensors by name. A pickle is read with `weights_only=True`, which runs no code.

    wanted: the names to load; None for all.
    """
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                names = opened.keys() if wanted is None else wanted
                return {name: None if names_only else opened.get_tensor(name) for name in names}
        # Files of torch before 1.6 cannot be mapped.
        loaded = torch.load(
            file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)
        )
        return {
            name: tensor
            for name, tensor in loaded.items()
            if isinstance(tensor, Tensor) and (wanted is None or name in wanted)
        }
    except pickle.UnpicklingError:
        reason = (
            lfs_pointer([file])
            or "it is no file of torch.save, or has more than tensors, which would run code"
        )
    except (
        SafetensorError,
        RuntimeError,
        OSError,
        EOFError,
        ValueError,
        KeyError,
        AttributeError,
    ) as error:
        reason = lfs_pointer([file]) or f"{first_line(error)}; copy it again"
    raise InputError(f"{file}: cannot be read ({reason})")


def write_tensors(directory: Path, tensors: Mapping[str, Tensor], config: JsonObject) -> None:
    """Write `model.safetensors`, then `config.json`, into a directory that exists."""
    # Cloned, because safetensors refuses tensors that share memory, as views of one buffer do.
    owned = {
        name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()
    }
    save_file(owned, directory / "model.safetensors", metadata={"format": "pt"})
    write_json_atomic(directory / "config.json", config)
