"""SIGTERM, SIGHUP and Ctrl-C: end at once, or after what is done has been saved."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TypeAlias

from draftsmith.core.ranks import is_main, launched
from draftsmith.core.terminal import discard_if_closed

_Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | None
_DEFAULT = (signal.SIG_DFL, signal.default_int_handler)


class Terminated(SystemExit):
    """SIGTERM or SIGHUP arrived; the command has kept what it could. Exit code 128 + the signal's
    number, as a shell reports it.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.signal = signal.Signals(number).name


@dataclass
class StopSignal:
    """Whether SIGTERM, SIGHUP or Ctrl-C arrived. While `held` is true it only sets `asked`;
    otherwise the program ends at once.

    asked: number of the signal that this process received, 0 for none. agreed: whether all
    processes know that one of them received a signal. A second Ctrl-C, which a launcher hands on as
    SIGTERM, ends the program at once even while `held`.
    """

    held: bool = False
    asked: int = 0
    agreed: bool = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        again = self.asked == signal.SIGINT and number != signal.SIGHUP
        self.asked = number
        if number == signal.SIGHUP:
            discard_if_closed()
        if again or not self.held:
            raise self.leaving()
        if number == signal.SIGINT and is_main():
            # os.write, because the signal may have interrupted a print, which is not reentrant.
            os.write(2, b"\ninterrupted: keeping what is done (Ctrl-C again: stop at once)\n")

    def leaving(self) -> BaseException:
        """The exception to raise once the held work has been saved."""
        if self.asked == signal.SIGINT:
            return KeyboardInterrupt()
        # A process that stops because another one was asked to stops as by SIGTERM.
        return Terminated(self.asked or signal.SIGTERM)


def interruptible() -> contextlib.AbstractContextManager[None]:
    """Let Ctrl-C and SIGTERM end a process that waits for others. torch would block until its
    timeout of 12 hours.
    """
    return _handled_by(signal.SIG_DFL) if launched() > 1 else contextlib.nullcontext()


@contextmanager
def _handled_by(handler: _Handler) -> Iterator[None]:
    before: dict[int, _Handler] = {}
    if threading.current_thread() is threading.main_thread():
        for caught in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            # `nohup` makes programs ignore SIGHUP, and `&` in a script Ctrl-C; keep it ignored for
            # them. A host that calls the library keeps its own handler too.
            found = signal.getsignal(caught)
            if found in _DEFAULT or isinstance(found, StopSignal):
                before[caught] = signal.signal(caught, handler)
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError once the block has computed for so long. Only the main thread is limited:
    no other one gets signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    began = time.thread_time()

    def check(*_: object) -> None:
        if time.thread_time() - began > seconds:
            raise TimeoutError

    before = signal.signal(signal.SIGVTALRM, check)
    timer = signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        signal.setitimer(signal.ITIMER_VIRTUAL, *timer)


@contextmanager
def terminable() -> Iterator[StopSignal]:
    """Inside the block SIGTERM and SIGHUP raise Terminated, Ctrl-C KeyboardInterrupt. While
    `stop.held` is true, signals are only recorded. Signals that the caller handles are left alone.
    """
    stop = StopSignal()
    with _handled_by(stop):
        yield stop
