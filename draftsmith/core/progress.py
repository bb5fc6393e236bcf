"""Progress of a long step, with the time that is left."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tqdm import tqdm  # type: ignore[import-untyped]

from draftsmith.core.ranks import is_main
from draftsmith.core.terminal import StandardError

T = TypeVar("T")
Advance = Callable[[int, str], None]
Tick = Callable[[int], None]


@contextmanager
def progress(what: str, total: int | None, done: int = 0) -> Iterator[Advance]:
    """Yield `advance(count, note)`, which reports `count` more finished units.

    total: number of units, None if unknown. done: units finished before. Progress goes to standard
    error: a bar that disappears on a terminal, a line every 15 seconds elsewhere. Of several
    processes only the main one reports.
    """
    is_terminal = sys.stderr.isatty()
    bar = tqdm(
        desc=what,
        total=total,
        initial=done,
        disable=not is_main(),
        leave=not is_terminal,
        mininterval=0.1 if is_terminal else 15,
        dynamic_ncols=True,
        file=StandardError(),
    )

    def advance(count: int, note: str = "") -> None:
        bar.set_postfix_str(note, refresh=False)
        bar.update(count)

    with bar:
        yield advance


def no_tick(*_: object) -> None:
    """An `Advance` or a `Tick` that does nothing."""


def track(items: Iterable[T], what: str, total: int) -> Iterator[T]:
    """Iterate `items`, showing progress."""
    with progress(what, total) as advance:
        for item in items:
            yield item
            advance(1, "")
