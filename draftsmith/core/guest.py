"""What a process has once, such as its environment: a library call gives it back as it was."""

import os
from collections.abc import Callable, Iterator
from contextlib import (
    AbstractContextManager,
    ExitStack,
    _GeneratorContextManager,
    contextmanager,
)
from threading import Lock
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def shared(
    change: Callable[P, AbstractContextManager[T]],
) -> Callable[P, _GeneratorContextManager[T]]:
    """Let calls that overlap, also in several threads, share one change to the process: the first
    one in makes it, the last one out undoes it.
    """
    lock = Lock()
    stack = ExitStack()
    values: list[T] = []

    @contextmanager
    def entered(*args: P.args, **options: P.kwargs) -> Iterator[T]:
        with lock:
            values.append(values[0] if values else stack.enter_context(change(*args, **options)))
        try:
            yield values[0]
        finally:
            with lock:
                values.pop()
                if not values:
                    stack.close()

    return entered


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set variables of the environment inside the block, and no others."""
    before = {name: os.environ.get(name) for name in values}
    os.environ |= values
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
