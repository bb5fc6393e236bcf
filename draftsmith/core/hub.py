"""Models by name: a directory or a name on the hub, code that comes with it, and uploading a
finished directory.

The token is read from the environment variable HF_TOKEN and from nowhere else; it is neither logged
nor saved.
"""

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from huggingface_hub import constants, snapshot_download
from huggingface_hub.utils import logging as hub_logging
from huggingface_hub.utils.tqdm import progress_bar_states

from draftsmith.core.environment import environment, shared
from draftsmith.core.errors import InputError, RunError, first_line, one_line
from draftsmith.core.ranks import from_main
from draftsmith.core.records import RUN
from draftsmith.core.sources import hub_is_reachable, is_hub_name

_LFS = b"version https://git-lfs.github.com/spec/"


@shared
@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers, datasets, the hub's client and DeepSpeed from drawing bars and giving
    advice; their errors still show.
    """
    # They take seconds to import, which a run's readers need not wait for.
    import torch
    from transformers import logging as transformers_logging

    loggers = (transformers_logging, hub_logging)
    levels = [logger.get_verbosity() for logger in loggers]
    hub_bars = dict(progress_bar_states)
    # `datasets` takes a second to import, and is imported before it is used.
    imported = [sys.modules.get(f"{name}.utils.logging") for name in ("transformers", "datasets")]
    drawn = [logger for logger in imported if logger and logger.is_progress_bar_enabled()]
    # For a checkpoint on the hub without safetensors transformers would ask a service to convert
    # it, in a thread.
    variables = {"DISABLE_SAFETENSORS_CONVERSION": "1"}
    # transformers imports DeepSpeed to save a model, and DeepSpeed prints that it sees no GPU.
    if not torch.cuda.is_available():
        variables["DS_ACCELERATOR"] = os.environ.get("DS_ACCELERATOR", "cpu")
    with environment(**variables):
        for logger in drawn:
            logger.disable_progress_bar()
        for logger in loggers:
            logger.set_verbosity_error()
        try:
            yield
        finally:
            for logger in drawn:
                logger.enable_progress_bar()
            progress_bar_states.clear()
            progress_bar_states.update(hub_bars)
            for logger, level in zip(loggers, levels, strict=True):
                logger.set_verbosity(level)


@shared
@contextlib.contextmanager
def _offline() -> Iterator[None]:
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextlib.contextmanager
def offline_if_unreachable(name: str | None = None) -> Iterator[bool]:
    """Let the hub's client use its cache at once if the hub cannot be asked; yield whether it
    can. For a directory `name` it is not asked.
    """
    reachable = (name is not None and Path(name).is_dir()) or hub_is_reachable()
    with contextlib.nullcontext() if reachable else _offline():
        yield reachable


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
        with offline_if_unreachable(name):
            return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the hub's client raises a dozen classes
        raise InputError(f"{name}: cannot be downloaded: {first_line(error)}") from None


def cached(name: str, file: str, revision: str | None = None) -> Path | None:
    """Return a file of a directory, or of the hub through its cache; None if it is missing or the
    hub unreachable.
    """
    from draftsmith.core.transformers_api import cached_file

    try:
        with offline_if_unreachable(name):
            path = cached_file(
                name,
                file,
                revision=revision or "main",
                _raise_exceptions_for_missing_entries=False,
            )
    except Exception:  # a dozen classes; loading the model itself gives the reason
        return None
    return None if path is None else Path(path)


# What a card on disk writes where a published one has the repository's name.
PLACEHOLDER = "DIRECTORY-OR-HUB-NAME"


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

    A new repository is private. Subdirectories (a run's checkpoints), hidden files and run.json,
    which names places on this machine, are not uploaded. README.md gets the repository's name in
    its examples.
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
            if file.is_file() and file.name[0] != "." and file.name != RUN:
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
