"""The two ways a command ends badly: the user can mend it (exit 2), or the run itself failed (exit 1)."""


class InputError(ValueError):
    """Bad input or usage. The message is one line: file, line, key, and what to do about it."""


class RunError(RuntimeError):
    """The run could not finish although its input was good. The message is one line."""
