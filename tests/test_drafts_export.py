"""Exports: files with exactly the names, shapes and values that other engines read, or one line
that says why not.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import gguf
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

import draftsmith as ds
from draftsmith.core.errors import RunError
from draftsmith.core.io import read_json
from draftsmith.core.prompts import read_prompt_hashes, write_prompt_hashes
from draftsmith.core.records import read_record
from draftsmith.core.tokenization import load_tokenizer
from draftsmith.drafts.config import GGUF_TYPES, Format
from draftsmith.drafts.heads import HEADS as FRESH_HEADS, Head, load_head, save_head
from draftsmith.drafts.heads.eagle import EagleHead
from draftsmith.drafts.heads.eagle3 import Eagle3Head
from draftsmith.drafts.heads.medusa import HydraHeads, MedusaHeads
from draftsmith.drafts.heads.store import write_tensors
from draftsmith.drafts.layouts.export import WRITERS, check_layout
from draftsmith.drafts.layouts.table import LAYOUTS
from tests.conftest import save_model, tiny_tokenizer
from tests.tiny_models import stirred

SHAPE: dict[str, Any] = {
    "vocab_size": 290,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
HALF = range(0, 290, 2)


def eagle3(*flags, layers=1, **options):
    """An EAGLE-3 head as its authors have it, but for these flags."""

    def make(target):
        fresh = Eagle3Head.fresh(target, norms="eagle3", **options)
        changed: dict[str, Any] = dict.fromkeys(flags, True)
        return Eagle3Head(replace(fresh.config, num_hidden_layers=layers, **changed), target)

    return make


def block(kind, **options):
    fresh: Any = FRESH_HEADS[kind].fresh
    return partial(fresh, num_layers=2, block_size=4, **options)


HEADS: dict[str, Callable[[PreTrainedModel], Head]] = {
    "eagle": lambda target: EagleHead.fresh(target),
    "eagle3": lambda target: Eagle3Head.fresh(target, draft_vocab=HALF, norms="eagle3"),
    "eagle3, full": eagle3(),
    "eagle3, residual": eagle3("norm_before_residual"),
    "eagle3 of gpt-oss": eagle3("norm_before_fc"),
    "eagle3, two layers": eagle3(layers=2),
    "eagle3.1": eagle3("fc_norm", "norm_output"),
    "medusa": lambda target: MedusaHeads.fresh(target, num_heads=3, num_layers=2),
    "hydra": lambda target: HydraHeads.fresh(target, num_heads=2),
    "dflash": block("dflash"),
    "dflash, part": block("dflash", draft_vocab=HALF),
    "jetspec": block("jetspec", window=4),
    "dspark": block("dspark"),
}
KINDS = {name: name.partition(",")[0].partition(" ")[0].partition(".")[0] for name in HEADS}
# Every head, and every format of its kind.
WRITTEN = [(name, form) for name, kind in KINDS.items() for form, of in WRITERS if of == kind]


@pytest.fixture
def saved(target_dir):
    """Moves a model's parameters, norms too, from where they began, and saves it with the tests'
    tokenizer.
    """

    def save(model, path):
        stirred(model, 0.1).save_pretrained(path)
        load_tokenizer(target_dir).save_pretrained(path)
        model.eval()
        return model

    return save


def head_of(name, target, path):
    save_head(stirred(HEADS[name](target), 0.1), path)
    return load_head(path, target)


@pytest.fixture
def target(saved, tmp_path):
    return saved(LlamaForCausalLM(LlamaConfig(**SHAPE)), tmp_path / "target")


def exported(tmp_path, form, draft="head", **more):
    more = {"target": str(tmp_path / "target")} | more
    return ds.export(
        ds.ExportConfig(draft=str(tmp_path / draft), format=form, out=str(tmp_path / "out"), **more)
    )


@pytest.mark.parametrize(("name", "form"), WRITTEN)
def test_a_head_is_written_in_every_layout_of_its_kind(name, form, target, tmp_path, golden):
    """The golden text has what config.json says beyond the target's, and the names of tensors."""
    head = head_of(name, target, tmp_path / "head")
    try:
        summary = exported(tmp_path, form)
    except ds.InputError as refused:
        golden(refused)
        return
    golden("\n".join([summary["check"]["how"], *summary["remarks"]]))
    if form == "gguf":
        fields = gguf.GGUFReader(tmp_path / "out" / "model.gguf").fields
        own = [field for field in fields if field.startswith("eagle3.")]
        golden("\n".join(f"{field} {fields[field].contents()}" for field in own))
        return
    assert summary["check"]["max_difference"] < 1e-6
    back = load_head(tmp_path / "out", target)
    theirs, ours = back.state_dict(), head.state_dict()
    # SGLang builds `fc` with a bias.
    assert theirs.keys() - {"fc.bias"} == ours.keys()
    assert all(torch.equal(theirs[key], ours[key]) for key in ours)
    assert "fc.bias" not in theirs or not theirs["fc.bias"].any()
    config = read_json(tmp_path / "out" / "config.json", "")
    known = target.config.to_dict() | {"transformers_version": config.get("transformers_version")}
    said = {key: value for key, value in config.items() if known.get(key) != value}
    golden(json.dumps(said, sort_keys=True))
    golden(" ".join(sorted(load_file(tmp_path / "out" / "model.safetensors"))))


@pytest.mark.parametrize("form", ["speculators", "gguf"])
def test_a_file_that_reads_back_as_another_draft_is_not_kept(
    form, target, tmp_path, monkeypatch, golden
):
    head_of("eagle3", target, tmp_path / "head")
    wrong = torch.tensor(0.5)
    if form == "gguf":
        quantize = gguf.quants.quantize
        name = "gguf.quants.quantize"
        monkeypatch.setattr(name, lambda values, kind: quantize(values * 0 + 0.5, kind))
    else:
        monkeypatch.setattr(
            "draftsmith.drafts.layouts.export.write_tensors",
            lambda out, tensors, config: write_tensors(
                out, tensors | {"norm.weight": tensors["norm.weight"] + wrong}, config
            ),
        )
    with golden.raises(RunError):
        exported(tmp_path, form)
    written = ("config.json", "model.safetensors", "model.gguf", "draftsmith.json")
    assert not any((tmp_path / "out" / name).exists() for name in written)


def test_the_engines_that_proved_a_layout_are_those_that_make_engines_installs():
    makefile = (Path(__file__).parents[1] / "Makefile").read_text(encoding="utf-8")
    installed = {
        "vllm": re.search(r"^VLLM := (.+)$", makefile, re.M),
        "speculators": re.search(r"speculators==(\S+)$", makefile, re.M),
        "llama-cpp-python": re.search(r"^LLAMA_CPP := (.+)$", makefile, re.M),
    }
    versions = {f"{name} {found[1]}" for name, found in installed.items() if found}
    proven = {writer.proven_in for writer in WRITERS.values()} - {None}
    assert len(versions) == 3
    assert {text.removeprefix("llama.cpp of ") for text in proven if text} == versions


def test_a_language_model_as_a_directory(target, saved, tmp_path):
    summary = exported(tmp_path, "hf", draft="target", target=None, dtype="bfloat16")
    assert summary["check"] == {"how": "read back by transformers", "max_difference": 0}
    assert {"config.json", "model.safetensors", "tokenizer.json", "draftsmith.json"} <= set(
        summary["files"]
    )
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.dtype == torch.bfloat16
    record = read_json(tmp_path / "out" / "draftsmith.json", "")
    assert record["kind"] == "draft-lm" and record["export"]["check"] == summary["check"]
    run = read_json(tmp_path / "out" / "run.json", "")
    assert (
        run["inputs"]["out"] == str(tmp_path / "out") and run["paths"][run["inputs"]["out"]] == "."
    )
    assert run["progress"]["done"] == 1 and run["finished"]
    # A second export replaces the first, and tied weights are written once.
    tied = LlamaForCausalLM(
        LlamaConfig(**SHAPE | {"tie_word_embeddings": True, "num_hidden_layers": 1})
    )
    saved(tied, tmp_path / "tied")
    exported(tmp_path, "hf", draft="tied", target=None)
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")


def test_embeddings_that_a_target_scales_are_written_as_its_head_was_given_them(
    saved, tmp_path, golden
):
    gemma = saved(
        GemmaForCausalLM(GemmaConfig(**SHAPE, head_dim=8, tie_word_embeddings=True)),
        tmp_path / "target",
    )
    head = head_of("eagle3", gemma, tmp_path / "head")
    head_of("eagle", gemma, tmp_path / "one")
    weight: Any = gemma.get_input_embeddings().weight
    weight = weight.detach()
    scaled = weight * torch.tensor(32**0.5)
    assert head.borrowed.scales_embedding
    # Checkpoints of our own too: a head's file says what its head is given.
    torch.testing.assert_close(
        load_file(tmp_path / "one" / "model.safetensors")["embed_tokens.weight"], scaled
    )
    for form, draft in (("eagle", "one"), ("eagle", "head"), ("speculators", "head")):
        exported(tmp_path, form, draft=draft)
        torch.testing.assert_close(
            load_file(tmp_path / "out" / "model.safetensors")["embed_tokens.weight"], scaled
        )
    load_head(tmp_path / "one", gemma)
    with golden.raises():
        exported(tmp_path, "sglang")


def test_what_a_layout_cannot_say_is_refused(saved, tmp_path, golden):
    shape = SHAPE | {"head_dim": 8}
    for model, reason in (
        (
            Gemma2ForCausalLM(Gemma2Config(**shape, final_logit_softcapping=20.0)),
            "caps its logits at 20.0",
        ),
        (CohereForCausalLM(CohereConfig(**SHAPE, logit_scale=0.25)), "scales its logits by 0.25"),
    ):
        directory = tmp_path / reason[:4]
        head_of("eagle3", saved(model, directory / "target"), directory / "head")
        for form in ("eagle", "sglang", "speculators", "gguf"):
            with golden.raises():
                exported(directory, form)
            assert not (directory / "out").exists()


LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    "change",
    [
        {"head_dim": 16},
        {"rope_parameters": LLAMA3},
        {"num_hidden_layers": 6},
    ],
)
def test_the_authors_code_has_limits_that_others_do_not(change, saved, tmp_path, golden):
    target = saved(LlamaForCausalLM(LlamaConfig(**SHAPE | change)), tmp_path / "target")
    head_of("eagle3", target, tmp_path / "head")
    with golden.raises():
        exported(tmp_path, "eagle")
    for form in ("sglang", "speculators"):
        exported(tmp_path, form)


def test_a_name_that_an_engine_would_skip_is_never_written(target, tmp_path, golden):
    head_of("eagle", target, tmp_path / "head")
    exported(tmp_path, "eagle")
    config = read_json(tmp_path / "out" / "config.json", "")
    file = tmp_path / "out" / "model.safetensors"
    layout = LAYOUTS["eagle"]
    expected = layout.expected(config, embedding=True)
    assert len(expected) == 10
    check_layout(file, expected)
    with golden.raises(RunError):
        check_layout(file, layout.expected(config | {"bias": True}, embedding=True))


def test_the_command(target, tmp_path, door, golden):
    head_of("eagle3", target, tmp_path / "head")
    words = f"export --draft {tmp_path}/head --format sglang".split()
    to = ["--target", tmp_path / "target", "--out"]
    summary = door.summary(*words, *to, tmp_path / "eagle3-out")
    assert summary["format"] == "sglang" and summary["kind"] == "eagle3"
    golden(door.ok("status", tmp_path)[0])
    door.refused(*words, "--out", tmp_path / "other")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("x")
    door.refused(*words, *to, tmp_path / "full")
    assert [file.name for file in (tmp_path / "full").iterdir()] == ["mine.txt"]
    assert {form for form, _ in WRITERS} == set(get_args(Format))


def test_an_export_keeps_what_the_draft_was_trained_on_and_for(target, tmp_path):
    head_of("eagle3", target, tmp_path / "head")
    write_prompt_hashes(tmp_path / "head", [5, 7])
    record = {"kind": "eagle3", "target": "big", "target_fingerprint": "0" * 16}
    (tmp_path / "head" / "draftsmith.json").write_text(json.dumps(record))
    summary = exported(tmp_path, "sglang")
    kept = read_prompt_hashes(tmp_path / "out")
    assert kept is not None and kept.tolist() == [5, 7]
    assert "prompt_hashes.npy" in summary["files"]
    assert read_record(tmp_path / "out")["target_fingerprint"] == "0" * 16


def test_gguf_holds_the_model_and_the_tokenizer(target, tmp_path):
    gguf = pytest.importorskip("gguf")
    exported(tmp_path, "gguf", draft="target")
    reader = gguf.GGUFReader(tmp_path / "out" / "model.gguf")
    tensors = {tensor.name: torch.tensor(tensor.data) for tensor in reader.tensors}
    state = target.state_dict()
    assert torch.equal(
        tensors["blk.3.ffn_gate.weight"], state["model.layers.3.mlp.gate_proj.weight"]
    )
    # Queries are stored so that neighbouring rows are rotated together.
    query = state["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(tensors["blk.0.attn_q.weight"][[0, 1, 2, 3]], query[[0, 4, 1, 5]])
    assert len(tensors) == 8 * 9 + 3
    field = {
        name: reader.fields[f"tokenizer.ggml.{name}"].contents()
        for name in ("model", "pre", "tokens", "merges")
    }
    assert field["model"] == "gpt2" and field["pre"] == "gpt-2" and len(field["tokens"]) == 290
    assert field["tokens"][:4] == ["<s>", "</s>", "!", '"']
    head = head_of("eagle3", target, tmp_path / "head")
    exported(tmp_path, "gguf")
    reader = gguf.GGUFReader(tmp_path / "out" / "model.gguf")
    tensors = {tensor.name: torch.tensor(tensor.data) for tensor in reader.tensors}
    assert isinstance(head, Eagle3Head) and torch.equal(tensors["d2t"], head.target_ids_D)
    assert list(reader.fields["eagle3.target_layers"].contents()) == [2, 4, 5]


@pytest.mark.parametrize("kind", GGUF_TYPES)
def test_gguf_matrices_have_the_type_that_was_asked_for(kind, tmp_path):
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
    }
    config = LlamaConfig(vocab_size=290, num_hidden_layers=1, **sizes)
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    summary = exported(tmp_path, "gguf", draft="target", type=kind)
    stored = {}
    for tensor in gguf.GGUFReader(tmp_path / "out" / "model.gguf").tensors:
        stored[tensor.name] = tensor
    assert stored["blk.0.ffn_gate.weight"].tensor_type.name == kind == summary["type"]
    assert stored["output_norm.weight"].tensor_type.name == "F32"
    weight = model.state_dict()["model.layers.0.mlp.gate_proj.weight"]
    kept = gguf.quants.dequantize(
        stored["blk.0.ffn_gate.weight"].data, stored["blk.0.ffn_gate.weight"].tensor_type
    )
    off = float((torch.tensor(kept) - weight).abs().max())
    # A step of the coarsest type is an eighth of a block's largest weight.
    assert off <= summary["check"]["max_difference"] <= float(weight.abs().max()) / 4
    assert (summary["check"]["max_difference"] == 0) == (kind == "F32")


def test_gguf_types_that_cannot_be_written_are_named(tmp_path, golden):
    save_model(tmp_path / "target", seed=0, layers=1, vocabulary=290)
    for options in (
        {"form": "gguf", "type": "Q4_K_M"},
        {"form": "hf", "type": "Q8_0"},
        {"form": "gguf", "type": "F16", "dtype": "float32"},
        {"form": "gguf", "draft": "target", "type": "Q8_0"},
    ):
        with golden.raises(ds.InputError):
            exported(tmp_path, **options)


def sentencepiece_like():
    """BPE with SentencePiece's spelling, as LLaMA-2's tokenizer.json has it."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{i:02X}>" for i in range(256)),
        "▁",
        "a",
        "b",
        "ab",
        "▁ab",
        "aab",
    ]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    model = models.BPE(
        vocabulary, [("a", "b"), ("▁", "ab"), ("a", "ab")], byte_fallback=True, unk_token="<unk>"
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=[],
    )


def test_gguf_scores_are_the_order_of_merges(saved, tmp_path):
    gguf = pytest.importorskip("gguf")
    saved(
        LlamaForCausalLM(LlamaConfig(**SHAPE | {"vocab_size": 270, "num_hidden_layers": 1})),
        tmp_path / "target",
    )
    sentencepiece_like().save_pretrained(tmp_path / "target")
    exported(tmp_path, "gguf", draft="target")
    fields = gguf.GGUFReader(tmp_path / "out" / "model.gguf").fields
    assert (
        fields["tokenizer.ggml.model"].contents() == "llama"
        and fields["tokenizer.ggml.add_space_prefix"].contents()
    )
    scores = fields["tokenizer.ggml.scores"].contents()
    assert scores[262:265] == [0.0, -1.0, -2.0] and scores[260] < -2
    assert fields["tokenizer.ggml.tokens"].contents()[265:] == [
        f"[PAD{i}]" for i in range(265, 270)
    ]
    assert fields["tokenizer.ggml.token_type"].contents()[:4] == [2, 3, 3, 6]
