"""Prompt sets that go by a name: `@gsm8k` is configs/prompts/gsm8k.yaml, `@gsm8k:FILE` its rows from a local file.

A suite is a file of data: which data set and split, how a row becomes a prompt, which rows, under which licence, whom
to cite. Its `version` goes up when its prompts change. The rows themselves come from the hub, or from a file with the
data set's own columns.
"""

import dataclasses
import difflib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from draftsmith_core.errors import InputError

DIRECTORY = Path(__file__).parents[1] / "configs" / "prompts"


@dataclass(frozen=True, kw_only=True)
class PromptSuite:
    """One file of configs/prompts/.

    One of `user` (the user's message), `prompt` (text to be continued as it is) and `turns` (the column with a chat, of
    which the first `keep_turns` are kept) makes a prompt of a row; `{column}`, `{column[key]}` and `{column[0]}` are
    filled in. Of the rows that `where` lets through (column: allowed values), every `every`-th is taken, up to
    `prompts`; a row that repeats an earlier prompt is passed over.
    """

    name: str
    version: int
    dataset: str
    split: str
    licence: str
    citation: str
    prompts: int
    subset: str | None = None
    files: str | None = None
    user: str | None = None
    prompt: str | None = None
    turns: str | None = None
    keep_turns: int = 1
    where: dict[str, list[str]] = field(default_factory=dict)
    every: int = 1


def suite_names() -> list[str]:
    """All suites there are."""
    return sorted(path.stem for path in DIRECTORY.glob("*.yaml"))


def suite_name(source: str) -> str:
    """The name in `@NAME` or `@NAME:FILE`."""
    return source.removeprefix("@").partition(":")[0]


def load_suite(name: str) -> PromptSuite:
    """Read a suite. InputError for a name that there is none of, with the nearest that there is."""
    path = DIRECTORY / f"{name}.yaml"
    if name not in suite_names():
        near = difflib.get_close_matches(name, suite_names(), 1)
        guess = f"did you mean @{near[0]}? " if near else ""
        raise InputError(f"@{name}: no such suite; {guess}there are {', '.join(f'@{each}' for each in suite_names())}")
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    keys = {each.name for each in dataclasses.fields(PromptSuite)}
    for key in values:
        if key not in keys:
            raise InputError(f"{path}: unknown key {key!r}; there are {', '.join(sorted(keys))}")
    suite = PromptSuite(name=name, **values)
    if sum(each is not None for each in (suite.user, suite.prompt, suite.turns)) != 1:
        raise InputError(f"{path}: needs one of user, prompt and turns")
    return suite


def suite_rows(
    suite: PromptSuite, rows: Iterator[tuple[int, dict[str, Any]]], source: str
) -> Iterator[tuple[int, Any]]:
    """(row number, row with `messages`, `conversations` or `prompt`) of the suite's prompts, from the data set's rows.

    InputError that names `source`, the row and the column for a row that lacks one.
    """
    taken = fitting = 0
    seen: set[str] = set()
    for number, row in rows:
        where = f"{source}:{number}"
        if any(str(_column(row, key, suite, where)) not in allowed for key, allowed in suite.where.items()):
            continue
        made = _made(suite, row, where)
        if repr(made) in seen:
            continue
        seen.add(repr(made))
        fitting += 1
        if (fitting - 1) % suite.every:
            continue
        yield number, made
        taken += 1
        if taken == suite.prompts:
            return


def _made(suite: PromptSuite, row: dict[str, Any], where: str) -> dict[str, Any]:
    if suite.turns is not None:
        turns = _column(row, suite.turns, suite, where)
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            raise InputError(f"{where}: column {suite.turns!r}: expected a list of turns, as suite {suite.name} has it")
        # ShareGPT's own names of keys are read wherever rows are.
        return {"conversations" if turns and "from" in turns[0] else "messages": turns[: suite.keep_turns]}
    template = suite.user if suite.user is not None else suite.prompt
    assert template is not None
    try:
        text = template.format_map(row)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise _missing(str(error).strip("'"), suite, row, where) from None
    return {"prompt": text} if suite.user is None else {"messages": [{"role": "user", "content": text.strip()}]}


def _column(row: dict[str, Any], key: str, suite: PromptSuite, where: str) -> Any:
    if key not in row:
        raise _missing(key, suite, row, where)
    return row[key]


def _missing(key: str, suite: PromptSuite, row: dict[str, Any], where: str) -> InputError:
    return InputError(
        f"{where}: suite {suite.name} reads rows of {suite.dataset}, and this one has no {key!r} (it has "
        f"{', '.join(map(repr, row))}); name a file of prompts without @{suite.name}"
    )
