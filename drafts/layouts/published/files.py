"""Tensors of a draft's directory: from safetensors, or from the pickles that most older checkpoints are.

A pickle is read with `weights_only=True`, which builds tensors and plain containers and runs nothing.
"""

import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftsmith_core.errors import InputError, first_line
from draftsmith_core.sources import first_bytes, lfs_pointer

_NO_PICKLE = "it is no file of torch.save"
# Of older transformers: follows from the config.
_COMPUTED = "rotary_emb.inv_freq"
# What trainers leave beside the weights.
_NOT_WEIGHTS = ("training_args", "training_state", "optimizer", "scheduler", "scaler", "rng_state")


def tensor_files(directory: Path) -> list[Path]:
    """The files that hold a directory's tensors: safetensors where there are any, else pickles."""
    found = sorted(directory.glob("*.safetensors"))
    if found:
        return found
    pickles = [file for ending in ("*.bin", "*.pt", "*.pth") for file in sorted(directory.glob(ending))]
    return [file for file in pickles if not file.name.startswith(_NOT_WEIGHTS)]


def tensor_names(directory: Path) -> set[str]:
    """Names of all tensors, without reading those of safetensors."""
    names: set[str] = set()
    for file in tensor_files(directory):
        if file.suffix == ".safetensors":
            try:
                with safe_open(file, framework="pt") as opened:
                    names |= set(opened.keys())
            except (SafetensorError, OSError) as error:
                raise _damaged(file, str(error)) from None
        else:
            names |= _unpickled(file).keys()
    return names


def read_tensors(directory: Path) -> tuple[Path, dict[str, Tensor]]:
    """All tensors, and the file to name in errors; InputError, one line, for files that cannot be read."""
    files = tensor_files(directory)
    if not files:
        raise InputError(f"{directory / 'model.safetensors'}: no such file; a head's tensors are expected in it")
    tensors: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in (_loaded(file) if file.suffix == ".safetensors" else _unpickled(file)).items():
            if name.endswith(_COMPUTED):
                continue
            if name in tensors:
                raise InputError(f"{file}: holds the tensor '{name}' as another file there does; delete one")
            tensors[name] = tensor
    return files[0], tensors


def _loaded(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (it is no dict)
    except (SafetensorError, OSError) as error:
        raise _damaged(file, str(error)) from None


def _torch_saved(file: Path) -> bool:
    """Whether it begins as what torch.save writes: a zip, or in old files a pickle. A file that is empty may have."""
    begin = first_bytes(file, 2)
    return not begin or begin.startswith((b"PK", b"\x80"))


def _damaged(file: Path, reason: str) -> InputError:
    return InputError(f"{file}: cannot be read ({lfs_pointer(file) or f'{reason}; copy it again'})")


def _unpickled(file: Path) -> dict[str, Tensor]:
    """The state dict in a pickle, its tensors mapped and not yet read where the file's format allows."""
    found: Any = None
    try:
        try:
            found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # files of torch before 1.6 cannot be mapped
            found = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        if not _torch_saved(file):
            raise _damaged(file, _NO_PICKLE) from None
        raise InputError(
            f"{file}: holds more than tensors, and reading that would run code; convert it to "
            f"{file.parent / 'model.safetensors'} where you trust it"
        ) from None
    except (RuntimeError, OSError, EOFError, ValueError, KeyError, AttributeError) as error:
        raise _damaged(file, first_line(error) if _torch_saved(file) else _NO_PICKLE) from None
    if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise InputError(f"{file}: is no dictionary of tensors by name; a draft's weights are expected in it")
    return {str(name): tensor for name, tensor in found.items()}
