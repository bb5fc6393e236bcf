"""Drafts in the layouts that others publish run as the same weights in ours.

Every case writes a tiny checkpoint with the files, keys and shapes of a published one, loads it,
and compares what it computes with the head that it was made from. Legend: V vocabulary, H hidden
size, D draft vocabulary.
"""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from draftsmith.core.errors import InputError
from draftsmith.decode import SpeculativeDecoder
from draftsmith.decode.propose.head_proposers import HeadProposer
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


@pytest.fixture(scope="module")
def target():
    return tiny_family("llama", 1, 0.0, **SHAPE)


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
    """Recognised, computes the same, comes back through our own layout, and drafts losslessly."""
    assert head_kind(directory) == ours.kind
    back = load_head(directory, target)
    for a, b in zip(outputs(ours), outputs(back), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
    save_head(back, directory / "ours")
    again = load_head(directory / "ours", target)
    assert again.config == back.config
    for a, b in zip(outputs(again), outputs(back), strict=True):
        assert torch.equal(a, b)
    prompts = [[3, 1, 4, 1, 5], [9, 2]]
    alone = SpeculativeDecoder(target).generate(prompts, max_new_tokens=12, eos_ids=())
    drafted = SpeculativeDecoder(target, HeadProposer(back), "kary:2,2").generate(
        prompts, max_new_tokens=12, eos_ids=()
    )
    assert [row.output_ids for row in drafted.generations] == [
        row.output_ids for row in alone.generations
    ]


def eagle(target, rope=None, **variant):
    rope = {"rope_type": "default", "rope_theta": 10000.0} | (rope or {})
    config = replace(EagleConfig.like(target), rms_norm_eps=1e-6, rope_parameters=rope, **variant)
    return stirred(EagleHead(config, target)).eval()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
def test_eagle_of_its_authors(bias, file, target, tmp_path):
    """yuhuili/EAGLE-Vicuna-7B-v1.3 has a bias and no key for it, yuhuili/EAGLE-LLaMA3-Instruct-8B
    the key, false.
    """
    head = eagle(target, bias=bias)
    tensors = head.state_dict() | {"embed_tokens.weight": head.borrowed.embedding_weight}
    assert tensors["layers.0.self_attn.q_proj.weight"].shape == (16, H)
    assert ("fc.bias" in tensors) is bias and not any("input_layernorm" in name for name in tensors)
    values = (
        LAYER_KEYS | ({} if bias else {"bias": False}) | {"rope_scaling": None, "pretraining_tp": 1}
    )
    check(write(tmp_path / "head", values, tensors, file), head, target)


@pytest.mark.parametrize("family", ["mixtral", "qwen2"])
def test_eagle_for_other_families(family, tmp_path):
    """yuhuili/EAGLE-mixtral-instruct-8x7B names the family; EAGLE-Qwen2-7B-Instruct has biases in
    q, k and v.
    """
    torch.manual_seed(2)
    own: PreTrainedModel
    if family == "mixtral":
        own = MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=2)).eval()
    else:
        own = Qwen2ForCausalLM(Qwen2Config(**SHAPE)).eval()
    head = eagle(own, {"rope_theta": 1e6}, bias=family == "mixtral", qkv_bias=family == "qwen2")
    values = LAYER_KEYS | {"model_type": family, "rope_theta": 1000000.0}
    if family == "qwen2":
        values |= {"architectures": ["Qwen2ForCausalLM"], "qkv_bias": True, "bias": False}
        assert head.state_dict()["layers.0.self_attn.k_proj.bias"].shape == (8,)
    check(write(tmp_path / "head", values, head.state_dict(), "pytorch_model.bin"), head, own)


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


def case(
    values,
    tensors=lambda h: h.state_dict(),
    file=SAFE,
    **options,
):
    """config.json, its tensors as published, the file, and options of the head."""
    return values, tensors, file, options


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


@pytest.mark.parametrize("name", EAGLE3)
def test_eagle3(name, target, tmp_path):
    values, tensors, file, options = EAGLE3[name]
    head = eagle3(target, **options)
    check(write(tmp_path / "head", values, tensors(head), file), head, target)


SHARING: dict[str, tuple[dict[str, Any], list[int] | None]] = {
    "no draft vocabulary is named": (without(SPECFORGE, "draft_vocab_size"), None),
    "its tokens are in d2t": (without(SPECFORGE, "draft_vocab_size"), DRAFT_VOCAB),
    "tied": (SPECFORGE | {"tie_word_embeddings": True}, DRAFT_VOCAB),
}


@pytest.mark.parametrize("way", SHARING)
def test_eagle3_without_a_projection_reads_the_targets(way, target, tmp_path):
    values, ids = SHARING[way]
    head = eagle3(target, ids)
    with torch.no_grad():
        head.lm_head.weight.copy_(target.lm_head.weight[ids or slice(None)])
    tensors = without(head.state_dict(), "lm_head.weight", "t2d")
    check(write(tmp_path / "head", values, tensors, "model.safetensors"), head, target)


def test_a_tied_projection_is_the_heads_own_embedding(target, tmp_path):
    head = eagle3(target, own_embedding=True)
    with torch.no_grad():
        head.lm_head.weight.copy_(head.embed_tokens.weight[DRAFT_VOCAB])
    values = SPECFORGE | {"tie_word_embeddings": True, "embed_requires_grad": True}
    tensors = without(head.state_dict(), "lm_head.weight", "t2d")
    check(write(tmp_path / "head", values, tensors, "model.safetensors"), head, target)


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


@pytest.mark.parametrize(
    "options",
    [
        {"norm_before_residual": True},
        {"norm_before_residual": True, "aux": (1, 4, 6)},
        {"norm_before_fc": True, "norm_output": True, "own_embedding": True},
        {"fc_norm": True, "qk_norm": True},
        {"ids": None, "norm_before_residual": True},
    ],
)
def test_eagle3_of_speculators(options, target, tmp_path):
    head = eagle3(target, **options)
    layer = LAYER | ({"model_type": "qwen3"} if options.get("qk_norm") else {})
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    values = (
        SPECULATORS
        | {"transformer_layer_config": layer}
        | {key: options.get(key, False) for key in flags}
    )
    values |= {
        "embed_requires_grad": "own_embedding" in options,
        "draft_vocab_size": V if "ids" in options else D,
    }
    if "aux" in options:
        values["eagle_aux_hidden_state_layer_ids"] = list(options["aux"])
    tensors = head.state_dict() if "own_embedding" in options else embedded(head)
    check(write(tmp_path / "head", values, renamed(tensors), "model.safetensors"), head, target)


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


def test_medusa_of_its_authors(target, tmp_path, caplog):
    """FasterDecoding/medusa-vicuna-7b-v1.3: its config says two heads, its file holds more;
    medusa-1.0-*: the target's config with two keys more, its weights beside the heads; the first
    Medusa reads the target's projection.
    """
    heads: MedusaHeads = stirred(MedusaHeads.fresh(target, num_heads=3)).eval()
    first = MedusaHeads.fresh(target, num_heads=2, num_layers=2).eval()
    blocks = {name: t + 0.1 for name, t in first.state_dict().items() if "linear" in name}
    first.load_state_dict(first.state_dict() | blocks)
    two = {"medusa_num_heads": 2, "medusa_num_layers": 1}
    inside = target.state_dict() | {
        f"medusa_head.{name}": tensor for name, tensor in heads.state_dict().items()
    }
    whole, others = (
        target.config.to_dict() | two | {"medusa_num_heads": 3},
        len(target.state_dict()),
    )
    for ours, values, tensors, file, warning in (
        (heads, two, heads.state_dict(), "medusa_lm_head.pt", "says 2 heads, its file holds 3"),
        (
            heads,
            whole,
            inside,
            "pytorch_model-00001-of-00001.bin",
            f"ignoring {others} tensors of its base model",
        ),
        (
            first,
            two | {"medusa_num_layers": 2},
            blocks,
            "medusa_lm_head.pt",
            "no output projections",
        ),
    ):
        with caplog.at_level(logging.WARNING):
            check(write(tmp_path / warning, values, tensors, file), ours, target)
        assert warning in caplog.text


HYDRA = {
    "base_model_name_or_path": "owner/base",
    "grounded_heads": True,
    "hidden_state_offset": 0,
    "hydra_head_arch": "mlp",
    "hydra_num_heads": 3,
    "hydra_num_layers": 2,
    "transformers_version": "4.31.0",
}


def test_hydra_of_its_authors(target, tmp_path, golden):
    """ankner/hydra-vicuna-7b-v1.3: a projection with a bias per head, a bias beside the first
    block.
    """
    sizes = {"hidden_size": H, "vocab_size": V, "num_heads": 3, "num_layers": 2}
    config = HeadsConfig(kind="hydra", **sizes, own_projection=True, skip_bias=True)
    heads = stirred(HydraHeads(config, target)).eval()
    names = {"heads.": "hydra_mlp.", "projections.": "hydra_lm_head.", ".skip.": ".res_connection."}
    tensors = {}
    for name, tensor in heads.state_dict().items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        tensors[name] = tensor
    assert tensors["hydra_mlp.2.0.res_connection.weight"].shape == (H, 4 * H)
    assert tensors["hydra_lm_head.1.bias"].shape == (V,)
    check(write(tmp_path / "head", HYDRA, tensors, "hydra_lm_head.pt"), heads, target)
    for key, value in (
        ("hydra_head_arch", "prefix-mlp"),
        ("grounded_heads", False),
        ("hidden_state_offset", 1),
    ):
        (tmp_path / "head" / "config.json").write_text(json.dumps(HYDRA | {key: value}))
        with golden.raises():
            load_head(tmp_path / "head", target)


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
DFLASH = BLOCK | {"dflash_config": {"mask_token_id": 39, "target_layer_ids": [1, 3, 5]}}


def block(kind, target, **options):
    fresh: Any = HEADS[kind].fresh
    head: BlockHead = fresh(target, num_layers=2, block_size=4, target_layers=[1, 3, 5], **options)
    config = replace(
        head.config, rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 1e6}
    )
    made = stirred(type(head)(config, target)).eval()
    if "draft_vocab" in options:
        made.set_draft_vocab(options["draft_vocab"])
    return made


def test_dflash_of_z_lab_and_jetspec(target, tmp_path):
    """z-lab/Qwen3-8B-DFlash-b16; JetSpec's has `causal_head`, and vLLM reads `causal`."""
    head = block("dflash", target)
    assert {"fc.weight", "hidden_norm.weight", "norm.weight"} < head.state_dict().keys()
    assert "layers.1.self_attn.k_norm.weight" in head.state_dict() and head.hidden_layers == (
        2,
        4,
        6,
    )
    check(write(tmp_path / "dflash", DFLASH, head.state_dict(), "model.safetensors"), head, target)
    causal = block("jetspec", target)
    inner = {"dflash_config": {**DFLASH["dflash_config"], "causal": True}}
    for name, values in (("key", DFLASH | {"causal_head": True}), ("inner", DFLASH | inner)):
        check(
            write(tmp_path / name, values, causal.state_dict(), "model.safetensors"), causal, target
        )


def test_block_drafters_with_windows(target, tmp_path, golden):
    """XiaomiMiMo's say `use_swa`; z-lab's of Gemma 4 have layer types, and are causal in layers
    with a window.
    """
    head = block("dflash", target, window=3)
    tensors = head.state_dict()
    inner = DFLASH["dflash_config"] | {"use_swa": True, "swa_window_size": 3}
    check(
        write(tmp_path / "swa", DFLASH | {"dflash_config": inner}, tensors, "model.safetensors"),
        head,
        target,
    )
    windows = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 3}
    back = load_head(
        write(tmp_path / "typed", DFLASH | windows, tensors, "model.safetensors"), target
    )
    assert isinstance(back, BlockHead) and (back.config.window, back.config.causal) == (3, True)
    mixed = DFLASH | windows | {"layer_types": ["sliding_attention", "full_attention"]}
    with golden.raises():
        load_head(write(tmp_path / "mixed", mixed, tensors, "model.safetensors"), target)


@pytest.mark.parametrize("reduced", [False, True])
def test_dspark_of_deepspec_and_of_speculators(reduced, target, tmp_path, golden):
    """deepseek-ai/dspark_qwen3_8b_block7; in speculators auxiliary ids are one higher, and lm_head
    holds the rows.
    """
    head = block("dspark", target, **({"draft_vocab": DRAFT_VOCAB} if reduced else {}))
    more = {
        "markov_rank": head.config.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
    }
    more |= {"confidence_head_with_markov": True, "draft_vocab_size": D if reduced else V}
    spec = {
        "architectures": ["Qwen3DSparkModel"],
        "mask_token_id": 39,
        "target_layer_ids": [1, 3, 5],
    }
    check(
        write(tmp_path / "deepspec", BLOCK | spec | more, head.state_dict(), "model.safetensors"),
        head,
        target,
    )
    values = more | {"speculators_model_type": "dspark", "block_size": 4, "mask_token_id": 39}
    values |= {"aux_hidden_state_layer_ids": [2, 4, 6], "transformer_layer_config": BLOCK}
    rows = {"lm_head.weight": target.get_output_embeddings().weight[DRAFT_VOCAB]} if reduced else {}
    tensors = head.state_dict() | rows | {"verifier_norm.weight": torch.ones(H)}
    check(write(tmp_path / "speculators", values, tensors, "model.safetensors"), head, target)
    if reduced:
        other_order = reordered(tensors)
        check(write(tmp_path / "order", values, other_order, "model.safetensors"), head, target)
        tensors["lm_head.weight"] = tensors["lm_head.weight"] + 0.1
        with golden.raises():
            load_head(write(tmp_path / "other", values, tensors, "model.safetensors"), target)


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


FOREIGN: dict[str, dict[str, Any]] = {
    "P-EAGLE": SPECULATORS | {"speculators_model_type": "peagle"},
    "Domino": {"architectures": ["DominoDraftModel"], "dflash_config": {}},
    "a Domino drafter": {
        "architectures": ["DFlashDraftModel"],
        "dflash_config": {"projector_type": "domino"},
    },
    "DFlash 2": {"architectures": ["DFlash2DraftModel"], "dflash_config": {}},
    "DFly": {"speculators_model_type": "dfly"},
}


@pytest.mark.parametrize("name", FOREIGN)
def test_drafters_that_nothing_here_runs_are_named(name, target, tmp_path, golden):
    directory = write(tmp_path / "head", FOREIGN[name], {"fc.weight": torch.ones(2, 2)}, SAFE)
    line = refused(directory, target)
    assert name in line and "take" in line
    with golden.raises():
        head_kind(directory)


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
