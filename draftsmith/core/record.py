"""The record of a draft that this project made, beside its weights."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from draftsmith.core.errors import InputError
from draftsmith.core.io import JsonObject, first_damaged, read_json

# Beside the weights of a draft: how it was made.
RECORD = "draftsmith.json"


def train_longer(draft: str) -> str:
    """Return the command that trains a finished draft for as many steps again, into another
    directory; empty if no record says how it was trained.

    The directory itself refuses more steps: its schedule has ended.
    """
    record = read_record(Path(draft), ["kind"])
    command = shlex.split(record.get("command") or "")
    if command[:2] != ["draftsmith", "train"]:
        return ""
    replaced = {"--draft", "--out"}
    if record["kind"] == "draft-lm":
        # Its vocabulary is a part of it.
        replaced.add("--draft_vocab_size")
    words: list[str] = []
    left_out = False
    for word in command:
        key, equals, _ = word.partition("=")
        if key.startswith("--"):
            left_out = key.replace("-", "_").replace("__", "--", 1) in replaced
        if not left_out:
            words.append(word)
        left_out = left_out and not equals
    directory = draft.rstrip("/")
    return shlex.join([*words, "--draft", directory, "--out", f"{directory}-longer"])


def check_weights(checkpoint: Path) -> None:
    """Raise InputError if weights of a draft that this project made are not what was written."""
    digests = read_record(checkpoint).get("files", {})
    weights = {name: digests[name] for name in digests if name.endswith(".safetensors")}
    if damaged := first_damaged(checkpoint, weights):
        raise InputError(
            f"{checkpoint / damaged}: is not what was written; copy or make the draft again"
        )


def read_record(checkpoint: Path, keys: Sequence[str] = ()) -> JsonObject:
    """The record of a draft that this project made, with these keys; empty for others."""
    path = checkpoint / RECORD
    return read_json(path, "the record of a draft checkpoint", keys) if path.is_file() else {}
