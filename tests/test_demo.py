"""The demo in its short form: `align` on the shipped pair, from prompts to report, in any directory."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from draftsmith.demo import demo_run
from eval.results import Results


@pytest.mark.slow
def test_demo_from_prompts_to_report(
    tmp_path: Path, door: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = door("demo", "--short", "--json")
    assert code == 0, err
    demo = tmp_path / "out" / "demo"
    results = Results.load(demo / "eval")
    assert results.drafts == ["base", "jsd-plain", "jsd-balanced"]
    assert {(name, results.kind(name)) for name in results.domains()} == {
        ("prose", "id"),
        ("code", "ood"),
        ("unicode", "ood"),
    }
    assert results.temperatures == [0.0, 1.0]
    assert all(0 < (row["value"] or 0) < 1 for row in results.rows("alpha"))
    assert {tree for tree, _ in results.methods} == {"chain:2", "kary:3,2"}
    assert [row["value"] == row["n"] for row in results.rows("identical")] == [True] * 3 * 2 * 5
    assert all(name in out for name in (*results.drafts, "prose", "code", "unicode"))
    # Both are trained alike, at equal optimizer steps, but for what is replayed; the draft that keeps is offered.
    records = [json.loads((demo / name / "draftsmith.json").read_text()) for name in ("jsd-plain", "jsd")]
    assert [record["steps"] for record in records] == [4, 4]
    assert [record["objective"] for record in records] == ["jsd:beta=0.5"] * 2
    assert [record["config"]["replay_fraction"] for record in records] == [0.0, 0.7]
    # Evaluation prompts come from documents that no alignment prompt comes from.
    names = {
        file: {json.loads(line)["id"].split(" #")[0] for line in (demo / "prompts" / file).open()}
        for file in ("prose.train.jsonl", "prose.jsonl")
    }
    assert names["prose.jsonl"] and not names["prose.jsonl"] & names["prose.train.jsonl"]
    # Nothing points into the installed package: the last lines can be typed from this directory.
    summary = json.loads(out.splitlines()[-1])
    assert (summary["best"], summary["policy"]) == ("jsd-balanced", "balanced")
    assert str(demo_run.PAIR) not in (demo / "eval" / "results.json").read_text()
    assert (tmp_path / summary["checkpoint"] / "model.safetensors").is_file()
    # The second pair: the drafts beside the padded target, which writes what the small one writes.
    large = Results.load(demo / "eval-large")
    assert large.drafts == results.drafts and large.domains() == ["prose"]
    assert large.document["models"]["target"]["parameters"] > 4 * results.document["models"]["target"]["parameters"]
    assert all(way["speedup"] > 0 for cell in summary["large"]["cells"] for way in cell["decoding"])
    assert "padded with zeros" in Path(summary["large"]["report"]).read_text()
    assert "padded with zeros" in out
    assert all(row["value"] == row["n"] for row in large.rows("identical"))
    words = summary["decode"].split()[1:]
    code, out, err = door(*words, "--max_new_tokens", "4")
    assert code == 0, err
