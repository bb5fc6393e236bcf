"""The errors that draftsmith raises on purpose. All of them are a `DraftsmithError`.

`InputError` and `RunError` are also a `ValueError` and a `RuntimeError`, so code that catches those catches them.
"""


class DraftsmithError(Exception):
    """Base of the family. The message is one line, written for the person who started the run."""


class InputError(DraftsmithError, ValueError):
    """Bad input or usage: the message names the file, line or key and says what to do. Exit code 2."""


class RunError(DraftsmithError, RuntimeError):
    """The run could not finish although its input was good (a full disk, a lost process). Exit code 1."""
