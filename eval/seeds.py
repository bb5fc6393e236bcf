"""Runs of one draft with several training seeds: `--draft jsd=RUN jsd=RUN` are measured as jsd#1
and jsd#2, and figures of jsd are over both.

Imports no torch.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from glob import glob
from pathlib import Path
from typing import NamedTuple

from draftsmith.core.errors import InputError
from draftsmith.core.prompt_rows import parse_named
from draftsmith.core.records import read_record
from draftsmith.eval.schema import ModelRow, Remark


class Spread(NamedTuple):
    """Lowest and highest figure over training seeds, and their number; of gains over a base with
    seeds, every run over every run of the base.
    """

    low: float
    high: float
    seeds: str


def draft_of(run: str) -> str:
    """The draft that a run belongs to; a draft of one run is its own. No given name has a `#`."""
    return run.partition("#")[0]


def shown(drafts: Collection[str]) -> list[str]:
    """The drafts in the order given, each once whatever the number of its runs."""
    return list(dict.fromkeys(map(draft_of, drafts)))


def runs_of(draft: str, drafts: Collection[str]) -> list[str]:
    """The measured drafts that a name stands for: its runs, or itself."""
    return [run for run in drafts if draft in (run, draft_of(run))]


def seeded(drafts: Collection[str]) -> list[str]:
    """The drafts of several runs."""
    return [draft for draft in shown(drafts) if draft not in drafts]


def named_runs(values: Sequence[str]) -> dict[str, str]:
    """Sources by name. A NAME= that comes several times, or with a pattern, has runs. Raise
    InputError for a run that is given twice.
    """
    sources: dict[str, list[str]] = {}
    for value in values:
        ((name, source),) = parse_named("--draft", [value]).items()
        runs = sources.setdefault(name, [])
        if runs and not value.startswith(f"{name}="):
            parse_named("--draft", [f"{name}={runs[0]}", value])  # refuses the second
        found = sorted(glob(source)) if "*" in source else [source]
        if not found or set(found) & set(runs):
            why = "is given twice" if found else "fits no directory"
            raise InputError(f"--draft {value}: {why}; name each run once")
        runs += found
    named = {}
    for name, runs in sources.items():
        for number, run in enumerate(runs, start=1):
            named[name if len(runs) == 1 else f"{name}#{number}"] = run
    return named


def of_runs(models: Mapping[str, ModelRow]) -> Iterator[Remark]:
    """Find drafts whose runs do not differ in their training seed alone. Raise InputError if their
    models differ.
    """
    for draft in seeded(models):
        rows = [models[run] for run in runs_of(draft, models)]
        shapes = {f"{row['model_type']} of {row['parameters']:,}" for row in rows}
        if len(shapes) > 1:
            found = " and ".join(sorted(shapes))
            raise InputError(f"--draft {draft}: its runs are {found} parameters; name them apart")
        configs = [read_record(Path(row["name"])).get("config", {}) for row in rows]
        differ = []
        for key, value in configs[0].items():
            if any(config.get(key) != value for config in configs):
                differ.append(key)
        if differ != ["seed"]:
            named = ", ".join(differ) or "no recorded option"
            text = f"draft {draft}: its runs differ in {named}, not in their training seed alone"
            yield Remark(about="seeds", text=text)
