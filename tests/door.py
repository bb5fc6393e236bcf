"""The command line in this process, as the fixture `door` gives it to tests."""

import json
import shlex
from typing import Any

import pytest
from accelerate.state import AcceleratorState, GradientState, PartialState

from draftsmith.__main__ import main
from tests.golden import Golden


def forget_processes() -> None:
    """accelerate keeps its state in singletons; two commands in one process must not share it."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState._reset_state()


class Door:
    """`door(words...)` runs a command: (exit code, standard output, standard error)."""

    def __init__(self, captured: pytest.CaptureFixture[str], golden: Golden) -> None:
        self._captured = captured
        self._golden = golden

    def __call__(self, *words: object) -> tuple[int, str, str]:
        self._captured.readouterr()
        forget_processes()
        try:
            code = main([str(word) for word in words])
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        out, err = self._captured.readouterr()
        return code, out, err

    def ok(self, *words: object) -> tuple[str, str]:
        """Standard output and error of a command that must succeed."""
        code, out, err = self(*words)
        assert code == 0, err
        return out, err

    def refused(self, *words: object, code: int = 2) -> str:
        """Standard error of a command that must end with this code, and without a traceback; the
        command, the code and the last line are compared with the golden text.
        """
        found, _, err = self(*words)
        assert found == code and "Traceback" not in err, err
        command = shlex.join(map(str, words))
        self._golden(f"$ {command}\n{code} {err.strip().splitlines()[-1]}")
        return err

    def summary(self, *words: object) -> dict[str, Any]:
        """What a command that must succeed ends with where `--json` is given."""
        found: dict[str, Any] = json.loads(self.ok(*words, "--json")[0].splitlines()[-1])
        return found
