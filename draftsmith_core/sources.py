"""What `--target` and `--draft` may name: a model's directory or a name on the hub; and code that comes with it."""

import socket
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import getproxies

from huggingface_hub import snapshot_download
from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE
from huggingface_hub.utils import logging as hub_logging
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file

from draftsmith_core.errors import InputError, first_line
from draftsmith_core.io import read_json, sha256_file
from draftsmith_core.processes import say

_CONFIGS = ("config.json", "tokenizer_config.json")
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
    """Raise InputError unless `name` is a directory that can hold a model, or can be a name on the hub."""
    path = Path(name)
    if path.is_file():
        raise InputError(f"{name}: is a file; name the directory that it lies in")
    if not path.is_dir():
        if name.startswith((".", "/", "~")) or name.count("/") > 1 or not name.strip():
            raise InputError(f"{name}: no such directory (a hub name is written owner/name)")
        return
    if (path / "adapter_config.json").exists():
        raise InputError(
            f"{name}: holds a LoRA adapter, not a whole model; merge it into its base model with peft "
            f"(merge_and_unload, save_pretrained) and name the result"
        )
    if (path / "run" / "run.json").exists() and not (path / "config.json").exists():
        raise InputError(f"{name}: holds a training run that has not ended; the same train command continues it")
    # transformers ignores a generation config that it cannot read, and with it the tokens that end an answer.
    for file in ("config.json", "generation_config.json"):
        if (path / file).exists():
            read_json(path / file, "a model's config")


def hub_has_address() -> bool:
    """Whether the hub can be asked at all. Its client would retry for a minute before saying that it cannot."""
    if HF_HUB_OFFLINE or getproxies():
        return not HF_HUB_OFFLINE
    try:
        socket.getaddrinfo(urlparse(ENDPOINT).hostname, 443)
    except OSError:
        return False
    return True


def why_not(name: str, error: Exception) -> str:
    """One line for what transformers or the hub's client raised."""
    text = str(error)
    if "trust_remote_code" in text or "custom code" in text:
        files = ", ".join(remote_files(name)) or "Python files in it"
        return f"it needs code that comes with it ({files}); read that, and add --trust_remote_code to run it"
    if "Weights only load failed" in text:
        return "its weights are a pickle with more in it than tensors, and reading that would run code"
    return lfs_pointer(*sorted(Path(name).glob("*"))) or first_line(error)


def lfs_pointer(*files: Path) -> str | None:
    """Which of these files is a pointer of git-lfs, as a clone without it has; None if none is."""
    for file in files:
        if file.is_file():
            with file.open("rb") as opened:
                if opened.read(len(_LFS)) == _LFS:
                    return f"{file.name} is a pointer of git-lfs and not the file itself; run git lfs pull there"
    return None


def remote_files(name: str) -> dict[str, str]:
    """Python files that `auto_map` in the configs of a model names, and where each is from: a commit, or a hash here.

    Asks the hub for files that are not in its cache; files that it does not have are left out.
    """
    files: dict[str, str] = {}
    for config in _CONFIGS:
        path = cached(name, config)
        for reference in _strings(read_json(path, "a model's config").get("auto_map") if path else None):
            source, _, module = reference.rpartition("--")
            file = f"{module.rpartition('.')[0]}.py"
            place = cached(source or name, file)
            if place is not None:
                from_hub = place.parent.parent.name == "snapshots"  # snapshots/COMMIT/FILE of the hub's cache
                version = f"commit {place.parent.name}" if from_hub else f"sha256 {sha256_file(place)[:16]}"
                files[f"{source}: {file}" if source else file] = version
    return files


def _strings(value: Any) -> list[str]:
    items = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return [value] if isinstance(value, str) else [text for item in items for text in _strings(item)]


def snapshot(name: str) -> Path:
    """A small repository of the hub as a directory in its cache; InputError if it cannot be had."""
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.bin", "*.pt", "*.pth"]))
    except Exception as error:  # the hub's client raises a dozen classes
        raise InputError(f"{name}: cannot be downloaded: {first_line(error)}") from None


def cached(name: str, file: str) -> Path | None:
    """A file of a directory, or of the hub through its cache; None if there is none or the hub cannot be asked."""
    try:
        path = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
    except Exception:  # the same refusal follows, with its reason, when the model itself is loaded
        return None
    return None if path is None else Path(path)


@cache
def announce_remote_code(name: str) -> None:
    """Say on standard error, once, which code `--trust_remote_code` will run, and of which commit."""
    for file, version in remote_files(name).items():
        say(f"{name}: running {file} ({version}), as --trust_remote_code allows")
