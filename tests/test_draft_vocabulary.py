"""A language model with output rows for a part of the vocabulary. Law 1 for it is in
tests/test_decode_lossless.py.
"""

import copy
import json
import logging
import random
from collections import Counter
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, PreTrainedModel

import draftsmith as ds
from draftsmith.core.sampling import Sampling
from draftsmith.drafts.draft_vocabulary import (
    FILE,
    attach_draft_vocabulary,
    commonest_tokens,
    draft_rows,
    draft_vocabulary,
    fastest_size,
    likely_tokens,
    mean_probabilities,
    rarest_token,
    read_draft_vocabulary,
    token_counts,
    trim,
)
from draftsmith.drafts.load import draft_fingerprint, load_models
from draftsmith.eval.formulas import Continuation
from draftsmith.train import draft_setup
from draftsmith.train.batch import IGNORE, Batch
from draftsmith.train.config import Optim
from draftsmith.train.data import load_examples
from draftsmith.train.objective import parse_objective
from draftsmith.train.teacher import StoredTeacher
from draftsmith.train.trainees.lm import LMTrainee
from tests.tiny_models import DRAFT_VOCAB, alpha_sums, random_llama, tiny_llama

IDS = torch.tensor(DRAFT_VOCAB)
KEPT = 60


def gemma():
    """With tied embeddings and a soft cap on its logits."""
    torch.manual_seed(5)
    shape: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "head_dim": 8,
    }
    heads: dict[str, Any] = {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "final_logit_softcapping": 2.0,
    }
    model: PreTrainedModel = Gemma2ForCausalLM(Gemma2Config(vocab_size=40, **shape, **heads)).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_(0, 0.5)  # type: ignore[operator]
    return model


@pytest.fixture(scope="module")
def trained(target_dir, draft_dir, distilled, tmp_path_factory):
    """A draft of 60 of 290 tokens."""
    out = tmp_path_factory.mktemp("trained") / "draft"
    shared: Any = {
        "target": target_dir,
        "draft": draft_dir,
        "data": [distilled],
        "out": str(out),
        "device": "cpu",
    }
    options: Any = {
        "max_length": 48,
        "objective": "fkl",
        "steps": 6,
        "eval_every": 3,
        "optim": Optim(lr=0.01),
    }
    ds.train(ds.TrainConfig(**shared, **options, draft_vocab_size=KEPT))
    return out


@pytest.mark.parametrize("make", [lambda: random_llama(3, 40), gemma])
@torch.inference_mode()
def test_its_logits_are_the_whole_ones_at_its_tokens(make):
    """-inf elsewhere, also behind a soft cap, which would make it finite; and with half the rows to
    read.
    """
    whole = make()
    trimmed = copy.deepcopy(whole)
    trim(trimmed, IDS)
    ids = torch.randint(0, 40, (2, 7))
    logits, wanted = trimmed(ids).logits, whole(ids).logits
    assert logits.shape == wanted.shape
    torch.testing.assert_close(logits[..., IDS], wanted[..., IDS])
    others = torch.ones(40, dtype=torch.bool).index_fill(0, IDS, False)
    assert bool((logits[..., others] == -torch.inf).all())
    assert len(trimmed.get_output_embeddings().weight) == len(IDS)
    assert draft_fingerprint(trimmed) != draft_fingerprint(whole)


def test_free_places_go_to_what_the_target_finds_likely():
    counts = Counter({30: 5, 31: 1, 32: 1})
    assert commonest_tokens(counts, 5) == [0, 1, 30, 31, 32]
    likely = [0.0] * 40
    likely[35] = 0.2
    likely[39] = 0.1
    assert commonest_tokens(counts, 5, likely) == [30, 31, 32, 35, 39]
    assert commonest_tokens(Counter({5: 1}), 3, [0.1, 0.2]) == [0, 1, 5]
    # What occurs comes first; of equals the likelier.
    likely[32] = 0.01
    assert commonest_tokens(counts, 2, likely) == [30, 32]
    target = tiny_llama(0, vocabulary=40)
    texts = [[3, 4, 5], [6, 7]]
    mean_V = mean_probabilities(target, texts)
    assert float(mean_V.sum()) == pytest.approx(1, abs=1e-5)
    best = mean_V.clone().index_fill(0, torch.tensor([30, 31, 32]), -1.0).argsort(descending=True)
    chosen = likely_tokens(counts, 6, target, texts, 40)
    assert set(chosen) == {30, 31, 32, *best[:3].tolist()}
    # A draft of fewer tokens drafts none that it lacks.
    assert max(likely_tokens(counts, 33, target, texts, 33)) == 32


def test_the_size_is_where_mass_and_cost_meet():
    target = tiny_llama(0, vocabulary=40)
    texts = [[3, 4, 5], [6, 7], [8, 9]]
    free = fastest_size(target, texts, layers=0.1, projection=0.0)
    assert (free.tokens, free.cost) == (40, 0.1) and free.missing < 1e-5
    dear = fastest_size(target, texts, layers=0.1, projection=5.0)
    assert dear.tokens < 40 and dear.missing > 0
    assert dear.cost == pytest.approx(0.1 + 5 * dear.tokens / 40)


def test_training_keeps_the_commonest_tokens_and_leaves_a_whole_model(
    trained, draft_dir, target_dir, caplog, golden
):
    out = trained
    ids = read_draft_vocabulary(str(out), 290)
    assert ids is not None and len(ids) == KEPT
    record = json.loads((out / "draftsmith.json").read_text())
    assert 0 < record["heldout_missing_mass"] < 1
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (draft_dir, out))
    rows = torch.isin(torch.arange(290), ids)
    moved = (before.lm_head.weight != after.lm_head.weight).any(1)
    assert torch.equal(moved, rows), "rows of tokens that are not drafted stay as they were"
    with caplog.at_level(logging.WARNING):
        pair = load_models(target_dir, [str(out)], device="cpu")
    golden("\n".join(caplog.messages), having="drafts")
    assert torch.equal(draft_vocabulary(pair.drafts[str(out)]), ids)  # type: ignore[arg-type]


def test_alpha_in_training_is_alpha_of_the_loaded_draft(trained, target_dir, distilled):
    """Laws 5 and 10: the target's distribution against a draft that is restricted to its tokens."""
    out = trained
    pair = load_models(target_dir, [str(out)], device="cpu")
    draft = pair.drafts[str(out)]
    assert isinstance(draft, PreTrainedModel)
    whole = AutoModelForCausalLM.from_pretrained(out).eval()
    attach_draft_vocabulary(whole, draft_vocabulary(draft))  # type: ignore[arg-type]
    rows = [
        row
        for row in load_examples([distilled], None, 48).rows.select(range(4))
        if row["response_ids"]
    ]
    texts = [
        Continuation(str(n), row["prompt_ids"], row["response_ids"]) for n, row in enumerate(rows)
    ]
    measured = alpha_sums(pair.target, draft, texts, Sampling(temperature=1.0), batch_size=2)
    trainee = LMTrainee(whole, parse_objective("ce"), pair.target).eval()
    for row, alpha in zip(rows, measured["alpha"], strict=True):
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        labels = torch.full_like(ids, IGNORE)
        labels[0, len(row["prompt_ids"]) - 1 : -1] = ids[0, len(row["prompt_ids"]) :]
        sums = trainee(Batch(ids, labels))
        assert float(sums.alpha) == pytest.approx(alpha, abs=1e-4)
        # Tokens that are not drafted have no cross-entropy, and count.
        assert int(sums.tokens) == len(row["response_ids"])


def test_its_loss_is_that_of_the_restricted_distributions():
    """Against the definition; gradients reach the kept rows alone, and stored rows know no more
    than a live teacher.
    """
    draft, target = random_llama(3, 40), random_llama(4, 40)
    attach_draft_vocabulary(draft, IDS)
    ids = torch.randint(0, 40, (1, 9))
    labels = torch.full_like(ids, IGNORE)
    labels[0, 2:8] = ids[0, 3:9]
    tokens = ids[0, 3:9]
    q = draft(ids).logits[0, 2:8, IDS].log_softmax(-1).detach()
    whole = target(ids).logits[0, 2:8].log_softmax(-1).detach()
    p = whole[:, IDS].log_softmax(-1)
    expected = {"fkl": float((p.exp() * (p - q)).sum())}
    kept = torch.isin(tokens, IDS)
    picked = draft_rows(IDS, tokens)[kept]
    expected["ce"] = float(-q[kept].gather(1, picked[:, None]).sum())
    for objective, value in expected.items():
        draft.zero_grad()
        trainee = LMTrainee(draft, parse_objective(objective), target).train()
        sums = trainee(Batch(ids, labels))
        assert float(sums.loss.detach()) == pytest.approx(value, abs=1e-4), objective
        assert int(sums.tokens) == 6
        sums.loss.backward()
        gradient = draft.lm_head.weight.grad
        others = torch.ones(40, dtype=torch.bool).index_fill(0, IDS, False)
        assert (
            isinstance(gradient, torch.Tensor)
            and bool((gradient[others] == 0).all())
            and bool(gradient.any())
        )
    assert float(trainee.eval()(Batch(ids, labels)).missing) == pytest.approx(
        float((1 - whole.exp()[:, IDS].sum(-1)).sum()), abs=1e-4
    )
    top = whole.topk(8)
    stored = StoredTeacher(top.indices, top.values, (1 - top.values.exp().sum(-1)).clamp_min(0))
    alone = LMTrainee(draft, parse_objective("tvd")).eval()(Batch(ids, labels, stored=stored))
    assert 0 < float(alone.alpha) <= float(torch.minimum(whole.exp()[:, IDS], q.exp()).sum()) + 1e-5


def test_training_again_keeps_what_it_has(trained, door, target_dir, distilled, tmp_path, golden):
    out = trained
    words = (
        f"train --target {target_dir} --draft {out} --data {distilled} --out "
        f"{tmp_path / 'again'} --device cpu"
    )
    words += " --max_length 48 --steps 2 --eval_every 2"
    code, _, err = door(*words.split(), "--draft_vocab_size", KEPT)
    assert code == 2
    golden(err, having="draft_vocab_size")
    said, _ = door.ok(*words.split())
    golden(said, having="cannot be drafted")
    assert (tmp_path / "again" / FILE).read_bytes() == (out / FILE).read_bytes()


def test_an_export_is_whole_and_says_so(trained, tmp_path, door, golden):
    out = trained
    said, _ = door.ok("export", "--draft", out, "--format", "hf", "--out", tmp_path / "hf")
    golden(said)
    assert (tmp_path / "hf" / FILE).read_bytes() == (out / FILE).read_bytes()
    ids = torch.randint(0, 290, (1, 6))
    one, other = (
        AutoModelForCausalLM.from_pretrained(path)(ids).logits for path in (out, tmp_path / "hf")
    )
    torch.testing.assert_close(one, other)


def test_the_rarest_token_is_the_last_unused_one_that_has_an_embedding():
    embedding_VH = torch.ones(6, 2)
    assert rarest_token(token_counts([[0, 1, 5], [2, 5]]), embedding_VH) == 4
    embedding_VH[4] = 0
    assert rarest_token(token_counts([[0, 1, 5], [2, 5]]), embedding_VH) == 3
    assert rarest_token(token_counts([[0, 1, 5], [2, 3, 5]]), embedding_VH) == 3


@pytest.mark.parametrize("kind", ["lm", "eagle3"])
def test_it_is_chosen_once(kind, target_dir, draft_dir, distilled, tmp_path, monkeypatch):
    """Publishing takes what was chosen at the start, and so does a run that goes on."""
    chosen: list[list[int]] = []

    def choose(*words):
        tokens = random.Random(len(chosen)).sample(range(290), KEPT)
        chosen.append(sorted(tokens))
        return chosen[-1]

    monkeypatch.setattr(draft_setup, "likely_tokens", choose)
    options: Any = {
        "target": target_dir,
        "draft": draft_dir if kind == "lm" else None,
        "kind": kind,
        "data": [distilled],
        "out": str(tmp_path / kind),
        "device": "cpu",
        "max_length": 48,
        "objective": "fkl",
        "steps": 2,
        "draft_vocab_size": KEPT,
    }
    ds.train(**options)
    weights = tmp_path / kind / "model.safetensors"
    made = weights.read_bytes()
    weights.unlink()
    ds.train(**options)
    assert len(chosen) == 1 and weights.read_bytes() == made
    draft = load_models(target_dir, [str(tmp_path / kind)], device="cpu").drafts.popitem()[1]
    assert draft_setup.drafted_tokens(draft) == chosen[0]
