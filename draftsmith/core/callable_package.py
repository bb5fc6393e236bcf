"""Packages that are called like the function of their name: `ds.train(config)` works beside
`draftsmith.train.loop`, whichever of them is imported first.
"""

import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any


class CallablePackage(ModuleType):
    """A package whose call is a function of `function_module`, imported at the first call."""

    function_module: str

    @property
    def function(self) -> Callable[..., Any]:
        """The function that a call runs."""
        name = self.__name__.rpartition(".")[2]
        return getattr(import_module(self.function_module), name)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.function)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.function(*arguments, **options)


def make_callable(package: str, module: str) -> None:
    """Let the imported `package` be called as the function of its name in its `module`."""
    found = sys.modules[package]
    found.__class__ = CallablePackage
    found.__dict__["function_module"] = f"{package}.{module}"
