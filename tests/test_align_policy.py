"""`align --policy balanced`: the draft replays general text while it trains."""

import json
from typing import Any

import pytest
import yaml

import draftsmith as ds
from draftsmith.alignment.config import AlignConfig
from draftsmith.alignment.summary import lines, summary
from draftsmith.drafts.draft_vocabulary import FILE
from draftsmith.eval.schema import SuiteKind
from tests.distilled import write_rows
from tests.results_made_up import BASE, BOTH, view
from tests.test_align import ONE_WAY, SMALL


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    rows = [{"prompt": f"The quick brown fox jumps {i} times over the lazy dog"} for i in range(24)]
    return write_rows(tmp_path_factory.mktemp("policy") / "own.jsonl", *rows)


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_balanced_draft_replays_and_is_compared_with_a_plain_one(
    door, prompts, target_dir, draft_dir, tmp_path
):
    out = tmp_path / "out"
    words: list[Any] = [
        "--target",
        target_dir,
        "--draft",
        draft_dir,
        "--prompts",
        prompts,
        "--out",
        out,
        *SMALL,
    ]
    words += [*ONE_WAY, "--policy", "balanced", "--plain", "true"]
    printed, err = door.ok("align", *words, "--json")
    # General text is replayed; the plain draft beside it is trained alike but for that.
    kept, plain = (
        json.loads((out / name / "draftsmith.json").read_text())["config"]
        for name in ("jsd-balanced", "jsd-plain")
    )
    assert (kept["replay"], kept["replay_fraction"]) == ([str(out / "general")], 0.5)
    assert {key for key in kept if kept[key] != plain[key]} == {
        "out",
        "replay",
        "replay_fraction",
        "steps",
    }
    # Both are trained on as many answers.
    assert (plain["steps"], kept["steps"]) == (
        6,
        12,
    ) and "12 steps: as many answers" in err
    manifest = json.loads((out / "general" / "manifest.json").read_text())
    assert (
        manifest["config"]["prompts"].startswith("token:")
        and manifest["config"]["temperature"] == 1.0
    )
    assert ds.Results.load(out / "eval").drafts == ["base", "jsd-plain", "jsd-balanced", "lookup"]
    summary = json.loads(printed.splitlines()[-1])
    assert (summary["best"], summary["policy"]) == ("jsd-balanced", "balanced")
    # Again: nothing is made anew.
    weights = out / "jsd-balanced" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert door("align", *words)[0] == 0
    assert weights.stat().st_mtime_ns == before


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_draft_vocabulary_is_given_once(door, prompts, target_dir, draft_dir, tmp_path):
    out = tmp_path / "out"
    words: list[Any] = [
        "--target",
        target_dir,
        "--prompts",
        prompts,
        *SMALL,
        "--policy",
        "balanced",
    ]
    part = ["--train.draft_vocab_size", 120]
    _, err = door.ok("align", *words, "--draft", draft_dir, "--out", out, *part)
    assert "train: drafts 120 of 290 tokens; of the held-out responses " in err
    assert yaml.safe_load((out / "align.yaml").read_text())["train"]["draft_vocab_size"] == 120
    assert (out / "jsd-balanced" / FILE).is_file()
    # A draft that has one gets no other, and that is said before anything is made.
    more = [
        "--draft",
        out / "jsd-balanced",
        "--out",
        tmp_path / "none",
        "--train.draft_vocab_size",
        120,
    ]
    assert f"train.draft_vocab_size: {out / 'jsd-balanced'} already has one" in door.refused(
        "align", *words, *more
    )
    assert not (tmp_path / "none" / "align.yaml").exists()


@pytest.mark.parametrize(
    ("winner", "kind", "what", "parts"),
    [
        ("jsd-balanced", "draft", "the draft jsd-balanced", ["--draft jsd-balanced --tree"]),
        (
            "lookup",
            "prompt_lookup",
            "prompt lookup, no draft",
            [
                "--draft prompt_lookup --tree",
                '  vllm: vllm serve t --speculative-config \'{"method":"ngram"',
                "prompt_lookup_num_tokens=",
                "--spec-type ngram-simple --spec-ngram-simple-size-n 3",
            ],
        ),
        (
            "both",
            "prompt_lookup+draft",
            "both: ",
            [
                "--draft prompt_lookup+both --tree",
                "--spec-type ngram-simple,draft-simple --spec-draft-n-max",
                "--spec-ngram-simple-size-n 2",
            ],
        ),
        ("both", "prompt_lookup+eagle", "both: ", ["--draft prompt_lookup+both"]),
        (None, "draft", "none of them", []),
    ],
)
def test_the_last_lines_say_what_to_serve(winner, kind, what, parts):
    others = {"lookup": {"id": 0.2, "ood": 0.1}, "both": BASE}
    results = view({"base": BASE, "jsd-balanced": BASE, **others}, BOTH)
    for row in results.rows("speedup"):
        speed = (1.5, 1.4, 1.6) if row["draft"] == winner else (0.8, 0.7, 0.9)
        row["value"], row["low"], row["high"] = speed
    models = results.document["models"]
    models["lookup"]["parameters"] = 0
    for name, model in models.items():
        model["name"] = name
    if winner:
        models[winner]["kind"] = kind
    config = AlignConfig(target="t", prompts="p", draft="d", out="o", policy="balanced")
    said = lines(summary(config, results), results)
    at = next(index for index, line in enumerate(said) if line.startswith("serve: "))
    assert said[at].startswith(f"serve: {what}")
    served = "\n".join(said[at:])
    assert all(part in served for part in parts), served
    # llama.cpp has no heads of EAGLE-1.
    assert ("llama-server" in served) == any("--spec-type" in part for part in parts)


def test_the_worst_set_stands_beside_the_pool():
    sets: dict[str, SuiteKind] = {"prose": "id", "code": "ood", "unicode": "ood"}
    results = view({"base": BASE, "jsd-balanced": {"id": 0.2, "ood": 0.1}}, sets)
    for row in results.rows("gain"):
        if row["domain"] == "unicode":
            row |= {"value": -0.022, "low": -0.036, "high": -0.009}
    config = AlignConfig(target="t", prompts="p", draft="d", out="o", policy="balanced")
    (line,) = (
        line
        for line in lines(summary(config, results), results)
        if "out of distribution: alpha" in line
    )
    assert "worst on unicode, \u22120.022 [\u22120.036, \u22120.009]" in line
