"""What a training run is made of: losses, schedule, data, batches; and law 5, that training sees what decoding does."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

import decode.batch_run
from decode import DraftModelProposer, SpeculativeDecoder
from draftsmith_core.errors import InputError
from draftsmith_core.io import sha256_file
from draftsmith_core.models import load_model
from draftsmith_core.sampling import Sampling, generator, probs
from draftsmith_core.tokenization import Tokenizer, load_tokenizer
from train.batch import IGNORE, Batch
from train.config import Optim
from train.data import Examples, collate, divide, load_examples
from train.loop import _curves, learning_rate, make_optimizer
from train.mixture import order
from train.teacher import find_projection


@pytest.fixture(scope="module")
def tokenizer(target_dir: str) -> Tokenizer:
    return load_tokenizer(target_dir)


def write_set(directory: Path, rows: list[tuple[list[int], list[int]]]) -> str:
    """A distilled set with these prompts and responses."""
    directory.mkdir()
    columns = {"prompt_ids": [list(p) for p, _ in rows], "response_ids": [list(r) for _, r in rows]}
    kind = pa.list_(pa.int32())
    schema = pa.schema([("prompt_ids", kind), ("response_ids", kind)])
    pq.write_table(pa.table(columns, schema=schema), directory / "part-00000.parquet")
    part = {"file": "part-00000.parquet", "rows": len(rows), "sha256": sha256_file(directory / "part-00000.parquet")}
    (directory / "manifest.json").write_text(json.dumps({"complete": True, "parts": [part]}))
    return str(directory)


def valid_logits(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Logits `[N, V]` at the positions that predict a response token, the way the trainee makes them."""
    head = find_projection(model, "draft")
    rows_N = (batch.labels_BT.reshape(-1) != IGNORE).nonzero().squeeze(1)
    states_BTH = model.base_model(input_ids=batch.ids_BT, use_cache=False).last_hidden_state
    return head.finish(F.linear(states_BTH.flatten(0, 1)[rows_N], head.weight_VH, head.bias_V))


def examples_of(tmp_path: Path, rows: list[tuple[list[int], list[int]]], max_length: int = 32) -> Examples:
    return load_examples([write_set(tmp_path / "set", rows)], None, max_length)


def test_reading_options_does_not_import_torch() -> None:
    heavy = "{'torch', 'transformers', 'datasets', 'accelerate', 'numpy'}"
    code = f"import sys, train.config; print(*sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == ""


def test_the_rate_warms_up_and_follows_a_cosine_down() -> None:
    optim = Optim(lr=2.0, warmup_steps=4, final_lr_fraction=0.25)
    rates = [learning_rate(optim, step, 24) for step in range(25)]
    assert rates[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
    assert rates[14] == pytest.approx((2.0 + 0.5) / 2)
    assert rates[24] == pytest.approx(0.5)
    assert all(a > b for a, b in zip(rates[4:], rates[5:], strict=False))
    assert learning_rate(Optim(lr=1.0), 0, 10) == 1.0
    assert learning_rate(Optim(lr=1.0, warmup_steps=9), 3, 5) == pytest.approx(4 / 9)


def test_tau_of_training_is_that_of_the_default_chain() -> None:
    """One alpha is that of every depth of chain:4, 1 + a + ... + a^4; several are cut to as many depths."""

    def tau(alphas: list[float]) -> float:
        return _curves([0.0, 0.0, 0.0, 0.0, *alphas, *[1.0] * len(alphas)], "heldout_")["heldout_tau"]

    assert tau([0.8]) == pytest.approx((1 - 0.8**5) / 0.2)
    assert tau([1.0]) == 5 and tau([0.0]) == 1
    assert tau([0.5, 0.25]) == 1 + 0.5 + 0.125
    assert tau([1.0] * 7) == 5


def test_decay_is_for_matrices_only(draft_dir: str) -> None:
    model = load_model(draft_dir, device="cpu")
    groups = make_optimizer(model, Optim(weight_decay=0.1)).param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert all(p.ndim == 2 for p in groups[0]["params"])
    assert all(p.ndim == 1 for p in groups[1]["params"])
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    assert isinstance(make_optimizer(model, Optim(name="sgd")), torch.optim.SGD)


def test_every_epoch_is_a_permutation_and_a_pure_function() -> None:
    stream = order(10, 0, 40, seed=1)
    for epoch in range(4):
        assert sorted(stream[10 * epoch : 10 * epoch + 10]) == list(range(10))
    assert stream[:10].tolist() != stream[10:20].tolist()
    for start, stop in ((0, 1), (3, 9), (8, 23), (10, 20), (19, 21), (39, 40)):
        assert order(10, start, stop, seed=1).tolist() == stream[start:stop].tolist()
    assert order(10, 0, 40, seed=2).tolist() != stream.tolist()
    # A step may be larger than the data.
    assert len(order(3, 0, 8, seed=1)) == 8


def test_labels_by_hand(tmp_path: Path) -> None:
    examples = examples_of(tmp_path, [([5, 6, 7], [8, 9, 1]), ([], [4, 3, 2]), ([2], [1])])
    batch = collate(examples, [0, 1, 2])
    x = IGNORE
    assert batch.ids_BT.tolist() == [[5, 6, 7, 8, 9, 1], [4, 3, 2, 0, 0, 0], [2, 1, 0, 0, 0, 0]]
    assert batch.labels_BT.tolist() == [[x, x, 8, 9, 1, x], [3, 2, x, x, x, x], [1, x, x, x, x, x]]
    assert examples.valid_tokens.tolist() == [3, 2, 1]
    assert (batch.labels_BT != x).sum(1).tolist() == [3, 2, 1]
    assert collate(examples, [2, 0]).ids_BT.tolist() == [[2, 1, 0, 0, 0, 0], [5, 6, 7, 8, 9, 1]]


def test_rows_are_cut_and_rows_without_a_response_are_dropped(tmp_path: Path) -> None:
    rows = [([1, 2], [3, 4, 5]), ([1, 2, 3, 4], [5]), ([1], []), ([], [7]), ([9] * 6, [1])]
    examples = examples_of(tmp_path, rows, max_length=4)
    assert examples.dropped == 4
    assert examples.valid_tokens.tolist() == [2]
    assert collate(examples, [0]).ids_BT.tolist() == [[1, 2, 3, 4]]
    with pytest.raises(InputError, match="raise max_length"):
        load_examples([str(tmp_path / "set")], None, 2)


def test_text_is_packed_with_its_ends(tmp_path: Path, tokenizer: Tokenizer) -> None:
    texts = ["The quick brown fox", "jumps over", "the lazy dog"]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    examples = load_examples([str(path)], tokenizer, 8)
    stream = [token for text in texts for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    rows = list(examples.rows)
    # A last block of one token would have nothing to predict; this stream leaves none.
    assert len(stream) % 8 != 1
    assert [token for row in rows for token in row["response_ids"]] == stream
    assert all(row["prompt_ids"] == [] for row in rows)
    assert {len(row["response_ids"]) for row in rows[:-1]} == {8}
    batch = collate(examples, [0])
    assert batch.labels_BT[0, :7].tolist() == stream[1:8]
    assert batch.labels_BT[0, 7] == IGNORE


def test_a_chat_is_trained_on_its_last_answer(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{% for m in messages %}{{ m.content }}\n\n{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    chat = [("user", "Who?"), ("assistant", "The fox"), ("user", "And?"), ("assistant", "the dog")]
    path = tmp_path / "m.jsonl"
    path.write_text(json.dumps({"messages": [{"role": r, "content": c} for r, c in chat]}))
    examples = load_examples([str(path)], tokenizer, 64)
    row = examples.rows[0]
    assert tokenizer.decode(row["prompt_ids"], skip_special_tokens=True) == "Who?\n\nThe fox\n\nAnd?\n\n"
    assert tokenizer.decode(row["response_ids"]) == "the dog</s>"
    labels = collate(examples, [0]).labels_BT[0].tolist()
    first = len(row["prompt_ids"]) - 1
    assert labels[:first] == [IGNORE] * first
    assert labels[first:-1] == row["response_ids"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no response token fits"),
        ('{"prompt": "a"}', "t.jsonl:1: needs `text`"),
        ('{"text": 5}', "t.jsonl:1: needs `text`"),
    ],
)
def test_data_that_cannot_be_trained_on_is_named(tmp_path: Path, tokenizer: Tokenizer, text: str, message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        load_examples([str(path)], tokenizer, 16)


def test_samples_of_a_prompt_stay_on_one_side(tmp_path: Path) -> None:
    rows = [([2, prompt], [3, sample]) for prompt in range(40) for sample in range(3)]
    examples = examples_of(tmp_path, rows)
    training, heldout = divide(examples, 0.25)
    sides = [{tuple(row["prompt_ids"]) for row in side.rows} for side in (training, heldout)]
    assert sides[0].isdisjoint(sides[1])
    assert len(sides[0] | sides[1]) == 40
    assert len(training.rows) + len(heldout.rows) == 120
    assert 3 <= len(sides[1]) <= 20
    assert training.digest != heldout.digest != examples.digest
    assert len(training.valid_tokens) == len(training.rows)
    # The side of a prompt does not depend on where its rows stand.
    (tmp_path / "again").mkdir()
    again = divide(examples_of(tmp_path / "again", rows[::-1]), 0.25)[1]
    assert {tuple(row["prompt_ids"]) for row in again.rows} == sides[1]


def test_padding_does_not_matter(tmp_path: Path, draft_dir: str) -> None:
    model = load_model(draft_dir, device="cpu")
    examples = examples_of(tmp_path, [([5, 6], [7, 8]), ([9], [3] * 20)])
    with torch.no_grad():
        together = valid_logits(model, collate(examples, [0, 1]))
        alone = [valid_logits(model, collate(examples, [index])) for index in (0, 1)]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("drafted", [False, True])
def test_training_sees_what_decoding_does(
    tmp_path: Path, draft_dir: str, target_dir: str, monkeypatch: pytest.MonkeyPatch, drafted: bool
) -> None:
    """Law 5: the training forward of a row and the decoder's cached, step by step forward give the same logits."""
    model, true_probs = load_model(draft_dir, device="cpu"), probs
    seen: list[Tensor] = []

    def recording(logits: Tensor, sampling: Sampling) -> Tensor:
        seen.append(logits.clone())
        return true_probs(logits, sampling)

    prompt = [0, 30, 7, 91, 12]
    if not drafted:
        monkeypatch.setattr(decode.batch_run, "probs", recording)
        decoder = SpeculativeDecoder(model)
    else:
        # The same model as a drafter: its own logits at every node of its chain, through its own cache.
        import decode.propose.static_tree as drafting

        monkeypatch.setattr(drafting, "probs", recording)
        target = load_model(draft_dir, device="cpu")
        decoder = SpeculativeDecoder(target, DraftModelProposer(model), "chain:3", "speculative")
    answer = decoder.generate([prompt], Sampling(), 12, [generator(3)], eos_ids=()).generations[0].output_ids
    examples = examples_of(tmp_path, [(prompt, answer)], max_length=64)
    with torch.no_grad():
        trained_NV = valid_logits(model, collate(examples, [0]))
    assert len(trained_NV) == 12
    decoded_NV = torch.cat([logits.reshape(-1, logits.shape[-1]) for logits in seen])
    if not drafted:
        torch.testing.assert_close(decoded_NV, trained_NV, atol=1e-4, rtol=0)
        return
    # A draft equal to its target is always accepted: every position but the bonus ones was drafted once.
    distance = (decoded_NV[:, None] - trained_NV[None]).abs().amax(-1)
    drafted_positions = [position for position in range(12) if position % 4 != 3]
    assert distance[:, drafted_positions].amin(0).max() < 1e-4
    assert (distance.amin(1) < 1e-4).sum() >= len(drafted_positions)
