"""`draftsmith status DIR`: what a directory holds, whether it is finished, and how to go on, by the
`run.json` of every command.
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from draftsmith.config import StatusConfig
from draftsmith.core.errors import InputError
from draftsmith.core.io import JsonObject, require_keys
from draftsmith.core.options import configured
from draftsmith.core.records import RUN, path_now, read_run
from draftsmith.core.runs import holder

# A directory of directories of results is looked into this deep.
_DEPTH = 2
_KEYS = ("stage", "command", "inputs", "paths", "progress", "finished")
# What to run or open next, by the first word of the stage.
_NEXT = {
    "alignment": "open {here}/eval/report.html",
    "distilled": "draftsmith train --data {here} --target {target} --draft DRAFT --out OUT",
    "draft": "draftsmith eval --draft {here} --target {target} --id PROMPTS --out OUT",
    "evaluation": "open {here}/report.html",
    "export": "draftsmith doctor --target {target} --draft {draft}",
}


@dataclass(frozen=True)
class Held:
    """What one directory holds.

    made_by: the command that made or began it. following: what to run or open next.
    """

    path: str
    holds: str
    state: Literal["finished", "unfinished", "running"]
    progress: str
    made_by: str
    following: str


def status(config: StatusConfig | None = None, **options: Any) -> JsonObject:
    """Return what a directory and those below it hold. Raise InputError if it is nothing of ours.

    The rows of `held` are those of `Held`.
    """
    config = configured(StatusConfig, config, options)
    return summary(config.directory, look(config.directory))


def summary(directory: str, held: Sequence[Held]) -> JsonObject:
    """Return what was found as plain values."""
    return {"directory": directory, "held": [asdict(each) for each in held]}


def look(directory: str) -> list[Held]:
    """Return what a directory and those below it hold, in the order of their names."""
    path = Path(directory)
    if not path.is_dir():
        raise InputError(f"{directory}: is no directory")
    held = list(_found(path, _DEPTH))
    if not held:
        raise InputError(f"{directory}: holds nothing that draftsmith made")
    return held


def _found(directory: Path, depth: int) -> Iterator[Held]:
    record = read_run(directory)
    if record:
        require_keys(record, _KEYS, directory / RUN)
        yield _held(directory, record)
    if depth and (not record or record["stage"] == "alignment"):
        for inner in sorted(directory.iterdir()):
            if inner.is_dir() and not inner.name.startswith("."):
                yield from _found(inner, depth - 1)


def _held(directory: Path, record: JsonObject) -> Held:
    words = shlex.split(record["command"])
    now = [path_now(word, record, directory) for word in words]
    # What was typed in Python is no command line.
    again = record["command"] if now == words else shlex.join(now)
    stage = record["stage"]
    progress = "nothing is finished yet"
    if done := record["progress"]:
        of = "" if done["of"] is None else f" of {done['of']}"
        progress = f"{done['done']}{of} {done['unit']}"
    state: Literal["finished", "unfinished", "running"] = "unfinished"
    following = again
    if holder(directory) is not None:
        state = "running"
        following = "wait for it"
    elif record["finished"]:
        state = "finished"
        names = {"here": str(directory), "target": "TARGET", "draft": "DRAFT"}
        for key, value in record["inputs"].items():
            if isinstance(value, str):
                names[key] = path_now(value, record, directory)
        quoted = {key: shlex.quote(name) for key, name in names.items()}
        following = _NEXT.get(stage.split()[0], "open {here}").format(**quoted)
    return Held(str(directory), stage, state, progress, again, following)
