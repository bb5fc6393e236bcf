"""Uploading a finished directory to the Hugging Face hub.

The token is read from the environment variable HF_TOKEN and from nowhere else; it is neither logged nor saved.
"""

import os
import re
from pathlib import Path
from typing import Literal

from huggingface_hub import constants

from draftsmith_core.errors import InputError, RunError, one_line
from draftsmith_core.processes import on_main

# What a card on disk writes where a published one has the repository's name.
PLACEHOLDER = "DIRECTORY-OR-HUB-NAME"


def is_hub_name(name: str) -> bool:
    """Whether `name` reads as `owner/name` on the hub and is not a path that exists here."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name, re.ASCII) is not None and not Path(name).exists()


def check_push(name: str) -> None:
    """Refuse, before any work is done, an upload that could not succeed. Raises InputError."""
    if not is_hub_name(name):
        raise InputError(f"push_to_hub: {name!r} is not a repository on the hub; write owner/name")
    if not os.environ.get("HF_TOKEN"):
        raise InputError(
            "push_to_hub: the environment variable HF_TOKEN is not set; it must hold a token that may write"
        )
    if constants.HF_HUB_OFFLINE:
        raise InputError("push_to_hub: HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it, or leave this out")


def push(directory: Path, name: str, repo_type: Literal["model", "dataset"]) -> str:
    """Upload the files directly in `directory` as one commit and return the repository's URL.

    A repository that does not exist yet is created private. Subdirectories (a run's checkpoints) and hidden files stay
    here. README.md is uploaded with the repository's name in its examples. Raises RunError in one line; what is on
    disk is not touched, and the same command uploads it again.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # httpx's: what HfHubHTTPError is not

    try:
        api = HfApi(token=os.environ["HF_TOKEN"])
        repository = api.create_repo(name, repo_type=repo_type, private=True, exist_ok=True)
        operations = []
        for file in sorted(directory.iterdir()):
            if file.is_file() and not file.name.startswith("."):
                content: str | bytes = str(file)
                if file.name == "README.md":
                    content = file.read_text(encoding="utf-8").replace(PLACEHOLDER, repository.repo_id).encode()
                operations.append(CommitOperationAdd(path_in_repo=file.name, path_or_fileobj=content))
        message = f"Upload by draftsmith: {directory.name}"
        api.create_commit(repository.repo_id, operations, repo_type=repo_type, commit_message=message)
    except (OSError, ValueError, RuntimeError, HTTPError) as error:
        raise RunError(
            f"push_to_hub {name}: {one_line(error)}; {directory} is complete, and the same command uploads it again"
        ) from None
    return str(repository)


def pushed(directory: Path, name: str | None, repo_type: Literal["model", "dataset"]) -> dict[str, str]:
    """`{"pushed": url}` for a run's summary; empty without a name. Every process calls it, the main one uploads."""
    if name is None:
        return {}
    urls: list[str] = []
    on_main(lambda: urls.append(push(directory, name, repo_type)))
    return {"pushed": urls[0]} if urls else {}
