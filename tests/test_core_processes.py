"""Several processes, signals, and what is set for OpenMP before torch starts its threads."""

import os
import platform
import pty
import signal
import subprocess
import sys

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from draftsmith.__main__ import ended, main
from draftsmith.core.host import limit_threads
from draftsmith.core.launcher import launcher_request
from draftsmith.core.ranks import divided, on_main


def test_divided_work_within_on_main_is_done_by_the_main_process(monkeypatch):
    """The others wait for it to end, and would never come to meet it."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("accelerate.utils.broadcast_object_list", lambda failure: None)
    found: list[int] = []
    on_main(lambda: found.extend(divided(3, lambda index: index)))
    assert found == [0, 1, 2]


@pytest.mark.parametrize("line", ["decode --target t --prompt a", "doctor --draft d --target t"])
def test_a_command_of_one_process_is_refused_in_several(line, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(line.split()) == 2
    assert "runs in one process, but 2 were launched" in capsys.readouterr().err


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_main_process_gives_the_launcher_the_reason(rank, tmp_path, monkeypatch, capsys):
    file = tmp_path / "error.json"
    for name, value in (
        ("RANK", rank),
        ("WORLD_SIZE", "2"),
        ("TORCHELASTIC_ERROR_FILE", str(file)),
    ):
        monkeypatch.setenv(name, value)
    handled: list[int] = []
    slept: list[float] = []
    monkeypatch.setattr("signal.signal", lambda number, handler: handled.append(number))
    monkeypatch.setattr("time.sleep", slept.append)
    assert ended(main(["train"])) == 2
    reason = capsys.readouterr().err.strip()
    if rank == "0":
        assert reason.startswith("draftsmith train: --") and not slept
        assert ProcessFailure(0, 1, 2, str(file)).message == reason
    else:
        # The launcher would stop the main process before it has said why.
        assert not reason and not file.exists() and len(slept) == 1
        assert handled == [signal.SIGTERM]


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


OPENMP = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


@pytest.mark.parametrize(
    ("imports", "given", "expected"),
    [
        ("draftsmith.__main__", {}, {"GOMP_SPINCOUNT": "2000"}),
        ("draftsmith", {}, {"GOMP_SPINCOUNT": "2000"}),
        ("draftsmith", {"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),
        ("torch, draftsmith", {}, {}),
    ],
)
def test_threads_wait_alike_in_every_command_and_in_python(imports, given, expected):
    program = (
        f"import os, {imports}\n"
        f"print({{name: os.environ[name] for name in {OPENMP} if name in os.environ}})"
    )
    clean = {name: value for name, value in os.environ.items() if name not in OPENMP}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=clean | given,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(expected)


@pytest.mark.slow
@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only glibc gives freed blocks back so early"
)
def test_freed_memory_serves_the_next_tensors():
    program = (
        "import resource, torch\n"
        "from draftsmith.core.host import keep_freed_memory\n"
        "keep_freed_memory()\n"
        "def faults():\n"
        "    torch.ones(1 << 24)\n"  # 64 MiB
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "counts = [faults() for _ in range(30)]\n"
        "print(counts[-1] - counts[-6])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 1000  # a page each would be 16,384


def test_settings_of_the_launcher_that_nothing_follows_are_dropped_with_one_warning(
    monkeypatch, capsys
):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "false")
    assert [launcher_request() for _ in range(2)] == ["single", "single"]
    assert capsys.readouterr().err.splitlines() == [
        "warning: ignoring the launcher's dynamo_backend; set `compile` instead",
        "warning: ignoring the launcher's megatron_lm_config; use DDP, DeepSpeed or FSDP instead",
    ]
