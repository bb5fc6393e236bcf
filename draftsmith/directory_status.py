"""`draftsmith status DIR`: what a directory holds, whether it is finished, and how to go on.

Reads only. Stages leave files that say what they are: a manifest, a record, results, run.json.
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from draftsmith.config import StatusConfig
from draftsmith.core.errors import InputError, counted
from draftsmith.core.io import JsonObject, read_json, require_keys
from draftsmith.core.options import command_line, configured
from draftsmith.core.record import RECORD
from draftsmith.core.runs import holder
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.manifest import count_kept
from draftsmith.eval.moved import path_now
from draftsmith.train.config import TrainConfig
from draftsmith.train.objective import OWN_LOSS

State = Literal["finished", "unfinished", "running"]
# A directory of directories of results is looked into this deep.
_DEPTH = 2


@dataclass(frozen=True)
class Held:
    """What one directory holds.

    made_by: the command that made or began it, None if it is not recorded. following: what to run
    or open next.
    """

    path: str
    holds: str
    state: State
    facts: str
    made_by: str | None
    following: str

    def lines(self) -> list[str]:
        """Return it in words."""
        made_by = [] if self.made_by is None else [f"  made by: {self.made_by}"]
        return [
            f"{self.path}: {self.holds}, {self.state}; {self.facts}",
            *made_by,
            f"  next:    {self.following}",
        ]


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
    # A part of an alignment lies in its directory.
    above = path.absolute().parent if path.name in ("", "..") else path.parent
    whole = _alignment(above)
    held = list(_found(path, _DEPTH, whole)) or list(filter(None, [whole]))
    if not held:
        raise InputError(f"{directory}: holds nothing that draftsmith made")
    return held


def _found(directory: Path, depth: int, whole: Held | None = None) -> Iterator[Held]:
    """whole: the alignment that this directory is a part of."""
    for read in (_alignment, _distilled_set, _draft, _evaluation):
        held = read(directory)
        if held is None:
            continue
        if whole is not None:
            # `align` goes on with its parts, and runs while any of them does.
            facts = f"{held.facts}; part of the alignment {whole.path}"
            held = replace(held, facts=facts, made_by=whole.made_by, following=whole.following)
        yield held
        if read is not _alignment:
            return
        whole = held
        break
    if depth:
        for inner in sorted(directory.iterdir()):
            if inner.is_dir() and not inner.name.startswith("."):
                yield from _found(inner, depth - 1, whole)


def _alignment(directory: Path) -> Held | None:
    if not (directory / "distill.yaml").is_file():
        return None
    report = directory / "eval" / "report.html"
    facts = "its stages have their options in .yaml files"
    again = _identity(directory, "run.json").get("command")
    begun = _unfinished(directory, "an alignment", facts, again, list(directory.glob("*/")))
    if begun.state == "running" or not report.is_file():
        return begun
    return replace(begun, state="finished", following=f"open {report}")


def _distilled_set(directory: Path) -> Held | None:
    here = str(directory)
    manifest = directory / "manifest.json"
    if manifest.is_file():
        made = read_json(
            manifest,
            "the manifest of a distilled set",
            ["command", "config", "counts", "response_tokens"],
        )
        words = shlex.split(made["command"])
        out = words[words.index("--out") + 1] if "--out" in words else here
        target = path_now(made["config"]["target"], out, here)
        train = ["draftsmith", "train", "--data", here, "--target", target]
        facts = f"{made['counts']['rows']} rows, {made['response_tokens']} response tokens"
        following = f"{shlex.join(train)} --draft DRAFT --out OUT"
        return Held(here, "a distilled set", "finished", facts, made["command"], following)
    begun = _identity(directory, "run.json")
    if "prompts" not in begun:
        return None
    again = begun.pop("command") or command_line("distill", DistillConfig(**begun))
    kept = f"{counted(count_kept(directory), 'answer')} kept"
    return _unfinished(directory, "a distilled set", kept, again)


def _draft(directory: Path) -> Held | None:
    here = str(directory)
    record = directory / RECORD
    if record.is_file():
        made = read_json(record, "the record of a draft")
        target = str(made.get("target") or "TARGET")
        if "export" in made:
            return _export(directory, made, target)
        require_keys(made, ["kind"], record)
        out = made.get("config", {}).get("out", here)
        words = ["draftsmith", "eval", "--draft", here]
        words += ["--target", path_now(target, out, here)]
        holds = f"a draft ({made['kind'].removeprefix('draft-')})"
        following = f"{shlex.join(words)} --id PROMPTS --out OUT"
        return Held(here, holds, "finished", _figures(made), made.get("command"), following)
    begun = _identity(directory, "run/run.json")
    if not begun:
        return None
    own_loss = begun["objective"].startswith(OWN_LOSS)
    if own_loss:
        del begun["objective"]
    typed = begun.pop("command")
    training = TrainConfig(**begun)
    again = None if own_loss else typed or command_line("train", training)
    names = sorted(path.name for path in directory.glob("run/checkpoints/step_*"))
    step = int(names[-1].removeprefix("step_")) if names else 0
    whole = f" of {training.steps}" if training.steps else ""
    newest = f"its newest checkpoint is of step {step}{whole}"
    return _unfinished(directory, f"a draft ({training.kind})", newest, again)


def _export(directory: Path, made: JsonObject, target: str) -> Held:
    source = made["source"]["name"]
    written = made["export"]
    holds = f"an export ({written['kind']} as {written['format']})"
    serve = shlex.join(["draftsmith", "doctor", "--target", target, "--draft", source])
    return Held(str(directory), holds, "finished", f"made of {source}", made["command"], serve)


def _figures(record: JsonObject) -> str:
    steps = record.get("steps")
    trained = f"trained for {steps} steps" if steps else "not trained"
    for figure in ("heldout_alpha", "heldout_loss"):
        if figure in record:
            name = figure.replace("heldout_", "held-out ")
            return f"{trained}; best {name} {record[figure]:.3f} at step {record['best_step']}"
    return trained


def _evaluation(directory: Path) -> Held | None:
    file = directory / "results.json"
    if file.is_file():
        results = read_json(file, "the results of an evaluation")
        if "schema_version" not in results:
            return None
        require_keys(results, ["drafts", "provenance"], file)
        drafts = f"of {', '.join(results['drafts'])}"
        following = f"open {directory / 'report.html'}"
        made_by = results["provenance"]["command"]
        return Held(str(directory), "an evaluation", "finished", drafts, made_by, following)
    cells = len(list(directory.glob("cells/*.json")))
    if not cells:
        return None
    kept = f"{counted(cells, 'measurement')} kept"
    return _unfinished(directory, "an evaluation", kept, None)


def _unfinished(
    directory: Path, holds: str, facts: str, again: str | None, parts: Sequence[Path] = ()
) -> Held:
    """Describe what a run left, which holds the directory or one of its parts while it runs.

    again: the command that continues it, None if it is unknown.
    """
    if any(holder(held) is not None for held in (directory, *parts)):
        return Held(str(directory), holds, "running", facts, again, "wait for it")
    following = again or "run the command that began it again; what is finished is kept"
    return Held(str(directory), holds, "unfinished", facts, again, following)


def _identity(directory: Path, name: str) -> JsonObject:
    """Return the options of a run that began: those that decide its result, and the places that it
    reads and writes, as they are now; {} if none began. `command`: what began it, as it was typed.
    """
    here = str(directory)
    file = directory / name
    if not file.is_file():
        return {}
    record = read_json(file, "the record of a run", ["identity", "places"])
    began_in = record["places"].get("out", here)

    def now(value: object) -> object:
        if isinstance(value, list):
            return [now(each) for each in value]
        return path_now(value, began_in, here) if isinstance(value, str) else value

    places = {key: now(value) for key, value in record["places"].items()}
    config: JsonObject = record["identity"]["config"] | places | {"out": here}
    listed = [each if isinstance(each, list) else [each] for each in record["places"].values()]
    named = list(chain.from_iterable(listed))
    words = shlex.split(record.get("command", ""))
    config["command"] = shlex.join(str(now(word)) if word in named else word for word in words)
    return config
