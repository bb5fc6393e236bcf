"""Teacher rows are the target's own distributions, of answers made or found, and training needs no
target with them.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.core.errors import RunError
from draftsmith.core.models import load_model
from draftsmith.core.teacher_rows import unpack
from draftsmith.core.tokenization import load_tokenizer
from draftsmith.distill.score import score
from tests.distilled import errors, files, manifest, rows_of, write_rows

K = 7


@pytest.fixture
def make(target_dir, prompts_file, tmp_path, monkeypatch):
    """`distill` of a set of four parts."""
    monkeypatch.chdir(tmp_path)
    words = (
        f"distill --target {target_dir} --prompts {prompts_file} --max_new_tokens 12 "
        "--num_samples 2 --part_rows 5"
    )
    return [*words.split(), "--temperature", "0.7"]


@pytest.fixture
def words(make, door, target_dir):
    """`distill --score plain`, where plain is a set without teacher rows."""
    door.ok(*make, "--out", "plain")
    return f"distill --target {target_dir} --score plain --out scored --teacher_top_k {K}".split()


def check_teacher_rows(rows, target_dir):
    target = load_model(target_dir, device="cpu", dtype="float32")
    for row in rows:
        prompt, response = row["prompt_ids"], row["response_ids"]
        with torch.no_grad():
            p_TV = target(torch.tensor([prompt + response])).logits[0].double().softmax(-1)
        # Nothing predicts the first token of a text without a prompt.
        for place, (ids, logprobs, tail) in enumerate(zip(*unpack(row["teacher"]), strict=True)):
            if prompt or place:
                p_V = p_TV[len(prompt) - 1 + place]
                assert ids.tolist() == sorted(p_V.topk(K).indices.tolist())
                torch.testing.assert_close(
                    torch.tensor(logprobs).exp().double(), p_V[ids], atol=1e-6, rtol=4e-3
                )
                assert tail == pytest.approx(1 - float(p_V[ids].sum()), rel=1e-3)


def test_a_scored_set_is_one_that_was_scored_while_it_was_made(
    make, words, door, target_dir, golden
):
    out, _ = door.ok(*words, "--json")
    door.ok(*make, *f"--out at_once --teacher_top_k {K}".split())
    rows = rows_of("scored")
    assert len(rows) == 16 and rows == rows_of("at_once")
    check_teacher_rows(rows, target_dir)
    assert json.loads(out.splitlines()[-1])["bytes_per_token"] == 30
    golden(out)
    fingerprints = [
        manifest(name)["identity"]["target_fingerprint"] for name in ("plain", "scored")
    ]
    assert fingerprints[0] == fingerprints[1]
    before = files("scored")
    door.ok(*words, "--json")
    assert files("scored") == before
    door.refused(*words, "--teacher_top_k", 8)


def test_more_than_the_vocabulary_is_the_whole_law(target_dir):
    ids, _, tail = unpack(
        score(load_model(target_dir, device="cpu", dtype="float32"), [3, 4], [5, 6, 7], 10_000)
    )
    assert ids.tolist() == [list(range(290))] * 3 and tail == pytest.approx([0, 0, 0], abs=1e-9)


def test_a_draft_is_trained_without_the_target(words, target_dir, draft_dir, door):
    door.ok(*words)
    train = f"train --data scored --draft {draft_dir} --objective fkl --max_length 64".split()
    train += "--steps 12 --optim.lr 0.01 --device cpu --heldout_fraction 0.2".split()
    door.ok(*train, "--out", "draft")
    judged = [json.loads(line) for line in Path("draft/run/metrics.jsonl").read_text().splitlines()]
    judged = [line for line in judged if "heldout_alpha" in line]
    assert judged[-1]["heldout_alpha"] > judged[0]["heldout_alpha"]
    # What lies in the tail is not known, and not counted: alpha is at most the target's own.
    door.ok(*train, *f"--target {target_dir} --out live".split())
    live = json.loads(Path("live/run/metrics.jsonl").read_text().splitlines()[0])
    assert judged[0]["heldout_alpha"] <= live["heldout_alpha"] + 1e-6


def test_logits_that_are_not_finite_name_the_model(target_dir, golden):
    target = load_model(target_dir, device="cpu")
    with torch.no_grad():
        target.get_parameter("model.embed_tokens.weight")[7] = torch.inf
    score(target, [3, 4], [5, 6], K)
    with golden.raises(RunError):
        score(target, [3, 4], [7, 6], K)


def test_rows_from_elsewhere(words, door, target_dir, golden):
    """Chats as text, and tokens; rows that cannot be scored are skipped with their reason."""
    Path("chat.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    )
    chat = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "The fox."}]
    given: list[Any] = [
        {"messages": chat, "id": "c", "domain": "chat"},
        {"prompt_ids": [5, 6], "response_ids": [7, 8, 1]},
        {"messages": chat[:1]},
        {"prompt_ids": [5, 6], "response_ids": []},
        {"prompt_ids": [5, 6], "response_ids": [290]},
        {"prompt_ids": [5], "response_ids": [7] * 96},
        {"prompt_ids": "five", "response_ids": [7]},
        {"text": "no answer"},
        {"prompt_ids": [], "response_ids": [7, 8, 9]},
        {"prompt_ids": [2**31], "response_ids": [7]},
        {"input_ids": [5, 6, 7, 8, 1], "loss_mask": [0, 1, 0, 1, 1], "id": "two"},
        {"prompt": "The fox", "completion": " jumps"},
        {"messages": [chat[0], {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]},
        "{broken",
    ]
    words[4] = write_rows("rows.jsonl", *given)
    out, _ = door.ok(*words, *"--chat_template chat.jinja --part_rows 4".split())
    golden(out)
    golden("\n".join(f"{line['row']}: {line['reason']}" for line in errors("scored")))
    rows = rows_of("scored")
    assert load_tokenizer(target_dir).decode(rows[0]["prompt_ids"]) == "[user]Who?[assistant]"
    assert [(row["domain"], row["tokens_from"]) for row in rows[:2]] == [
        ("chat", "text"),
        ("default", "target"),
    ]
    assert [row["finish_reason"] for row in rows] == [
        "stop",
        "stop",
        "length",
        "length",
        "stop",
        "stop",
    ]
    assert [(row["id"], row["turn"]) for row in rows[3:5]] == [("two", 0), ("two-1", 1)]
    # One prompt of one row, as `distill` writes turns.
    assert rows[3]["prompt_hash"] == rows[4]["prompt_hash"] != rows[1]["prompt_hash"]
    check_teacher_rows(rows, target_dir)


def test_a_source_that_cannot_be_used(words, door):
    part = Path("plain/part-00001.parquet")
    part.write_bytes(part.read_bytes()[:-9])
    door.refused(*words)
    Path("plain/manifest.json").write_text('{"complete": true, "parts": [{}]}')
    door.refused(*words, "--out", "o")
    words[4] = write_rows("prompts.jsonl", {"prompt": "only asked"})
    door.refused(*words, "--out", "o", code=1)
