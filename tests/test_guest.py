"""A guest in somebody else's Python: what the process looks like after a call."""

import copy
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import transformers

import draftsmith as ds
from draftsmith.core.devices import attention_of_any_length, generators_kept
from draftsmith.core.environment import environment, shared
from draftsmith.core.hub import quiet
from draftsmith.core.signals import Terminated, limited, terminable
from tests.global_state import changed, global_state
from tests.results_made_up import BASE, BOTH, view


def test_importing_and_generating_leave_the_process_as_it_was(target_dir, draft_dir):
    for name in ds.__all__:
        getattr(ds, name)  # what it imports of others has state of its own
    transformers.logging.set_verbosity_info()
    before = global_state()
    pair = ds.load_pair(target_dir, draft=draft_dir, device="cpu")
    assert changed(before) == {}
    pair.generate("The quick", max_new_tokens=4, temperature=1.0)
    assert changed(before) == {}
    for piece in pair.stream("The quick", max_new_tokens=8):
        assert piece is not None
        break
    assert changed(before) == {}
    with pytest.raises(ds.InputError):
        ds.load_pair("/nosuch/model")
    assert changed(before) == {}
    transformers.logging.set_verbosity_warning()


def test_calls_that_overlap_share_one_change():
    """The last one out restores what the first one found; an error counts as leaving."""
    seen: list[str] = []

    @shared
    @contextmanager
    def change():
        seen.append("made")
        yield len(seen)
        seen.append("undone")

    with change() as first:
        with pytest.raises(KeyError), change() as second:
            raise KeyError
        assert first == second == 1 and seen == ["made"]
    assert seen == ["made", "undone"]


def test_a_change_that_fails_is_not_counted():
    tries: list[int] = []

    @shared
    @contextmanager
    def change():
        tries.append(1)
        if len(tries) == 1:
            raise OSError
        yield

    with pytest.raises(OSError), change():
        pass
    with change():
        assert len(tries) == 2


@pytest.mark.parametrize("switch", [attention_of_any_length, generators_kept, quiet])
def test_threads_that_overlap_leave_the_process_as_it_was(switch):
    """In every order of arriving and leaving."""
    before = global_state()
    inside = threading.Barrier(4)

    def visit(number):
        with switch():
            inside.wait()
            torch.rand(1)
            if number % 2:
                with switch():
                    torch.manual_seed(number)

    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            list(pool.map(visit, range(4)))
    drawn = "nothing" if switch is generators_kept else "torch generator"
    assert changed(before, besides=drawn) == {}


def test_variables_that_the_host_sets_meanwhile_stay(monkeypatch):
    monkeypatch.setenv("GUEST_OURS", "host")
    monkeypatch.delenv("GUEST_THEIRS", raising=False)
    with environment(GUEST_OURS="ours"):
        monkeypatch.setenv("GUEST_THEIRS", "1")
        assert os.environ["GUEST_OURS"] == "ours"
    assert (os.environ["GUEST_OURS"], os.environ["GUEST_THEIRS"]) == ("host", "1")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_host_keeps_its_own_handler_of_signals(number):
    arrived: list[int] = []
    found = signal.signal(number, lambda signum, frame: arrived.append(signum))
    try:
        with terminable() as stop:
            signal.raise_signal(number)
        assert (arrived, stop.asked) == ([number], 0)
        # The default one is replaced, also inside another run, and comes back.
        signal.signal(number, signal.SIG_DFL)
        with terminable(), pytest.raises((Terminated, KeyboardInterrupt)), terminable():
            signal.raise_signal(number)
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, found)


@pytest.mark.parametrize(
    ("first", "second", "ends"),
    [
        (signal.SIGINT, signal.SIGINT, KeyboardInterrupt),
        (signal.SIGINT, signal.SIGTERM, Terminated),  # a launcher's second Ctrl-C
        (signal.SIGINT, signal.SIGHUP, None),
        (signal.SIGTERM, signal.SIGINT, None),
        (signal.SIGTERM, signal.SIGTERM, None),
    ],
)
def test_what_comes_after_ctrl_c_ends_also_a_run_that_is_being_saved(first, second, ends):
    found = [signal.signal(number, signal.SIG_DFL) for number in (first, second)]
    try:
        with terminable() as stop:
            stop.held = True
            signal.raise_signal(first)
            with pytest.raises(ends) if ends else nullcontext():
                signal.raise_signal(second)
    finally:
        for number, handler in zip((second, first), reversed(found), strict=True):
            signal.signal(number, handler)


def test_a_host_keeps_its_virtual_timer():
    found = signal.signal(signal.SIGVTALRM, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_VIRTUAL, 500, 7)
    try:
        with limited(5):
            pass
        left, interval = signal.getitimer(signal.ITIMER_VIRTUAL)
        assert 400 < left < 501 and interval == 7
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, found)


def test_results_options_and_errors_can_be_pickled(target_dir, draft_dir):
    pair = ds.load_pair(target_dir, draft=draft_dir, device="cpu")
    output = pair.generate("The quick", max_new_tokens=4)
    config = ds.TrainConfig(out="o", data=["d"], draft="d")
    results = view({"base": BASE}, BOTH, prompts=2)
    for value in (output, config, results):
        assert pickle.loads(pickle.dumps(value)) == value
    unmet = ds.RequirementError(["a is 1", "b is 2"])
    for error in (ds.InputError("a: b"), ds.RunError("c"), unmet):
        again = copy.copy(pickle.loads(pickle.dumps(error)))
        assert (type(again), str(again)) == (type(error), str(error))
        assert vars(again) == vars(error)
    with pytest.raises((AttributeError, ValueError, pickle.PicklingError)):
        pickle.dumps(pair)


FORK = """
import os, sys
import torch
import draftsmith as ds

pair = ds.load_pair(sys.argv[1], draft=sys.argv[2], device="cpu")
torch.rand(4_000_000).cos()  # with all threads, as large models do
expected = pair.generate("The quick", max_new_tokens=8).text
child = os.fork()
if child == 0:
    torch.set_num_threads(1)
    torch.rand(4_000_000).cos()
    os._exit(int(pair.generate("The quick", max_new_tokens=8).text != expected))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.slow(10)
def test_a_fork_decodes_with_the_pair_of_its_parent(target_dir, draft_dir):
    command = [sys.executable, "-c", FORK, target_dir, draft_dir]
    environ = os.environ | {"OMP_NUM_THREADS": "2"}
    assert subprocess.run(command, env=environ, timeout=120, check=False).returncode == 0


def test_a_stream_that_is_dropped_ends_its_decoding(target_dir, monkeypatch):
    """Also where the decoding thread itself collects it, which cannot wait for itself."""
    pair = ds.load_pair(target_dir, device="cpu")
    dropped = threading.Event()
    steps: list[int] = []
    errors: list[object] = []
    decode = pair.decode

    def decode_and_collect(job, on_tokens):
        def step(*tokens):
            steps.append(threading.get_ident())
            if len(steps) > 1 and dropped.wait(10):
                gc.collect()
            on_tokens(*tokens)

        return decode(job, step)

    monkeypatch.setattr(pair, "decode", decode_and_collect)
    monkeypatch.setattr(sys, "unraisablehook", errors.append)
    before = set(threading.enumerate())
    cycle: list[Any] = [pair.stream("a", max_new_tokens=64, ignore_eos=True)]
    cycle.append(cycle)  # only the collector frees it
    gc.disable()
    try:
        assert next(cycle[0]) is not None
        (thread,) = set(threading.enumerate()) - before
        del cycle
        dropped.set()
        thread.join(10)
    finally:
        gc.enable()
    assert not thread.is_alive() and errors == [] and len(steps) == 2
