"""What `--target` and `--draft` may name: a model's directory or a name on the hub; and code that comes with it.

What can be refused from the name and small files is refused here, before transformers answers with something longer.
"""

import socket
from functools import cache
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from urllib.parse import urlparse
from urllib.request import getproxies

from huggingface_hub import snapshot_download, try_to_load_from_cache
from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import logging as hub_logging
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file

from draftsmith_core.errors import InputError, one_line
from draftsmith_core.io import read_json, sha256_file
from draftsmith_core.processes import say

_CONFIGS = ("config.json", "tokenizer_config.json")
_INDEX = "model.safetensors.index.json"
_LFS = b"version https://git-lfs.github.com/spec/"


def quiet() -> None:
    """Keep transformers and the hub's client from drawing bars and printing advice; their errors still show."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    hub_logging.set_verbosity_error()


def is_url(name: str) -> bool:
    """Whether `name` is an address in a store or on the web, not a path."""
    return "://" in name


def check_source(name: str) -> None:
    """InputError unless `name` is a local directory or can be a name on the hub (`owner/name` or `name`)."""
    if not name.strip():
        raise InputError(f"{name!r}: is empty; name a directory or a model on the hub, as owner/name")
    if is_url(name):
        parts = [part for part in urlparse(name).path.split("/") if part]
        hint = f"write {'/'.join(parts[:2])}" if len(parts) >= 2 else "write its name on the hub, as owner/name"
        raise InputError(f"{name}: is a URL; {hint}, or download it and name the directory")
    if not name.isprintable():
        raise InputError(f"{name!r}: holds a character that cannot be in a name")
    path = Path(name)
    if path.suffix == ".gguf":
        raise InputError(f"{name}: GGUF files cannot be read; name the safetensors checkpoint that it was made from")
    if path.is_file():
        raise InputError(f"{name}: is a file; name the directory that it lies in")
    if path.is_dir():
        _check_directory(path, name)
        return
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise InputError(f"{name}: no such directory (a hub name is written owner/name)")
    try:
        cached = any(isinstance(try_to_load_from_cache(name, file), str) for file in ("config.json", "tokenizer.json"))
    except HFValidationError:
        raise InputError(f"{name}: no such directory, and not a name that the hub can have") from None
    if not cached and HF_HUB_OFFLINE:
        raise InputError(
            f"{name}: no such directory, and not in the hub's cache; HF_HUB_OFFLINE is set, so nothing is downloaded"
        )
    if not cached and not hub_has_address():
        raise InputError(
            f"{name}: no such directory, not in the hub's cache, and {urlparse(ENDPOINT).hostname} cannot be reached; "
            f"check the path, or the network"
        )


def _check_directory(path: Path, name: str) -> None:
    """InputError that says what a directory holds instead of a model, and which of its small files is broken."""
    if (path / "adapter_config.json").exists():
        base = read_json(path / "adapter_config.json", "the config of an adapter").get("base_model_name_or_path")
        raise InputError(
            f"{name}: holds a LoRA adapter, not a whole model; merge it into {base or 'its base model'} with peft "
            f"(merge_and_unload, save_pretrained) and name the result"
        )
    if (path / "config.json").exists():
        read_json(path / "config.json", "a model's config")
        # transformers ignores one that it cannot read, and with it the tokens that end an answer.
        if (path / "generation_config.json").exists():
            read_json(path / "generation_config.json", "how the model generates")
        return
    if (path / "run" / "run.json").exists():
        raise InputError(f"{name}: holds a training run that has not ended; the same train command continues it")
    if (path / "manifest.json").exists() and any(path.glob("part-*.parquet")):
        raise InputError(f"{name}: holds a distilled set; that is data for train, not a model")
    if any(path.glob("*.gguf")):
        raise InputError(f"{name}: holds GGUF files only; name the safetensors checkpoint that they were made from")
    # A tokenizer alone is enough for some options.
    if not any(path.glob("tokenizer*")):
        inside = sorted(path.glob("*/config.json")) or sorted(path.glob("snapshots/*/config.json"))
        hint = f"did you mean {inside[0].parent}?" if inside else "a model's directory has one"
        raise InputError(f"{name}: holds no config.json; {hint}")


def hub_has_address() -> bool:
    """Whether the hub can be asked at all. Its client would retry for a minute before saying that it cannot."""
    if HF_HUB_OFFLINE or getproxies():
        return not HF_HUB_OFFLINE
    try:
        socket.getaddrinfo(urlparse(ENDPOINT).hostname, 443)
    except OSError:
        return False
    return True


def why_not(name: str, error: Exception, what: str) -> str:
    """One line for what transformers or the hub's client raised: they use a dozen classes for a missing checkpoint."""
    text = one_line(error)
    if (pointer := lfs_pointer(*sorted(Path(name).glob("*")))) is not None:
        return pointer
    if (shards := _wrong_shards(Path(name))) is not None:
        return shards
    if "trust_remote_code" in text or "custom code" in text:
        files = ", ".join(remote_files(name)) or "Python files in it"
        return f"its {what} needs code that comes with it ({files}); read that, and add --trust_remote_code to run it"
    if "Error while deserializing" in text:
        return f"a safetensors file of it is cut short or damaged ({_first_line(error)}); copy it again"
    if "Weights only load failed" in text:
        return (
            "its weights are a pickle with more in it than tensors, and reading that would run code; convert it to "
            "model.safetensors where you trust it"
        )
    if isinstance(error, IndexError | EOFError | UnpicklingError):
        return f"its weights cannot be read as a pickle ({_first_line(error)}); copy them again"
    if "no file named model.safetensors" in text:
        return "it has no weights (model.safetensors or pytorch_model.bin)"
    if "gated repo" in text:
        return f"the hub gives it to accounts that were granted access; ask on https://hf.co/{name} and set HF_TOKEN"
    return _first_line(error)


def lfs_pointer(*files: Path) -> str | None:
    """In words: which of these files is a pointer of git-lfs, as a clone without it has; None where none is."""
    for file in files:
        if first_bytes(file, len(_LFS)) == _LFS:
            return f"{file.name} is a pointer of git-lfs and not the file itself; run git lfs pull there"
    return None


def _wrong_shards(directory: Path) -> str | None:
    """In words: what is wrong with the list of a checkpoint's shards, or missing of them; None where nothing is."""
    index = directory / _INDEX
    if not index.is_file():
        return None
    listed = read_json(index, "the list of a model's shards")
    files = listed.get("weight_map")
    if "metadata" not in listed or not isinstance(files, dict) or not files:
        return f"{_INDEX} lacks 'metadata' or 'weight_map'; copy it again"
    missing = sorted({str(each) for each in files.values() if not (directory / str(each)).is_file()})
    if not missing:
        return None
    return f"it lacks {len(missing)} of the files that {_INDEX} lists (such as {missing[0]}); copy them too"


def first_bytes(file: Path, count: int) -> bytes:
    """What a file begins with, to explain why it could not be read; empty where it cannot be opened."""
    try:
        with file.open("rb") as opened:
            return opened.read(count)
    except OSError:
        return b""


def _first_line(error: Exception) -> str:
    if type(error) is KeyError:
        return f"it names {error}, which is not known"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return (" ".join(lines[:2]) if lines[0].endswith(":") else lines[0]).rstrip(". ")


def remote_files(name: str) -> dict[str, str]:
    """Python files that `auto_map` in the configs of a model names, and where each is from: a commit, or a hash here.

    Asks the hub for files that are not in its cache; files that it does not have are left out.
    """
    found: dict[str, str] = {}
    for config in _CONFIGS:
        path = cached(name, config)
        for reference in _strings(read_json(path, "a model's config").get("auto_map") if path else None):
            source, _, module = reference.rpartition("--")
            file = f"{module.rpartition('.')[0]}.py"
            place = cached(source or name, file)
            if place is not None:
                found[f"{source}: {file}" if source else file] = _version(place)
    return found


def _strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [text for each in value for text in _strings(each)]
    return [value] if isinstance(value, str) else []


def snapshot(name: str) -> Path:
    """A small repository of the hub as a directory in its cache; InputError, one line, when it cannot be had."""
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.bin", "*.pt", "*.pth"]))
    except Exception as error:  # the hub's client raises a dozen classes
        raise InputError(f"{name}: cannot be downloaded: {why_not(name, error, 'draft')}") from None


def cached(name: str, file: str) -> Path | None:
    """A file of a directory, or of the hub through its cache; None where there is none or the hub cannot be asked."""
    if Path(name).is_dir():
        return Path(name) / file if (Path(name) / file).is_file() else None
    try:
        path = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
    except Exception:  # the same refusal follows, with its reason, when the model itself is loaded
        return None
    return None if path is None else Path(path)


def _version(path: Path) -> str:
    """The commit of a file in the hub's cache (`snapshots/COMMIT/FILE`), the sha256 of any other."""
    if path.parent.parent.name == "snapshots":
        return f"commit {path.parent.name}"
    return f"sha256 {sha256_file(path)[:16]}"


@cache
def announce_remote_code(name: str) -> None:
    """Say on standard error, once, which code `--trust_remote_code` will run, and of which commit."""
    for file, version in remote_files(name).items():
        say(f"{name}: running {file} ({version}), as --trust_remote_code allows")
