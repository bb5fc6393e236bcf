"""What a launcher's environment says, and what is said where it is wrong."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from draftsmith.__main__ import main
from draftsmith_core.errors import InputError
from draftsmith_core.processes import (
    Terminated,
    divided,
    is_main,
    launched,
    on_main,
    telling_who_is_waited_for,
    terminable,
)


@pytest.mark.parametrize("variable", ["RANK", "WORLD_SIZE"])
def test_a_variable_that_is_no_number_is_one_line(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "two")
    with pytest.raises(InputError, match=f"{variable}: the environment has 'two', no whole number; unset it"):
        (is_main if variable == "RANK" else launched)()
    monkeypatch.setenv(variable, "")
    assert is_main() and launched() == 1


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
    assert "runs in one process, and 2 were launched" in capsys.readouterr().err


def test_a_process_that_waits_for_others_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A launcher that was killed leaves its processes waiting for it."""
    for variable, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "node7"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(variable, value)
    said = ""
    with telling_who_is_waited_for(after_s=0):
        while not said:
            time.sleep(0.001)
            said = capfd.readouterr().err
    assert said.startswith("draftsmith: process 1 of 2 waits for the others at node7:29500;")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with telling_who_is_waited_for(after_s=0):
        time.sleep(0.05)
    assert not capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_process_that_waits_for_others_can_be_ended(number: int) -> None:
    """Waiting happens in torch, where Python's own handlers do not run."""
    program = (
        "import signal; from draftsmith_core.processes import *\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "with terminable(), telling_who_is_waited_for():\n"
        "    print(signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), flush=True); signal.pause()"
    )
    environment = os.environ | {"RANK": "1", "WORLD_SIZE": "2"}
    waiting = subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
    assert waiting.stdout is not None
    assert waiting.stdout.readline().split() == [str(signal.SIG_DFL)] * 2
    waiting.send_signal(number)
    assert waiting.wait() == -number


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_within_a_destructor_is_not_lost(number: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    """Python drops what is raised there, and the run would go on."""

    class Dies:
        def __del__(self) -> None:
            os.kill(os.getpid(), number)
            time.sleep(0.01)

    with pytest.raises((Terminated, KeyboardInterrupt)) as stopped, terminable():
        Dies()
        time.sleep(10)
    assert isinstance(stopped.value, Terminated) == (number == signal.SIGTERM)
    assert capsys.readouterr().err == ""
