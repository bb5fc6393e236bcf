"""The compiled kernel: right for every shape and processor, kept in the cache, and dispensable."""

import _ctypes
import ctypes
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from draftsmith.decode import (
    llama_forward as forward_module,
    native,
    packed_weights as packed_module,
)
from draftsmith.decode.kernel_forward import KernelForward
from draftsmith.decode.llama_forward import LeanForward
from draftsmith.decode.native import (
    _MOST_ROWS as MOST_ROWS,
    Kernel,
    PackedMatrix,
    kernel,
    narrowest,
    structures,
)
from draftsmith.decode.packed_weights import packs_of, take_over
from draftsmith.decode.runner import Block, Runner
from draftsmith.decode.supported_models import ability

built = pytest.mark.skipif(
    kernel() is None, reason="no C compiler with OpenMP here, or torch has another runtime"
)

# The instructions that the source can be built for here; sse2 has no vector instruction for fp16
# and no fused multiply-add. The processor that runs the tests has to know them. What has to be
# compiled is slow.
BUILDS = {
    "avx512f": "-march=native",
    "asimd": "-march=native",
    "f16c": "-march=haswell",
    "sse2": "-march=x86-64",
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[] if "native" in flag else pytest.mark.slow)
        for name, flag in BUILDS.items()
    ],
)
def library(request, tmp_path_factory):
    """The kernel built for one of `BUILDS`."""
    own, flag = kernel(), BUILDS[request.param]
    if own is None or request.param not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip("this processor, or its compiler, cannot build or run that")
    if flag in native._FLAGS:
        return own
    path = tmp_path_factory.mktemp("kernel") / "kernel.so"
    flags = [flag if each.startswith("-march") else each for each in native._FLAGS]
    subprocess.run(["cc", *flags, "-o", path, *native.SOURCES], check=True)
    return Kernel(ctypes.CDLL(str(path)))


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_sixteen_bits_give_the_bits_of_fp32(library, monkeypatch, dtype, outputs, inputs):
    monkeypatch.setattr(library, "tiles", False)
    generator = torch.Generator().manual_seed(outputs * inputs)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype).float()
    bias = torch.randn(outputs, generator=generator)
    narrow = PackedMatrix(library, weight)
    monkeypatch.setattr(native, "narrowest", lambda matrix: matrix)
    wide = PackedMatrix(library, weight)
    assert wide.values.dtype == torch.float32
    assert (
        narrow.values.dtype == dtype or inputs * outputs < 10
    )  # a few values may fit bf16 by chance
    for rows in range(1, 65) if outputs * inputs < 9000 else (1, 2, 5, 6, 7, 12, 13, 29, 61, 64):
        x = torch.randn(rows, inputs, generator=generator)
        other = torch.randn(rows, outputs, generator=generator) if rows % 2 else None
        assert same_numbers(narrow.linear(x, bias, other), wide.linear(x, bias, other))


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


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_bf16_has_the_same_bits_with_any_number_of_threads(of_bf16, threads):
    generator = torch.Generator().manual_seed(0)
    matrix = PackedMatrix(of_bf16, torch.randn(200, 300, generator=generator).bfloat16())
    x = torch.randn(MOST_ROWS + 5, 300, generator=generator)
    before = torch.get_num_threads()
    products = [matrix.linear(x[:rows]) for rows in (1, 6, 7, MOST_ROWS + 5)]
    torch.set_num_threads(threads)
    again = [matrix.linear(x[:rows]) for rows in (1, 6, 7, MOST_ROWS + 5)]
    torch.set_num_threads(before)
    assert all(map(torch.equal, products, again))


@pytest.mark.parametrize(
    ("outputs", "inputs"), [(1, 64), (63, 128), (64, 64), (65, 192), (130, 320)]
)
def test_four_bits_give_the_bits_of_fp32(library, monkeypatch, outputs, inputs):
    generator = torch.Generator().manual_seed(outputs * inputs)
    codes = torch.randint(0, 256, (outputs, inputs // 2), generator=generator, dtype=torch.uint8)
    scales, table = (
        torch.randn(outputs, inputs // 64, generator=generator),
        torch.randn(16, generator=generator),
    )
    indices = torch.stack([codes >> 4, codes & 15], dim=2).reshape(outputs, inputs).long()
    weight = table[indices] * scales.repeat_interleave(64, dim=1)
    four, bias = (
        PackedMatrix.of_codes(library, codes, scales, table),
        torch.randn(outputs, generator=generator),
    )
    monkeypatch.setattr(native, "narrowest", lambda matrix: matrix)
    wide = PackedMatrix(library, weight)
    assert torch.equal(four.rows(torch.arange(outputs)), weight)
    # 4 bits a value and a scale for 64 of them, the surplus columns of the last panel, and the
    # table.
    assert four.values.numel() == 64 + wide.values.numel() * 36 // 64
    for rows in (1, 2, 5, 6, 7, 12, 13, 29, 61, MOST_ROWS + 1):
        x = torch.randn(rows, inputs, generator=generator)
        other = torch.randn(rows, outputs, generator=generator) if rows % 2 else None
        assert torch.equal(four.linear(x, bias, other), wide.linear(x, bias, other))


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


# Heads that fill no vector, that fill several, and one key/value head for all.
MODELS: dict[str, Any] = {
    "grouped": (
        LlamaForCausalLM,
        LlamaConfig,
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
    ),
    "one group": (
        LlamaForCausalLM,
        LlamaConfig,
        {"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 10},
    ),
    "biased": (
        LlamaForCausalLM,
        LlamaConfig,
        {"attention_bias": True, "mlp_bias": True, "head_dim": 20},
    ),
    "values of bf16": (
        LlamaForCausalLM,
        LlamaConfig,
        {"num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True},
    ),
    "tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True, "head_dim": 16}),
    "head norms": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 36},
    ),
    # Windows that end inside the prompts.
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {
            "num_key_value_heads": 1,
            "head_dim": 24,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "final_logit_softcapping": 7.0,
        },
    ),
    "gemma2": (
        Gemma2ForCausalLM,
        Gemma2Config,
        {
            "num_key_value_heads": 2,
            "head_dim": 24,
            "sliding_window": 20,
            "query_pre_attn_scalar": 30,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 7.0,
        },
    ),
    # Keys that these classes do not read.
    "opt": (
        OPTForCausalLM,
        OPTConfig,
        {"ffn_dim": 100, "num_key_value_heads": 1, "head_dim": 7},
    ),
    "opt gelu, no bias": (
        OPTForCausalLM,
        OPTConfig,
        {"ffn_dim": 100, "enable_bias": False, "activation_function": "gelu"},
    ),
    "neox": (GPTNeoXForCausalLM, GPTNeoXConfig, {"num_key_value_heads": 1}),
    "neox in turn": (
        GPTNeoXForCausalLM,
        GPTNeoXConfig,
        {
            "use_parallel_residual": False,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "hidden_act": "gelu_new",
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 1.0,
            },
        },
    ),
}


OTHER_FAMILIES = ["gemma3", "gemma2", "opt", "neox"]


@torch.inference_mode(False)
def build(name, dtype=torch.float32):
    torch.manual_seed(len(name))
    model, config, changes = MODELS[name]
    sizes = {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 83,
        "hidden_size": 72,
    }
    made = model(
        config(
            **sizes | changes,
            intermediate_size=100,
            num_hidden_layers=3,
            max_position_embeddings=256,
        )
    )
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, 0.9 if parameter.ndim == 1 else 0, 0.2)
        if name == "values of bf16":
            parameter.data = parameter.data.bfloat16().float()
    return made.to(dtype).train(False)


@pytest.fixture
def whole(monkeypatch, library):
    """Every model goes through the kernel, built as the test says; counts its forwards."""
    monkeypatch.setattr(forward_module, "SMALLEST_MODEL", 0)
    monkeypatch.setattr(packed_module, "_SMALLEST", 0)
    for module in (forward_module, packed_module):
        monkeypatch.setattr(module, "kernel", lambda: library)
    calls: list[int] = []
    run = KernelForward.run

    def counted(self, *values, **named):
        calls.append(values[0].numel())
        return run(self, *values, **named)

    monkeypatch.setattr(KernelForward, "run", counted)
    yield calls


def chain(count):
    sees = torch.ones(1, count, count, dtype=torch.bool).tril()
    return Block(torch.arange(count).unsqueeze(0), sees, static=True)


# The root, two children, and a child of each.
TREE = Block(
    torch.tensor([[0, 1, 1, 2, 2]]),
    torch.tensor(
        [[[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]]
    ).bool(),
    static=True,
)


def runner(model, prompts):
    take_over(model)
    made = Runner(model, ability(model).windows, 256, packs_of(model))
    made.prefill(prompts, 40)
    return made


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_equals_tensor_operations(whole, monkeypatch, name):
    model = build(name)
    prompts = [list(range(1, 38)), list(range(2, 21))]
    tokens = torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, 13, 14]])

    def outputs():
        found = []
        run = runner(model, prompts)
        for kept in (0, 2):
            run.open()
            logits, states = run.forward(tokens, TREE, keep_logits=kept, hidden_layers=(0, 2, -1))
            run.keep([[0, 2, 4], [0, 1]])
            found += [logits, *states]
        return found

    ours = outputs()
    assert whole == [2 * 37, 10, 10]
    monkeypatch.setattr(LeanForward, "_embedding_table", lambda *_: None)
    theirs = outputs()
    assert whole == [2 * 37, 10, 10]
    assert [each.shape for each in ours] == [each.shape for each in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_a_row_has_the_same_bits_in_any_company(whole, monkeypatch, name):
    """A prompt alone and among many, a token alone and in a tree, read whole and a few rows at a
    time, by any number of threads.
    """
    model = build(name)
    prompts = [list(range(first, first + 7 * first)) for first in range(1, 6)]
    tokens = torch.arange(25).view(5, 5)
    after = torch.full((5, 1), 6)

    def outputs(rows, pieces=None):
        """Of the tree's path 0, 2, 4, and of a token behind it, when the path has moved up."""
        run = runner(model, [prompts[row] for row in rows])
        run.open()
        if pieces is None:
            logits, states = run.forward(tokens[rows], TREE, keep_logits=5, hidden_layers=(1, -1))
            found = [each[:, [0, 2, 4]] for each in (logits, *states)]
            run.keep([[0, 2, 4]] * len(rows))
        else:
            parts = []
            for piece in pieces:
                logits, states = run.forward(
                    tokens[rows][:, piece], chain(len(piece)), hidden_layers=(1, -1)
                )
                parts.append((logits, *states))
                run.keep([list(range(len(piece)))] * len(rows))
                run.open()
            found = [torch.cat(each, dim=1) for each in zip(*parts, strict=True)]
        run.open()
        return [*found, run.forward(after[rows], chain(1))[0]]

    every = list(range(5))
    together = outputs(every)
    assert whole == [5 * 35, 25, 5]
    assert same(outputs(every, [[0], [2, 4]]), together)
    before = torch.get_num_threads()
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert same(outputs(every), together)
    torch.set_num_threads(before)
    monkeypatch.setattr(forward_module, "MOST_TOKENS", 12 if name in OTHER_FAMILIES else 70)
    del whole[:]
    assert same(outputs(every), together)
    assert len(whole) > 4
    for row in every:
        assert same(outputs([row]), [each[row : row + 1] for each in together])


def same(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_many_queries_behind_a_long_cache(whole, monkeypatch, name):
    # More slots than one block of keys, and more queries with one key/value head than are taken
    # together.
    model = build(name)
    prompt, tokens = [place % 80 for place in range(150)], torch.arange(35).unsqueeze(0)

    def outputs(pieces):
        run, found = runner(model, [prompt]), []
        for piece in pieces:
            run.open()
            found.append(run.forward(piece, chain(piece.shape[1]))[0])
            run.keep([list(range(piece.shape[1]))])
        return torch.cat(found, dim=1)

    together = outputs([tokens])
    assert torch.equal(outputs(list(tokens.split([1, 20, 14], dim=1))), together)
    assert len(whole) == 6
    monkeypatch.setattr(LeanForward, "_embedding_table", lambda *_: None)
    torch.testing.assert_close(outputs([tokens]), together, atol=2e-4, rtol=1e-4)
    assert len(whole) == 6


@pytest.mark.parametrize("name", OTHER_FAMILIES)
@torch.inference_mode()
def test_a_model_in_bf16_has_its_own_constants_and_better_sums(whole, library, monkeypatch, name):
    """The scale of an embedding is rounded as the model rounds it; nothing else is, but where a
    processor multiplies pairs of bf16.
    """
    monkeypatch.setattr(library, "pairs", False)
    model = build(name, torch.bfloat16)
    exact = build(name, torch.bfloat16).float()
    prompt = list(range(1, 31))
    run = runner(model, [prompt])
    run.open()
    tokens = torch.tensor([[5, 6, 7]])
    logits, (embedded,) = run.forward(tokens, chain(3), hidden_layers=(0,))
    whole_text = torch.cat([torch.tensor([prompt]), tokens], dim=1)
    own = model(whole_text, output_hidden_states=True)
    assert torch.equal(embedded, own.hidden_states[0][:, 30:])
    if hasattr(exact.get_input_embeddings(), "embed_scale"):
        exact.get_input_embeddings().embed_scale.copy_(model.model.embed_tokens.embed_scale)
    truth = exact(whole_text).logits[:, 30:]
    torch.testing.assert_close(logits, truth, atol=2e-4, rtol=1e-4)
    assert (logits - truth).norm() < (own.logits[:, 30:] - truth).norm()


@pytest.mark.parametrize("name", OTHER_FAMILIES)
@torch.inference_mode()
def test_a_taken_over_model_gives_its_own_weights(whole, name):
    model, plain = build(name), build(name)
    tokens = torch.tensor([list(range(1, 31))])
    run = runner(model, [tokens[0].tolist()])
    run.open()
    assert torch.equal(model(tokens).logits, plain(tokens).logits)
    weights = plain.state_dict()
    assert all(torch.equal(weights[key], value) for key, value in model.state_dict().items())


@torch.inference_mode()
def test_a_position_without_an_embedding_is_refused(whole, golden):
    run = runner(build("opt"), [[1, 2, 3]])
    run.limit = None
    run.lengths = [256]
    run.cache.capacity = 257
    run.cache._stores[0].grow(1, 257)
    run.open()
    with golden.raises(IndexError):
        run.forward(torch.tensor([[1]]), chain(1))


@torch.inference_mode()
@pytest.mark.parametrize(
    "tokens",
    [
        torch.zeros(1, 5, dtype=torch.long),
        torch.zeros(1, 2, dtype=torch.int),
        torch.zeros(2, 2, dtype=torch.long),
    ],
)
def test_wrong_sizes_are_errors(whole, tokens, golden):
    run = runner(build("one group"), [[1, 2, 3]])
    run.open()
    with golden.raises():
        run.forward(tokens, chain(2))
    run.lengths = [run.cache.capacity]
    run.open()
    with golden.raises():
        run.forward(torch.zeros(1, 2, dtype=torch.long), chain(2))


@torch.inference_mode()
def test_what_is_not_a_number_stays_none_and_large_numbers_are_right(whole):
    with torch.inference_mode(False):
        model = build("grouped")
        model.model.layers[1].mlp.gate_proj.weight.data.mul_(2e3)  # far beyond what exp can hold
    run = runner(model, [[1, 2, 3]])
    run.open()
    (ours, _), own = (
        run.forward(torch.tensor([[4, 5]]), chain(2)),
        model(torch.tensor([[1, 2, 3, 4, 5]])).logits[:, 3:],
    )
    assert ours.isfinite().all()
    torch.testing.assert_close(ours / own.abs().max(), own / own.abs().max(), atol=1e-4, rtol=1e-3)
    with torch.inference_mode(False):
        model.model.layers[0].input_layernorm.weight.data[3] = float("nan")
    run = runner(model, [[1, 2, 3]])
    run.open()
    assert run.forward(torch.tensor([[4, 5]]), chain(2))[0].isnan().all()


@torch.inference_mode()
def test_a_token_outside_the_vocabulary_is_refused(whole, golden):
    run = runner(build("tied"), [[1, 2, 3]])
    for token in (83, -1):
        run.open()
        with golden.raises(IndexError):
            run.forward(torch.tensor([[token]]), chain(1))
