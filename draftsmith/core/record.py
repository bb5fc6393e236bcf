"""The record of a draft that this project made, beside its weights."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from draftsmith.core.errors import InputError
from draftsmith.core.io import JsonObject, first_damaged, read_json

# Beside the weights of a draft: how it was made.
RECORD = "draftsmith.json"
# A draft that gained this much held-out alpha in the last fifth of its steps was still improving.
RISING = 0.005
# Fewest points of a curve that say so.
LEAST_POINTS = 4


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
    words = []
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


def heldout_curve(checkpoint: Path) -> list[tuple[int, float]]:
    """Steps and held-out alphas of the training, from the metrics beside the weights."""
    metrics = checkpoint / "run" / "metrics.jsonl"
    curve = []
    for line in metrics.read_text(encoding="utf-8").splitlines() if metrics.is_file() else ():
        figures = json.loads(line)
        if "heldout_alpha" in figures:
            curve.append((figures["step"], figures["heldout_alpha"]))
    return curve


def still_rising(curve: Sequence[tuple[int, float]]) -> float | None:
    """The rise of held-out alpha over the last fifth of the steps; None if it is below `RISING`."""
    if len(curve) < LEAST_POINTS:
        return None
    last_step, last = curve[-1]
    before = [alpha for step, alpha in curve if step <= 0.8 * last_step]
    rise = last - max(before)
    return rise if rise >= RISING else None


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
