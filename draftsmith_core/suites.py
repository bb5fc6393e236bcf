"""Prompt sets that go by a name: `@gsm8k` is configs/prompts/gsm8k.yaml, `@gsm8k:FILE` its rows from a local file.

A suite is a file of data: which data set and split, how a row becomes a prompt, which rows, under which licence, whom
to cite. Its `version` goes up when its prompts change. The rows themselves come from the hub, or from a file with the
data set's own columns.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from draftsmith_core.errors import InputError, nearest

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
    """Read a suite; InputError for an unknown name."""
    if name not in suite_names():
        known = [f"@{suite}" for suite in suite_names()]
        raise InputError(f"@{name}: no such suite; {nearest(f'@{name}', known, 'there are')}")
    return PromptSuite(name=name, **yaml.safe_load((DIRECTORY / f"{name}.yaml").read_text(encoding="utf-8")))


def suite_rows(
    suite: PromptSuite, rows: Iterator[tuple[int, dict[str, Any]]], source: str
) -> Iterator[tuple[int, Any]]:
    """(row number, row with `messages`, `conversations` or `prompt`) of the suite's prompts, from the data set's rows.

    Raise InputError that names `source`, the row and the column for a row that lacks one.
    """
    fitting = 0
    seen: set[str] = set()
    for number, row in rows:
        try:
            if any(str(row[key]) not in allowed for key, allowed in suite.where.items()):
                continue
            prompt = _prompt(suite, row)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise InputError(
                f"{source}:{number}: suite {suite.name} reads rows of {suite.dataset}, and this one lacks {error} (it "
                f"has {', '.join(map(repr, row))}); name a file of prompts without @{suite.name}"
            ) from None
        if repr(prompt) in seen:
            continue
        seen.add(repr(prompt))
        fitting += 1
        if (fitting - 1) % suite.every == 0:
            yield number, prompt
            if fitting > (suite.prompts - 1) * suite.every:
                return


def _prompt(suite: PromptSuite, row: dict[str, Any]) -> dict[str, Any]:
    if suite.turns is not None:
        turns = row[suite.turns][: suite.keep_turns]
        # ShareGPT's own names of keys are read wherever rows are.
        return {"conversations" if turns and "from" in turns[0] else "messages": turns}
    if suite.user is None:
        return {"prompt": str(suite.prompt).format_map(row)}
    return {"messages": [{"role": "user", "content": suite.user.format_map(row).strip()}]}
