"""Several processes, signals, and what is set for OpenMP before torch starts its threads."""

import contextlib
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from draftsmith.__main__ import ended, main
from draftsmith.core import launcher, progress, ranks, records, runs
from draftsmith.core.environment import limit_threads
from draftsmith.core.errors import InputError, LauncherError
from draftsmith.core.launcher import launcher_request
from draftsmith.core.options import for_all
from draftsmith.core.ranks import divided, on_main
from draftsmith.train.config import TrainConfig

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def launched(monkeypatch):
    """`launched(RANK=1, ...)` sets the variables of a launcher, and no others of them."""

    def launch(**variables):
        for name in LAUNCHER:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return launch


TWO = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}


def test_divided_work_within_on_main_is_done_by_the_main_process(monkeypatch):
    """The others wait for it to end, and would never come to meet it."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("accelerate.utils.broadcast_object_list", lambda failure: None)
    found: list[int] = []
    on_main(lambda: found.extend(divided(3, lambda index: index)))
    assert found == [0, 1, 2]


@pytest.mark.parametrize("line", ["decode --target t --prompt a", "doctor --draft d --target t"])
def test_a_command_of_one_process_is_refused_in_several(
    line, monkeypatch, launched, tmp_path, capsys, golden
):
    monkeypatch.chdir(tmp_path)
    launched(RANK=0, **TWO)
    assert main(line.split()) == 2
    golden(capsys.readouterr().err)


LEFT: list[dict[str, Any]] = [
    {"RANK": 1},
    {"WORLD_SIZE": 2, "RANK": 1},
    {"WORLD_SIZE": "two"},
    {"LOCAL_RANK": "-1"},
    {"RANK": "one", **TWO},
    {"RANK": 2, **TWO},
    {"RANK": 0, **TWO, "MASTER_PORT": "p"},
]


@pytest.mark.parametrize("left", LEFT, ids=str)
def test_what_is_left_of_a_launcher_is_named(left, launched, door):
    launched(**left)
    door.refused("train", "--data", "d", "--out", "o", "--draft", "d")


@pytest.mark.parametrize("variables", [{"WORLD_SIZE": 1, "RANK": 0}, {"RANK": 1, **TWO}])
def test_a_whole_set_of_variables_is_taken(variables, launched):
    launched(**variables)
    ranks.check_launcher()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_processes_that_do_not_come_are_waited_for_no_longer_than_a_minute(
    rank, launched, monkeypatch, golden
):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launched(RANK=rank, **TWO | {"MASTER_PORT": port})
    assert launcher._MEET_S == 60
    monkeypatch.setattr(launcher, "_MEET_S", 0.1)
    with golden.raises(LauncherError):
        launcher.wait_for_all()


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["train", "--print_config"]])
@pytest.mark.parametrize("rank", [0, 1])
def test_of_two_processes_one_prints_help_and_options(words, rank, launched, capsys):
    launched(RANK=rank, **TWO)
    with contextlib.suppress(SystemExit):
        main(words)
    assert bool(capsys.readouterr().out) == (rank == 0)


def test_of_processes_that_met_the_first_that_fails_says_why(launched, monkeypatch, capsys, golden):
    """Once on each machine, with its rank. Those that lose it, or fail likewise, are silent."""
    monkeypatch.setattr(ranks, "_store", HashStore())
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    lost = RuntimeError("[gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")

    def fails(rank, machine, error):
        launched(RANK=rank, GROUP_RANK=machine, **TWO | {"WORLD_SIZE": 4})

        def run(*words):
            raise error

        monkeypatch.setattr("draftsmith.__main__.run", run)
        return ended(main(["train"])), capsys.readouterr().err

    reason = "draftsmith train: rank 1: a row is broken\n"
    assert fails(1, 0, InputError("a row is broken")) == (2, reason)
    assert fails(0, 0, lost) == (1, "")
    assert fails(2, 1, lost) == (1, reason)
    assert fails(3, 1, KeyError("a bug that follows")) == (1, "")
    monkeypatch.setattr(ranks, "_store", HashStore())
    code, said = fails(1, 0, lost)
    assert code == 1
    golden(said)
    assert said.count("\n") == 1
    golden(said)
    monkeypatch.setattr(ranks, "_store", HashStore())
    with pytest.raises(KeyError):
        fails(1, 0, KeyError("a bug"))


def test_processes_of_another_identity_are_refused(tmp_path, monkeypatch, launched, golden):
    """Where a run begins; of other options, where processes meet."""
    identity: dict[str, object] = {"config": {"optim": {"lr": 1e-3}}, "data": "0" * 16}
    gathered: list[dict[str, object]] = []
    monkeypatch.setattr(records, "from_each", lambda work: [work(), *gathered])

    def begin(name):
        with runs.Run(tmp_path / name) as run:
            run.begin("set", identity, "", {})

    begin("one")
    others: list[dict[str, object]] = [
        {"config": {"optim": {"lr": 5e-3}}},
        {"data": "1" * 16},
    ]
    for other in others:
        gathered[:] = [identity, identity | other]
        with golden.raises():
            begin("other")
    assert not (tmp_path / "other").exists()
    launched(RANK=0, **TWO)
    monkeypatch.setattr("accelerate.utils.broadcast_object_list", lambda failure: None)
    gathered[:] = [{"config": for_all(TrainConfig(draft="d", out="o", data=["d"], seed=1))}]
    with golden.raises():
        launcher.agree_on(TrainConfig(draft="d", out="o", data=["d"]))


def test_processes_share_all_options_but_those_of_a_machine():
    def options(**more):
        return for_all(TrainConfig(draft="d", **more))

    same = options(out="o", data=["d"], device="cpu")
    assert same == options(out="p", data=["other/place"], device="cuda:1")
    cached = [options(out="o", data=["d"], target="t", head={"features": path}) for path in "ab"]
    assert cached[0] == cached[1]
    for key, value in {"batch_size": 3, "seed": 1, "target": "t", "save_every": 7}.items():
        assert same != options(out="o", data=["d"], **{key: value}), key


def test_a_directory_that_processes_do_not_share_is_refused(tmp_path, monkeypatch, golden):
    """The main process writes its lock there, and another one finds none, or an old one."""
    monkeypatch.setattr(runs, "_SHOWN_S", 0)
    monkeypatch.setattr(runs, "from_main", lambda work: b"process 7 on elsewhere")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / ".draftsmith-lock").write_text("process 8 on elsewhere")
    for name in ("old", "new"):
        with golden.raises():
            with runs.hold(tmp_path / name):
                pass
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_main_process_gives_the_launcher_the_reason(
    rank, tmp_path, monkeypatch, launched, capsys, golden
):
    file = tmp_path / "error.json"
    launched(RANK=rank, LOCAL_RANK=rank, TORCHELASTIC_ERROR_FILE=file, **TWO)
    handled: list[int] = []
    slept: list[float] = []
    monkeypatch.setattr("signal.signal", lambda number, handler: handled.append(number))
    monkeypatch.setattr("time.sleep", slept.append)
    assert ended(main(["train"])) == 2
    reason = capsys.readouterr().err.strip()
    if rank == "0":
        assert not slept
        golden(reason)
        assert ProcessFailure(0, 1, 2, str(file)).message == reason
    else:
        # The launcher would stop the main process before it has said why. Here nobody said it.
        assert not file.exists()
        golden(reason)
        assert slept == [30] and handled == [signal.SIGTERM]


def test_a_pipe_that_breaks_asks_a_run_to_stop_as_sigterm_does():
    program = (
        "from draftsmith.core.progress import progress\n"
        "from draftsmith.core.signals import terminable\n"
        "with terminable() as stop:\n"
        "    stop.held = True\n"
        "    with progress('work', 1) as advance:\n"
        "        advance(1)\n"
        "    print(stop.leaving().code)\n"
    )
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=writer, check=True
    )
    os.close(writer)
    assert done.stdout == b"143\n"


def test_a_terminal_that_closes_ends_a_run_without_a_traceback():
    program = (
        "import fcntl, os, signal, sys, termios, threading\n"
        "from draftsmith.core.signals import Terminated, terminable\n"
        # Tests that nohup runs begin with SIGHUP ignored.
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
        "try:\n"
        "    with terminable():\n"
        "        print('begun', flush=True)\n"
        "        threading.Event().wait()\n"
        "except Terminated as stop:\n"
        "    print('nobody reads this', file=sys.stderr, flush=True)\n"
        "    os.write(int(sys.argv[1]), stop.signal.encode())\n"
        "    raise\n"
    )
    reader, writer = os.pipe()
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(writer)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        pass_fds=[writer],
        start_new_session=True,
    )
    os.close(theirs)
    os.close(writer)
    assert os.read(ours, 5) == b"begun"
    os.close(ours)
    assert child.wait() == 129
    assert os.read(reader, 100) == b"SIGHUP"
    os.close(reader)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_process_that_waits_for_others_can_be_ended(number):
    """Waiting happens in torch, where Python's own handlers do not run."""
    program = (
        "import signal; from draftsmith.core.signals import *\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "with terminable(), interruptible():\n"
        "    print(signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), "
        "flush=True); signal.pause()"
    )
    environment = os.environ | {"RANK": "1", "WORLD_SIZE": "2"}
    waiting = subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert waiting.stdout is not None
    assert waiting.stdout.readline().split() == [str(signal.SIG_DFL)] * 2
    waiting.send_signal(number)
    assert waiting.wait() == -number


@pytest.mark.parametrize(
    ("given", "limit", "expected"),
    [
        (None, "max 100000", None),
        (None, None, None),
        (None, "250000 100000", "2"),
        (None, "50000 100000", "1"),
        ("5", "200000 100000", "5"),  # what the user has set stays
    ],
)
def test_threads_follow_the_share_of_the_container(given, limit, expected, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    if limit is not None:
        (tmp_path / "cpu.max").write_text(f"{limit}\n")
    limit_threads(tmp_path)
    assert os.environ.get("OMP_NUM_THREADS") == expected


def test_settings_of_the_launcher_that_nothing_follows_are_dropped_with_one_warning(
    monkeypatch, capsys, golden
):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "false")
    assert [launcher_request() for _ in range(2)] == ["single", "single"]
    golden(capsys.readouterr().err)


def test_a_step_of_unknown_length_shows_that_it_goes_on(monkeypatch, capsys):
    with progress.waiting("align: reads the target"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "_period_s", lambda: 0.01)
    with pytest.raises(InputError), progress.waiting("align: reads the target"):
        time.sleep(0.1)
        raise InputError("target: is not there")
    said = capsys.readouterr().err
    assert said.count("align: reads the target, 00:00") > 2 and said.endswith("\n")
