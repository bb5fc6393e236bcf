"""Drafts made from a target: what is kept is the target's, whatever the family; what is filled in
is said.
"""

from typing import Any, cast

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from benchmarks.lib.tiny_types import tiny_model
from draftsmith.core.models import load_model, read_per_token, vocabulary_size
from draftsmith.core.tokenization import load_tokenizer
from draftsmith.drafts.make.prune import FAMILIES, prune
from draftsmith.drafts.make.size import filled, too_costly
from draftsmith.drafts.make.transplant import transplant
from draftsmith.drafts.vocabulary import map_vocabulary, pieces, token_texts
from tests.conftest import sentencepiece

V, H = 40, 32
PLAIN: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": H,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
GROUPED = PLAIN | {"intermediate_size": 48, "num_key_value_heads": 2}
TEXTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7]]
IDS = torch.tensor(TEXTS[:1])


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_layers_left_out_are_the_target_without_them(name, tmp_path):
    """Against the target with the other layers turned into the identity; saved and loaded again."""
    target = tiny_model(name)
    whole, kept = prune(target)
    assert kept == [0, 1, 2, 3]
    torch.testing.assert_close(whole(IDS).logits, target(IDS).logits)
    small, kept = prune(target, num_layers=2, keep="even")
    assert kept == [0, 3]
    layers = cast(Any, target.get_submodule(FAMILIES[name].layers))
    handles = [
        layers[index].register_forward_hook(
            lambda _, args, kwargs, out: (
                args[0] if isinstance(out, torch.Tensor) else (args[0], *out[1:])
            ),
            with_kwargs=True,
        )
        for index in (1, 2)
    ]
    expected = target(IDS, use_cache=False).logits
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(small(IDS).logits, expected)
    assert small.config.num_hidden_layers == 2
    small.save_pretrained(tmp_path)
    torch.testing.assert_close(load_model(str(tmp_path), device="cpu")(IDS).logits, expected)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_neurons_that_do_nothing_go_first(name):
    """Half of the neurons are made silent: without them the model computes the same."""
    target, family = tiny_model(name), FAMILIES[name]
    for layer in cast(Any, target.get_submodule(family.layers)):
        weight = layer.get_submodule(family.down).weight
        (weight if name == "gpt2" else weight.T)[::2] = 0.0
    small, _ = prune(target, intermediate_size=24, texts=TEXTS)
    torch.testing.assert_close(small(IDS).logits, target(IDS).logits)
    assert read_per_token(small) < read_per_token(target)


def test_layers_are_kept_as_named():
    kept = {
        keep: prune(tiny_model("llama"), num_layers=3, keep=keep)[1]
        for keep in ("first", "last", "even")
    }
    assert kept == {"first": [0, 1, 2], "last": [1, 2, 3], "even": [0, 2, 3]}


def sentencepiece_tokenizer():
    """Of tokens that the byte-level one of conftest lacks, too."""
    return sentencepiece(*"\u2581the \u2581quick qu e r s th \u2581 t h a dog k u i c q".split(" "))


def test_token_texts_are_the_bytes_that_decode_gives(target_dir):
    byte_level, pieced = load_tokenizer(target_dir), sentencepiece_tokenizer()
    texts = token_texts(byte_level)
    for text in ("The quick brown fox", "é λ 漢 🙂", "12, 345"):
        ids = byte_level.encode(text, add_special_tokens=False)
        assert b"".join(texts[i] for i in ids) == text.encode()
    assert not {0, 1} & texts.keys()
    theirs = token_texts(pieced)
    vocabulary = pieced.get_vocab()
    assert theirs[vocabulary["\u2581the"]] == b" the" and theirs[vocabulary["<0x0A>"]] == b"\n"
    assert pieces(b"quick", {b"qu": 1, b"q": 2, b"i": 3, b"ck": 4}, 2) == [1, 3, 4]
    assert pieces(b"quack", {b"qu": 1}, 2) is None


def test_a_map_of_two_vocabularies(target_dir, golden):
    target, draft = load_tokenizer(target_dir), sentencepiece_tokenizer()
    words = map_vocabulary(target, draft, 292, 280)
    ours, theirs = token_texts(draft), token_texts(target)
    pairs = dict(zip(words.target_ids.tolist(), words.draft_ids.tolist(), strict=True))
    assert len(set(pairs.values())) == len(pairs) == words.shared > 10
    assert (
        pairs[target.bos_token_id] == draft.bos_token_id
        and pairs[target.eos_token_id] == draft.eos_token_id
    )
    for t, d in pairs.items():
        assert t in (0, 1) or theirs[t] == ours[d]
    for token, text in theirs.items():
        assert b"".join(ours[each] for each in words.in_draft[token]) == text
    # Padding of the model.
    assert words.in_draft[290] == words.in_draft[291] == (draft.eos_token_id,)
    logits = torch.arange(280.0)
    moved = words.to_target(logits)
    assert moved.shape == (292,) and int(moved.isfinite().sum()) == words.shared
    for t, d in pairs.items():
        assert moved[t] == d


def test_of_tokens_with_one_text_the_one_that_is_written_is_taken(target_dir):
    """`t` and `<0x74>` are the same byte; runs of spaces are added tokens of GPT-NeoX and Phi."""
    byte_level, pieced = load_tokenizer(target_dir), sentencepiece_tokenizer()
    byte_level.add_tokens(["    "])
    run, letter = byte_level.get_vocab()["    "], byte_level.get_vocab()["t"]
    own = pieced.get_vocab()
    there = map_vocabulary(byte_level, pieced, len(byte_level), len(pieced))
    assert there.in_draft[letter] == (own["t"],)
    assert there.in_draft[run] == (own["\u2581"],) * 4
    back = map_vocabulary(pieced, byte_level, len(pieced), len(byte_level))
    pairs = dict(zip(back.target_ids.tolist(), back.draft_ids.tolist(), strict=True))
    assert pairs[own["t"]] == letter and own["<0x74>"] not in pairs
    assert back.in_draft[own["<0x74>"]] == (letter,), "it is read all the same"


@torch.no_grad()
def test_a_transplanted_donor_has_no_token_beyond_its_new_vocabulary(target_dir):
    """A special token of the target's own has no text, and the last rows of its tables no token."""
    target: Any = load_model(target_dir, device="cpu")
    tokenizer = load_tokenizer(target_dir)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|x|>"]})
    target.resize_token_embeddings(296, mean_resizing=False)
    config = LlamaConfig(**GROUPED | {"vocab_size": 400, "pad_token_id": 399})
    moved, found = transplant(
        LlamaForCausalLM(config), sentencepiece_tokenizer(), target, tokenizer
    )
    assert moved.config.vocab_size == 296 and moved.config.pad_token_id is None
    assert (moved.config.bos_token_id, moved.config.eos_token_id) == (0, 1)
    assert (found.unmapped, found.padding) == (("<|x|>",), 5)


@torch.no_grad()
def test_a_transplanted_donor_has_rows_by_text(target_dir):
    target, tokenizer = load_model(target_dir, device="cpu"), load_tokenizer(target_dir)
    donor_tokenizer = sentencepiece_tokenizer()
    torch.manual_seed(7)
    donor: PreTrainedModel = LlamaForCausalLM(
        LlamaConfig(**GROUPED | {"vocab_size": len(donor_tokenizer)})
    )
    moved, found = transplant(donor, donor_tokenizer, target, tokenizer)
    assert vocabulary_size(moved) == vocabulary_size(target) == 290
    assert found.shared + found.from_pieces + len(found.unmapped) + found.padding == 290
    assert found.unmapped == () and found.padding == 0 and found.from_pieces > 0
    ours, theirs = token_texts(donor_tokenizer), token_texts(tokenizer)
    by_text = {text: d for d, text in reversed(list(ours.items()))}
    old, new = (cast(Any, model.get_input_embeddings()).weight for model in (donor, moved))
    old_out, new_out = (cast(Any, model.get_output_embeddings()).weight for model in (donor, moved))
    for token, text in theirs.items():
        ids = [by_text[text]] if text in by_text else pieces(text, by_text, 8)
        assert ids is not None
        torch.testing.assert_close(new[token], old[ids].mean(0))
        assert torch.equal(new_out[token], old_out[ids[0]])
    assert torch.equal(new[tokenizer.eos_token_id], old[donor_tokenizer.eos_token_id])
    inner = dict(moved.named_parameters())
    assert all(
        torch.equal(inner[name], value)
        for name, value in donor.named_parameters()
        if ".layers." in name
    )


def test_a_shape_is_filled_from_the_target_and_its_cost_is_told(golden):
    target = LlamaConfig(**GROUPED, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    values, taken = filled({"model_type": "llama", "hidden_size": 8}, target)
    special = {"bos_token_id", "eos_token_id", "pad_token_id"}
    assert taken.keys() == special | {"vocab_size", "max_position_embeddings", "rope_parameters"}
    assert values == {"model_type": "llama", "hidden_size": 8} | taken and values["vocab_size"] == V
    assert "vocab_size" not in filled({"vocab_size": 41, "rope_theta": 1.0}, target)[1]
    assert "rope_parameters" not in filled({"rope_theta": 1.0}, target)[1]
    # Frequencies of the target that are made for its size of heads are not the draft's.
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 500.0,
        "original_max_position_embeddings": 32,
    }
    longrope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    scaled = LlamaConfig(**GROUPED | {"hidden_size": 64}, rope_parameters=longrope)
    assert filled({}, scaled)[1]["rope_parameters"] == {"rope_type": "default", "rope_theta": 500.0}
    assert too_costly(50, 100) is None
    golden(str(too_costly(51, 100)))


@pytest.mark.parametrize("tied", [True, False])
def test_an_embedding_that_is_only_looked_up_costs_nothing(tied):
    model = LlamaForCausalLM(LlamaConfig(**GROUPED, tie_word_embeddings=tied))
    everything = sum(parameter.numel() for parameter in model.parameters())
    assert read_per_token(model) == everything - (0 if tied else V * H)
