"""One run at a time writes a directory, and only a run of the same options continues it."""

import os
import signal
import socket
import time

import pytest

from draftsmith.core.errors import InputError
from draftsmith.core.runs import Run, claim, hold

HOLDER = """
import time
from pathlib import Path
from draftsmith.core.runs import hold
from draftsmith.core.signals import terminable
with terminable(), hold(Path({out!r}), file={file}):
    Path("held").touch()
    while not Path("released").exists():
        time.sleep(0.002)
"""


class Holder:
    """A process that holds a directory or file."""

    def __init__(self, spawn, there, out, file):
        self.there = there
        self.child = spawn(cwd=there, patch=HOLDER.format(out=str(out), file=file))
        self.child.until("pid")
        self.pid = int((self.child.directory / "pid").read_text())
        while not (there / "held").exists():
            time.sleep(0.002)

    def release(self):
        (self.there / "released").touch()
        self.child.until("code")


@pytest.fixture
def start(spawn, tmp_path_factory):
    """Start a process that holds a directory; returns once it does."""
    started = []

    def holder(out, file=False):
        started.append(Holder(spawn, tmp_path_factory.mktemp("holder"), out, file))
        return started[-1]

    yield holder
    for each in started:
        each.release()


def test_a_second_run_is_refused_in_one_line_that_names_the_first(tmp_path, start, golden):
    out = tmp_path / "out"
    child = start(out)
    with pytest.raises(InputError) as refused, hold(out):
        pass
    golden(refused.value)
    assert f"process {child.pid} on {socket.gethostname()}" in str(refused.value)
    child.release()
    with hold(out):
        assert f"process {os.getpid()} " in (out / ".draftsmith-lock").read_text()
        with golden.raises(), hold(out):
            pass
        assert (out / ".draftsmith-lock").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_run_that_was_stopped_leaves_the_directory_free(tmp_path, start, number):
    child = start(tmp_path)
    os.kill(child.pid, number)
    child.child.until("code")
    # Only SIGKILL leaves the file, and that does not stop the next run.
    assert (tmp_path / ".draftsmith-lock").exists() == (number == signal.SIGKILL)
    with hold(tmp_path):
        assert f"process {os.getpid()} " in (tmp_path / ".draftsmith-lock").read_text()


def test_a_file_has_its_lock_beside_it(tmp_path, start, golden):
    start(tmp_path / "rows.jsonl", file=True)
    assert [path.name for path in tmp_path.iterdir()] == [".rows.jsonl.draftsmith-lock"]
    with (
        golden.raises(),
        hold(tmp_path / "rows.jsonl", file=True),
    ):
        pass
    with hold(tmp_path / "other.jsonl", file=True):
        pass


def test_a_directory_belongs_to_the_run_that_claimed_it(tmp_path, golden):
    out = tmp_path / "out"
    identity = {"config": {"seed": 1, "layers": (1, 2)}, "data": "ab" * 32, "rows": 8}
    assert claim(out, "set", identity, "", {}) is False
    (out / ".part.draftsmith-tmp123").write_text("left by a killed run")
    assert claim(out, "set", identity, "", {}) is True
    assert [path.name for path in out.iterdir()] == ["run.json"]
    other = {**identity, "config": {"seed": 2, "layers": [1, 2]}}
    with pytest.raises(InputError) as refused:
        claim(out, "set", other, "", {})
    golden(str(refused.value))
    # A hash says nothing to a person.
    with golden.raises():
        claim(out, "set", {**identity, "data": "cd" * 32}, "", {})


def content(out):
    """Every file."""
    return {
        str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()
    }


def test_a_journal_drops_what_a_kill_cut_short_and_what_another_run_wrote(tmp_path):
    with Run(tmp_path) as run:
        with run.journal("rows", "head") as journal:
            journal.append(1)
            journal.append({"a": "é"})
        with (tmp_path / "rows").open("ab") as file:
            file.write(b'{"torn')
        with run.journal("rows", "head") as journal:
            assert journal.rows == [1, {"a": "é"}]
        with run.journal("rows", "other") as journal:
            assert journal.rows == []
            journal.remove()
    assert content(tmp_path) == {}


@pytest.mark.parametrize("file", [False, True])
def test_a_run_that_fails_before_it_wrote_leaves_no_directory(tmp_path, file, golden):
    out = tmp_path / "a" / "b" / "out"

    def fail(kept=None):
        with golden.raises(), Run(out, file=file) as run:
            run.lock()
            if kept is not None:
                kept.write_text("kept")
            raise InputError("too soon")

    fail()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a").mkdir()
    fail()
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]
    assert list((tmp_path / "a").iterdir()) == []
    fail(tmp_path / "a" / "b" / "mine")
    assert (tmp_path / "a" / "b" / "mine").read_text() == "kept"
