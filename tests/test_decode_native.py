"""The compiled linear layer: right for every shape, kept in the cache, and dispensable."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decode import native
from decode.native import MOST_ROWS, kernel

built = pytest.mark.skipif(kernel() is None, reason="no C compiler with OpenMP here, or torch has another runtime")


@built
@given(
    rows=st.sampled_from([1, 2, 5, 6, 7, 13, 29, 64, MOST_ROWS]),
    inputs=st.integers(1, 300),
    outputs=st.integers(1, 200),
    biased=st.booleans(),
    added=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_equals_the_plain_layer_within_rounding(
    rows: int, inputs: int, outputs: int, biased: bool, added: bool
) -> None:
    generator = torch.Generator().manual_seed(rows * inputs + outputs)
    x, weight = torch.randn(rows, inputs, generator=generator), torch.randn(outputs, inputs, generator=generator)
    bias = torch.randn(outputs, generator=generator) if biased else None
    other = torch.randn(rows, outputs, generator=generator) if added else None
    made = kernel()
    assert made is not None
    got = made.linear(x, made.pack(weight), outputs, bias, other)
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias) + (0 if other is None else other)
    # Rounding of a sum in order: a few units in the last place of the largest partial sums.
    allowed = 1e-6 * (x.abs() @ weight.abs().t() + 10)
    assert bool(((got.double() - exact).abs() <= allowed).all())
    # Rows do not know of each other: the same row gives the same bits in any company.
    alone = made.linear(x[-1:], made.pack(weight), outputs, bias, None if other is None else other[-1:])
    assert torch.equal(got[-1:], alone)


@built
def test_threads_do_not_change_the_bits() -> None:
    made = kernel()
    assert made is not None
    weight, x = torch.randn(700, 90), torch.randn(9, 90)
    packed = made.pack(weight)
    one = made.linear(x, packed, 700, None, None)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(made.linear(x, packed, 700, None, None), one)
    finally:
        torch.set_num_threads(before)


@built
def test_is_built_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernel.__wrapped__() is not None
    (kept,) = (tmp_path / "draftsmith").glob("*.so")
    calls: list[list[str]] = []
    run = subprocess.run

    def counting(command: list[str], **options: object) -> object:
        calls.append(command)
        return run(command, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "run", counting)
    assert kernel.__wrapped__() is not None
    assert [command[1:] for command in calls] == [["--version"]] and kept.exists()


@built
@pytest.mark.parametrize("left", [0, 1000, 8192])
def test_a_torn_library_is_built_again(tmp_path: Path, left: int, spawn: Callable[..., Any]) -> None:
    code = "from decode.native import kernel; assert kernel() is not None"
    env = {"PATH": "/usr/bin:/bin", "XDG_CACHE_HOME": str(tmp_path)}
    for _ in range(2):
        # In a process of its own: loading a torn library is a bus error.
        assert spawn(env=env, cwd=Path.cwd(), patch=code).wait() == (0, "", "")
        (kept,) = (tmp_path / "draftsmith").glob("*.so")
        kept.write_bytes(kept.read_bytes()[:left])


def test_without_a_compiler_there_is_none_and_nothing_is_said(tmp_path: Path, spawn: Callable[..., Any]) -> None:
    code = "from decode.native import kernel; assert kernel() is None"
    for env in (
        {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)},
        {"PATH": "/usr/bin:/bin", "CC": "/bin/false", "XDG_CACHE_HOME": str(tmp_path)},
    ):
        assert spawn(env=env, cwd=Path.cwd(), patch=code).wait() == (0, "", "")


def test_a_wrong_library_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_right", lambda made: False)
    assert kernel.__wrapped__() is None
