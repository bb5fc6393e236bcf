"""Where prompts come from, as the parts of a distilled set read them."""

from collections.abc import Iterator
from itertools import islice
from typing import Protocol

from draftsmith.core.errors import InputError
from draftsmith.core.prompt_rows import Record, count_rows, iterate_records, parse_record
from draftsmith.core.prompts import Prompt, PromptReader, Skipped
from draftsmith.core.row_formats import KEYS
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.filters import WORDS, Suites


class PromptSource(Protocol):
    """Rows that become prompts. name: for messages, without secrets."""

    @property
    def name(self) -> str: ...

    def count(self) -> int | None:
        """Number of rows, None if it is unknown."""

    def records(self) -> Iterator[Record]:
        """Yield the rows as they are stored."""

    def read(self, record: Record) -> Prompt | Skipped:
        """Return the prompt of a row, or why it is skipped."""

    def sample_name(self, prompt: Prompt, sample: int) -> str:
        """Return the name from which the seed of a sample follows; each sample has its own."""


class StoredPrompts:
    """The rows of a file, a hub dataset or free texts, up to `max_prompts`."""

    def __init__(
        self, config: DistillConfig, source: str, reader: PromptReader, suites: Suites | None
    ) -> None:
        self._source = source
        self._limit = config.max_prompts
        self._strict = config.strict
        self._reader = reader
        self._suites = suites

    @property
    def name(self) -> str:
        return self._reader.source

    def count(self) -> int | None:
        rows = count_rows(self._source)
        return rows if rows is None else min(rows, self._limit or rows)

    def records(self) -> Iterator[Record]:
        return islice(iterate_records(self._source), self._limit)

    def read(self, record: Record) -> Prompt | Skipped:
        """Skip a row that shares words with a suite and, unless `strict`, one that is broken."""
        read = self._reader.read if self._strict else self._reader.read_or_skip
        prompt = read(record)
        if self._suites is None or isinstance(prompt, Skipped):
            return prompt
        suite = self._suites.shared_with(parse_record(record, self.name))
        if suite is None:
            return prompt
        return Skipped(
            record.number, f"shares {WORDS} words in a row with the evaluation's {suite}"
        )

    def sample_name(self, prompt: Prompt, sample: int) -> str:
        # Prompts without an explicit id may repeat, so their row tells them apart.
        own = prompt.id if prompt.own_id else f"{prompt.id}/{prompt.row}"
        return f"{own}/{sample}"

    def check_usable(self) -> None:
        """Raise InputError if no row is a usable prompt."""
        reason = f"a row needs one of the keys {', '.join(KEYS)}"
        number = 0
        for number, record in enumerate(self.records(), 1):
            prompt = self.read(record)
            if isinstance(prompt, Prompt):
                return
            if number == 1:
                reason = f"row {prompt.row}: {prompt.reason}"
        raise InputError(f"{self.name}: none of its {number} rows can be used ({reason})")
