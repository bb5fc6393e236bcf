"""The simulation of drifting traffic, on a tiny pair: what it measures, keeps and says."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.drift import ARMS, Options, below, picture, recovered, run, table
from draftsmith.alignment.switch import weights_mark
from draftsmith.demo import corpus, demo_run
from eval.report.theme import LIGHT, write_png


def window(base: float, naive: float, adapted: float, alone: float | None = None) -> dict[str, Any]:
    values = {"base": base, "naive": naive, "adapted": adapted} | ({} if alone is None else {"specialist": alone})
    return {
        name: {
            "alpha": {"value": value, "low": value - 0.01, "high": value + 0.01},
            "over_base": {"value": value - base, "low": value - base - 0.01, "high": value - base + 0.01},
        }
        for name, value in values.items()
    }


def test_what_was_recovered_and_how_long_an_arm_was_below() -> None:
    windows = [
        window(0.4, 0.4, 0.4),
        window(0.4, 0.45, 0.44, 0.45),
        window(0.3, 0.2, 0.28),
        window(0.3, 0.25, 0.38, 0.4),
    ]
    results = {"options": {"windows": 2}, "windows": windows, "promoted": [True, True, False]}
    assert recovered(results) == pytest.approx([0.8, 0.8])
    assert (below(results, "naive"), below(results, "adapted")) == (2, 1)
    text = table(results)
    assert "| code 1 | 0.300 | 0.200 | 0.280 |  | not promoted |" in text and "phase by phase: 80%, 80%" in text


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_the_stream_in_pieces_is_as_at_once(
    tmp_path: Path, target_dir: str, draft_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pair").mkdir()
    (tmp_path / "pair" / "target").symlink_to(target_dir)
    (tmp_path / "pair" / "base").symlink_to(draft_dir)
    monkeypatch.setattr(demo_run, "PAIR", tmp_path / "pair")
    monkeypatch.setattr(corpus, "split", lambda domain: corpus.Split((), (), ()))

    def passages(domain: str, documents: Any, characters: int) -> list[dict[str, str]]:
        words = f"the {domain} of quick brown foxes jumps over a lazy dog and numbers such as 12 and 345".split()
        return [{"text": " ".join([str(i), *words[i % 9 :], *words, *words])} for i in range(40)]

    monkeypatch.setattr(corpus, "passages", passages)
    options = Options(out=str(tmp_path / "out"), windows=2, requests=16, new_tokens=8, steps=2, bootstrap=100)
    first = run(replace(options, rounds=1))
    assert len(first["windows"]) == 2 and len(first["promoted"]) == 1
    found = run(options)
    assert len(found["windows"]) == 6 and len(found["promoted"]) == 5
    assert [("specialist" in each) for each in found["windows"]] == [False, True] * 3
    assert found["windows"][:2] == first["windows"]
    # Before the first round all serve the base.
    assert {found["windows"][0][arm]["alpha"]["value"] for arm in ("base", "naive", "adapted")} == {
        found["windows"][0]["base"]["alpha"]["value"]
    }
    assert set(ARMS) == set(found["windows"][1])
    # The served draft is the one that the last promotion left.
    record = tmp_path / "out" / "served" / "draftsmith.json"
    lineage = json.loads(record.read_text())["lineage"] if record.exists() else []
    assert len(lineage) == sum(found["promoted"])
    mark = weights_mark(tmp_path / "out" / "served")
    assert run(options) == found and weights_mark(tmp_path / "out" / "served") == mark
    write_png(picture(found, LIGHT), tmp_path / "drift.png")
    assert (tmp_path / "drift.png").stat().st_size > 10_000
