"""The front door: the command line, the demo and, lazily, everything that Python can call."""

from draftsmith_core import __version__

__all__ = ["__version__"]
