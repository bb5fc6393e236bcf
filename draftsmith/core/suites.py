"""Suites, known data sets by name: where their rows are, and how a row becomes a prompt.

`@gsm8k` is configs/prompts/gsm8k.yaml. A file with `parts` is a family: `@spec-bench-qa` is a part
of configs/prompts/spec-bench.yaml, and `@spec-bench` stands for all its parts. Imports no torch.
"""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import yaml

from draftsmith.core.errors import InputError, nearest
from draftsmith.core.io import JsonObject

DIRECTORY = Path(__file__).parents[1] / "configs" / "prompts"


@dataclass(frozen=True)
class SuiteSource:
    """A file of configs/prompts/, or one part of it.

    One of four keys makes a prompt of a row; templates fill in `{column}`, `{column[key]}` and
    `{column[0]}`.
    user: template of a message. prompt: template of a text to continue. turns: column with a chat;
    its first `keep_turns` turns are kept. questions: columns that may hold the user's turns, of
    which the first is asked.

    where: values that a column must have. every: take every nth row that fits. prompts: maximum
    number of prompts. placeholder: text of rows that `fill` has yet to fill. gated: whether the hub
    gives the files only to those who accept its conditions.
    """

    name: str
    family: str
    version: int
    dataset: str
    prompts: int
    licence: str
    citation: str
    split: str = "train"
    subset: str | None = None
    files: str | None = None
    user: str | None = None
    prompt: str | None = None
    turns: str | None = None
    questions: tuple[str, ...] = ()
    keep_turns: int = 1
    where: dict[str, list[str]] = field(default_factory=dict)
    every: int = 1
    placeholder: str | None = None
    fill: str | None = None
    gated: bool = False

    def local_file(self, path: str) -> str:
        """Return the file that a path leads to: itself, or one of the data set's in a directory."""
        if not path or not Path(path).is_dir():
            return path
        file = self.files or f"{self.subset or self.name}.jsonl"
        return str(Path(path) / file.rpartition("/")[2])

    def fits(self, row: JsonObject) -> bool:
        """Return whether a row is of this suite; KeyError if it lacks a column."""
        return all(str(row[column]) in values for column, values in self.where.items())

    def prompt_of(self, row: JsonObject) -> JsonObject:
        """Return a row's prompt as a row of `messages`, `conversations` or `prompt`.

        Raise KeyError, IndexError, TypeError or AttributeError if the row has other columns.
        """
        if self.turns is not None:
            turns = row[self.turns][: self.keep_turns]
            is_sharegpt = turns and "from" in turns[0]
            return {"conversations" if is_sharegpt else "messages": turns}
        if self.questions:
            return {"messages": [{"role": "user", "content": self._asked(row)}]}
        if self.user is None:
            assert self.prompt is not None
            return {"prompt": self.prompt.format_map(row)}
        content = self.user.format_map(row).strip()
        return {"messages": [{"role": "user", "content": content}]}

    def _asked(self, row: JsonObject) -> str:
        columns = [column for column in self.questions if row.get(column)]
        asked = row[columns[0] if columns else self.questions[0]]
        first = asked if isinstance(asked, str) else asked[0]
        return str(first["content"] if isinstance(first, dict) else first)


@cache
def _sources() -> dict[str, SuiteSource]:
    """All suites by name."""
    sources = {}
    for file in sorted(DIRECTORY.glob("*.yaml")):
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
        parts = values.pop("parts", None)
        members: dict[str, JsonObject] = {file.stem: {}}
        if parts is not None:
            members = {f"{file.stem}-{part}": own for part, own in parts.items()}
        for name, own in members.items():
            sources[name] = SuiteSource(name=name, family=file.stem, **values | own)
    return sources


def suite_names() -> list[str]:
    """All suites there are."""
    return sorted(_sources())


def suite_name(source: str) -> str:
    """The name in `@NAME` or `@NAME:FILE`."""
    return source.removeprefix("@").partition(":")[0]


def load_suite(name: str) -> SuiteSource:
    """Return a suite; InputError for an unknown name."""
    sources = _sources()
    if name in sources:
        return sources[name]
    if members := _members(name):
        raise InputError(
            f"@{name}: stands for {len(members)} suites; name one, such as @{members[0]}"
        )
    families = sorted({f"@{suite.family}" for suite in sources.values()})
    raise InputError(f"@{name}: no such suite; {nearest(f'@{name}', families)}")


def expand(source: str) -> dict[str, str]:
    """Return the suites of a family as sources, by part; empty for any other source.

    `@redhat:DIR` gives `{"qa": "@redhat-qa:DIR", ...}`.
    """
    if not source.startswith("@"):
        return {}
    family = suite_name(source)
    path = source.removeprefix(f"@{family}")
    return {name.removeprefix(f"{family}-"): f"@{name}{path}" for name in _members(family)}


def _members(family: str) -> list[str]:
    named = _sources().values()
    return [suite.name for suite in named if suite.family == family and suite.name != family]
