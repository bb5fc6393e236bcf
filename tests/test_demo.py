"""The demo's own steps, cut down to seconds: the real commands on the shipped pair, from prompts to report."""

import importlib
import json
from pathlib import Path

import pytest

from draftsmith.cli import demo

SMALL = {
    "distill": ["--max_prompts", "24", "--max_new_tokens", "24", "--batch_size", "24"],
    "train": ["--steps", "6", "--eval_every", "3"],
    "eval": ["--max_prompts", "4", "--max_new_tokens", "16", "--speed_prompts", "1", "--bootstrap", "200"],
}


@pytest.mark.slow
def test_demo_from_prompts_to_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo._write_prompts(tmp_path / "prompts")
    ran = []
    for name, words in demo.steps(tmp_path):
        importlib.import_module(f"draftsmith.cli.{name}").run([*words, *SMALL[name]])
        ran.append(name)
    assert ran == ["distill", "train", "train", "eval"]
    results = json.loads((tmp_path / "eval" / "results.json").read_text())
    rows = [row for row in results["alpha"] if row["domain"] is not None]
    assert {row["draft"] for row in rows} == {"base", "seqkd", "jsd"}
    assert {(row["domain"], row["kind"]) for row in rows} == {("prose", "id"), ("code", "ood"), ("unicode", "ood")}
    assert {row["temperature"] for row in rows} == {0.0, 1.0}
    assert all(0 < row["alpha"]["value"] < 1 for row in rows)
    assert {row["tree"] for row in results["decoding"]} == {"chain:2", "kary:3,2"}
    for row in results["decoding"]:
        if row["temperature"] == 0:
            assert row["identical_outputs"]["same"] == row["identical_outputs"]["of"], row
    capsys.readouterr()
    demo._print_table(results)
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("base", "seqkd", "jsd", "prose", "code", "unicode"))
    # Held-out prompts come from documents that no alignment prompt comes from.
    names = {
        file: {json.loads(line)["id"].split(" #")[0] for line in (tmp_path / "prompts" / file).open()}
        for file in ("prose.train.jsonl", "prose.jsonl")
    }
    assert names["prose.jsonl"] and not names["prose.jsonl"] & names["prose.train.jsonl"]
