"""Keeps prompts of the evaluation out of the training data: a prompt that shares a run of words with one is left out.

The runs are of 13 words, as for GPT-3 (Brown et al. 2020, appendix C); a text of fewer words counts as one run. They
are of the texts themselves, before any chat template, whose own words all prompts would share.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from draftsmith_core.errors import InputError
from draftsmith_core.io import hash_json
from draftsmith_core.prompt_rows import KEYS, iterate_rows

WORDS = 13
# A run that stands in more rows of a suite is its form ("Answer the following question ..."), not its content.
_FORM = 10
# A character of a script that is written without spaces is a word of its own.
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")


class Suites:
    """The runs of words of some prompt sets, each under the name of its set."""

    def __init__(self, named: Sequence[str]) -> None:
        """named: `NAME=P` each, P a file or name of prompts. InputError for what cannot be read."""
        self._names: dict[int, str] = {}
        for value in named:
            name, equals, source = value.partition("=")
            if not (name and equals and source):
                raise InputError(f"--decontaminate {value}: expected NAME=P, such as gsm8k=gsm8k.jsonl")
            counts = Counter(run for _, row in iterate_rows(source) for run in set(runs_of_words(row, WORDS)))
            if not counts:
                raise InputError(f"--decontaminate {value}: holds no text")
            self._names |= {run: name for run, count in counts.items() if count <= _FORM}

    @property
    def digest(self) -> str:
        """What tells these sets from others."""
        return hash_json(sorted(self._names))[:16]

    def shared_with(self, row: dict[str, Any]) -> str | None:
        """The name of a set that the text of a row shares a run with."""
        return next((self._names[run] for run in runs_of_words(row, WORDS) if run in self._names), None)


def runs_of_words(row: dict[str, Any], length: int) -> Iterator[int]:
    """A 64-bit hash of each run of so many words in what a row asks; of a text of fewer words, of all of it."""
    for text in _texts(row):
        words = _WORD.findall(text.lower())
        for start in range(max(1, len(words) - length + 1) if words else 0):
            run = " ".join(words[start : start + length])
            yield int.from_bytes(hashlib.blake2b(run.encode("utf-8", "replace"), digest_size=8).digest(), "big")


def _texts(row: dict[str, Any]) -> list[str]:
    """What was asked: the turns of users, or the text of a row without turns."""
    key = next((key for key in KEYS if row.get(key) is not None), None)
    if key != "messages":
        return [str(row[key])] if key else []
    turns: Any = row["messages"]
    return [str(turn.get("content")) for turn in turns if isinstance(turn, dict) and turn.get("role") == "user"]
