"""Progress of a long step, with the time that is left."""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tqdm import tqdm  # type: ignore[import-untyped]

from draftsmith.core.ranks import is_main
from draftsmith.core.terminal import StandardError

T = TypeVar("T")
Advance = Callable[[int, str], None]
Tick = Callable[[int], None]


def _period_s() -> float:
    """Seconds between lines: on a terminal something moves all the time."""
    return 1.0 if sys.stderr.isatty() else 60.0


@contextmanager
def _beside(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run `work` in a thread, which ends with the block by its event."""
    over = threading.Event()
    thread = threading.Thread(target=work, args=[over], daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def progress(what: str, total: int | None, done: int = 0) -> Iterator[Advance]:
    """Yield `advance(count, note)`, which reports `count` more finished units.

    total: number of units, None if unknown. done: units finished before. Progress goes to standard
    error: a bar that disappears on a terminal, a line every minute elsewhere, also while no unit is
    finished. Of several processes only the main one reports.
    """
    is_terminal = sys.stderr.isatty()
    bar = tqdm(
        desc=what,
        total=total,
        initial=done,
        disable=not is_main(),
        leave=not is_terminal,
        mininterval=0.1 if is_terminal else _period_s(),
        dynamic_ncols=True,
        file=StandardError(),
    )

    def advance(count: int, note: str = "") -> None:
        bar.set_postfix_str(note, refresh=False)
        bar.update(count)

    def tick(over: threading.Event) -> None:
        while not over.wait(_period_s()):
            bar.refresh()

    with bar, _beside(tick):
        yield advance


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show that a step of unknown length goes on, and for how long it has."""

    def show(over: threading.Event) -> None:
        # What is refused at once is refused in one line.
        if over.wait(_period_s()):
            return
        with tqdm(
            desc=what,
            bar_format="{desc}, {elapsed}",
            leave=not sys.stderr.isatty(),
            file=StandardError(),
            disable=not is_main(),
        ) as bar:
            while not over.wait(_period_s()):
                bar.refresh()

    with _beside(show):
        yield


def no_tick(*_: object) -> None:
    """An `Advance` or a `Tick` that does nothing."""


def track(items: Iterable[T], what: str, total: int) -> Iterator[T]:
    """Iterate `items`, showing progress."""
    with progress(what, total) as advance:
        for item in items:
            yield item
            advance(1, "")
