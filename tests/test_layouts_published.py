"""Drafts in the layouts that others publish run as the same weights in ours.

`CASES` is the table: a tiny checkpoint with the files, keys and shapes of a published one, and the
head that it was made from. tests/test_drafts_export.py writes them, and the engine tests of
`tests.engine_proofs` compare logits. Legend: V vocabulary, H hidden size, D draft vocabulary.
"""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel

from draftsmith.core.errors import InputError
from draftsmith.drafts.heads import HEADS, head_kind, load_head, save_head
from draftsmith.drafts.heads.block import BlockHead
from draftsmith.drafts.heads.eagle import EagleConfig, EagleHead
from draftsmith.drafts.heads.eagle3 import Eagle3Config, Eagle3Head
from draftsmith.drafts.heads.medusa import HeadsConfig, HydraHeads, MedusaHeads
from draftsmith.drafts.layouts.table import LAYOUTS
from draftsmith.drafts.load import load_draft
from tests.test_drafts_heads import outputs
from tests.tiny_models import DRAFT_VOCAB, stirred
from tests.train_laws import tiny_family

V, H, D = 40, 16, 12
SHAPE: dict[str, Any] = dict(
    vocab_size=V,
    hidden_size=H,
    intermediate_size=24,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    initializer_range=0.3,
)
# What the authors' config.json of an EAGLE head says of its layer, in transformers 4 terms.
LAYER_KEYS: dict[str, Any] = SHAPE | dict(
    architectures=["LlamaForCausalLM"],
    bos_token_id=1,
    eos_token_id=2,
    hidden_act="silu",
    initializer_range=0.02,
    model_type="llama",
    num_hidden_layers=1,
    pad_token_id=0,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    torch_dtype="float16",
    transformers_version="4.28.1",
    use_cache=True,
)


@cache
def target_of(family):
    if family == "mixtral":
        torch.manual_seed(2)
        model: PreTrainedModel = MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=2))
        return model.eval()
    return tiny_family(family, 1, 0.0, **SHAPE)


@pytest.fixture
def target():
    return target_of("llama")


def write(directory, values, tensors, file):
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(values))
    owned = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    if file.endswith(".safetensors"):
        save_file(owned, directory / file)
    else:
        torch.save(owned, directory / file)
        torch.save({"lr": 1e-3}, directory / "training_args.bin")
    return directory


def check(directory, ours, target):
    """Recognised, computes the same, and comes back through our own layout."""
    assert head_kind(directory) == ours.kind
    back = load_head(directory, target)
    for a, b in zip(outputs(ours), outputs(back), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
    save_head(back, directory / "ours")
    again = load_head(directory / "ours", target)
    assert again.config == back.config
    for a, b in zip(outputs(again), outputs(back), strict=True):
        assert torch.equal(a, b)


def eagle(target, rope=None, **variant):
    rope = {"rope_type": "default", "rope_theta": 10000.0} | (rope or {})
    config = replace(EagleConfig.like(target), rms_norm_eps=1e-6, rope_parameters=rope, **variant)
    return stirred(EagleHead(config, target)).eval()


def eagle3(target, ids=DRAFT_VOCAB, hidden=H, **variant):
    rope = {"rope_type": "default", "rope_theta": 10000.0} | variant.pop("rope", {})
    config = Eagle3Config.like(
        target,
        draft_vocab_size=V if ids is None else len(ids),
        eagle_aux_hidden_state_layer_ids=variant.pop("aux", (2, 4, 5)),
        target_hidden_size=H,
    )
    config = replace(config, rms_norm_eps=1e-6, rope_parameters=rope, hidden_size=hidden, **variant)
    head = Eagle3Head(config, target)
    if ids is not None:
        head.set_draft_vocab(ids)
    return stirred(head).eval()


def renamed(tensors, prefix=""):
    return {
        prefix + name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()
    }


def without(tensors, *names):
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def embedded(head):
    return head.state_dict() | {"embed_tokens.weight": head.borrowed.embedding_weight}


LLAMA3: dict[str, Any] = dict(
    factor=8.0, high_freq_factor=4.0, low_freq_factor=1.0, rope_type="llama3"
)
LLAMA3 |= {"original_max_position_embeddings": 32}
AUTHORS = LAYER_KEYS | {"draft_vocab_size": D}
SPECFORGE = AUTHORS | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "head_dim": 4,
    "rope_theta": 10000.0,
}
MODELOPT_FLAGS = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}
MODELOPT_INNER = {
    "eagle_aux_hidden_state_layer_ids": [],
    "use_aux_hidden_state": True,
} | MODELOPT_FLAGS
MODELOPT = SPECFORGE | {"attention_bias": False, "mlp_bias": False, "eagle_config": MODELOPT_INNER}


BIN, SAFE = "pytorch_model.bin", "model.safetensors"
EAGLE_VALUES = LAYER_KEYS | {"rope_scaling": None, "pretraining_tp": 1}


class Case(NamedTuple):
    """config.json of a published checkpoint, the head that it holds, its tensors as published, the
    file, and what loading says.
    """

    values: dict[str, Any]
    make: Callable[[Any], Any]
    tensors: Callable[[Any], dict[str, Any]] = lambda head: head.state_dict()
    file: str = SAFE
    family: str = "llama"
    said: str = ""


def case(values, tensors=lambda head: head.state_dict(), file=SAFE, **options):
    """One of EAGLE-3, with options of the head."""
    return Case(values, partial(eagle3, **options), tensors, file)


def inner(*layers, **more):
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers), **more}}


def reordered(tensors):
    """The tokens of a draft vocabulary in another order, with their rows."""
    order_D = torch.randperm(D, generator=torch.Generator().manual_seed(0))
    rows = ("lm_head.weight", "markov_head.markov_w2.weight")
    moved = {name: tensors[name][order_D] for name in rows if name in tensors}
    ids_D = tensors["d2t"] + torch.arange(D)
    return tensors | moved | {"d2t": ids_D[order_D] - torch.arange(D)}


FULL = {"d2t": torch.zeros(V, dtype=torch.int64), "t2d": torch.ones(V, dtype=torch.bool)}
NARROW = {"hidden_size": 8, "head_dim": 4, "target_hidden_size": H}
LINEAR: dict[str, Any] = {"rope_type": "linear", "factor": 2.0}
FLAGS_31: dict[str, Any] = {"fc_norm": True, "norm_output": True}
AUX = {
    f"fc_norm.{i}.weight": f"aux_norm_{name}.weight"
    for i, name in enumerate(("low", "mid", "high"))
}
EAGLE3 = {
    "authors": case(AUTHORS, file=BIN),
    "authors, with the target's number of layers": case(AUTHORS | {"num_hidden_layers": 8}),
    "authors, with the embedding": case(AUTHORS, embedded),
    "authors, whole vocabulary": case(
        AUTHORS | {"draft_vocab_size": V}, lambda h: h.state_dict() | FULL, BIN, ids=None
    ),
    "authors, own width and embedding (LLaMA 3.3 70B)": case(
        AUTHORS | NARROW, file=BIN, hidden=8, own_embedding=True
    ),
    "rope: linear, by its old key": case(
        AUTHORS | {"rope_scaling": {"type": "linear", "factor": 2.0}}, rope=LINEAR
    ),
    "rope: llama3": case(
        AUTHORS | {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
        rope=LLAMA3 | {"rope_theta": 500000.0},
    ),
    "rope: parameters without a base": case(
        AUTHORS | {"rope_theta": 300.0, "rope_parameters": {"rope_type": "default"}},
        rope={"rope_theta": 300.0},
    ),
    "SpecForge": case(SPECFORGE | inner(1, 2, 6, use_aux_hidden_state=True), aux=(2, 3, 7)),
    "SpecForge, EAGLE-3.1": case(
        SPECFORGE | FLAGS_31 | {"target_hidden_size": H},
        lambda h: {AUX.get(name, name): tensor for name, tensor in h.state_dict().items()},
        **FLAGS_31,
    ),
    "frequencies that follow from the config": case(
        AUTHORS,
        lambda h: h.state_dict() | {"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(2)},
        BIN,
    ),
    "layers.0": case(SPECFORGE, lambda h: renamed(h.state_dict())),
    "tokens in another order": case(SPECFORGE, lambda h: reordered(h.state_dict())),
    "a prefix": case(SPECFORGE, lambda h: renamed(h.state_dict(), "model.")),
    "ModelOpt": case(MODELOPT, lambda h: without(h.state_dict(), "t2d")),
    "ModelOpt, five layers": case(
        MODELOPT | inner(1, 2, 3, 4, 5, norm_before_fc=True),
        lambda h: without(h.state_dict(), "t2d"),
        aux=(2, 3, 4, 5, 6),
        norm_before_fc=True,
    ),
}


LAYER: dict[str, Any] = dict(
    model_type="llama",
    vocab_size=V,
    hidden_size=H,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    rms_norm_eps=1e-6,
    hidden_act="silu",
    max_position_embeddings=64,
    rope_theta=10000.0,
    attention_bias=False,
    mlp_bias=False,
)
METHOD = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}
SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_version": "0.7.0",
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [METHOD],
        "verifier": {"name_or_path": "owner/target", "architectures": ["LlamaForCausalLM"]},
    },
    "transformer_layer_config": LAYER,
    "draft_vocab_size": D,
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def shared_rows(ids):
    """A head whose projection is the target's rows."""

    def make(target):
        head = eagle3(target, ids)
        with torch.no_grad():
            head.lm_head.weight.copy_(target.lm_head.weight[ids or slice(None)])
        return head

    return make


def tied(target):
    """A head whose projection is its own embedding."""
    head = eagle3(target, own_embedding=True)
    with torch.no_grad():
        head.lm_head.weight.copy_(head.embed_tokens.weight[DRAFT_VOCAB])
    return head


def projectionless(head):
    return without(head.state_dict(), "lm_head.weight", "t2d")


UNNAMED = without(SPECFORGE, "draft_vocab_size")
TIED = SPECFORGE | {"tie_word_embeddings": True}
EAGLE3 |= {
    "no draft vocabulary is named": Case(UNNAMED, shared_rows(None), projectionless),
    "the tokens of the projection are in d2t": Case(
        UNNAMED, shared_rows(DRAFT_VOCAB), projectionless
    ),
    "tied to the target's": Case(TIED, shared_rows(DRAFT_VOCAB), projectionless),
    "tied to its own": Case(TIED | {"embed_requires_grad": True}, tied, projectionless),
}


def speculators(flags, values=None, tensors=embedded, **options):
    """A checkpoint of speculators with these flags set."""
    every = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    said = {"embed_requires_grad": False} | {flag: flag in flags for flag in every}
    options |= dict.fromkeys(flags, True)
    made = partial(eagle3, **options)
    return Case(SPECULATORS | said | (values or {}), made, lambda h: renamed(tensors(h)))


SPECULATORS_CASES = {
    "residual": speculators(["norm_before_residual"]),
    "other layers": speculators(
        ["norm_before_residual"], {"eagle_aux_hidden_state_layer_ids": [1, 4, 6]}, aux=(1, 4, 6)
    ),
    "own embedding": speculators(
        ["norm_before_fc", "norm_output"],
        {"embed_requires_grad": True},
        lambda h: h.state_dict(),
        own_embedding=True,
    ),
    "as Qwen 3": speculators(
        ["fc_norm"],
        {"transformer_layer_config": LAYER | {"model_type": "qwen3"}},
        qk_norm=True,
    ),
    "whole vocabulary": speculators(["norm_before_residual"], {"draft_vocab_size": V}, ids=None),
}


WHOLE_VOCAB = {"draft_vocab_size": V}
# Values of its config, options of the head, and tensors that its file lacks.
NOT_WHOLE: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "no names of a draft vocabulary": (SPECFORGE, {}, ("d2t", "t2d")),
    "a norm of three": (SPECFORGE | FLAGS_31, FLAGS_31, ("fc_norm.0.weight",)),
    "no projection": (SPECFORGE, {}, ("lm_head.weight",)),
    "no whole projection": (SPECFORGE | WHOLE_VOCAB, {"ids": None}, ("lm_head.weight",)),
    "no projection, speculators": (SPECULATORS, {}, ("lm_head.weight",)),
    "no whole projection, speculators": (
        SPECULATORS | WHOLE_VOCAB,
        {"ids": None},
        ("lm_head.weight",),
    ),
    "two layers": (
        SPECULATORS | {"transformer_layer_config": LAYER | {"num_hidden_layers": 2}},
        {"norm_before_residual": True},
        (),
    ),
    "a window": (SPECULATORS | {"transformer_layer_config": LAYER | {"sliding_window": 8}}, {}, ()),
    "a kind of another": (SPECULATORS | {"speculators_model_type": "dflash"}, {}, ()),
    # Drafters that nothing here runs.
    "P-EAGLE": (SPECULATORS | {"speculators_model_type": "peagle"}, {}, ()),
    "Domino": ({"architectures": ["DominoDraftModel"], "dflash_config": {}}, {}, ()),
    "a Domino drafter": (
        {
            "architectures": ["DFlashDraftModel"],
            "dflash_config": {"projector_type": "domino"},
        },
        {},
        (),
    ),
    "DFlash 2": ({"architectures": ["DFlash2DraftModel"], "dflash_config": {}}, {}, ()),
    "DFly": ({"speculators_model_type": "dfly"}, {}, ()),
}


@pytest.mark.parametrize("name", NOT_WHOLE)
def test_what_is_not_whole_is_refused(name, target, tmp_path, golden):
    values, options, missing = NOT_WHOLE[name]
    tensors = without(eagle3(target, **options).state_dict(), *missing)
    if "speculators_version" in values:
        tensors = renamed(tensors)
    directory = write(tmp_path / "head", values, tensors, SAFE)
    with golden.raises():
        load_head(directory, target)


# The first Medusa reads the target's projection, and its file holds the blocks alone.
def first_medusa(target):
    heads = MedusaHeads.fresh(target, num_heads=2, num_layers=2).eval()
    with torch.no_grad():
        for name, parameter in heads.named_parameters():
            parameter.add_(0.1 * ("linear" in name))
    return heads


def medusa(target):
    return stirred(MedusaHeads.fresh(target, num_heads=3)).eval()


def beside_the_target(head):
    own = {f"medusa_head.{name}": tensor for name, tensor in head.state_dict().items()}
    return head.borrowed.target.state_dict() | own


def as_vllm_names_them(head):
    tensors = {}
    for name, tensor in head.state_dict().items():
        number, _, rest = name.partition(".")
        if "linear" in rest:
            tensors[f"blocks.{number}.layers.0.{rest.rpartition('.')[2]}"] = tensor
        else:
            tensors[f"lm_heads.{number}.weight"] = tensor
    return tensors


TWO = {"medusa_num_heads": 2, "medusa_num_layers": 1}
HYDRA = {
    "base_model_name_or_path": "owner/base",
    "grounded_heads": True,
    "hidden_state_offset": 0,
    "hydra_head_arch": "mlp",
    "hydra_num_heads": 3,
    "hydra_num_layers": 2,
    "transformers_version": "4.31.0",
}
HYDRA_NAMES = {
    "heads.": "hydra_mlp.",
    "projections.": "hydra_lm_head.",
    ".skip.": ".res_connection.",
}


def hydra(target, layers=2):
    """A projection with a bias per head, and a bias beside the first block."""
    sizes = {"hidden_size": H, "vocab_size": V, "num_heads": 3, "num_layers": layers}
    config = HeadsConfig(kind="hydra", **sizes, own_projection=True, skip_bias=True)
    return stirred(HydraHeads(config, target)).eval()


def hydra_tensors(head):
    tensors = {}
    for name, tensor in head.state_dict().items():
        for ours, theirs in HYDRA_NAMES.items():
            name = name.replace(ours, theirs)
        tensors[name] = tensor
    assert tensors["hydra_mlp.2.0.res_connection.weight"].shape == (H, 4 * H)
    assert tensors["hydra_lm_head.1.bias"].shape == (V,)
    return tensors


# The layers of a block drafter, as z-lab's and DeepSpec's config.json have them.
BLOCK: dict[str, Any] = LAYER_KEYS | dict(
    architectures=["DFlashDraftModel"],
    auto_map={"AutoModel": "dflash.DFlashDraftModel"},
    attention_bias=False,
    block_size=4,
    head_dim=4,
    layer_types=["full_attention"] * 2,
    model_type="qwen3",
    num_hidden_layers=2,
    num_target_layers=8,
    rope_scaling=None,
    rope_theta=1e6,
    sliding_window=None,
    torch_dtype="bfloat16",
)
ROPE_1E6 = {"rope_type": "default", "rope_theta": 1e6}
TAPS = {"mask_token_id": 39, "target_layer_ids": [1, 3, 5]}


def dflash(**inner):
    return BLOCK | {"dflash_config": TAPS | inner}


def block(kind, target, **options):
    fresh: Any = HEADS[kind].fresh
    head: BlockHead = fresh(target, num_layers=2, block_size=4, target_layers=[1, 3, 5], **options)
    config = replace(head.config, rms_norm_eps=1e-6, rope_parameters=ROPE_1E6)
    made = stirred(type(head)(config, target)).eval()
    if "draft_vocab" in options:
        made.set_draft_vocab(options["draft_vocab"])
    return made


# Of speculators auxiliary ids are one higher, and lm_head holds the target's rows.
def dspark(size):
    return {
        "markov_rank": H // 4,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "draft_vocab_size": size,
    }


def of_deepspec(size):
    return BLOCK | TAPS | dspark(size) | {"architectures": ["Qwen3DSparkModel"]}


def of_speculators(size):
    return dspark(size) | {
        "speculators_model_type": "dspark",
        "block_size": 4,
        "mask_token_id": 39,
        "aux_hidden_state_layer_ids": [2, 4, 6],
        "transformer_layer_config": BLOCK,
    }


def with_rows(head):
    rows = {"verifier_norm.weight": torch.ones(H)}
    if head.reduced:
        rows["lm_head.weight"] = head.borrowed.target.lm_head.weight[DRAFT_VOCAB]
    return head.state_dict() | rows


PART = partial(block, "dspark", draft_vocab=DRAFT_VOCAB)
CASES: dict[str, Case] = {
    # yuhuili/EAGLE-Vicuna-7B-v1.3 has a bias and no key for it.
    "EAGLE": Case(EAGLE_VALUES, partial(eagle, bias=True), embedded, BIN),
    # yuhuili/EAGLE-LLaMA3-Instruct-8B has the key, false.
    "EAGLE, no bias": Case(EAGLE_VALUES | {"bias": False}, eagle, embedded),
    # yuhuili/EAGLE-mixtral-instruct-8x7B names the family.
    "EAGLE for Mixtral": Case(
        LAYER_KEYS | {"model_type": "mixtral", "rope_theta": 1e6},
        partial(eagle, rope={"rope_theta": 1e6}, bias=True),
        file=BIN,
        family="mixtral",
    ),
    # yuhuili/EAGLE-Qwen2-7B-Instruct has biases in q, k and v.
    "EAGLE for Qwen 2": Case(
        LAYER_KEYS
        | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "rope_theta": 1e6}
        | {"qkv_bias": True, "bias": False},
        partial(eagle, rope={"rope_theta": 1e6}, qkv_bias=True),
        file=BIN,
        family="qwen2",
    ),
    **EAGLE3,
    **{f"speculators, {name}": made for name, made in SPECULATORS_CASES.items()},
    # FasterDecoding/medusa-vicuna-7b-v1.3: its config says two heads, its file holds more.
    "Medusa": Case(TWO, medusa, file="medusa_lm_head.pt", said="says 2 heads, its file holds 3"),
    "Medusa, by its type": Case({"model_type": "medusa"}, medusa, file="medusa_lm_head.pt"),
    "Medusa as vLLM names it": Case(
        TWO | {"medusa_num_heads": 3, "model_type": "medusa", "medusa_fc_bias": True},
        medusa,
        as_vllm_names_them,
    ),
    # medusa-1.0-*: the target's config with two keys more, its weights beside the heads.
    "Medusa in its target": Case(
        SHAPE | TWO | {"medusa_num_heads": 3, "model_type": "llama"},
        medusa,
        beside_the_target,
        "pytorch_model-00001-of-00001.bin",
        said="tensors of its base model",
    ),
    "Medusa without projections": Case(
        TWO | {"medusa_num_layers": 2},
        first_medusa,
        lambda head: {name: t for name, t in head.state_dict().items() if "linear" in name},
        "medusa_lm_head.pt",
        said="no output projections",
    ),
    # ankner/hydra-vicuna-7b-v1.3
    "Hydra": Case(HYDRA, hydra, hydra_tensors, "hydra_lm_head.pt"),
    "Hydra, one layer": Case(
        HYDRA | {"hydra_num_layers": 1}, partial(hydra, layers=1), hydra_tensors, SAFE
    ),
    # z-lab/Qwen3-8B-DFlash-b16
    "DFlash": Case(dflash(), partial(block, "dflash")),
    # XiaomiMiMo's
    "DFlash, a window": Case(
        dflash(use_swa=True, swa_window_size=3), partial(block, "dflash", window=3)
    ),
    # JetSpec's own key, and the one that vLLM reads.
    "JetSpec": Case(dflash() | {"causal_head": True}, partial(block, "jetspec")),
    "JetSpec, as vLLM reads it": Case(dflash(causal=True), partial(block, "jetspec")),
    # deepseek-ai/dspark_qwen3_8b_block7
    "DSpark of DeepSpec": Case(of_deepspec(V), partial(block, "dspark")),
    "DSpark of DeepSpec, part": Case(of_deepspec(D), PART),
    "DSpark of speculators": Case(of_speculators(V), partial(block, "dspark"), with_rows),
    "DSpark of speculators, part": Case(of_speculators(D), PART, with_rows),
    "DSpark of speculators, order": Case(
        of_speculators(D), PART, lambda head: reordered(with_rows(head))
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_published_draft_is_the_head_that_it_holds(name, tmp_path, caplog):
    it = CASES[name]
    target = target_of(it.family)
    head = it.make(target)
    with caplog.at_level(logging.WARNING):
        check(write(tmp_path / "head", it.values, it.tensors(head), it.file), head, target)
    assert it.said in caplog.text


def test_what_a_layout_does_not_say_is_refused(target, tmp_path, golden):
    """Other kinds of Hydra heads, layers with and without a window, rows that are not the
    target's.
    """
    hydras = hydra_tensors(hydra(target))
    for key, value in (
        ("hydra_head_arch", "prefix-mlp"),
        ("grounded_heads", False),
        ("hidden_state_offset", 1),
    ):
        with golden.raises():
            load_head(write(tmp_path / key, HYDRA | {key: value}, hydras, BIN), target)
    tensors = block("dflash", target, window=3).state_dict()
    windows = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 3}
    back = load_head(write(tmp_path / "typed", dflash() | windows, tensors, SAFE), target)
    # z-lab's of Gemma 4 are causal in layers with a window.
    assert isinstance(back, BlockHead) and (back.config.window, back.config.causal) == (3, True)
    mixed = dflash() | windows | {"layer_types": ["sliding_attention", "full_attention"]}
    with golden.raises():
        load_head(write(tmp_path / "mixed", mixed, tensors, SAFE), target)
    tensors = with_rows(PART(target))
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 0.1
    with golden.raises():
        load_head(write(tmp_path / "other", of_speculators(D), tensors, SAFE), target)


def test_every_layout_is_in_the_table_and_documented():
    assert {layout.kind for layout in LAYOUTS.values()} == set(HEADS)
    page = (Path(__file__).parents[1] / "docs" / "files.md").read_text(encoding="utf-8")
    for layout in LAYOUTS.values():
        assert layout.title in page or "SGLang" in layout.title, layout.title


def test_a_head_by_its_name_on_the_hub(target, draft_dir, tmp_path, monkeypatch):
    """From the hub's cache, as it lies there after a download; a language model's name is left to
    transformers.
    """
    head = eagle3(target)
    for name, source in (("EAGLE3", None), ("lm", Path(draft_dir))):
        repository = tmp_path / f"models--owner--{name}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text("0" * 40)
        (repository / "snapshots").mkdir()
        if source is None:
            write(
                repository / "snapshots" / ("0" * 40),
                AUTHORS,
                head.state_dict(),
                "pytorch_model.bin",
            )
        else:
            (repository / "snapshots" / ("0" * 40)).symlink_to(source)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert head_kind("owner/EAGLE3") == "eagle3" and head_kind("owner/lm") is None
    for a, b in zip(outputs(head), outputs(load_head("owner/EAGLE3", target)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def refused(directory, target):
    with pytest.raises(InputError) as caught:
        load_head(directory, target)
    (line,) = str(caught.value).splitlines()
    return line


@pytest.mark.parametrize("declared", [1, 2, 8])
def test_layers_are_those_of_the_file(declared, target, tmp_path, golden):
    """Of EAGLE-3; the target's number of layers says nothing. EAGLE-1 has one."""
    two = eagle3(target, num_hidden_layers=2, **FLAGS_31)
    values = AUTHORS | FLAGS_31 | {"num_hidden_layers": declared}
    directory = write(tmp_path / "eagle3", values, two.state_dict(), SAFE)
    if declared == 1:
        line = refused(directory, target)
        golden(line)
    else:
        check(directory, two, target)
    second = {key: value for key, value in two.state_dict().items() if key.startswith("layers.")}
    values = LAYER_KEYS | {"architectures": ["EagleModel"], "num_hidden_layers": declared}
    line = refused(
        write(tmp_path / "eagle", values, eagle(target).state_dict() | second, SAFE), target
    )
    golden(line)
    values = AUTHORS | {"num_hidden_layers": 2}
    line = refused(write(tmp_path / "cut", values, eagle3(target).state_dict(), BIN), target)
    golden(line)


KEY = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize("given", [{}, {KEY: None}, {KEY: []}, {KEY: [None] * 3}, inner()])
def test_states_that_no_config_names(given, target, tmp_path, golden):
    """Three are the usual ones. What else the file reads is asked for."""
    head = eagle3(target)
    check(write(tmp_path / "three", AUTHORS | given, head.state_dict(), SAFE), head, target)
    five = eagle3(target, aux=(1, 2, 3, 4, 5)).state_dict()
    line = refused(write(tmp_path / "five", AUTHORS | given, five, SAFE), target)
    golden(line)
    named = AUTHORS | {KEY: [1, 2, 3, 4, 5]}
    line = refused(write(tmp_path / "more", named, head.state_dict(), SAFE), target)
    golden(line)


def test_layers_of_a_block_drafter_that_no_config_names(target, tmp_path, golden):
    head = HEADS["dflash"].fresh(target)
    save_head(head, tmp_path / "head")
    file = tmp_path / "head/config.json"
    values = json.loads(file.read_text())
    values["dflash_config"]["target_layer_ids"] = values["dflash_config"]["target_layer_ids"][:2]
    file.write_text(json.dumps(values))
    line = refused(tmp_path / "head", target)
    golden(line)


def test_the_mtp_layer_of_gemma_4_is_a_checkpoint_of_its_own(tmp_path, monkeypatch, golden):
    gemma = tiny_family("llama", 1, 0.0, **SHAPE)
    gemma.save_pretrained(tmp_path)
    gemma.name_or_path = str(tmp_path)
    monkeypatch.setattr(type(gemma.config), "model_type", "gemma4_text")
    with golden.raises():
        load_head("mtp", gemma)
    values = {"model_type": "gemma4_assistant", "architectures": ["Gemma4AssistantForCausalLM"]}
    directory = write(tmp_path / "assistant", values, {"a": torch.ones(1)}, SAFE)
    # A language model to doctor, which knows the engines that run it.
    assert head_kind(directory) is None
    with golden.raises():
        load_draft(str(directory), gemma, device="cpu", dtype="float32")
