"""Every way to run a model equals its own forward: the lean one of torch, packed weights, and the
kernel, whole and in parts; and what they do not know runs as its own.

Legend: B rows, q queries.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from draftsmith.decode import take_over
from draftsmith.decode.kernel_forward import KernelForward
from draftsmith.decode.llama_forward import LeanForward, lean_forward
from draftsmith.decode.packed_weights import PackedLinear, packs_of
from draftsmith.decode.runner import Block, Runner
from draftsmith.decode.supported_models import ability
from draftsmith.decode.tree import Tree
from draftsmith.decode.tree_batch import TreeBatch
from tests.kernel_builds import library

__all__ = ["library"]
VOCABULARY = 83
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}
SCALED = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {**SCALED, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
DYNAMIC = LINEAR | {"rope_type": "dynamic"}
WHOLE_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
# Heads that fill no vector, that fill several, and one key/value head for all; windows that end
# inside the prompts.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped": ("llama", {"num_key_value_heads": 2, "head_dim": 64}),
    "one group": (
        "llama",
        {"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 10},
    ),
    "biased": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 20}),
    "values of bf16": (
        "llama",
        {"num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True},
    ),
    "tied": ("llama", {"tie_word_embeddings": True, "head_dim": 16}),
    "head norms": ("qwen3", {"head_dim": 36}),
    "gemma3": (
        "gemma3_text",
        {
            "num_key_value_heads": 1,
            "head_dim": 24,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "final_logit_softcapping": 7.0,
        },
    ),
    "gemma2": (
        "gemma2",
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
    "opt": ("opt", {"ffn_dim": 100, "num_key_value_heads": 1, "head_dim": 7}),
    "opt gelu, no bias": (
        "opt",
        {"ffn_dim": 100, "enable_bias": False, "activation_function": "gelu"},
    ),
    "neox": ("gpt_neox", {"num_key_value_heads": 1}),
    "neox in turn": (
        "gpt_neox",
        {
            "use_parallel_residual": False,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "hidden_act": "gelu_new",
            "rope_parameters": WHOLE_ROPE,
        },
    ),
}
# Their kernel is that of the others.
BY_TORCH: dict[str, tuple[str, dict[str, Any]]] = {
    "gelu": ("llama", {"hidden_act": "gelu"}),
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "linear": ("llama", {"rope_parameters": LINEAR}),
    "yarn": ("llama", {"rope_parameters": SCALED | {"rope_type": "yarn"}}),
    "mistral": ("mistral", {"num_key_value_heads": 2, "sliding_window": None}),
    "mistral, window": ("mistral", {"num_key_value_heads": 1, "sliding_window": 7}),
    "qwen2": ("qwen2", {"num_key_value_heads": 2}),
    "qwen2, mixed": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
}
KERNEL_ONLY = {"gemma3", "gemma2", "opt", "opt gelu, no bias", "neox", "neox in turn"}
OTHER_FAMILIES = ["gemma3", "gemma2", "opt", "neox"]
HIDDEN = (0, 1, 2, 3, -1)


@torch.inference_mode(False)
def build(name, dtype=torch.float32, **changes):
    kind, options = (MODELS | BY_TORCH)[name]
    torch.manual_seed(len(name))
    config = AutoConfig.for_model(kind, **SIZES | options | changes)
    model: Any = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        # Norm weights of 1 and biases of 0 would hide a mistake.
        nn.init.normal_(parameter, 0.9 if parameter.ndim == 1 else 0, 0.2)
        if name == "values of bf16":
            parameter.data = parameter.data.bfloat16().float()
    return model.to(dtype).train(False)


@pytest.fixture
def ran(monkeypatch):
    """The number of tokens of each forward, by the way that it ran."""
    calls: dict[str, list[int]] = {"lean": [], "kernel": []}
    for way, kind in (("lean", LeanForward), ("kernel", KernelForward)):

        def counted(self, *values, seen=calls[way], run=kind.run, **named):
            seen.append(values[0].numel())
            return run(self, *values, **named)

        monkeypatch.setattr(kind, "run", counted)
    return calls


@pytest.fixture
def packed(monkeypatch, library):
    """Matrices of any size are packed, by the kernel built as the test says."""
    monkeypatch.setattr("draftsmith.decode.packed_weights._SMALLEST", 0)
    for module in ("llama_forward", "packed_weights"):
        monkeypatch.setattr(f"draftsmith.decode.{module}.kernel", lambda: library)


@pytest.fixture
def whole(monkeypatch, packed, ran):
    """Every model goes through the kernel; the number of tokens of each of its forwards."""
    monkeypatch.setattr("draftsmith.decode.llama_forward.SMALLEST_MODEL", 0)
    return ran["kernel"]


def runner(model, fast=True):
    take_over(model)
    return Runner(model, ability(model).windows, 256, packs_of(model) if fast else None)


def begun(model, prompts):
    run = runner(model)
    run.prefill(prompts, 40)
    run.open()
    return run


def tree_block(parents, rows=1, static=None):
    arrays = TreeBatch.build(Tree(parents), torch.device("cpu"))
    offsets_RM = nn.functional.pad(arrays.depths_RN, (1, 0))
    return Block(
        offsets_RM.expand(rows, -1),
        arrays.sees_RMM.expand(rows, -1, -1),
        static=rows == 1 if static is None else static,
    )


def chain(count):
    return tree_block(tuple(range(-1, count - 2)))


PARENTS = (-1, -1, 0, 0, 1)
# The root, two children, and a child of each.
TREE = tree_block((-1, -1, 0, 1))


def walk(run, lengths, rows_of_block=1):
    """Logits and hidden states of a prefill, a tree step, a step behind the kept path, and a single
    token.
    """
    torch.manual_seed(5)
    prompts = [torch.randint(VOCABULARY, (length,)).tolist() for length in lengths]
    states = run.prefill(prompts, 40, HIDDEN)
    # What a model makes of the padding behind a row is not used.
    seen: list[Tensor] = [
        torch.cat([state[row, :length] for row, length in enumerate(lengths)]) for state in states
    ]
    for keep_logits, block, cells in (
        (0, tree_block(PARENTS, rows_of_block), [0, 2, 5]),
        (2, tree_block(PARENTS), [0]),
        (0, tree_block((), rows_of_block), [0]),
    ):
        run.open()
        tokens = torch.randint(VOCABULARY, (len(prompts), block.queries))
        logits, hidden = run.forward(tokens, block, keep_logits, HIDDEN)
        seen += [logits, *hidden]
        run.keep([cells[: 1 + row % 2] if row else cells for row in range(len(prompts))])
    return seen


def assert_close(ours, theirs, tolerance=1e-4):
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.shape == other.shape
        assert (mine - other).abs().max() <= tolerance * other.abs().max()


def check_walks(model, fast=True):
    for lengths in ([9], [1], [12, 12], [3, 14, 37]):
        for rows_of_block in {1, len(lengths)}:
            own = walk(runner(model, False), lengths, rows_of_block)
            assert_close(walk(runner(model, fast), lengths, rows_of_block), own)


@pytest.mark.parametrize("name", sorted({*MODELS, *BY_TORCH} - KERNEL_ONLY))
@torch.inference_mode()
def test_lean_equals_the_models_own_forward(name, ran):
    check_walks(build(name))
    assert ran["lean"] and not ran["kernel"]


@pytest.mark.parametrize("name", [*MODELS, *BY_TORCH])
@torch.inference_mode()
def test_packed_layers_equal_plain_ones_whatever_runs_them(name, packed, ran):
    model, plain = build(name), build(name)
    own = walk(runner(plain, False), [9, 4])
    assert_close(walk(runner(model), [9, 4]), own)
    packs_of(model).prepare(model)
    assert PackedLinear in map(type, model.modules())
    assert_close(walk(runner(model), [9, 4]), own)  # repacked, fused
    assert_close(walk(runner(model, False), [9, 4]), own, 1e-5)


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_the_kernel_equals_the_models_own_forward(name, whole):
    check_walks(build(name))
    assert max(whole) == 3 * 37 and min(whole) == 1


@pytest.mark.parametrize("name", ["grouped", "mistral, window", "qwen2, mixed"])
@pytest.mark.parametrize("fast", [True, False])
@torch.inference_mode()
def test_a_prompt_in_pieces_is_the_prompt(name, fast, monkeypatch):
    model = build(name)
    once = walk(runner(model, fast), [21, 9])
    monkeypatch.setattr("draftsmith.decode.runner._CHUNK", 4)
    assert_close(walk(runner(model, fast), [21, 9]), once)


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
        run = begun(model, [prompts[row] for row in rows])
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
    most = 12 if name in OTHER_FAMILIES else 70
    monkeypatch.setattr("draftsmith.decode.llama_forward.MOST_TOKENS", most)
    del whole[:]
    assert same(outputs(every), together)
    assert len(whole) > 4
    for row in every:
        assert same(outputs([row]), [each[row : row + 1] for each in together])


def same(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_many_queries_behind_a_long_cache(whole, name):
    # More slots than one block of keys, and more queries with one key/value head than are taken
    # together.
    model = build(name)
    prompt, tokens = [place % 80 for place in range(150)], torch.arange(35).unsqueeze(0)

    def outputs(pieces, fast=True):
        run, found = runner(model, fast), []
        run.prefill([prompt], 40)
        for piece in pieces:
            run.open()
            found.append(run.forward(piece, chain(piece.shape[1]))[0])
            run.keep([list(range(piece.shape[1]))])
        return torch.cat(found, dim=1)

    together = outputs([tokens])
    assert torch.equal(outputs(list(tokens.split([1, 20, 14], dim=1))), together)
    assert len(whole) == 6
    assert_close([together], [outputs([tokens], fast=False)], 2e-4)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["tied", "biased", "head norms"])
@torch.inference_mode()
def test_half_precision(name, dtype, native, monkeypatch):
    """Rounding differs; it may not be worse than the model's own."""
    if not native:
        monkeypatch.setattr("draftsmith.decode.packed_weights.kernel", lambda: None)
    model, reference = build(name, dtype), build(name, dtype).float()
    ours, theirs = walk(runner(model), [9, 4]), walk(runner(model, False), [9, 4])
    exact = walk(runner(reference, False), [9, 4])
    for mine, other, truth in zip(ours, theirs, exact, strict=True):
        # The kernel gives logits in fp32.
        assert other.dtype == dtype and mine.dtype in {dtype, torch.float32 if native else dtype}
        assert (mine - truth).norm() <= 1.5 * (other - truth).norm() + 1e-3 * truth.norm()


@pytest.mark.parametrize("name", OTHER_FAMILIES)
@torch.inference_mode()
def test_a_model_in_bf16_has_its_own_constants_and_better_sums(whole, library, monkeypatch, name):
    """The scale of an embedding is rounded as the model rounds it; nothing else is, but where a
    processor multiplies pairs of bf16.
    """
    monkeypatch.setattr(library, "pairs", False)
    model = build(name, torch.bfloat16)
    exact = build(name, torch.bfloat16).float()
    text = torch.tensor([[*range(1, 31), 5, 6, 7]])
    run = begun(model, [text[0, :30].tolist()])
    logits, (embedded,) = run.forward(text[:, 30:], chain(3), hidden_layers=(0,))
    own = model(text, output_hidden_states=True)
    assert torch.equal(embedded, own.hidden_states[0][:, 30:])
    if hasattr(exact.get_input_embeddings(), "embed_scale"):
        exact.get_input_embeddings().embed_scale.copy_(model.model.embed_tokens.embed_scale)
    truth = exact(text).logits[:, 30:]
    torch.testing.assert_close(logits, truth, atol=2e-4, rtol=1e-4)
    assert (logits - truth).norm() < (own.logits[:, 30:] - truth).norm()


@pytest.mark.parametrize("name", OTHER_FAMILIES)
@torch.inference_mode()
def test_a_taken_over_model_gives_its_own_weights(whole, name):
    model, plain = build(name), build(name)
    tokens = torch.tensor([list(range(1, 31))])
    begun(model, tokens.tolist())
    assert torch.equal(model(tokens).logits, plain(tokens).logits)
    weights = plain.state_dict()
    assert all(torch.equal(weights[key], value) for key, value in model.state_dict().items())


@torch.inference_mode()
def test_what_a_model_cannot_read_is_refused(whole, golden):
    """A token or a position without an embedding, wrong sizes, and a full cache."""
    one = torch.zeros(1, 2, dtype=torch.long)
    for token in (VOCABULARY, -1):
        with golden.raises(IndexError):
            begun(build("tied"), [[1, 2, 3]]).forward(torch.tensor([[token]]), chain(1))
    model = build("opt")
    run = Runner(model, ability(model).windows, None, packs_of(model))
    run.prefill([[1] * 256], 1)
    run.open()
    with golden.raises(IndexError):
        run.forward(torch.tensor([[1]]), chain(1))
    for tokens in (torch.zeros(1, 5, dtype=torch.long), one.int(), one.repeat(2, 1)):
        with golden.raises():
            begun(build("one group"), [[1, 2, 3]]).forward(tokens, chain(2))
    run = begun(build("one group"), [[1, 2, 3]])
    run.lengths = [run.cache.capacity]
    run.open()
    with golden.raises():
        run.forward(one, chain(2))


@torch.inference_mode()
def test_what_is_not_a_number_stays_none_and_large_numbers_are_right(whole):
    text = torch.tensor([[1, 2, 3, 4, 5]])
    model = build("grouped")
    model.model.layers[1].mlp.gate_proj.weight.data.mul_(2e3)  # far beyond what exp can hold
    own = model(text).logits[:, 3:]
    ours, _ = begun(model, [[1, 2, 3]]).forward(text[:, 3:], chain(2))
    assert ours.isfinite().all()
    torch.testing.assert_close(ours / own.abs().max(), own / own.abs().max(), atol=1e-4, rtol=1e-3)
    model.model.layers[0].input_layernorm.weight.data[3] = float("nan")
    ours, _ = begun(model, [[1, 2, 3]]).forward(text[:, 3:], chain(2))
    assert ours.isnan().all()


class Custom(LlamaForCausalLM):
    """Somebody's own model with a familiar base."""


def of_family(kind, **options):
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **SIZES | options)
    )
    return model.eval()


TINY_GPT2 = GPT2Config(vocab_size=VOCABULARY, n_positions=256, n_embd=32, n_layer=3, n_head=4)
REFUSED: dict[str, Callable[[Any], object]] = {
    "subclass": lambda model: Custom(LlamaConfig(**SIZES)).train(False),
    "hook": lambda model: model.model.layers[1].mlp.register_forward_hook(
        lambda module, args, output: output * 2
    ),
    "patched forward": lambda model: setattr(model.model.layers[1].mlp, "forward", lambda x: x),
    "replaced linear": lambda model: setattr(
        model.model.layers[1].mlp, "up_proj", nn.Sequential(model.model.layers[1].mlp.up_proj)
    ),
    "parametrised": lambda model: nn.utils.parametrizations.weight_norm(
        model.model.layers[1].mlp.up_proj
    ),
    "eager": lambda model: model.set_attn_implementation("eager"),
    "training": lambda model: model.train(),
    "mixed dtypes": lambda model: model.model.layers[1].mlp.up_proj.to(torch.float64),
    "dynamic rope": lambda model: build("grouped", rope_parameters=DYNAMIC),
    "gpt2": lambda model: GPT2LMHeadModel(TINY_GPT2).train(False),
    "norms behind": lambda model: of_family("opt", ffn_dim=48, do_layer_norm_before=False),
    "projected": lambda model: of_family("opt", ffn_dim=48, word_embed_proj_dim=36),
    "norms without weights": lambda model: of_family(
        "opt", ffn_dim=48, layer_norm_elementwise_affine=False
    ),
    "other activation": lambda model: of_family("gpt_neox", hidden_act="quick_gelu"),
    "rope by length": lambda model: of_family(
        "gpt_neox", rope_parameters=DYNAMIC | {"partial_rotary_factor": 1.0}
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_the_lean_forward_does_not_know_runs_as_its_own_forward(kind):
    model = build("grouped")
    other = REFUSED[kind](model)
    model = other if isinstance(other, PreTrainedModel) else model
    take_over(model)
    assert lean_forward(model, packs_of(model)) is None
    if kind not in ("training", "mixed dtypes", "patched forward", "parametrised", "gpt2"):
        with torch.inference_mode():
            assert_close(walk(runner(model), [9]), walk(runner(model, False), [9]), 1e-5)
    assert lean_forward(build("grouped"), packs_of(model)) is not None
