"""What a launcher's environment says, and what is said where it is wrong."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith.__main__ import main
from draftsmith_core.processes import divided, on_main


def test_divided_work_within_on_main_is_done_by_the_main_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for it to end, and would never come to meet it."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("accelerate.utils.broadcast_object_list", lambda failure: None)
    found: list[int] = []
    on_main(lambda: found.extend(divided(3, lambda index: index)))
    assert found == [0, 1, 2]


@pytest.mark.parametrize(
    "line",
    [
        "decode --target t --prompt a",
        "init --target t --method prune --out o",
        "merge --draft a b --out o",
        "export --draft q --format hf --out o",
        "doctor --target t --draft q",
        "plan --target t --draft q --prompts p --out o",
    ],
)
def test_a_command_of_one_process_is_refused_in_several(
    line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(line.split()) == 2
    assert "runs in one process, but 2 were launched" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_process_that_waits_for_others_can_be_ended(number: int) -> None:
    """Waiting happens in torch, where Python's own handlers do not run."""
    program = (
        "import signal; from draftsmith_core.processes import *\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "with terminable(), interruptible():\n"
        "    print(signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), flush=True); signal.pause()"
    )
    environment = os.environ | {"RANK": "1", "WORLD_SIZE": "2"}
    waiting = subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
    assert waiting.stdout is not None
    assert waiting.stdout.readline().split() == [str(signal.SIG_DFL)] * 2
    waiting.send_signal(number)
    assert waiting.wait() == -number
