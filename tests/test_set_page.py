"""The page of a distilled set shows what its rows add up to, escaped, and needs no network."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pyarrow.dataset import dataset

from draftsmith.set_page import read_answers, read_teacher
from draftsmith_core.models import load_model

Door = Callable[..., tuple[int, str, str]]


@pytest.fixture
def made(target_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, door: Door) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [
        {"prompt": f"The quick {number}", "domain": "<b>code</b>" if number % 3 else "prose"} for number in range(9)
    ]
    Path("p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": ""}]))
    words = f"distill --target {target_dir} --prompts p.jsonl --out set --max_new_tokens 9 --teacher_top_k 290".split()
    code, _, err = door(*words, "--temperatures", "0:1", "1:1", "--part_rows", 4)
    assert code == 0, err
    return Path("set")


def test_the_page_shows_the_set(made: Path, door: Door) -> None:
    code, out, err = door("distill", "--stats", made, "--json")
    assert code == 0, err
    assert json.loads(out.splitlines()[-1]) == {"page": "set/stats.html"}
    page = (made / "stats.html").read_text()
    manifest = json.loads((made / "manifest.json").read_text())
    assert f"<h1>9 answers, {manifest['response_tokens']} tokens</h1>" in page
    assert "1 skipped: key &#39;prompt&#39; is empty (row 10)" in page
    assert page.count("<svg") == 4 and "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)
    assert "<b>code" not in page and "&lt;b&gt;code" in page
    for said in ("ended by stop", "ended by length", "at temperature 0", "at temperature 1", "entropy, nats"):
        assert said in page, said
    # Drawing is a function of the set, and training reads the set as before.
    assert door("distill", "--stats", made)[0] == 0 and (made / "stats.html").read_text() == page


def test_sums_are_those_of_the_rows(made: Path, target_dir: str) -> None:
    data = dataset(sorted(map(str, made.glob("part-*"))))
    answers, rows = read_answers(data), data.to_table().to_pylist()
    lengths = [len(row["response_ids"]) for row in rows]
    assert list(answers["answer"]) == lengths and set(answers["domain"]) == {"prose", "<b>code</b>"}
    assert list(answers["prompt"]) == [len(row["prompt_ids"]) for row in rows]
    target, entropy = load_model(target_dir, device="cpu", dtype="float32"), 0.0
    for row in rows:
        with torch.no_grad():
            logits = target(torch.tensor([row["prompt_ids"] + row["response_ids"]])).logits[0]
        p_RV = logits[len(row["prompt_ids"]) - 1 : -1].double().softmax(-1)
        entropy -= float((p_RV * p_RV.log()).sum())
    teacher = read_teacher(data)
    assert teacher is not None and teacher[0].sum() == sum(lengths)
    assert teacher[1] == pytest.approx(entropy, rel=2e-3)
