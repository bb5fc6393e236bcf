"""The lean forward, packed weights and masks: equal to the model's own forward, and gone without a
trace.
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

from draftsmith.decode import packed_weights as packed_module, runner as runner_module
from draftsmith.decode.llama_forward import lean_forward
from draftsmith.decode.native import kernel
from draftsmith.decode.packed_weights import packs_of, take_over
from draftsmith.decode.runner import Block, Runner
from draftsmith.decode.supported_models import ability
from draftsmith.decode.tree import Tree
from draftsmith.decode.tree_batch import TreeBatch

VOCABULARY = 61
SIZES: dict[str, Any] = {
    **{
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
    },
    **{"num_attention_heads": 4, "max_position_embeddings": 128},
}
SCALED = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {**SCALED, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {**SCALED, "rope_type": "yarn"}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_key_value_heads": 4}),
    "llama gqa": ("llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama bias": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 10}),
    "llama gelu": ("llama", {"hidden_act": "gelu"}),
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "linear": ("llama", {"rope_parameters": LINEAR}),
    "yarn": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {"num_key_value_heads": 2, "sliding_window": None}),
    "mistral sliding": ("mistral", {"num_key_value_heads": 1, "sliding_window": 7}),
    "qwen2": ("qwen2", {"num_key_value_heads": 2}),
    "qwen2 mixed": (
        "qwen2",
        {
            "num_key_value_heads": 2,
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 1,
        },
    ),
    "qwen3": ("qwen3", {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True}),
}
HIDDEN = (0, 1, 2, 3, -1)
TREE = Tree((-1, -1, 0, 0, 1))


def build(name, dtype=torch.float32, **changes):
    kind, options = MODELS[name]
    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, **SIZES | options | changes)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # Norm weights of 1 and biases of 0 would hide a mistake.
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.mul_(4)
    model.to(dtype=dtype)  # type: ignore[call-arg]
    return model


def runner(model, fast):
    take_over(model)
    return Runner(model, ability(model).windows, 128, packs_of(model) if fast else None)


def tree_block(tree, rows=1, static=None):
    arrays = TreeBatch.build(tree, torch.device("cpu"))
    offsets_RM = nn.functional.pad(arrays.depths_RN, (1, 0))
    return Block(
        offsets_RM.expand(rows, -1),
        arrays.sees_RMM.expand(rows, -1, -1),
        static=rows == 1 if static is None else static,
    )


def walk(run, lengths, rows_of_block, keep_logits=0):
    """Logits and hidden states of a prefill, a tree step, a step behind the kept path, and a single
    token.
    """
    torch.manual_seed(5)
    prompts = [torch.randint(VOCABULARY, (length,)).tolist() for length in lengths]
    seen: list[Tensor] = list(run.prefill(prompts, 40, HIDDEN))
    # What a model makes of the padding behind a row is not used.
    seen = [
        torch.cat([state[row, :length] for row, length in enumerate(lengths)]) for state in seen
    ]
    root = tree_block(Tree(()), rows_of_block)
    for block, cells in (
        (tree_block(TREE, rows_of_block), [0, 2, 5]),
        (tree_block(TREE), [0]),
        (root, [0]),
    ):
        run.open()
        tokens = torch.randint(VOCABULARY, (len(prompts), block.queries))
        logits, hidden = run.forward(tokens, block, keep_logits, HIDDEN)
        seen += [logits, *hidden]
        run.keep([cells[: 1 + row % 2] if row else cells for row in range(len(prompts))])
    return seen


def assert_close(ours, theirs, tolerance):
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.shape == other.shape
        assert (mine - other).abs().max() <= tolerance * other.abs().max()


@pytest.mark.parametrize("lengths", [[9], [1], [12, 12], [3, 14, 8]])
@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_lean_equals_the_models_own_forward(name, lengths):
    with torch.inference_mode(False):
        model = build(name)
    lean = runner(model, True)
    assert lean._lean is not None
    for rows_of_block in {1, len(lengths)}:
        ours = walk(lean, lengths, rows_of_block)
        assert_close(ours, walk(runner(model, False), lengths, rows_of_block), 1e-4)


@pytest.fixture
def any_size(monkeypatch):
    """Pack matrices of any size."""
    if kernel() is None:
        pytest.skip("no C compiler with OpenMP here, or torch has another runtime")
    monkeypatch.setattr(packed_module, "_SMALLEST", 0)


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_packed_layers_equal_plain_ones_whatever_runs_them(name, any_size):
    with torch.inference_mode(False):
        model = build(name)
    plain = walk(runner(model, False), [9, 4], 1)
    run = runner(model, True)
    assert run._lean is not None and packed_module.PackedLinear in map(type, model.modules())
    assert_close(walk(run, [9, 4], 1), plain, 1e-4)
    packs_of(model).prepare(model)
    assert_close(walk(runner(model, True), [9, 4], 1), plain, 1e-4)  # repacked, fused
    run = runner(model, True)
    run._lean = None
    assert_close(walk(run, [9, 4], 1), plain, 1e-5)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama gqa", "llama bias", "qwen3"])
@torch.inference_mode()
def test_half_precision(name, dtype, native, monkeypatch):
    if not native:
        monkeypatch.setattr(packed_module, "kernel", lambda: None)
    with torch.inference_mode(False):
        model = build(name, dtype)
    reference = build(name, dtype).float()
    ours, theirs = walk(runner(model, True), [9, 4], 1), walk(runner(model, False), [9, 4], 1)
    exact = walk(runner(reference, False), [9, 4], 1)
    for mine, other, truth in zip(ours, theirs, exact, strict=True):
        # The kernel gives logits in fp32.
        assert other.dtype == dtype and mine.dtype in (
            (dtype, torch.float32) if native else (dtype,)
        )
        # Rounding differs; it may not be worse than the model's own.
        assert (mine - truth).norm() <= 1.5 * (other - truth).norm() + 1e-3 * truth.norm()


@pytest.mark.parametrize("name", ["llama", "mistral sliding", "qwen2 mixed"])
@pytest.mark.parametrize("fast", [True, False])
@torch.inference_mode()
def test_a_prompt_in_pieces_is_the_prompt(name, fast, monkeypatch):
    model = build(name)
    whole = walk(runner(model, fast), [21, 9], 1)
    monkeypatch.setattr(runner_module, "_CHUNK", 4)
    assert_close(walk(runner(model, fast), [21, 9], 1), whole, 1e-4)


def walk_quietly(model, fast):
    with torch.inference_mode():
        return walk(runner(model, fast), [9], 1)


def tiny_gpt2():
    torch.manual_seed(3)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=128, n_embd=32, n_layer=3, n_head=4)
    )
    model.train(False)
    return model


class Custom(LlamaForCausalLM):
    """Somebody's own model with a familiar base."""


def of_family(kind, **options):
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **SIZES | options)
    )
    return model.eval()


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
    "dynamic rope": lambda model: build("llama", rope_parameters=DYNAMIC),
    "gpt2": lambda model: tiny_gpt2(),
    "norms behind": lambda model: of_family("opt", ffn_dim=48, do_layer_norm_before=False),
    "projected": lambda model: of_family("opt", ffn_dim=48, word_embed_proj_dim=16),
    "norms without weights": lambda model: of_family(
        "opt", ffn_dim=48, layer_norm_elementwise_affine=False
    ),
    "other activation": lambda model: of_family("gpt_neox", hidden_act="quick_gelu"),
    "rope by length": lambda model: of_family(
        "gpt_neox", rope_parameters={**DYNAMIC, "partial_rotary_factor": 1.0}
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_the_lean_forward_does_not_know_runs_as_its_own_forward(kind):
    model = build("llama")
    other = REFUSED[kind](model)
    model = other if isinstance(other, PreTrainedModel) else model
    take_over(model)
    assert lean_forward(model, packs_of(model)) is None
    if kind not in ("training", "mixed dtypes", "patched forward", "parametrised", "gpt2"):
        assert_close(walk_quietly(model, True), walk_quietly(model, False), 1e-5)
    assert lean_forward(build("llama"), packs_of(model)) is not None
