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
    """Yield `advance(count, note)`, which reports `count` more finished units; `done` were finished before.

    total: of how many; None when that is not known.

    Writes to standard error, so that standard output holds results only. Of several processes only the main one
    writes, about its own share of the work.
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
    now_done = done

    def line(note: str) -> str:
        elapsed = time.monotonic() - started
        if total is None:
            return f"{what}: {now_done} {note} [{elapsed:.0f}s]".replace("  ", " ")
        left = elapsed / max(1, now_done - done) * (total - now_done)
        return f"{what}: {now_done}/{total} {note} [{elapsed:.0f}s, {left:.0f}s left]".replace("  ", " ")

    def advance(count: int, note: str = "") -> None:
        nonlocal now_done, last
        now_done += count
        if time.monotonic() - last >= _SECONDS_BETWEEN_LINES or now_done == total:
            last = time.monotonic()
            sys.stderr.write(line(note) + "\n")
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
