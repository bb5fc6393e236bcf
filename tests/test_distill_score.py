"""Teacher rows of a distilled set are the target's own distributions, and training works on them without the target."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from distill.score import score
from draftsmith_core.errors import RunError
from draftsmith_core.models import load_model
from draftsmith_core.teacher_rows import unpack

Door = Callable[..., tuple[int, str, str]]
K = 5


@pytest.fixture
def made(target_dir: str, prompts_file: str, tmp_path: Path, door: Door) -> Path:
    words = ["distill", "--target", target_dir, "--prompts", prompts_file, "--out", tmp_path / "set"]
    code, _, err = door(*words, "--max_new_tokens", 12, "--num_samples", 2, "--teacher_top_k", K, "--temperature", 0.7)
    assert code == 0, err
    return tmp_path / "set"


def rows_of(directory: Path) -> list[dict[str, Any]]:
    return [row for path in sorted(directory.glob("part-*.parquet")) for row in pq.read_table(path).to_pylist()]


def test_rows_are_the_targets_own_distributions(made: Path, target_dir: str) -> None:
    target = load_model(target_dir, device="cpu", dtype="float32")
    rows = rows_of(made)
    assert len(rows) == 16
    for row in rows:
        prompt, response = row["prompt_ids"], row["response_ids"]
        with torch.no_grad():
            logits_TV = target(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        p_RV = logits_TV.double().softmax(-1)
        for p_V, ids, logprobs, tail in zip(p_RV, *unpack(row["teacher"]), strict=True):
            assert ids.tolist() == sorted(p_V.topk(K).indices.tolist())
            torch.testing.assert_close(torch.tensor(logprobs).exp().double(), p_V[ids], atol=1e-6, rtol=4e-3)
            assert tail == pytest.approx(1 - float(p_V[ids].sum()), rel=1e-3)


def test_more_than_the_vocabulary_is_the_whole_law(target_dir: str) -> None:
    target = load_model(target_dir, device="cpu", dtype="float32")
    ids, _, tail = unpack(score(target, [3, 4], [5, 6, 7], 10_000))
    assert ids.tolist() == [list(range(290))] * 3
    assert tail == pytest.approx([0, 0, 0], abs=1e-9)


def test_a_draft_is_trained_without_the_target(
    made: Path, target_dir: str, draft_dir: str, tmp_path: Path, door: Door
) -> None:
    words = ["train", "--data", made, "--draft", draft_dir, "--objective", "fkl", "--max_length", 64, "--steps", 12]
    words += ["--optim.lr", 0.01, "--device", "cpu", "--heldout_fraction", 0.2]
    code, _, err = door(*words, "--out", tmp_path / "draft")
    assert code == 0, err
    judged = [json.loads(line) for line in (tmp_path / "draft/run/metrics.jsonl").read_text().splitlines()]
    judged = [line for line in judged if "heldout_alpha" in line]
    assert judged[-1]["heldout_alpha"] > judged[0]["heldout_alpha"]
    # What lies in the tail is not known, and not counted: alpha is at most the target's own.
    code, _, err = door(*words, "--target", target_dir, "--out", tmp_path / "live")
    assert code == 0, err
    live = json.loads((tmp_path / "live/run/metrics.jsonl").read_text().splitlines()[0])
    assert judged[0]["heldout_alpha"] <= live["heldout_alpha"] + 1e-6


def test_logits_that_are_not_finite_name_the_model(target_dir: str) -> None:
    target = load_model(target_dir, device="cpu")
    with torch.no_grad():
        target.get_parameter("model.embed_tokens.weight")[7] = torch.inf
    score(target, [3, 4], [5, 6], K)
    with pytest.raises(RunError, match=rf"^{target_dir}: gives logits that are NaN or infinite on an answer; try"):
        score(target, [3, 4], [7, 6], K)
