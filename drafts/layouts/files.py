"""Tensor files of a head: reads safetensors, or the pickles that most older checkpoints are; writes safetensors.

A pickle is read with `weights_only=True`, which builds tensors and plain containers and runs no code.
"""

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftsmith_core.errors import InputError, first_line
from draftsmith_core.hub import lfs_pointer
from draftsmith_core.io import write_json_atomic

# Frequencies that older versions of transformers saved; they follow from the config.
_COMPUTED = "rotary_emb.inv_freq"
_NOT_WEIGHTS = ("training_args", "training_state", "optimizer", "scheduler", "scaler", "rng_state")


def tensor_files(directory: Path) -> list[Path]:
    """The files that hold a directory's tensors: safetensors if there are any, else pickles."""
    if safetensors := sorted(directory.glob("*.safetensors")):
        return safetensors
    pickles = [file for ending in ("*.bin", "*.pt", "*.pth") for file in sorted(directory.glob(ending))]
    return [file for file in pickles if not file.name.startswith(_NOT_WEIGHTS)]


def tensor_names(directory: Path) -> set[str]:
    """Names of all tensors; safetensors files are not read whole."""
    return {name for file in tensor_files(directory) for name in _load(file, names_only=True)}


def read_tensors(directory: Path) -> tuple[Path, dict[str, Tensor]]:
    """All tensors, and the file to name in errors."""
    files = tensor_files(directory)
    if not files:
        raise InputError(f"{directory / 'model.safetensors'}: no such file; a head's tensors are expected in it")
    tensors: dict[str, Tensor] = {}
    for file in files:
        loaded = {name: tensor for name, tensor in _load(file).items() if not name.endswith(_COMPUTED)}
        if twice := sorted(tensors.keys() & loaded.keys()):
            raise InputError(f"{file}: has the tensor '{twice[0]}', as another file there does; delete one")
        tensors |= loaded
    return files[0], tensors


def _load(file: Path, names_only: bool = False) -> dict[str, Any]:
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                return {name: None if names_only else opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        # Files of torch before 1.6 cannot be mapped.
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
        return {name: tensor for name, tensor in loaded.items() if isinstance(tensor, Tensor)}
    except pickle.UnpicklingError:
        reason = lfs_pointer(file) or "it is no file of torch.save, or has more than tensors, which would run code"
    except (SafetensorError, RuntimeError, OSError, EOFError, ValueError, KeyError, AttributeError) as error:
        reason = lfs_pointer(file) or f"{first_line(error)}; copy it again"
    raise InputError(f"{file}: cannot be read ({reason})")


def write_tensors(directory: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write `model.safetensors`, then `config.json`, into a directory that exists."""
    # Cloned, because safetensors refuses tensors that share memory, as views of one buffer do.
    owned = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    save_file(owned, directory / "model.safetensors", metadata={"format": "pt"})
    write_json_atomic(directory / "config.json", dict(config))
