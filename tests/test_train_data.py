"""Training data: rows, their order, packing, replay, the teacher's columns; and the schedule of a
run.
"""

import json
import math
from itertools import zip_longest
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, MambaConfig

from draftsmith.core import teacher_rows
from draftsmith.core.io import sha256_file
from draftsmith.core.models import load_model
from draftsmith.drafts.heads.medusa import HeadsConfig, HydraHeads
from draftsmith.train.batch import IGNORE, LossSums, pack, packing_method
from draftsmith.train.batches import collate
from draftsmith.train.config import Optim
from draftsmith.train.data import (
    chats_read_once,
    divide,
    document_tokens,
    load_examples,
    packed,
    with_replay,
)
from draftsmith.train.loop import curves
from draftsmith.train.objective import parse_objective
from draftsmith.train.optimizer import (
    hidden_matrices,
    learning_rate,
    make_optimizer,
    orthogonal,
    usual_rate,
)
from draftsmith.train.stream import order, units
from draftsmith.train.trainees.lm import LMTrainee
from tests.chat_families import FAMILIES as FAMILIES_OF_CHATS
from tests.distilled import write_rows
from tests.tiny_models import FRESH
from tests.train_laws import FAMILIES, SIZES, tiny_family

Row = dict[str, Any]


def write(directory, rows):
    """A distilled set of these rows."""
    directory.mkdir(parents=True)
    path = directory / "part-00000.parquet"
    ids = [(name, pa.list_(pa.int32())) for name in ("prompt_ids", "response_ids")]
    more = [("teacher", pa.large_binary())] if "teacher" in rows[0] else []
    more += [(name, pa.string()) for name in ("asked", "prompt_hash") if name in rows[0]]
    pq.write_table(pa.Table.from_pylist(rows, schema=pa.schema(ids + more)), path)
    part = {"file": path.name, "sha256": sha256_file(path), "rows": len(rows)}
    (directory / "manifest.json").write_text(json.dumps({"complete": True, "parts": [part]}))
    return str(directory)


def examples_of(tmp_path, name, rows, max_length=24):
    return load_examples([write(tmp_path / name, rows)], None, max_length)


def pairs(*rows):
    return [{"prompt_ids": prompt, "response_ids": response} for prompt, response in rows]


def test_the_rate_warms_up_and_follows_a_cosine_down():
    optim = Optim(lr=2.0, warmup_steps=4, final_lr_fraction=0.25)
    rates = [learning_rate(optim, step, 24) for step in range(25)]
    assert rates[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
    assert rates[14] == pytest.approx((2.0 + 0.5) / 2)
    assert rates[24] == pytest.approx(0.5)
    assert all(a > b for a, b in zip(rates[4:], rates[5:], strict=False))
    assert learning_rate(Optim(lr=1.0), 0, 10) == 1.0
    assert learning_rate(Optim(lr=1.0, warmup_steps=9), 3, 5) == pytest.approx(4 / 9)


def test_with_wsd_the_rate_falls_over_the_last_fifth():
    optim = Optim(lr=2.0, warmup_steps=4, final_lr_fraction=0.25, schedule="wsd")
    rates = [learning_rate(optim, step, 20) for step in range(21)]
    assert rates[3:17] == pytest.approx([2.0] * 14)
    assert rates[18] == pytest.approx((2.0 + 0.5) / 2)
    assert rates[20] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("parameters", "taught", "lr"),
    [(68_000_000, True, 2e-4), (160_000_000, True, 1e-4), (1000, False, 1e-3)],
)
def test_the_usual_rate_is_that_of_the_recipes(parameters, taught, lr):
    assert usual_rate(parameters, taught) == lr


@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6)])
def test_an_update_of_muon_has_singular_values_near_one(shape):
    matrix = torch.zeros(shape).fill_diagonal_(1e-3)
    values = torch.linalg.svdvals(orthogonal(matrix))
    assert 0.6 < float(values.min()) and float(values.max()) < 1.3


def muons(draft):
    taken = set(map(id, hidden_matrices(draft)))
    return {name for name, parameter in draft.named_parameters() if id(parameter) in taken}


@pytest.mark.parametrize("kind", [*FRESH, "hydra-own", "lm", "lm-tied", "gpt2"])
def test_muon_knows_tables_by_their_module(kind):
    """Vocabularies as long as sides of layers change nothing."""
    taken = []
    for vocabulary in (1009, 40, 20, 60, 80):
        sizes = SIZES | {"hidden_size": 20, "intermediate_size": 40, "n_inner": 40}
        sizes |= {"vocab_size": vocabulary, "tie_word_embeddings": kind != "lm", "bos_token_id": 0}
        config = AutoConfig.for_model("gpt2" if kind == "gpt2" else "llama", **sizes)
        draft: Any = AutoModelForCausalLM.from_config(config)
        if kind == "hydra-own":
            values = {"hydra_num_heads": 2, "hydra_own_projection": True}
            draft = HydraHeads(HeadsConfig.from_json(values, draft), draft)
        elif kind in FRESH:
            if vocabulary < 40 and ("eagle3" in kind or "part" in kind):
                continue
            draft = FRESH[kind](draft)
        taken.append(muons(draft))
    assert all(names == taken[0] for names in taken)
    tables = ("lm_head", "embed_tokens", "wte", "wpe", "projections", "markov_w")
    assert not any(table in name for name in taken[0] for table in tables)
    matrices = {name for name, each in draft.named_parameters() if each.ndim == 2}
    if kind == "medusa":
        assert taken[0] == {name for name in matrices if "linear" in name}
    else:
        rest = matrices - taken[0]
        assert all(any(table in name for table in tables) for name in rest)


def test_tau_of_training_is_that_of_the_default_chain():
    """One alpha is that of every depth of chain:4, 1 + a + ... + a^4; several are cut to as many
    depths.
    """

    def tau(alphas):
        zero = torch.tensor(0.0)
        alpha_D = torch.tensor(alphas, dtype=torch.float64)
        sums = LossSums(zero, zero, alpha_D, torch.ones(len(alphas)))
        return curves(sums, "heldout_")["heldout_tau"]

    assert tau([0.8]) == pytest.approx((1 - 0.8**5) / 0.2)
    assert tau([1.0]) == 5 and tau([0.0]) == 1
    assert tau([0.5, 0.25]) == 1 + 0.5 + 0.125
    assert tau([1.0] * 7) == 5


def test_decay_is_for_matrices_and_muon_for_those_of_layers(draft_dir):
    model = load_model(draft_dir, device="cpu")
    groups = make_optimizer(model, Optim(lr=1.0, weight_decay=0.1)).param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert all(p.ndim == 2 for p in groups[0]["params"])
    assert all(p.ndim == 1 for p in groups[1]["params"])
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    rest, hidden = make_optimizer(model, Optim(lr=1.0, name="muon")).parts
    taken = {id(each) for each in hidden.param_groups[0]["params"]}
    assert taken == set(map(id, hidden_matrices(model))) and taken
    left = sum(len(group["params"]) for group in rest.param_groups)
    assert left == len(list(model.parameters())) - len(taken)
    (part,) = make_optimizer(model, Optim(name="sgd", lr=1.0)).parts
    assert isinstance(part, torch.optim.SGD)


def test_every_epoch_is_a_permutation_and_a_pure_function():
    stream = order(10, 0, 40, seed=1)
    for epoch in range(4):
        assert sorted(stream[10 * epoch : 10 * epoch + 10]) == list(range(10))
    assert stream[:10].tolist() != stream[10:20].tolist()
    for start, stop in ((0, 1), (3, 9), (8, 23), (10, 20), (19, 21), (39, 40)):
        assert order(10, start, stop, seed=1).tolist() == stream[start:stop].tolist()
    assert order(10, 0, 40, seed=2).tolist() != stream.tolist()
    # A step may be larger than the data.
    assert len(order(3, 0, 8, seed=1)) == 8


def test_labels_by_hand(tmp_path):
    examples = examples_of(
        tmp_path, "set", pairs(([5, 6, 7], [8, 9, 1]), ([], [4, 3, 2]), ([2], [1]))
    )
    batch = collate(examples, [0, 1, 2])
    x = IGNORE
    assert batch.ids_BT.tolist() == [[5, 6, 7, 8, 9, 1], [4, 3, 2, 0, 0, 0], [2, 1, 0, 0, 0, 0]]
    assert batch.labels_BT.tolist() == [[x, x, 8, 9, 1, x], [3, 2, x, x, x, x], [1, x, x, x, x, x]]
    assert examples.valid_tokens.tolist() == [3, 2, 1]
    assert (batch.labels_BT != x).sum(1).tolist() == [3, 2, 1]
    assert collate(examples, [2, 0]).ids_BT.tolist() == [[2, 1, 0, 0, 0, 0], [5, 6, 7, 8, 9, 1]]


def test_rows_are_cut_and_rows_without_a_response_are_dropped(tmp_path, golden):
    rows = pairs(([1, 2], [3, 4, 5]), ([1, 2, 3, 4], [5]), ([1], []), ([], [7]), ([9] * 6, [1]))
    examples = examples_of(tmp_path, "set", rows, max_length=4)
    assert examples.dropped == 4
    assert examples.valid_tokens.tolist() == [2]
    assert collate(examples, [0]).ids_BT.tolist() == [[1, 2, 3, 4]]
    with golden.raises():
        load_examples([str(tmp_path / "set")], None, 2)


def test_text_is_packed_with_its_ends(tmp_path, tokenizer):
    texts = ["The quick brown fox", "jumps over", "the lazy dog"]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    examples = load_examples([str(path)], tokenizer, 8)
    stream = [
        token for text in texts for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    ]
    rows = list(examples.rows)
    # A last block of one token would have nothing to predict; this stream leaves none.
    assert len(stream) % 8 != 1
    assert [token for row in rows for token in row["response_ids"]] == stream
    assert all(row["prompt_ids"] == [] for row in rows)
    assert {len(row["response_ids"]) for row in rows[:-1]} == {8}
    batch = collate(examples, [0])
    assert batch.labels_BT[0, :7].tolist() == stream[1:8]
    assert batch.labels_BT[0, 7] == IGNORE


CHAT = [("user", "Who?"), ("assistant", "The fox"), ("user", "And?"), ("assistant", "the dog")]


def turns_of(*turns):
    return [{"role": role, "content": content} for role, content in turns]


def test_a_chat_of_text_trains_what_its_ids_train(tmp_path, tokenizer, monkeypatch, golden):
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
        "{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    monkeypatch.setattr(tokenizer, "chat_template", template)
    text = write_rows(tmp_path / "text.jsonl", {"messages": turns_of(*CHAT)})
    by_text = load_examples([text], tokenizer, 128)
    ids: list[int] = []
    mask: list[int] = []
    for row in by_text.rows:
        prompt, response = row["prompt_ids"], row["response_ids"]
        assert prompt[: len(ids)] == ids
        mask += [0] * (len(prompt) - len(ids)) + [1] * len(response)
        ids = prompt + response
    golden(tokenizer.decode(ids))
    masked = write_rows(tmp_path / "ids.jsonl", {"input_ids": ids, "loss_mask": mask})
    by_ids = load_examples([masked], tokenizer, 128)
    assert by_ids.valid_tokens.tolist() == by_text.valid_tokens.tolist()
    for one, other in zip(by_ids.rows, by_text.rows, strict=True):
        assert one["prompt_ids"] == other["prompt_ids"]
        assert one["response_ids"] == other["response_ids"]
    # Both are one chat, on one side.
    more = write_rows(tmp_path / "more.jsonl", {"messages": turns_of(("user", "A"), *CHAT[1:])})
    training, heldout = divide(load_examples([text, more], tokenizer, 128), 0.5)
    assert len(training.rows) == len(heldout.rows) == 2


def test_an_answer_that_the_template_rewrites_is_left_out_and_counted(tmp_path, capsys, golden):
    family = FAMILIES_OF_CHATS["qwen3"].tokenizer
    thinks = {"role": "assistant", "content": "4", "reasoning_content": "2 and 2."}
    last = {"role": "assistant", "content": "9", "reasoning_content": "4 and 5."}
    first = turns_of(("user", "2+2?"))
    rows = [
        {"messages": [*first, thinks, *turns_of(("user", "+5?")), last]},
        {"messages": [*first, thinks | {"weight": 0}, *turns_of(("user", "+5?")), last]},
        {"messages": [*first, thinks]},
    ]
    source = write_rows(tmp_path / "m.jsonl", *rows)
    examples = load_examples([source], family, 1024)
    assert len(examples.rows) == 3
    said = capsys.readouterr().err
    golden(said)
    # Without thoughts the template keeps each answer as a server's target writes it.
    examples = load_examples([source], family, 1024, thinking=False)
    assert len(examples.rows) == 4


def test_samples_of_a_prompt_stay_on_one_side(tmp_path):
    rows = pairs(*(([2, prompt], [3, sample]) for prompt in range(40) for sample in range(3)))
    examples = examples_of(tmp_path, "set", rows)
    training, heldout = divide(examples, 0.25)
    sides = [{tuple(row["prompt_ids"]) for row in side.rows} for side in (training, heldout)]
    assert sides[0].isdisjoint(sides[1])
    assert len(sides[0] | sides[1]) == 40
    assert len(training.rows) + len(heldout.rows) == 120
    assert 3 <= len(sides[1]) <= 20
    assert training.digest != heldout.digest != examples.digest
    assert len(training.valid_tokens) == len(training.rows)
    # The side of a prompt does not depend on where its rows stand.
    again = divide(examples_of(tmp_path, "again", rows[::-1]), 0.25)[1]
    assert {tuple(row["prompt_ids"]) for row in again.rows} == sides[1]


@pytest.mark.parametrize("form", ["turns", "masked"])
def test_a_chat_of_ids_is_on_one_side(tmp_path, tokenizer, form):
    """No held-out answer stands in the prompt of a row that is trained."""
    rows: list[Row] = []
    for number in range(12):
        chat: list[int] = []
        mask: list[int] = []
        for turn in range(3):
            question, answer = [2, 10 + number, 30 + turn], [3, 20 + number, 40 + turn]
            if form == "turns":
                rows.append({"prompt_ids": [*chat, *question], "response_ids": answer})
            chat += question + answer
            mask += [0, 0, 0, 1, 1, 1]
        if form == "masked":
            rows.append({"input_ids": chat, "loss_mask": mask})
    source = write_rows(tmp_path / "ids.jsonl", *rows)
    training, heldout = divide(load_examples([source], tokenizer, 64), 0.25)
    assert len(heldout.rows) == 9 and len(training.rows) == 27
    chats = [{row["prompt_ids"][1] for row in side.rows} for side in (training, heldout)]
    assert chats[0].isdisjoint(chats[1])


def random_rows(seed, count, longest=9):
    draw = np.random.default_rng(seed)
    lengths = draw.integers(0, longest, (count, 2)) + [0, 1]
    lengths[lengths.sum(1) < 2] = [1, 2]
    return pairs(
        *((draw.integers(2, 61, a).tolist(), draw.integers(2, 61, b).tolist()) for a, b in lengths)
    )


def chat_rows(first):
    """A chat of three turns, whose second answer has another end than the template writes; a third
    turn whose history was rewritten; and samples of one token.
    """
    one = [first, 3, 4]
    two = [*one, 5, 6, 7, 30, 31]
    three = [*two, 8, 9, 20, 32, 33]
    rows = pairs(
        (three, [10, 11, 1]),
        (one, [5, 6, 7]),
        (two, [8, 9, 1]),
        ([first, 3, 4, 6, 7, 30, 31], [12, 1]),
        (one, [1]),
        (one, [2]),
    )
    return [row | {"prompt_hash": f"{first:016x}"} for row in rows]


def test_turns_of_a_chat_are_read_once_and_train_what_they_trained(tmp_path):
    rows = [*chat_rows(40), *chat_rows(41), {**pairs(([2], [3]))[0], "prompt_hash": ""}]
    apart = examples_of(tmp_path, "set", rows)
    once = chats_read_once(apart)
    assert once.sequences is not None
    assert once.sequences == [[1, 2, 0], *([3], [4], [5]), [7, 8, 6], *([9], [10], [11], [12])]
    assert once.valid_tokens.sum() == apart.valid_tokens.sum()
    assert once.lengths[0] == 16 and once.digest != apart.digest
    assert list(once.tokens())[0] == rows[0]["prompt_ids"] + rows[0]["response_ids"]
    batch = collate(once, [0])
    labels = [collate(apart, [row]).labels_BT[0].tolist() for row in (1, 2, 0)]
    joined = [max(place) for place in zip_longest(*labels, fillvalue=IGNORE)]
    assert batch.labels_BT[0].tolist() == joined and joined.count(1) == 2
    # Packed and mixed they are the same documents.
    general = chats_read_once(examples_of(tmp_path, "general", chat_rows(50)))
    for mixed in (with_replay(once, general), with_replay(packed(once, 0), packed(general, 0))):
        units_of_all = collate(mixed, range(len(mixed)))
        predicted = int((units_of_all.labels_BT != IGNORE).sum())
        assert predicted == mixed.valid_tokens.sum() == 3 * 13 + 1
        found = [document_tokens(document) for document in mixed.documents(len(mixed) - 1)]
        assert found[0][0] == 50
    cut = chats_read_once(load_examples([str(tmp_path / "set")], None, 10))
    batch = collate(cut, [0])
    assert batch.ids_BT.shape[1] == 10 and (batch.labels_BT != IGNORE).sum() == 3 + 2


def test_every_document_is_in_one_row_and_rows_are_full():
    lengths = np.random.default_rng(0).integers(1, 40, 1000)
    rows = pack(lengths, 64, seed=1)
    assert sorted(document for row in rows for document in row) == list(range(1000))
    used = np.array([lengths[row].sum() for row in rows])
    assert used.max() <= 64
    assert used.mean() > 0.95 * 64
    assert rows == pack(lengths, 64, seed=1)
    assert rows != pack(lengths, 64, seed=2)


@pytest.mark.parametrize("kind", FAMILIES)
def test_packed_losses_and_gradients_are_the_unpacked_ones(tmp_path, kind):
    plain = examples_of(tmp_path, "set", random_rows(1, 12))
    together = packed(plain, seed=0)
    assert len(together) < 9
    draft, target = tiny_family(kind, 1), tiny_family(kind, 2)
    trainee = LMTrainee(draft, parse_objective("fkl"), target, packing=True)
    assert trainee.packing == ("mask" if kind == "opt" else "positions")

    def totals(examples):
        draft.zero_grad(set_to_none=True)
        sums = trainee(collate(examples, range(len(examples))))
        sums.loss.backward()
        assert int(sums.tokens) == plain.valid_tokens.sum()
        return (
            sums.loss.detach(),
            sums.alpha,
            [p.grad for p in draft.parameters() if p.grad is not None],
        )

    one, other = totals(plain), totals(together)
    torch.testing.assert_close(other[0], one[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(other[1], one[1], rtol=1e-5, atol=0)
    for ours, theirs in zip(other[2], one[2], strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=1e-3, atol=2e-5 * float(theirs.abs().max() + 1)
        )


def test_a_recurrent_model_is_refused(golden):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        MambaConfig(vocab_size=61, hidden_size=16, num_hidden_layers=1)
    )
    with golden.raises():
        packing_method(model, "target")


def test_replay_is_spread_evenly_and_a_function_of_the_place(tmp_path):
    main, general = random_rows(3, 10), random_rows(4, 7)
    examples = with_replay(
        examples_of(tmp_path, "main", main), examples_of(tmp_path, "general", general)
    )
    assert len(examples) == 17
    assert examples.replay_from == 10
    stream = units(examples, 0, 200, seed=5, fraction=0.3)
    is_replay = stream >= 10
    for start in range(0, 200, 10):
        assert is_replay[start : start + 10].sum() == 3
    # Each source goes through whole epochs of its own.
    assert sorted(stream[~is_replay][:10]) == list(range(10))
    assert sorted(stream[is_replay][:7]) == list(range(10, 17))
    for start, stop in ((0, 1), (3, 4), (7, 31), (40, 48), (199, 200)):
        assert units(examples, start, stop, 5, 0.3).tolist() == stream[start:stop].tolist()
    assert (units(examples, 0, 50, 5, 0.0) < 10).all()
    assert (units(examples, 0, 50, 5, 1.0) >= 10).all()
    found = collate(examples, [12]).ids_BT[0].tolist()
    assert found == general[2]["prompt_ids"] + general[2]["response_ids"]
    assert examples.valid_tokens.sum() == sum(
        len(row["response_ids"]) - (not row["prompt_ids"]) for row in main + general
    )


def stored_rows():
    rows = pairs(([5, 6], [7, 8, 9]), ([], [3, 4]), ([2] * 4, [10, 11, 12]))
    for row in rows:
        tokens = np.array(row["response_ids"])
        # An even token is all that is listed: the other place has no mass.
        ids, second = np.stack([tokens, tokens + 1], -1), np.where(tokens % 2 == 1, -2.0, -math.inf)
        row["teacher"] = teacher_rows.pack(
            ids, np.stack([np.full(len(tokens), -0.5), second], -1), tokens / 100, 290
        )
    return rows


def test_the_teachers_columns_follow_the_labels(tmp_path):
    examples = examples_of(tmp_path, "set", stored_rows(), max_length=6)
    assert examples.stored
    for each, chosen in ((examples, [2, 0, 1]), (packed(examples, 0), None)):
        batch = collate(each, chosen or range(len(each)))
        assert batch.stored is not None
        tokens = batch.labels_BT[batch.labels_BT != IGNORE]
        # Of the second row's two tokens the first is not predicted, the third row is cut to two.
        assert sorted(tokens.tolist()) == [4, 7, 8, 9, 10, 11]
        assert batch.stored.top_ids_NK[:, 0].tolist() == tokens.tolist()
        torch.testing.assert_close(batch.stored.tail_N, tokens / 100, atol=0, rtol=1e-3)
        odd = tokens % 2 == 1
        assert (batch.stored.top_logprobs_NK[odd, 1] == -2.0).all()
        assert (batch.stored.top_logprobs_NK[~odd, 1].exp() == 0).all()
    moved = batch.to(torch.device("cpu"))
    assert moved.stored is not None and moved.positions_BT is not None


def packed_rows(ids, logprobs, tail):
    return teacher_rows.pack(np.array(ids), np.array(logprobs, float), np.array(tail, float), 290)


def test_sets_of_different_k_are_read_together(tmp_path):
    other = stored_rows()
    for row in other:
        length = len(row["response_ids"])
        row["teacher"] = packed_rows(
            [[1, 2, 3]] * length, [[-0.5, -math.inf, -2.0]] * length, [0.25] * length
        )
    examples = load_examples(
        [write(tmp_path / "a", stored_rows()), write(tmp_path / "b", other)], None, 16
    )
    stored = collate(examples, range(6)).stored
    assert stored is not None and stored.top_ids_NK.shape[1] == 3
    assert (stored.top_logprobs_NK[:7, 2] == -math.inf).all()
    assert stored.top_ids_NK[7:].tolist() == [[1, 2, 3]] * 7
