"""Where prompts come from, as the parts of a distilled set read them."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from draftsmith.core.errors import InputError, at
from draftsmith.core.prompt_rows import Record, count_rows, iterate_records, parse_record
from draftsmith.core.prompts import Prompt, PromptReader, Skipped
from draftsmith.core.row_formats import KEYS
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.filters import WORDS, Suites


@dataclass(frozen=True)
class StoredPrompts:
    """The rows of a file, a hub dataset or free texts, up to `max_prompts`."""

    config: DistillConfig
    source: str
    reader: PromptReader
    suites: Suites | None

    @property
    def name(self) -> str:
        return self.reader.source

    def count(self) -> int | None:
        """Number of rows, None if it is unknown."""
        rows = count_rows(self.source)
        return rows if rows is None else min(rows, self.config.max_prompts or rows)

    def records(self) -> Iterator[Record]:
        return islice(iterate_records(self.source), self.config.max_prompts)

    def read(self, record: Record) -> Prompt | Skipped:
        """Skip a row that shares words with a suite and, unless `strict`, one that is broken."""
        if self.config.strict:
            with at(f"{self.name}:{record.number}"):
                prompt = self.reader.read(record)
        else:
            prompt = self.reader.read_or_skip(record)
        if self.suites is None or isinstance(prompt, Skipped):
            return prompt
        suite = self.suites.shared_with(parse_record(record))
        if suite is None:
            return prompt
        return Skipped(
            record.number, f"shares {WORDS} words in a row with the evaluation's {suite}"
        )

    def sample_name(self, prompt: Prompt, sample: int) -> str:
        """Return the name from which the seed of a sample follows; each sample has its own."""
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


@dataclass(frozen=True)
class Openings:
    """`rows` times the start of a user's turn, which the target continues.

    ids: what it continues. end: the text that ends a user's turn, "" if only a token does.
    """

    name: str
    rows: int
    ids: tuple[int, ...]
    end: str

    def count(self) -> int:
        return self.rows

    def records(self) -> Iterator[Record]:
        return (Record(number, {}) for number in range(1, self.rows + 1))

    def read(self, record: Record) -> Prompt:
        return Prompt("magpie", "general", self.ids, record.number, own_id=True)

    def sample_name(self, prompt: Prompt, sample: int) -> str:
        return f"magpie/{prompt.row - 1}"


PromptSource: TypeAlias = StoredPrompts | Openings
