"""A guest in somebody else's Python: what the process looks like after a call."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
import transformers

import draftsmith as ds
from draftsmith.core.devices import attention_of_any_length, generators_kept
from draftsmith.core.guest import environment, shared
from draftsmith.core.hub import quiet
from draftsmith.core.signals import Terminated, limited, terminable
from tests.global_state import changed, global_state


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

    def visit(number: int) -> None:
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
