"""The compiled linear layer: right for every shape, kept in the cache, and dispensable."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decode import native
from decode.native import _MOST_ROWS as MOST_ROWS
from decode.native import Kernel, PackedMatrix, kernel, narrowest
from tests.native_builds import PARAMETERS, built_for

built = pytest.mark.skipif(kernel() is None, reason="no C compiler with OpenMP here, or torch has another runtime")


@built
@given(
    rows=st.sampled_from([1, 2, 5, 6, 7, 13, 29, 64, MOST_ROWS, MOST_ROWS + 3]),
    inputs=st.integers(1, 300),
    outputs=st.integers(1, 200),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    biased=st.booleans(),
    added=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_equals_the_plain_layer_within_rounding(
    rows: int, inputs: int, outputs: int, dtype: torch.dtype, biased: bool, added: bool
) -> None:
    generator = torch.Generator().manual_seed(rows * inputs + outputs)
    x, weight = torch.randn(rows, inputs, generator=generator), torch.randn(outputs, inputs, generator=generator)
    weight = weight.to(dtype).float()
    bias = torch.randn(outputs, generator=generator) if biased else None
    other = torch.randn(rows, outputs, generator=generator) if added else None
    made = kernel()
    assert made is not None
    matrix = PackedMatrix(made, weight)
    got = matrix.linear(x, bias, other)
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias) + (0 if other is None else other)
    # Rounding of a sum in order: a few units in the last place of the largest partial sums.
    allowed = 1e-6 * (x.abs() @ weight.abs().t() + 10)
    assert bool(((got.double() - exact).abs() <= allowed).all())
    # Rows do not know of each other: the same row gives the same bits in any company.
    alone = matrix.linear(x[-1:], bias, None if other is None else other[-1:])
    assert torch.equal(got[-1:], alone)
    assert torch.equal(matrix.rows(torch.arange(outputs)), weight)


@built
def test_threads_do_not_change_the_bits() -> None:
    made = kernel()
    assert made is not None
    weight, x = torch.randn(700, 90), torch.randn(9, 90)
    for exact in (weight, weight.bfloat16().float()):
        matrix = PackedMatrix(made, exact)
        one = matrix.linear(x)
        before = torch.get_num_threads()
        torch.set_num_threads(2)
        try:
            assert torch.equal(matrix.linear(x), one)
        finally:
            torch.set_num_threads(before)


@pytest.fixture(scope="module", params=PARAMETERS)
def each_build(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    return built_for(request.param, tmp_path_factory)


def same_numbers(a: torch.Tensor, b: torch.Tensor) -> bool:
    """To the bit, but for the sign and payload of NaN."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        a.nan_to_num(nan=1).view(torch.int32), b.nan_to_num(nan=1).view(torch.int32)
    )


SHAPES = [(1, 1), (3, 65), (63, 7), (64, 128), (65, 129), (130, 300), (200, 511)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_sixteen_bits_give_the_bits_of_fp32(
    each_build: Kernel, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, outputs: int, inputs: int
) -> None:
    generator = torch.Generator().manual_seed(outputs * inputs)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype).float()
    bias = torch.randn(outputs, generator=generator)
    narrow = PackedMatrix(each_build, weight)
    monkeypatch.setattr(native, "narrowest", lambda matrix: matrix)
    wide = PackedMatrix(each_build, weight)
    assert wide.values.dtype == torch.float32
    assert narrow.values.dtype == dtype or inputs * outputs < 10  # a few values may fit bf16 by chance
    for rows in range(1, 65) if outputs * inputs < 9000 else (1, 2, 5, 6, 7, 12, 13, 29, 61, 64):
        x = torch.randn(rows, inputs, generator=generator)
        other = torch.randn(rows, outputs, generator=generator) if rows % 2 else None
        assert same_numbers(narrow.linear(x, bias, other), wide.linear(x, bias, other))


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 64), (63, 128), (64, 64), (65, 192), (130, 320)])
def test_four_bits_give_the_bits_of_fp32(
    each_build: Kernel, monkeypatch: pytest.MonkeyPatch, outputs: int, inputs: int
) -> None:
    generator = torch.Generator().manual_seed(outputs * inputs)
    codes = torch.randint(0, 256, (outputs, inputs // 2), generator=generator, dtype=torch.uint8)
    scales, table = torch.randn(outputs, inputs // 64, generator=generator), torch.randn(16, generator=generator)
    indices = torch.stack([codes >> 4, codes & 15], dim=2).reshape(outputs, inputs).long()
    weight = table[indices] * scales.repeat_interleave(64, dim=1)
    four, bias = PackedMatrix.of_codes(each_build, codes, scales, table), torch.randn(outputs, generator=generator)
    monkeypatch.setattr(native, "narrowest", lambda matrix: matrix)
    wide = PackedMatrix(each_build, weight)
    assert torch.equal(four.rows(torch.arange(outputs)), weight)
    # 4 bits a value and a scale for 64 of them, the surplus columns of the last panel, and the table.
    assert four.values.numel() == 64 + wide.values.numel() * 36 // 64
    for rows in (1, 2, 5, 6, 7, 12, 13, 29, 61, MOST_ROWS + 1):
        x = torch.randn(rows, inputs, generator=generator)
        other = torch.randn(rows, outputs, generator=generator) if rows % 2 else None
        assert torch.equal(four.linear(x, bias, other), wide.linear(x, bias, other))


SPECIAL = [0.0, -0.0, 1.0, 2**-14, -(2**-24), 3 * 2**-24, 65504.0, float("inf"), -float("inf"), float("nan")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_is_itself_again(
    each_build: Kernel, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    # NaN is one value here: what tells one from another is lost on the way to 16 bits, in torch itself too.
    every = torch.where(every.isnan(), torch.tensor(float("nan"), dtype=dtype), every).view(256, 256)
    matrix = PackedMatrix(each_build, every.float())
    assert matrix.values.dtype == dtype
    assert same_numbers(matrix.rows(torch.arange(256)), every.float())
    # The vector path: each input alone picks out a column.
    clean = every.float().nan_to_num(nan=0, posinf=3, neginf=-3)
    assert same_numbers(PackedMatrix(each_build, clean).linear(torch.eye(256)).t() + 0.0, clean + 0.0)
    monkeypatch.setattr(native, "narrowest", lambda weight: weight)
    wide = PackedMatrix(each_build, every.float())
    x = torch.tensor(SPECIAL).repeat(7, 26)[:, :256].contiguous()
    x[:, 20:] = torch.randn(7, 236, generator=torch.Generator().manual_seed(0))
    assert same_numbers(matrix.linear(x), wide.linear(x))
    assert same_numbers(matrix.linear(x[:, :].nan_to_num(0, 1, 1)), wide.linear(x.nan_to_num(0, 1, 1)))


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (1.0, torch.bfloat16),
        (-0.0, torch.bfloat16),
        (2.0**-133, torch.bfloat16),  # subnormal in bf16 and in fp32
        (float("inf"), torch.bfloat16),
        (1 + 2**-7, torch.bfloat16),
        (1 + 2**-10, torch.float16),
        (2.0**-24 + 2.0**-15, torch.float16),  # subnormal in fp16 only
        (65504.0, torch.float16),
        (65520.0, torch.float32),  # would be infinity in fp16
        (1 + 2**-11, torch.float32),
        (2.0**-25 + 2.0**-15, torch.float32),
        (2.0**-140, torch.float32),
    ],
)
def test_a_matrix_is_narrowed_when_and_only_when_every_value_survives(value: float, dtype: torch.dtype) -> None:
    weight = torch.ones(40, 30)
    weight[37, 11] = value
    got = narrowest(weight)
    assert got.dtype == dtype
    assert torch.equal(got.float().view(torch.int32), weight.view(torch.int32))


@built
def test_rows_that_are_not_there_are_refused() -> None:
    made = kernel()
    assert made is not None
    matrix = PackedMatrix(made, torch.ones(3, 2))
    for ids in ([3], [0, -1]):
        with pytest.raises(IndexError, match="a matrix that has 3"):
            matrix.rows(torch.tensor(ids))
    assert matrix.rows(torch.tensor([], dtype=torch.long)).shape == (0, 2)


@built
def test_is_built_once_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    run = subprocess.run

    def counting(command: list[str], **options: object) -> object:
        calls.append(command)
        return run(command, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "run", counting)
    assert isinstance(native._kernel_or_reason.__wrapped__(), Kernel)
    assert [command[1:] for command in calls] == [["--version"]]


@built
@pytest.mark.parametrize(
    "damage", [lambda whole: whole[:4096], lambda whole: b"", lambda whole: whole[:-40] + b"x" * 40]
)
def test_a_damaged_library_is_built_anew(
    damage: Callable[[bytes], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "_FLAGS", ("-O0", *native._FLAGS[1:]))
    assert isinstance(native._kernel_or_reason.__wrapped__(), Kernel)
    (library,) = tmp_path.rglob("*.so")
    whole = library.read_bytes()
    library.unlink()
    library.write_bytes(damage(whole))
    assert isinstance(native._kernel_or_reason.__wrapped__(), Kernel)
    assert library.read_bytes() == whole


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"PATH": ""}, "no C compiler found; install gcc, or set CC"),
        ({"CC": "/bin/false"}, "/bin/false cannot build it"),
    ],
)
def test_without_a_compiler_there_is_none(
    variables: dict[str, str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"XDG_CACHE_HOME": str(tmp_path), **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(native, "_kernel_or_reason", native._kernel_or_reason.__wrapped__)
    assert kernel() is None
    line = native.missing_kernel()
    assert line is not None and reason in line and "\n" not in line
    assert native.missing_kernel("cuda") is None


def test_a_wrong_library_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_is_right", lambda made: False)
    assert "built it wrongly" in str(native._kernel_or_reason.__wrapped__()) or kernel() is None
