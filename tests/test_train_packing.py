"""Packed rows, replay and the teacher's columns: the same losses, and the same data however a step is divided."""

import copy
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    OPTConfig,
    PhiConfig,
    PreTrainedModel,
    Qwen3Config,
)

from draftsmith_core import teacher_rows
from draftsmith_core.errors import InputError
from train.batch import IGNORE
from train.data import Examples, collate, load_examples, packed, with_replay
from train.mixture import units
from train.objective import parse_objective
from train.packing import block_mask, document_layout, pack, packing_method
from train.trainees.lm import LMTrainee

Row = dict[str, Any]


def write(directory: Path, rows: list[Row]) -> str:
    directory.mkdir(parents=True)
    path = directory / "part-00000.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    part = {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "rows": len(rows)}
    (directory / "manifest.json").write_text(json.dumps({"complete": True, "parts": [part]}))
    return str(directory)


def random_rows(seed: int, count: int, longest: int = 9) -> list[Row]:
    draw = np.random.default_rng(seed)
    lengths = draw.integers(0, longest, (count, 2)) + [0, 1]
    lengths[lengths.sum(1) < 2] = [1, 2]
    return [
        {"prompt_ids": draw.integers(2, 61, a).tolist(), "response_ids": draw.integers(2, 61, b).tolist()}
        for a, b in lengths
    ]


def examples_of(tmp_path: Path, name: str, rows: list[Row], max_length: int = 24) -> Examples:
    return load_examples([write(tmp_path / name, rows)], None, max_length)


SMALL: dict[str, Any] = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
WIDE: dict[str, Any] = SMALL | {"intermediate_size": 24}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**WIDE),
    "gpt2": GPT2Config(vocab_size=61, n_embd=16, n_layer=2, n_head=2),
    "gpt_neox": GPTNeoXConfig(**WIDE),
    "opt": OPTConfig(**SMALL, ffn_dim=24, word_embed_proj_dim=16),
    "phi": PhiConfig(**WIDE),
    "mistral": MistralConfig(**WIDE, num_key_value_heads=1, sliding_window=4),
    "gemma2": Gemma2Config(**WIDE, num_key_value_heads=1, head_dim=8, sliding_window=4),
    "qwen3": Qwen3Config(**WIDE, num_key_value_heads=1, head_dim=8),
}


def tiny(kind: str, seed: int = 0, attention: str | None = None) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = copy.deepcopy(CONFIGS[kind])
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    assert isinstance(model, PreTrainedModel)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.eval()
    return model


def test_every_document_is_in_one_row_and_rows_are_full() -> None:
    lengths = np.random.default_rng(0).integers(1, 40, 1000)
    rows = pack(lengths, 64, seed=1)
    assert sorted(document for row in rows for document in row) == list(range(1000))
    used = np.array([lengths[row].sum() for row in rows])
    assert used.max() <= 64
    assert used.mean() > 0.95 * 64
    assert rows == pack(lengths, 64, seed=1)
    assert rows != pack(lengths, 64, seed=2)


def test_layout_and_mask_by_hand() -> None:
    positions, documents = document_layout([[2, 1], [4]], 5)
    assert positions.tolist() == [[0, 1, 0, 0, 0], [0, 1, 2, 3, 0]]
    assert documents.tolist() == [[0, 0, 1, -1, -1], [0, 0, 0, 0, -1]]
    mask = block_mask(documents, torch.float32)
    assert mask.shape == (2, 1, 5, 5)
    assert (mask[0, 0] == 0).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]
    assert mask.min() == torch.finfo(torch.float32).min


def test_packed_batches_hold_what_the_rows_hold(tmp_path: Path) -> None:
    plain = examples_of(tmp_path, "set", random_rows(0, 40))
    together = packed(plain, seed=3)
    assert together.groups is not None
    assert len(together) == len(together.groups) < len(plain) == 40
    assert together.valid_tokens.sum() == plain.valid_tokens.sum()
    assert together.digest != plain.digest
    assert packed(plain, seed=3).groups == together.groups
    for unit, group in enumerate(together.groups):
        batch = collate(together, [unit])
        assert batch.positions_BT is not None and batch.documents_BT is not None
        assert batch.ids_BT.shape[1] <= 24
        assert int((batch.labels_BT != IGNORE).sum()) == together.valid_tokens[unit]
        for document, row in enumerate(group):
            alone = collate(plain, [row])
            mine = batch.documents_BT[0] == document
            assert batch.ids_BT[0, mine].tolist() == alone.ids_BT[0].tolist()
            assert batch.labels_BT[0, mine].tolist() == alone.labels_BT[0].tolist()
            assert batch.positions_BT[0, mine].tolist() == list(range(alone.ids_BT.shape[1]))


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_packed_losses_and_gradients_are_the_unpacked_ones(tmp_path: Path, kind: str) -> None:
    plain = examples_of(tmp_path, "set", random_rows(1, 12))
    together = packed(plain, seed=0)
    assert len(together) < 9
    draft, target = tiny(kind, 1), tiny(kind, 2)
    trainee = LMTrainee(draft, parse_objective("fkl"), target, packing=True)
    assert trainee.packing == ("mask" if kind == "opt" else "positions")

    def totals(examples: Examples) -> tuple[Tensor, Tensor, list[Tensor]]:
        draft.zero_grad(set_to_none=True)
        sums = trainee(collate(examples, range(len(examples))))
        sums.loss.backward()
        assert int(sums.tokens) == plain.valid_tokens.sum()
        return sums.loss.detach(), sums.alpha, [p.grad for p in draft.parameters() if p.grad is not None]

    one, other = totals(plain), totals(together)
    torch.testing.assert_close(other[0], one[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(other[1], one[1], rtol=1e-5, atol=0)
    for ours, theirs in zip(other[2], one[2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=2e-5 * float(theirs.abs().max() + 1))


def test_adaspec_selects_per_document_also_when_packed(tmp_path: Path) -> None:
    plain = examples_of(tmp_path, "set", random_rows(2, 12))
    together = packed(plain, seed=0)
    models = [tiny("llama", seed) for seed in (1, 2, 3)]
    trainee = LMTrainee(models[0], parse_objective("adaspec:keep=0.3"), models[1], models[2], packing=True)
    one, other = (trainee(collate(each, range(len(each)))) for each in (plain, together))
    torch.testing.assert_close(other.loss, one.loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(other.alpha, one.alpha, rtol=1e-5, atol=0)


def test_a_recurrent_model_is_refused() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MambaConfig(vocab_size=61, hidden_size=16, num_hidden_layers=1))
    with pytest.raises(InputError, match="packing: target .MambaForCausalLM. cannot .*; set packing to false"):
        packing_method(model, "target")


def test_replay_is_spread_evenly_and_a_function_of_the_place(tmp_path: Path) -> None:
    main, general = random_rows(3, 10), random_rows(4, 7)
    examples = with_replay(examples_of(tmp_path, "main", main), examples_of(tmp_path, "general", general))
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


def test_packed_replay_stays_apart_from_the_data(tmp_path: Path) -> None:
    parts = [packed(examples_of(tmp_path, f"set{seed}", random_rows(seed, 20)), seed=0) for seed in (0, 1)]
    examples = with_replay(*parts)
    assert examples.groups is not None
    assert examples.replay_from == len(parts[0])
    batch = collate(examples, [len(parts[0])])
    assert batch.ids_BT.tolist() == collate(parts[1], [0]).ids_BT.tolist()
    assert len(examples) == len(parts[0]) + len(parts[1])


def stored_rows() -> list[Row]:
    rows: list[Row] = [
        {"prompt_ids": [5, 6], "response_ids": [7, 8, 9]},
        {"prompt_ids": [], "response_ids": [3, 4]},
        {"prompt_ids": [2] * 4, "response_ids": [10, 11, 12]},
    ]
    for row in rows:
        tokens = np.array(row["response_ids"])
        # An even token is all that is listed: the other place has no mass.
        ids, second = np.stack([tokens, tokens + 1], -1), np.where(tokens % 2 == 1, -2.0, -math.inf)
        row["teacher"] = teacher_rows.pack(ids, np.stack([np.full(len(tokens), -0.5), second], -1), tokens / 100, 290)
    return rows


def test_the_teachers_columns_follow_the_labels(tmp_path: Path) -> None:
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


def packed_rows(ids: Any, logprobs: Any, tail: Any) -> bytes:
    return teacher_rows.pack(np.array(ids), np.array(logprobs, float), np.array(tail, float), 290)


def test_sets_of_different_k_are_read_together(tmp_path: Path) -> None:
    other = stored_rows()
    for row in other:
        length = len(row["response_ids"])
        row["teacher"] = packed_rows([[1, 2, 3]] * length, [[-0.5, -math.inf, -2.0]] * length, [0.25] * length)
    examples = load_examples([write(tmp_path / "a", stored_rows()), write(tmp_path / "b", other)], None, 16)
    stored = collate(examples, range(6)).stored
    assert stored is not None and stored.top_ids_NK.shape[1] == 3
    assert (stored.top_logprobs_NK[:7, 2] == -math.inf).all()
    assert stored.top_ids_NK[7:].tolist() == [[1, 2, 3]] * 7


def test_rows_that_are_rare_but_right_are_read(tmp_path: Path) -> None:
    rows = stored_rows()
    rows[0]["teacher"] = packed_rows(
        [[3, 4], [3, 4], [4, 5]], [[-math.inf] * 2, [0, -math.inf], [-math.inf, -1]], [1, 0, 0.5]
    )
    rows[1]["teacher"] = packed_rows(np.zeros((2, 0), int), np.zeros((2, 0)), [1, 1])
    examples = examples_of(tmp_path, "set", rows)
    assert examples.stored
