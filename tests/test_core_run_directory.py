"""One run at a time writes a directory, and only a run of the same options continues it."""

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from draftsmith_core.errors import InputError
from draftsmith_core.run_directory import claim, hold

ROOT = Path(__file__).parents[1]
HOLDER = """
import sys
from pathlib import Path
from draftsmith_core.processes import terminable
from draftsmith_core.run_directory import hold
with terminable(), hold(Path(sys.argv[1]), file=len(sys.argv) > 2):
    print("held", flush=True)
    sys.stdin.read()
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a process that holds a directory; returns once it does."""
    started: list[subprocess.Popen[str]] = []

    def holder(out: Path, *more: str) -> "subprocess.Popen[str]":
        child = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(out), *more],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        return child

    yield holder
    for child in started:
        child.kill()
        child.communicate()


def test_a_second_run_is_refused_in_one_line_that_names_the_first(tmp_path: Path, start: Start) -> None:
    out = tmp_path / "out"
    child = start(out)
    with pytest.raises(InputError) as refused, hold(out):
        pass
    message = str(refused.value)
    assert message.startswith(f"--out {out}: process {child.pid} on {socket.gethostname()} has been writing it since 2")
    assert message.endswith("; wait for it, stop it, or choose another")
    assert "\n" not in message
    child.communicate("")
    with hold(out):
        assert json.loads((out / ".lock").read_text())["pid"] == os.getpid()
        with pytest.raises(InputError, match="another run in this process"), hold(out, "out"):
            pass
        assert (out / ".lock").exists()
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_run_that_was_stopped_leaves_the_directory_free(tmp_path: Path, start: Start, number: signal.Signals) -> None:
    child = start(tmp_path)
    child.send_signal(number)
    child.wait()
    # Only SIGKILL leaves the file, and that does not stop the next run.
    assert (tmp_path / ".lock").exists() == (number == signal.SIGKILL)
    with hold(tmp_path):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()


def test_a_file_has_its_lock_beside_it(tmp_path: Path, start: Start) -> None:
    start(tmp_path / "rows.jsonl", "file")
    assert [path.name for path in tmp_path.iterdir()] == [".rows.jsonl.lock"]
    with pytest.raises(InputError, match=r"^--out .*rows\.jsonl: process"), hold(tmp_path / "rows.jsonl", file=True):
        pass
    with hold(tmp_path / "other.jsonl", file=True):
        pass


def test_a_lock_left_on_another_machine_is_taken_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A node that died; or, where locks end at the machine, a run that lives, which only a person can know."""
    (tmp_path / ".lock").write_text(json.dumps({"host": "elsewhere", "pid": 7, "started": "2026-01-02 03:04:05"}))
    with hold(tmp_path):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
    said = "was being written by process 7 on elsewhere; make sure that it has ended"
    assert [each.getMessage() for each in caplog.records] == [f"--out {tmp_path}: {said}"]


def test_a_file_system_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lockf(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", lockf)
    with hold(tmp_path):
        pass
    assert "its file system has no locks (No locks available); start no second run there" in caplog.text


@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_a_torn_lock_file_does_not_stop_a_run(tmp_path: Path, text: str) -> None:
    (tmp_path / ".lock").write_text(text)
    with hold(tmp_path):
        pass
    assert not (tmp_path / ".lock").exists()


def test_a_directory_belongs_to_the_run_that_claimed_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    identity = {"config": {"seed": 1, "layers": (1, 2)}, "data": "abc", "rows": 8}
    assert claim(out, identity, what="training run", option="out") is False
    (out / ".part.tmp123").write_text("left by a killed run")
    assert claim(out, identity, what="training run", option="out") is True
    assert [path.name for path in out.iterdir()] == ["run.json"]
    other = {**identity, "config": {"seed": 2, "layers": [1, 2]}}
    with pytest.raises(InputError) as refused:
        claim(out, other, what="training run", option="out")
    assert str(refused.value) == (
        f"out {out}: holds another training run: its seed is 1, now it is 2; choose another out or delete the directory"
    )
    with pytest.raises(InputError, match="its rows is 8, now it is 9; choose another --out or set rows to 8$"):
        claim(out, {**identity, "rows": 9}, what="run", advice={"rows": "set rows to 8"})
    # As training runs were recorded before.
    (out / "run.json").write_text(json.dumps(identity))
    assert claim(out, identity, what="training run") is True


def test_a_finished_record_goes_before_the_one_in_the_making(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"identity": {"seed": 1}}))
    records = ("manifest.json", "run.json")
    assert claim(tmp_path, {"seed": 1}, what="set", records=records) is True
    assert not (tmp_path / "run.json").exists()
    with pytest.raises(InputError, match="holds another set: its seed is 1, now it is 2"):
        claim(tmp_path, {"seed": 2}, what="set", records=records)


def test_a_run_that_is_refused_leaves_none_of_the_directories_that_it_made(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(InputError, match="wrong"), hold(tmp_path / "there" / "new" / "newer" / "out"):
        raise InputError("wrong")
    assert list((tmp_path / "there").iterdir()) == []
    with pytest.raises(InputError, match="late"), hold(tmp_path / "there" / "new" / "out"):
        (tmp_path / "there" / "new" / "mine").touch()
        raise InputError("late")
    assert list((tmp_path / "there").rglob("*")) == [tmp_path / "there" / "new", tmp_path / "there" / "new" / "mine"]
