"""`draftsmith decode`: the rows of the command contract, whole or absent, and text as it comes."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftsmith.commands.stream import Stream
from draftsmith.models import eos_ids, load_model
from draftsmith.text import decode_text, load_tokenizer

Door = Callable[..., tuple[int, str, str]]

KILL_AT_ROW = """
import os, signal
import draftsmith.commands.decode as command
make, made = command._row, []
def dying(*words):
    made.append(1)
    if len(made) == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    return make(*words)
command._row = dying
"""


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def timeless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "stats": {k: v for k, v in row["stats"].items() if k != "seconds"}} for row in rows]


def contents(row: dict[str, Any]) -> tuple[str, int, list[int], str]:
    return row["id"], row["sample_index"], row["output_ids"], row["finish_reason"]


@pytest.mark.parametrize("drafted", [True, False])
def test_rows_are_those_of_the_contract(
    tmp_path: Path, door: Door, target_dir: str, draft_dir: str, prompts_file: str, drafted: bool
) -> None:
    out = tmp_path / "deep" / "rows.jsonl"
    words = ["--target", target_dir, "--prompts", prompts_file, "--num_samples", "2", "--max_new_tokens", "9"]
    words += ["--temperature", "1", "--out", str(out), "--json"]
    words += ["--draft", draft_dir, "--tree", "kary:2,2"] if drafted else []
    code, printed, err = door("decode", *words)
    assert code == 0, err
    rows = read(out)
    assert [p.name for p in out.parent.iterdir()] == ["rows.jsonl"]
    tokenizer = load_tokenizer(target_dir)
    eos = set(eos_ids(load_model(target_dir, device="cpu")))
    for row in rows:
        assert list(row) == ["id", "sample_index", "prompt_ids", "output_ids", "text", "finish_reason", "stats"]
        stats = row["stats"]
        assert list(stats) == ["target_calls", "proposed", "accepted", "accepted_by_depth", "seconds"]
        ids = row["output_ids"]
        assert 1 <= len(ids) <= 9
        assert (row["finish_reason"] == "stop") == (ids[-1] in eos)
        assert not eos.intersection(ids[:-1])
        assert row["finish_reason"] == "stop" or len(ids) == 9
        assert row["text"] == decode_text(tokenizer, ids)
        assert row["prompt_ids"][0] == tokenizer.bos_token_id
        assert sum(stats["accepted_by_depth"]) == stats["accepted"] <= stats["proposed"]
        assert stats["target_calls"] <= len(ids) <= stats["accepted"] + stats["target_calls"]
        assert stats["seconds"] > 0
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}
    assert any(row["stats"]["proposed"] for row in rows) == drafted
    keys = [(row["id"], row["sample_index"]) for row in rows]
    assert len(set(keys)) == len(keys) == 16
    assert ("numbers", 1) in keys
    summary = json.loads(printed.splitlines()[-1])
    assert summary["rows"] == 16
    assert summary["prompts_read"] == 9 == summary["prompts_done"] + summary["prompts_skipped"]
    assert summary["skipped"] == [{"row": 4, "reason": "key 'prompt' is empty"}]
    assert summary["tokens"] == sum(len(row["output_ids"]) for row in rows)
    assert summary["tau"] == pytest.approx(summary["tokens"] / summary["target_calls"])
    assert "1 of 9 prompts skipped (row 4" in printed


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_rows_do_not_depend_on_the_batch(
    tmp_path: Path, door: Door, target_dir: str, draft_dir: str, prompts_file: str, temperature: str
) -> None:
    found = []
    for size in (1, 3, 8):
        out = tmp_path / f"{size}.jsonl"
        words = ["--target", target_dir, "--draft", draft_dir, "--prompts", prompts_file, "--batch_size", size]
        more = ["--temperature", temperature, "--max_new_tokens", "12", "--out", out]
        assert door("decode", *words, *more)[0] == 0
        found.append(timeless(read(out)))
    assert found[0] == found[1] == found[2]


def test_greedy_is_what_the_target_alone_generates(
    tmp_path: Path, door: Door, target_dir: str, draft_dir: str, prompts_file: str
) -> None:
    target: Any = AutoModelForCausalLM.from_pretrained(target_dir)
    out = tmp_path / "rows.jsonl"
    words = ["--target", target_dir, "--draft", draft_dir, "--prompts", prompts_file, "--tree", "kary:3,2"]
    assert door("decode", *words, "--out", out, "--max_new_tokens", "14")[0] == 0
    rows = read(out)
    assert len(rows) == 8
    for row in rows:
        ids = torch.tensor([row["prompt_ids"]])
        whole = target.generate(ids, do_sample=False, max_new_tokens=14, attention_mask=torch.ones_like(ids))
        assert row["output_ids"] == whole[0, ids.shape[1] :].tolist()


def test_ignore_eos_goes_on(tmp_path: Path, door: Door, target_dir: str, prompts_file: str) -> None:
    out = tmp_path / "rows.jsonl"
    words = ["--target", target_dir, "--prompts", prompts_file, "--temperature", "1", "--ignore_eos"]
    assert door("decode", *words, "--out", out, "--max_new_tokens", "20", "--max_prompts", "5")[0] == 0
    rows = read(out)
    assert [len(row["output_ids"]) for row in rows] == [20] * 4
    assert {row["finish_reason"] for row in rows} == {"length"}


def test_a_killed_run_continues_where_it_was(
    tmp_path: Path, spawn: Callable[..., Any], target_dir: str, draft_dir: str, prompts_file: str
) -> None:
    words = ["decode", "--target", target_dir, "--draft", draft_dir, "--prompts", prompts_file]
    words += ["--num_samples", "2", "--temperature", "1", "--max_new_tokens", "8", "--batch_size", "2"]
    words += ["--out", "rows.jsonl"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    killed.mkdir()
    whole.mkdir()
    assert spawn(*words, cwd=whole).wait()[0] == 0
    assert spawn(*words, cwd=killed, patch=KILL_AT_ROW).wait()[0] == -9
    assert [p.name for p in killed.iterdir()] == [".rows.jsonl.partial"]
    before = read(killed / ".rows.jsonl.partial")[1:]
    assert len(before) == 5
    # What another command left is not continued, and not an error.
    assert spawn(*words, "--seed", "9", "--out", "other.jsonl", cwd=killed).wait()[0] == 0
    code, _, err = spawn(*words, cwd=killed).wait()
    assert (code, "Traceback" in err) == (0, False)
    rows = read(killed / "rows.jsonl")
    assert timeless(rows) == timeless(read(whole / "rows.jsonl"))
    # Rows of whole batches were kept, clock included; the half batch was made again.
    assert rows[:4] == before[:4]
    assert rows[4]["stats"]["seconds"] != before[4]["stats"]["seconds"]
    other = read(killed / "other.jsonl")
    assert [row["output_ids"] for row in other] != [row["output_ids"] for row in rows]
    assert sorted(p.name for p in killed.iterdir()) == ["other.jsonl", "rows.jsonl"]


def test_one_prompt_is_streamed(door: Door, target_dir: str, draft_dir: str) -> None:
    words = ["decode", "--target", target_dir, "--draft", draft_dir, "--prompt", "# The quick"]
    words += ["--max_new_tokens", "12", "--temperature", "1", "--json"]
    code, printed, err = door(*words)
    assert code == 0, err
    summary = json.loads(printed.splitlines()[-1])
    assert printed.startswith(summary["outputs"][0]["text"] + "\n")
    assert "tokens in" in printed
    tokenizer = load_tokenizer(target_dir)
    assert summary["outputs"][0]["prompt_ids"] == tokenizer("# The quick")["input_ids"]


class Recorder(io.StringIO):
    """Remembers what was written piece by piece."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def write(self, text: str) -> int:
        self.pieces.append(text)
        return super().write(text)


@pytest.mark.parametrize(
    "text", ["a é漢🙂👩‍🚀 b", "tabs\tand\r\nlines\n\n end ", "bell \x07 and \x1b[31mred", "[bold]no markup[/bold]", ""]
)
def test_what_is_streamed_is_the_text_and_no_character_is_torn(target_dir: str, text: str) -> None:
    tokenizer = load_tokenizer(target_dir)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    recorder = Recorder()
    stream = Stream(tokenizer, recorder)
    for start in range(0, len(ids), 2):
        stream.add(ids[start : start + 2], [True, False][: len(ids[start : start + 2])])
    assert not any("\ufffd" in piece for piece in recorder.pieces)
    stream.close()
    assert recorder.getvalue() == text + "\n"
    if len(text) > 10:
        assert sum(map(bool, recorder.pieces)) > 5


def test_an_end_in_the_middle_of_a_character_is_shown(target_dir: str) -> None:
    tokenizer = load_tokenizer(target_dir)
    ids = tokenizer("ab🙂", add_special_tokens=False)["input_ids"][:-1]
    recorder = Recorder()
    stream = Stream(tokenizer, recorder)
    stream.add(ids, [False] * len(ids))
    assert recorder.getvalue() == "ab"
    stream.close()
    assert recorder.getvalue() == decode_text(tokenizer, ids) + "\n"
    assert recorder.getvalue().startswith("ab\ufffd")


class Terminal(Recorder):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_drafted_tokens_stand_out_and_escapes_do_not_act(
    target_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    tokenizer = load_tokenizer(target_dir)
    ids = tokenizer("ab\x1b]0;c", add_special_tokens=False)["input_ids"]
    terminal = Terminal()
    stream = Stream(tokenizer, terminal)
    stream.add(ids, [True, *[False] * (len(ids) - 1)])
    stream.close()
    assert "\x1b[1;32ma" in terminal.getvalue()
    assert "\x1b]0;" not in terminal.getvalue()
    assert "drafted" in terminal.getvalue()
