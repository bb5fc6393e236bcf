"""Standard error, whose reader may go away: a pipe that breaks, or a terminal that closes."""

import logging
import os
import signal
import stat
import sys
from typing import Any

from draftsmith.core.errors import printable


class StandardError:
    """Write to standard error; if its pipe breaks (`2>&1 | head`), end the run as SIGTERM does."""

    def write(self, text: str) -> None:
        try:
            sys.stderr.write(text)
        except BrokenPipeError:
            _stop()

    def flush(self) -> None:
        try:
            sys.stderr.flush()
        except BrokenPipeError:
            _stop()

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


class Formatter(logging.Formatter):
    """Log records as messages that may be printed."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def _stop() -> None:
    _discard(sys.stderr.fileno())
    signal.raise_signal(signal.SIGTERM)


def discard_if_closed() -> None:
    """Send output to a terminal that was closed nowhere, so that writing does not fail."""
    for descriptor in (1, 2):
        is_device = stat.S_ISCHR(os.fstat(descriptor).st_mode)
        if is_device and not os.isatty(descriptor):
            _discard(descriptor)


def _discard(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
