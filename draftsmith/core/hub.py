"""Models by name: a directory or a name on the hub, code that comes with it, and uploading a
finished directory.

The token is read from the environment variable HF_TOKEN and from nowhere else; it is neither logged
nor saved.
"""

import contextlib
import os
import re
import socket
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal
from urllib.parse import urlparse
from urllib.request import getproxies

import torch
from huggingface_hub import constants, snapshot_download
from huggingface_hub.utils import logging as hub_logging
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file

from draftsmith.core.errors import InputError, RunError, first_line, one_line
from draftsmith.core.io import read_json
from draftsmith.core.ranks import from_main

# Files of a directory that a message names.
_NAMED = 4
_LFS = b"version https://git-lfs.github.com/spec/"


def quiet() -> None:
    """Keep transformers, the hub's client and DeepSpeed from drawing bars and giving advice; their
    errors still show.
    """
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    # transformers imports DeepSpeed to save a model, and DeepSpeed prints that it sees no GPU.
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


# One of these is in every model's directory, and one of those in every tokenizer's.
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")
_TOKENIZER = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")
# What directories without a model are, by a file in them.
_OTHERS = {
    "align.yaml": "align has made no draft here yet; run its command again to go on",
    "manifest.json": "is a set of answers, which `train --data` reads, and no model",
}


def check_source(name: str) -> None:
    """Raise InputError unless `name` is a directory that can hold a model, or can be a name on the
    hub.
    """
    path = Path(name)
    on_hub = bool(name.strip()) and not name.startswith((".", "/", "~")) and name.count("/") <= 1
    is_model = (path / "config.json").exists()
    reason = ""
    if path.is_file():
        reason = "is a file; name the directory that it lies in"
    elif not path.is_dir() and not on_hub:
        reason = "no such directory (a hub name is written owner/name)"
    elif (path / "adapter_config.json").exists():
        reason = "holds a LoRA adapter; merge it into its base model with peft first"
    elif path.is_dir() and not is_model:
        reason = _what_it_holds(path)
        if not reason and not _has(path, _WEIGHTS) and not has_tokenizer(path):
            reason = no_model(path)
    if reason:
        raise InputError(f"{name}: {reason}")
    # transformers ignores a generation config that it cannot read, and with it the tokens that end
    # an answer.
    for file in ("config.json", "generation_config.json"):
        if (path / file).exists():
            read_json(path / file, "a model's config")


def _what_it_holds(directory: Path) -> str:
    """Return what a directory that is no model holds instead; empty if nothing is known."""
    if (directory / "run" / "run.json").exists():
        return "holds an unfinished training run; run its train command again to resume it"
    if inside := sorted(directory.glob("*/config.json")):
        models = ", ".join(str(config.parent) for config in inside)
        return f"is no model itself; it holds {models}: name one"
    return next((what for file, what in _OTHERS.items() if (directory / file).exists()), "")


def has_tokenizer(directory: Path) -> bool:
    """Whether a directory holds files of a tokenizer."""
    return _has(directory, _TOKENIZER)


def _has(directory: Path, patterns: Sequence[str]) -> bool:
    return any(any(directory.glob(pattern)) for pattern in patterns)


def no_model(directory: Path) -> str:
    """Say what a directory lacks of a model; empty if it has a config and weights."""
    names = sorted(path.name for path in directory.glob("[!.]*"))
    lacks = [] if "config.json" in names else ["no config.json"]
    if not _has(directory, _WEIGHTS):
        lacks.append("no weights")
    if not lacks:
        return ""
    holds = ", ".join([*names[:_NAMED], *["..."] * (len(names) > _NAMED)])
    what = f"{' and '.join(lacks)}, only {holds}" if names else "it is empty"
    return f"holds no model ({what}); a model has config.json, *.safetensors and tokenizer.json"


def hub_has_address() -> bool:
    """Whether the hub can be asked at all. Its client would retry for a minute before saying that
    it cannot.
    """
    if constants.HF_HUB_OFFLINE:
        return False
    host = urlparse(constants.ENDPOINT).hostname
    with contextlib.suppress(OSError):
        return bool(getproxies() or socket.getaddrinfo(host, 443))
    return False


@contextlib.contextmanager
def offline_if_unreachable() -> Iterator[bool]:
    """Let the hub's client use its cache at once if the hub cannot be asked; yield whether it
    can.
    """
    before = constants.HF_HUB_OFFLINE
    reachable = hub_has_address()
    constants.HF_HUB_OFFLINE = not reachable
    try:
        yield reachable
    finally:
        constants.HF_HUB_OFFLINE = before


def why_not(name: str, error: Exception) -> str:
    """One line for what transformers or the hub's client raised."""
    text = str(error)
    if "trust_remote_code" in text or "custom code" in text:
        return (
            "it needs the Python code that comes with it; read that, and add "
            "--trust_remote_code to run it"
        )
    if "Weights only load failed" in text:
        return (
            "its weights are a pickle with more in it than tensors, and reading that would run code"
        )
    files = sorted(Path(name).glob("*"))
    return lfs_pointer(files) or first_line(error)


def lfs_pointer(files: Iterable[Path]) -> str | None:
    """Name the first git-lfs pointer among these files, as a clone without git-lfs has them; None
    if none is one.
    """
    for file in files:
        if file.is_file() and file.stat().st_size < 1024 and file.read_bytes().startswith(_LFS):
            return f"{file.name} is a git-lfs pointer, not the file itself; run git lfs pull there"
    return None


def snapshot(name: str, revision: str | None = None) -> Path:
    """A small repository of the hub as a directory in its cache; InputError if it cannot be had."""
    patterns = ["*.json", "*.safetensors", "*.bin", "*.pt", "*.pth"]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the hub's client raises a dozen classes
        raise InputError(f"{name}: cannot be downloaded: {first_line(error)}") from None


def cached(name: str, file: str) -> Path | None:
    """Return a file of a directory, or of the hub through its cache; None if it is missing or the
    hub unreachable.
    """
    try:
        with offline_if_unreachable():
            path = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
    except Exception:  # a dozen classes; loading the model itself gives the reason
        return None
    return None if path is None else Path(path)


# What a card on disk writes where a published one has the repository's name.
PLACEHOLDER = "DIRECTORY-OR-HUB-NAME"


def is_hub_name(name: str) -> bool:
    """Whether `name` reads as `owner/name` on the hub and is not a path that exists here."""
    is_name = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name, re.ASCII) is not None
    return is_name and not Path(name).exists()


def check_push(name: str) -> None:
    """Raise InputError, before any work is done, for an upload that could not succeed."""
    if not is_hub_name(name):
        raise InputError(f"push_to_hub: {name!r} is not a repository on the hub; write owner/name")
    if not os.environ.get("HF_TOKEN"):
        raise InputError(
            "push_to_hub: the environment variable HF_TOKEN must hold a token that may write"
        )


def push(directory: Path, name: str, repo_type: Literal["model", "dataset"]) -> str:
    """Upload the files directly in `directory` as one commit and return the repository's URL.

    A new repository is private. Subdirectories (a run's checkpoints) and hidden files are not
    uploaded. README.md gets the repository's name in its examples.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # httpx's: what HfHubHTTPError is not

    try:
        api = HfApi(token=os.environ["HF_TOKEN"])
        repository = api.create_repo(name, repo_type=repo_type, private=True, exist_ok=True)
        card = (directory / "README.md").read_text(encoding="utf-8")
        card = card.replace(PLACEHOLDER, repository.repo_id)
        contents: dict[str, Path | bytes] = {"README.md": card.encode()}
        for file in sorted(directory.iterdir()):
            if file.is_file() and not file.name.startswith("."):
                contents.setdefault(file.name, file)
        operations = [
            CommitOperationAdd(path_in_repo=name, path_or_fileobj=content)
            for name, content in contents.items()
        ]
        message = f"Upload by draftsmith: {directory.name}"
        api.create_commit(
            repository.repo_id, operations, repo_type=repo_type, commit_message=message
        )
    except (OSError, ValueError, RuntimeError, HTTPError) as error:
        reason = (
            f"{one_line(error)}; {directory} is complete, run the same command again to upload it"
        )
        raise RunError(f"push_to_hub {name}: {reason}") from None
    return str(repository)


def pushed(
    directory: Path, name: str | None, repo_type: Literal["model", "dataset"]
) -> dict[str, str]:
    """`{"pushed": url}` for a run's summary; empty without a name. Every process calls it, the main
    one uploads.
    """
    if name is None:
        return {}
    return {"pushed": from_main(lambda: push(directory, name, repo_type))}
