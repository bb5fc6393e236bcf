"""The compiled kernel: right for every shape and processor, kept in the cache, and dispensable."""

import _ctypes
import os
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

from draftsmith.decode import native
from draftsmith.decode.native import (
    _MOST_ROWS as MOST_ROWS,
    Kernel,
    PackedMatrix,
    kernel,
    narrowest,
    structures,
)
from tests.kernel_builds import built, library

__all__ = ["library"]


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
def test_equals_the_plain_layer_within_rounding(rows, inputs, outputs, dtype, biased, added):
    generator = torch.Generator().manual_seed(rows * inputs + outputs)
    x, weight = (
        torch.randn(rows, inputs, generator=generator),
        torch.randn(outputs, inputs, generator=generator),
    )
    weight = weight.to(dtype).float()
    bias = torch.randn(outputs, generator=generator) if biased else None
    other = torch.randn(rows, outputs, generator=generator) if added else None
    made = kernel()
    assert made is not None
    matrix = PackedMatrix(made, weight)
    got = matrix.linear(x, bias, other)
    exact = (
        x.double() @ weight.double().t()
        + (0 if bias is None else bias)
        + (0 if other is None else other)
    )
    # Rounding of a sum in order: a few units in the last place of the largest partial sums.
    allowed = 1e-6 * (x.abs() @ weight.abs().t() + 10)
    assert bool(((got.double() - exact).abs() <= allowed).all())
    # Rows do not know of each other: the same row gives the same bits in any company.
    alone = matrix.linear(x[-1:], bias, None if other is None else other[-1:])
    assert torch.equal(got[-1:], alone)
    assert torch.equal(matrix.rows(torch.arange(outputs)), weight)


def same_numbers(a, b):
    """To the bit, but for the sign and payload of NaN."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        a.nan_to_num(nan=1).view(torch.int32), b.nan_to_num(nan=1).view(torch.int32)
    )


SHAPES = [(1, 1), (3, 65), (63, 7), (64, 128), (65, 129), (130, 300), (200, 511)]


@pytest.mark.parametrize("kind", ["bf16", "fp16", "four bits"])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 64), (63, 128), (65, 192), (130, 320)])
def test_narrow_weights_give_the_bits_of_fp32(library, monkeypatch, kind, outputs, inputs):
    monkeypatch.setattr(library, "tiles", False)
    generator = torch.Generator().manual_seed(outputs * inputs)
    weight = torch.randn(outputs, inputs, generator=generator)
    if kind == "four bits":
        codes = torch.randint(0, 256, (outputs, inputs // 2), generator=generator)
        scales, table = weight[:, ::64].contiguous(), torch.randn(16, generator=generator)
        narrow = PackedMatrix.of_codes(library, codes.byte(), scales, table)
    else:
        weight = weight.bfloat16() if kind == "bf16" else weight.half()
        narrow = PackedMatrix(library, weight.float())
    monkeypatch.setattr(native, "narrowest", lambda matrix: matrix)
    wide = PackedMatrix(library, narrow.rows(torch.arange(outputs)))
    assert narrow.values.nbytes < wide.values.nbytes
    bias = torch.randn(outputs, generator=generator)
    for rows in (1, 2, 5, 6, 7, 12, 13, 29, 61, 64, MOST_ROWS + 1):
        x = torch.randn(rows, inputs, generator=generator)
        other = torch.randn(rows, outputs, generator=generator) if rows % 2 else None
        assert torch.equal(narrow.linear(x, bias, other), wide.linear(x, bias, other))


@pytest.fixture(params=["tiles", "pairs"])
def of_bf16(request):
    """The kernel of a processor that multiplies bf16 by tile registers (AMX), or pairs of bf16
    numbers (AVX512-BF16).
    """
    made = kernel()
    if made is None or not getattr(made, request.param):
        pytest.skip("this processor does not, or does it the other way")
    return made


@pytest.mark.parametrize(("outputs", "inputs"), [*SHAPES, (70, 1100), (64, 2100)])
def test_bf16_is_multiplied_as_exactly_as_fp32_or_as_a_model_in_bf16_does(of_bf16, outputs, inputs):
    generator = torch.Generator().manual_seed(outputs * inputs)
    weight = torch.randn(outputs, inputs, generator=generator).bfloat16()
    bias = torch.randn(outputs, generator=generator)
    matrix = PackedMatrix(of_bf16, weight)
    assert matrix.kind == (native._TILES if of_bf16.tiles else native._PAIRS)
    if inputs > 2000 and not of_bf16.tiles:
        pytest.skip("the bound is one for narrower sums")
    assert torch.equal(matrix.rows(torch.arange(outputs)), weight.float())
    # Of values that bf16 holds, given in fp32, the products are those of fp32.
    assert of_bf16.tiles or PackedMatrix(of_bf16, weight.float()).kind != native._PAIRS
    taken = torch.float32 if of_bf16.tiles else torch.bfloat16
    tolerance = 2e-7 if of_bf16.tiles else 1e-6
    for rows in (1, 2, 5, 6, 7, 10, 11, 12, 13, 16, 17, 33, MOST_ROWS + 2, MOST_ROWS + 7):
        check_product(matrix, weight, bias, rows, generator, taken=taken, tolerance=tolerance)


def check_product(
    matrix,
    weight,
    bias,
    rows,
    generator,
    *,
    taken=torch.float32,
    tolerance,
):
    """Compare the product of so many rows, each alone too, with that of rows rounded to `taken`."""
    outputs, inputs = weight.shape
    # Rows of many sizes, and elements of many sizes in a row.
    x = torch.randn(rows, inputs, generator=generator)
    x = x * torch.logspace(-9, 9, rows).unsqueeze(1) * torch.logspace(-3, 3, inputs)
    other = torch.randn(rows, outputs, generator=generator) if rows % 2 else None
    got = matrix.linear(x, bias, other)
    rounded = x.to(taken).double()
    exact = rounded @ weight.double().t() + bias + (0 if other is None else other)
    size = rounded.abs() @ weight.double().abs().t() + 10
    assert bool(((got - exact).abs() <= tolerance * size).all())
    alone = [matrix.linear(row, bias, mine) for row, mine in _rows(x, other)]
    assert torch.equal(torch.cat(alone), got)


def _rows(x, other):
    others = [None] * len(x) if other is None else list(other.split(1))
    return list(zip(x.split(1), others, strict=True))


@pytest.mark.parametrize("inputs", [40, 41])
def test_what_is_no_number_stays_in_its_row(of_bf16, inputs):
    weight = torch.randn(70, inputs, generator=torch.Generator().manual_seed(0)).abs().bfloat16()
    x = torch.ones(9, inputs)
    x[1, 3] = float("inf")
    x[3, -1] = -float("inf")
    x[5, 0] = torch.tensor(0x7F800001, dtype=torch.int32).view(torch.float32)  # NaN by its last bit
    if of_bf16.tiles:
        x[7] = 3e38
    got = PackedMatrix(of_bf16, weight).linear(x)
    torch.testing.assert_close(got, x @ weight.float().t(), equal_nan=True, rtol=1e-5, atol=1e-5)
    assert got.isnan().any(dim=1).tolist() == [row == 5 for row in range(9)]
    assert torch.equal(got[0], got[8])
    # Weights that are no numbers leave the tiles, which would make NaN of infinity.
    weight[2, 2] = float("inf")
    infinite = PackedMatrix(of_bf16, weight)
    assert infinite.kind != native._TILES
    assert infinite.linear(torch.ones(1, inputs))[0, 2] == float("inf")


def test_it_stands_beside_the_tiles_of_torch(of_bf16):
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    matrix = PackedMatrix(of_bf16, weight)
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    theirs = [x.bfloat16() @ weight.t()]
    ours = [matrix.linear(x)]
    for _ in range(3):
        theirs.append(x.bfloat16() @ weight.t())
        ours.append(matrix.linear(x))
    assert all(torch.equal(product, theirs[0]) for product in theirs)
    assert all(torch.equal(product, ours[0]) for product in ours)


SPECIAL = [
    0.0,
    -0.0,
    1.0,
    2**-14,
    -(2**-24),
    3 * 2**-24,
    65504.0,
    float("inf"),
    -float("inf"),
    float("nan"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_is_itself_again(library, monkeypatch, dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    # NaN is one value here: what tells one from another is lost on the way to 16 bits, in torch
    # itself too.
    every = torch.where(every.isnan(), torch.tensor(float("nan"), dtype=dtype), every).view(
        256, 256
    )
    matrix = PackedMatrix(library, every.float())
    assert matrix.values.dtype == dtype
    assert same_numbers(matrix.rows(torch.arange(256)), every.float())
    monkeypatch.setattr(library, "tiles", False)
    # The vector path: each input alone picks out a column.
    clean = every.float().nan_to_num(nan=0, posinf=3, neginf=-3)
    assert same_numbers(PackedMatrix(library, clean).linear(torch.eye(256)).t() + 0.0, clean + 0.0)
    monkeypatch.setattr(native, "narrowest", lambda weight: weight)
    wide = PackedMatrix(library, every.float())
    x = torch.tensor(SPECIAL).repeat(7, 26)[:, :256].contiguous()
    x[:, 20:] = torch.randn(7, 236, generator=torch.Generator().manual_seed(0))
    assert same_numbers(matrix.linear(x), wide.linear(x))
    assert same_numbers(
        matrix.linear(x[:, :].nan_to_num(0, 1, 1)), wide.linear(x.nan_to_num(0, 1, 1))
    )


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
def test_a_matrix_is_narrowed_when_and_only_when_every_value_survives(value, dtype):
    weight = torch.ones(40, 30)
    weight[37, 11] = value
    got = narrowest(weight)
    assert got.dtype == dtype
    assert torch.equal(got.float().view(torch.int32), weight.view(torch.int32))


@built
def test_is_built_once_and_kept(monkeypatch):
    calls: list[list[str]] = []
    run = subprocess.run

    def counting(command, **options):
        calls.append(command)
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", counting)
    assert isinstance(native._kernel_or_reason.__wrapped__(), Kernel)
    assert [command[1:] for command in calls] == [["--version"]]


@built
def test_structures_that_differ_are_not_used(monkeypatch, golden):
    monkeypatch.setattr(structures, "SHARED", structures.SHARED[::-1])
    reason = native._kernel_or_reason.__wrapped__()
    golden(str(reason))


@pytest.mark.slow
@built
@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole[:-40] + b"x" * 40,
        lambda whole: whole[:4096],
        lambda whole: b"",
    ],
)
def test_a_damaged_library_is_built_anew(damage, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "_FLAGS", ("-O0", *native._FLAGS[1:]))
    assert isinstance(native._kernel_or_reason.__wrapped__(), Kernel)
    (library,) = tmp_path.rglob("*.so")
    whole = library.read_bytes()
    library.unlink()
    library.write_bytes(damage(whole))
    assert isinstance(native._kernel_or_reason.__wrapped__(), Kernel)
    assert library.read_bytes() == whole


@pytest.fixture
def compiler(tmp_path):
    """The path of a compiler that copies a library which is there."""
    script = tmp_path / "cc"
    script.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exit\n'
        f'while [ "$1" != -o ]; do shift; done\ncp {_ctypes.__file__} "$2"\n'
    )
    script.chmod(0o755)
    return str(script)


@pytest.mark.parametrize("wrong", ["", "its owner", "its mode"])
def test_a_library_that_another_user_could_have_written_is_not_loaded(
    wrong, compiler, tmp_path, monkeypatch
):
    if os.geteuid():
        pytest.skip("only root can give files away")
    cache = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    before = os.umask(0)
    try:
        native._load(compiler)
    finally:
        os.umask(before)
    (library,) = cache.rglob("*.so")
    modes = [path.stat().st_mode & 0o777 for path in (library.parent, library)]
    assert modes == [0o700, 0o600]
    if wrong == "its mode":
        library.chmod(0o666)
    elif wrong == "its owner":
        os.chown(library, 1234, -1)
    loaded = native._load(compiler)._name
    assert loaded == str(library) if not wrong else "/cache/" not in loaded


def test_a_user_without_a_home_decodes_without_a_cache(compiler, monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert native._load(compiler)._name.startswith(tempfile.gettempdir())


def test_the_compiler_says_why_it_cannot_build(tmp_path, monkeypatch, golden):
    compiler = tmp_path / "cc"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] || { echo "ld: no -lgomp\n" >&2; exit 1; }\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    golden(native._kernel_or_reason.__wrapped__())


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"PATH": ""}, "no C compiler found; install gcc, or set CC"),
        ({"CC": "/bin/false"}, "/bin/false cannot build it"),
    ],
)
def test_without_a_compiler_there_is_none(variables, reason, tmp_path, monkeypatch):
    for name, value in {"XDG_CACHE_HOME": str(tmp_path), **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(native, "_kernel_or_reason", native._kernel_or_reason.__wrapped__)
    assert kernel() is None
    line = native.missing_kernel()
    assert line is not None and reason in line and "\n" not in line
    assert native.missing_kernel("cuda") is None


@built
def test_a_wrong_library_is_not_used(monkeypatch, golden):
    monkeypatch.setattr(native, "_is_right", lambda made: False)
    golden(str(native._kernel_or_reason.__wrapped__()))
