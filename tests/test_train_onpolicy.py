"""On-policy training: what the draft answers, how much of it, and that nothing about a run changes how."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from decode import SpeculativeDecoder
from distill.config import DistillConfig
from distill.generate import distill
from draftsmith_core.models import eos_ids, load_model
from draftsmith_core.sampling import Sampling, generator, row_seed
from draftsmith_core.tokenization import load_tokenizer
from tests.train_laws import close, metrics
from train.batch import IGNORE
from train.config import OnPolicy
from train.data import collate, load_examples
from train.onpolicy import Answerer


@pytest.fixture
def examples(distilled, draft_dir):
    return load_examples([distilled], load_tokenizer(draft_dir), 48)


def answerer_of(draft_dir: str, seed: int = 7, max_length: int = 48, **policy: Any) -> Answerer:
    model = load_model(draft_dir, device="cpu", dtype="float32")
    options = OnPolicy(**({"fraction": 1.0, "max_new_tokens": 12} | policy))
    decoder = SpeculativeDecoder(model, fast=False)
    return Answerer(model, decoder, options, max_length, seed, model.config.vocab_size)


def test_answers_are_the_drafts_own_and_do_not_depend_on_the_batch(examples, draft_dir):
    answerer = answerer_of(draft_dir)
    rows, places = [0, 5, 9, 13], [100, 101, 102, 103]
    together = answerer.draw(examples, rows, places)
    for index, (row, place) in enumerate(zip(rows, places, strict=True)):
        prompt, answer = together[index]
        assert prompt == examples.rows[row]["prompt_ids"]
        assert answerer.draw(examples, [row], [place])[0] == (prompt, answer)
        alone = SpeculativeDecoder(answerer.draft).generate(
            [prompt], Sampling(), 12, [generator(row_seed(7, f"answer {place}"))], eos_ids(answerer.draft)
        )
        assert alone.generations[0].output_ids == answer
    assert len({tuple(answerer.draw(examples, [0], [place])[0][1]) for place in range(20)}) > 15
    assert answerer_of(draft_dir, seed=8).draw(examples, rows, places) != together


@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.5, 1.0])
def test_as_many_sequences_are_drawn_as_asked_for(fraction, draft_dir):
    answerer = answerer_of(draft_dir, fraction=fraction)
    drawn = [answerer.is_drawn(place) for place in range(4000)]
    assert sum(drawn) / 4000 == pytest.approx(fraction, abs=0.03)
    # Replay takes every second place when it has half of them; it must be drawn from like the rest.
    assert sum(drawn[::2]) / 2000 == pytest.approx(fraction, abs=0.04)


def test_batches_hold_the_answers_and_no_stored_rows(target_dir, prompts_file, draft_dir, tmp_path):
    options: dict[str, Any] = {"max_new_tokens": 6, "device": "cpu", "teacher_top_k": 3}
    distill(DistillConfig(target=target_dir, prompts=prompts_file, out=str(tmp_path / "set"), **options), "d")
    examples = load_examples([str(tmp_path / "set")], load_tokenizer(draft_dir), 48)
    plain = collate(examples, [0, 3])
    assert plain.stored is not None
    batch = collate(examples, [0, 3], {1: ([5, 6, 7], [8, 9])})
    assert batch.stored is None
    assert batch.ids_BT[1, :5].tolist() == [5, 6, 7, 8, 9]
    assert batch.labels_BT[1, :5].tolist() == [IGNORE, IGNORE, 8, 9, IGNORE]
    assert batch.labels_BT[0][batch.labels_BT[0] != IGNORE].tolist() == examples.rows[0]["response_ids"]
    assert collate(examples, [0, 3], {}).stored is not None


def test_an_answer_ends_where_the_draft_ends_or_the_room_does(examples, draft_dir):
    longest = max(len(row["prompt_ids"]) for row in examples.rows)
    answerer = answerer_of(draft_dir, max_length=longest + 3)
    ends = set(eos_ids(answerer.draft))
    lengths = []
    for place in range(24):
        for prompt, answer in answerer.draw(examples, [place], [place]).values():
            assert 1 <= len(answer) <= min(12, longest + 3 - len(prompt))
            assert not ends.intersection(answer[:-1])
            lengths.append(len(answer))
    assert min(lengths) < 12


def words(target_dir: str, draft_dir: str, distilled: str) -> list[str]:
    return (
        f"train --target {target_dir} --draft {draft_dir} --data {distilled} --max_length 48 --objective fkl "
        "--on_policy.fraction 0.5 --on_policy.max_new_tokens 12 --heldout_fraction 0.2 --eval_every 4 --save_every 4 "
        "--device cpu"
    ).split()


def test_a_draft_of_more_tokens_than_the_target_says_none_that_the_target_lacks(
    target_dir, other_vocabulary_dir, distilled, tmp_path, door
):
    wide = other_vocabulary_dir
    run = [*words(target_dir, wide, distilled), "--steps", 2, "--on_policy.fraction", 1, "--out", tmp_path / "draft"]
    door.ok(*run)
    model = load_model(wide, device="cpu", dtype="float32")
    with torch.no_grad():
        model.get_output_embeddings().weight[290:] *= 4  # it would like to say little else
    prompts = [[2, 3, 4]] * 8
    said = {}
    for known in (290, 300):
        decoder = SpeculativeDecoder(model, fast=False)
        answerer = Answerer(model, decoder, OnPolicy(fraction=1.0, max_new_tokens=12), 48, 7, known)
        said[known] = max(max(answer) for answer in answerer.answer(prompts, range(8)))
    assert said[290] < 290 <= said[300]
    assert not model._forward_hooks


def test_a_step_does_not_depend_on_how_it_is_divided(target_dir, draft_dir, distilled, tmp_path, door):
    """Law 6: 8 x 1, 2 x 4 and 1 x 8 draw the same answers and take the same steps."""
    run = [*words(target_dir, draft_dir, distilled), "--optim.name", "sgd", "--optim.lr", "0.5", "--steps", "4"]
    for size, times in ((8, 1), (2, 4), (1, 8)):
        door.ok(*run, "--batch_size", size, "--accumulation", times, "--out", tmp_path / str(size))
    begun, ended = (load_file(out / "model.safetensors") for out in (Path(draft_dir), tmp_path / "8"))
    assert max(float((ended[name] - begun[name]).abs().max()) for name in ended) > 1e-3
    for other in ("2", "1"):
        for line, same in zip(metrics(tmp_path / "8"), metrics(tmp_path / other), strict=True):
            assert same == pytest.approx(line, rel=1e-4)
            assert line.get("drawn_tokens") == same.get("drawn_tokens") and line.get("tokens") == same.get("tokens")
        close(tmp_path / other, tmp_path / "8", atol=1e-5)
