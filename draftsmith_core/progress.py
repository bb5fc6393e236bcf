"""Progress of a long step, with the time that is left: a bar on a terminal, now and then a line elsewhere."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from draftsmith_core.processes import is_main

T = TypeVar("T")
Advance = Callable[[int, str], None]
Tick = Callable[[int], None]
_SECONDS_BETWEEN_LINES = 15.0


@contextmanager
def progress(what: str, total: int | None, done: int = 0) -> Iterator[Advance]:
    """Yield `advance(count, note)`, which reports `count` more finished units.

    total: number of units, None if unknown. done: units finished before. Progress goes to standard error, because
    standard output holds results. Of several processes only the main one reports, about its own share.
    """
    if not is_main():
        yield no_advance
        return
    console = Console(stderr=True)
    if console.is_terminal:
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("[dim]{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        with bar:
            task = bar.add_task(what, total=total, completed=done, note="")

            def update(count: int, note: str = "") -> None:
                bar.update(task, advance=count, note=note)

            yield update
        return
    started = last = time.monotonic()
    finished = done

    def advance(count: int, note: str = "") -> None:
        nonlocal finished, last
        finished += count
        now = time.monotonic()
        if now - last < _SECONDS_BETWEEN_LINES and finished != total:
            return
        last = now
        left = "" if total is None else f", {(now - started) / max(1, finished - done) * (total - finished):.0f}s left"
        count_of = finished if total is None else f"{finished}/{total}"
        sys.stderr.write(f"{what}: {count_of} {note} [{now - started:.0f}s{left}]\n".replace("  ", " "))
        sys.stderr.flush()

    yield advance


def no_advance(count: int, note: str) -> None:
    """An `Advance` that does nothing."""


def no_tick(count: int) -> None:
    """A `Tick` that does nothing, for work without a progress bar."""


def track(items: Iterable[T], what: str, total: int) -> Iterator[T]:
    """Iterate `items`, showing progress."""
    with progress(what, total) as advance:
        for item in items:
            yield item
            advance(1, "")
