"""The study of a real chat model, on the demo's pair in tiny sizes: its pieces resume, and keep
what is kept.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.places import ROOT
from benchmarks.studies import real_speed, real_study
from benchmarks.studies.real_pair import best, run
from benchmarks.studies.real_study import TINY, Options, Study, data, keep_set
from draftsmith.core.errors import InputError
from draftsmith.core.io import read_json, write_rows
from draftsmith.eval.results import Results

PAIR = ROOT / "draftsmith" / "demo" / "pair"
WORDS = (
    "the quick brown fox jumps over a lazy dog that does not mind numbers such as 12 or 345".split()
)


def texts(count: int, start: int) -> list[dict[str, str]]:
    return [
        {"text": " ".join(WORDS[(i * k + start) % len(WORDS)] for k in range(1, 16))}
        for i in range(count)
    ]


@pytest.fixture
def study(tmp_path):
    """Tiny sizes, on the demo's target."""
    place = tmp_path / "texts"
    for start, (name, count) in enumerate(
        {"alpaca": 20, "gsm8k_train": 9, "gsm8k_test": 3, "humaneval": 3}.items()
    ):
        write_rows(
            place / f"{name}.jsonl", ({"prompt": row["text"]} for row in texts(count, start))
        )
    for name in ("c4", "wiki"):
        write_rows(
            place / f"{name}.jsonl",
            ({"text": 3 * f"{row['text']} "} for row in texts(3, len(name))),
        )
    options = Options(
        target=str(PAIR / "target"), data=str(place), out=str(tmp_path / "out"), tiny=True
    )
    return Study(options, TINY)


def test_tables_of_speed_name_the_best_and_what_failed():
    parts = dict.fromkeys(real_speed.PARTS, 2.0)

    def way(speed: float, over: float) -> dict[str, Any]:
        return {"tokens_per_s": speed, "speed_over_ar": over, "tau": over, "parts_of_a_step": parts}

    alone = way(20.0, 1.0) | dict.fromkeys(
        ("share_of_memory_limit", "share_of_memory_limit_after_prefill"), 0.5
    )
    ours: dict[str, Any] = {
        "forwards": {"target_behind_128": {"ours": {"1": {"ms": 9.0}, "2": {"ms": 10.0}}}}
    }
    for at in ("0", "1"):
        hf, drafted = {"tokens_per_s": 8.0, "speed_over_ar": 0.4, "tau": 1.0}, way(32.0, 1.6)
        ours[f"T={at}"] = {
            "raw_forward_ms": {"ours": 9.0},
            "limit_tokens_per_s_without_draft": 99.0,
            "hf": hf,
        }
        ours[f"T={at}"] |= {
            "ar": alone | {"weight_MB_per_token": 269.0},
            "head@planned tree": drafted,
        }
    ours["setting"] = {"options": {"draft": "pruned", "head": "eagle"}}
    ours["plans"] = {"head@planned tree, T = 0": {"name": "chain:3", "speedup": None}}
    served = {f"T={at}": {"tokens_per_s": 16.0, "over_ar": 0.8} for at in ("0", "1")}
    faster = {at: row | {"over_ar": 4.0} for at, row in served.items()}
    llama = {
        "F16": served,
        "Q8_0": faster,
        "F16, draft, 2 tokens": {"failed": "no port"},
        "ar": {"T=0": [1.0, 2.0]},
    }
    found = {
        "ours": ours,
        "llama-server": llama,
        "openvino-genai": {"skipped": "not here"},
        "vllm": {"failed": "it"},
    }
    text = real_speed.speed_tables(found)
    best = (
        "head@planned tree is 1.60 times ours alone, and 2.00 times the best of the others in "
        "16 bits"
    )
    assert f"T = 0: {best} (llama-server, F16)." in text and f"T = 1: {best}" in text
    assert "| draftsmith, eagle, planned tree | 32.00 | 1.60 | 1.60 | 32.00 | 1.60 | 1.60 |" in text
    assert (
        "| llama-server F16, draft, 2 tokens | failed: no port |" in text
        and "skipped: not here |" in text
    )


@pytest.mark.slow  # distils, trains and evaluates
@pytest.mark.usefixtures("undrawn")
def test_a_study_continues_and_a_kept_set_is_taken_by_the_target_that_wrote_it(
    study, monkeypatch, capsys
):
    record = study.out / "drafts" / "pruned" / "draftsmith.json"
    made = []
    for drafts in (["pruned"], ["pruned", "hydra"]):
        run(Options(**vars(study.options) | {"only": ["data", "which"], "drafts": drafts}))
        made.append(record.stat().st_mtime_ns)
    assert made[0] == made[1]
    results, printed = Results.load(study.out / "which"), capsys.readouterr().out
    assert results.drafts == ["pruned", "hydra"] and results.domains() == [
        "chat",
        "maths",
        "code",
        "c4",
        "wiki",
    ]
    assert "| Hydra |" in printed and "tau chat" in printed and best(study, ["hydra"]) == "hydra"
    with pytest.raises(InputError, match="has none of eagle3; run --only which"):
        best(study, ["eagle3"])

    kept = Path(study.options.out).parent / "kept"
    monkeypatch.setattr(real_study, "KEPT", kept)
    for name in TINY.answered:
        keep_set(study, name)
    manifest = (kept / "chat" / "manifest.json").read_text()
    assert study.options.target not in manifest and str(study.out) not in manifest
    (study.out / "data").rename(study.out / "first")
    asked: list[str] = []
    monkeypatch.setattr(real_study, "distill", lambda config, command: asked.append(config.out))
    # Prompts are on this machine; the answers come from the repository.
    taken = Study(Options(**vars(study.options) | {"tiny": False}), TINY)
    data(taken)
    part = "chat/part-00000.parquet"
    assert (study.out / "data" / part).read_bytes() == (study.out / "first" / part).read_bytes()
    changed = read_json(kept / "chat" / "manifest.json", "a set")
    changed["identity"]["target_fingerprint"] = "0" * 16
    (kept / "chat" / "manifest.json").write_text(json.dumps(changed))
    (study.out / "data").rename(study.out / "second")
    data(taken)
    assert asked == [str(study.out / "data" / "chat")] and (study.out / "data" / "maths").exists()


@pytest.mark.slow  # distils, trains and evaluates
@pytest.mark.usefixtures("undrawn")
def test_the_longest_piece_aligns_its_head_and_times_it_behind_lookup(study, capsys):
    run(Options(**vars(study.options) | {"only": ["data", "longest"]}))
    printed = capsys.readouterr().out
    assert "| maths, lookup, EAGLE-3, aligned to maths |" in printed
    record = json.loads((study.out / "drafts" / "eagle-longest" / "draftsmith.json").read_text())
    assert record["config"]["head"]["test_steps"] == 3
