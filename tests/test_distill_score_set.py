"""Answers that are there already get the target's distributions: the same as while distilling, whatever disturbs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from draftsmith_core.models import load_model
from draftsmith_core.teacher_rows import unpack
from draftsmith_core.tokenization import load_tokenizer

Door = Callable[..., tuple[int, str, str]]
Spawn = Callable[..., Any]
KILL = """
import os, signal
import distill.parts as module
write, written = module.pq.write_table, []
def dying(table, path):
    written.append(path)
    if len(written) == 2:
        path.write_bytes(b"PAR1 half a file")
        os.kill(os.getpid(), signal.SIGKILL)
    write(table, path)
module.pq.write_table = dying
"""


@pytest.fixture
def words(target_dir: str, prompts_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, door: Door) -> list[str]:
    """`distill --score plain`, where plain is a set of four parts without teacher rows."""
    monkeypatch.chdir(tmp_path)
    make = f"distill --target {target_dir} --prompts {prompts_file} --max_new_tokens 8 --num_samples 2 --part_rows 5"
    code, _, err = door(*make.split(), "--out", "plain")
    assert code == 0, err
    return f"distill --target {target_dir} --score plain --out scored --teacher_top_k 7".split()


def rows_of(directory: str) -> list[dict[str, Any]]:
    return [row for path in sorted(Path(directory).glob("part-*")) for row in pq.read_table(path).to_pylist()]


def files(directory: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


def test_a_scored_set_is_one_that_was_scored_while_it_was_made(
    words: list[str], door: Door, target_dir: str, prompts_file: str
) -> None:
    code, out, err = door(*words, "--json")
    assert code == 0, err
    make = f"distill --target {target_dir} --prompts {prompts_file} --max_new_tokens 8 --num_samples 2 --part_rows 5"
    assert door(*make.split(), "--out", "at_once", "--teacher_top_k", 7)[0] == 0
    assert rows_of("scored") == rows_of("at_once")
    assert "scored: 16 of 16 rows scored" in out and json.loads(out.splitlines()[-1])["bytes_per_token"] == 30
    made = json.loads(Path("scored/manifest.json").read_text())
    assert (
        made["identity"]["target_fingerprint"]
        == json.loads(Path("plain/manifest.json").read_text())["identity"]["target_fingerprint"]
    )
    before = files("scored")
    assert door(*words, "--json")[0] == 0 and files("scored") == before
    code, _, err = door(*words, "--teacher_top_k", 8)
    assert code == 2 and "was made with other options: teacher_top_k is 7, now it is 8" in err


def test_a_draft_is_trained_on_it_without_the_target(words: list[str], door: Door, draft_dir: str) -> None:
    assert door(*words)[0] == 0
    train = ["train", "--data", "scored", "--draft", draft_dir, "--objective", "fkl", "--max_length", 64, "--steps", 3]
    code, _, err = door(*train, "--device", "cpu", "--heldout_fraction", 0.2, "--out", "draft", "--optim.lr", 0.01)
    assert code == 0, err


def test_rows_from_elsewhere(words: list[str], door: Door, target_dir: str) -> None:
    """Chats as text, and tokens; rows that cannot be scored are skipped with their reason."""
    Path("chat.jinja").write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]")
    chat = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "The fox."}]
    rows: list[Any] = [
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
        {"messages": [chat[0], {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]},
    ]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n")
    words[4] = "rows.jsonl"
    code, out, err = door(*words, "--chat_template", "chat.jinja", "--part_rows", 4)
    assert code == 0, err
    assert "3 of 12 rows scored" in out and "9 skipped" in out
    said = {
        line["row"]: line["reason"] for line in map(json.loads, Path("scored/errors.jsonl").read_text().splitlines())
    }
    for number, reason in (
        (3, "does not end with an assistant turn"),
        (4, "no answer"),
        (5, "holds a token that the target, with 290, does not have"),
        (6, "97 tokens, more than the 96 that fit"),
        (7, "token ids in prompt_ids"),
        (8, "needs `messages` that end with the assistant's answer, or token ids in prompt_ids"),
        (10, "token ids in prompt_ids"),
        (11, "ends with calls of tools, whose tokens are not known"),
        (12, "not valid JSON"),
    ):
        assert reason in said[number]
    tokenizer, target = load_tokenizer(target_dir), load_model(target_dir, device="cpu", dtype="float32")
    found = rows_of("scored")
    assert tokenizer.decode(found[0]["prompt_ids"]) == "[user]Who?[assistant]"
    assert tokenizer.decode(found[0]["response_ids"]) == "The fox.</s>"
    assert [row["finish_reason"] for row in found] == ["stop", "stop", "length"]
    assert found[0]["domain"] == "chat" and found[1]["domain"] == "default"
    for row in found:
        prompt, response = row["prompt_ids"], row["response_ids"]
        with torch.no_grad():
            p_TV = target(torch.tensor([prompt + response])).logits[0].double().softmax(-1)
        ids, logprobs, _ = unpack(row["teacher"])
        assert len(ids) == len(response)
        for place in range(0 if prompt else 1, len(response)):
            p_V = p_TV[len(prompt) - 1 + place]
            assert ids[place].tolist() == sorted(p_V.topk(7).indices.tolist())
            torch.testing.assert_close(torch.tensor(logprobs[place]).exp().double(), p_V[ids[place]], rtol=4e-3, atol=0)


def test_a_source_that_cannot_be_used(words: list[str], door: Door, target_dir: str) -> None:
    code, _, err = door(*words, "--out", "plain")
    assert code == 2 and "was made with other options" in err
    code, _, err = door(*words, "--temperature", 1)
    assert code == 2 and "--temperature: unknown option" in err
    part = Path("plain/part-00001.parquet")
    part.write_bytes(part.read_bytes()[:-9])
    code, _, err = door(*words)
    assert code == 2 and f"{part}: is not the file that the manifest describes" in err
    Path("plain/manifest.json").write_text('{"complete": true, "parts": [{}]}')
    code, _, err = door(*words, "--out", "o")
    assert code == 2 and "plain: its manifest.json is not that of a distilled set" in err
    Path("plain/manifest.json").unlink()
    code, _, err = door(*words, "--out", "o")
    assert code == 2 and "plain/manifest.json: no such file" in err
    for source, said in (("gone.jsonl", "no such file"), ("empty.jsonl", "holds no rows")):
        Path("empty.jsonl").write_text("")
        words[4] = source
        code, _, err = door(*words, "--out", "o")
        assert code == 2 and f"{source}: {said}" in err
        assert not Path("o").exists()
    Path("prompts.jsonl").write_text('{"prompt": "only asked"}\n')
    words[4] = "prompts.jsonl"
    code, _, err = door(*words, "--out", "o")
    assert code == 1 and "o: no row is left: 1 skipped: needs `messages`" in err
