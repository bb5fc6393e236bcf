"""`align --policy`: a draft between base and aligned, chosen without looking at the evaluation's
prompts.
"""

import json
from pathlib import Path
from typing import Any, cast, get_args

import pytest
import torch
import yaml
from safetensors.torch import load_file

import draftsmith as ds
from drafts.draft_vocabulary import FILE, draft_vocabulary, trim
from drafts.load import load_pair
from draftsmith.alignment.config import AlignConfig, Policy
from draftsmith.alignment.policy import RULES, TOLERANCE, Point, between, choose
from draftsmith.alignment.stages import lines
from eval.schema import Estimate, SuiteKind
from tests.distilled import write_rows
from tests.results_made_up import BASE, view
from tests.test_align import ONE_WAY, SMALL


def point(weight: float, id_change: float, general: float, low: float = 0.01) -> Point:
    """A draft with these changes in distribution and in general text, whose lower bound is `low`
    below.
    """

    def change(value: float, below: float) -> Estimate:
        return {"value": value, "low": value - below, "high": value + 0.01, "n": 8}

    return Point(weight, {}, {"id": change(id_change, 0.01), "general": change(general, low)})


def test_every_rule_takes_the_point_that_it_describes():
    line = [
        point(0.0, 0.0, 0.0),
        point(0.25, 0.02, 0.005, low=0.005 + TOLERANCE / 2),
        point(0.5, 0.05, -0.01),
        point(1.0, 0.08, -0.06, low=0.02),
    ]
    assert {*RULES, "id"} == set(get_args(Policy))
    assert (choose("balanced", line).weight, choose("no_loss", line).weight) == (0.5, 0.25)
    # Where nothing qualifies, the base stays: also where the others gain nothing.
    worse = [line[0], point(0.5, -0.02, -0.03), point(1.0, -0.05, -0.1)]
    assert choose("no_loss", worse).weight == choose("balanced", worse).weight == 0.0


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    rows = [{"prompt": f"The quick brown fox jumps {i} times over the lazy dog"} for i in range(24)]
    return write_rows(tmp_path_factory.mktemp("policy") / "own.jsonl", *rows)


@pytest.mark.usefixtures("undrawn")
def test_a_policy_adds_the_draft_it_chose_to_the_evaluation(
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
        for name in ("jsd", "jsd-plain")
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
    ) and "2 times the steps: as many answers" in err
    manifest = json.loads((out / "general" / "manifest.json").read_text())
    assert (
        manifest["config"]["prompts"].startswith("token:")
        and manifest["config"]["temperature"] == 1.0
    )
    record = json.loads((out / "policy" / "jsd.json").read_text())
    assert (record["policy"], record["rule"]) == ("balanced", RULES["balanced"])
    weights = [each["weight"] for each in record["points"]]
    assert weights == [0.0, 0.25, 0.5, 0.75, 1.0] and record["weight"] in weights
    assert (
        record["points"][0]["change"]["id"]["value"] == 0
        and record["points"][4]["change"]["id"]["value"] != 0
    )
    # It was chosen on answers that the evaluation does not ask for.
    assert record["texts"]["id"] >= 2 and record["texts"]["general"] >= 2
    base, aligned, made = (
        load_file(Path(each) / "model.safetensors")
        for each in (draft_dir, out / "jsd", out / "jsd-balanced")
    )
    for name, tensor in made.items():
        torch.testing.assert_close(
            tensor, torch.lerp(base[name].float(), aligned[name], record["weight"])
        )
    assert ds.Results.load(out / "eval").drafts == ["base", "jsd-plain", "jsd-balanced"]
    summary = json.loads(printed.splitlines()[-1])
    assert (summary["best"], summary["policy"]) == ("jsd-balanced", "balanced")
    assert f"jsd-balanced: interpolation weight {record['weight']:g} towards jsd" in err
    # Again: nothing is measured or made anew.
    before = {
        path: path.stat().st_mtime_ns
        for path in (out / "policy" / "jsd.json", out / "jsd-balanced" / "config.json")
    }
    assert door("align", *words)[0] == 0
    assert before == {path: path.stat().st_mtime_ns for path in before}


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_draft_vocabulary_is_kept_from_the_base_to_the_draft_that_the_policy_takes(
    door, prompts, target_dir, draft_dir, tmp_path
):
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
    assert "train: drafts 120 of 290 tokens; of the responses " in err
    assert yaml.safe_load((out / "align.yaml").read_text())["train"]["draft_vocab_size"] == 120
    assert (out / "jsd" / FILE).read_bytes() == (out / "jsd-balanced" / FILE).read_bytes()
    # The line begins at the base with these tokens only.
    pair = load_pair(target_dir, {"base": draft_dir, "jsd": str(out / "jsd")}, device="cpu")
    base, aligned = (cast(Any, pair.drafts[name]) for name in ("base", "jsd"))
    ids_D = draft_vocabulary(aligned)
    assert ids_D is not None
    whole = base(torch.tensor([[3, 4, 5]])).logits
    trim(base, ids_D)
    begun = between(base, aligned, 0.0)
    assert torch.equal(draft_vocabulary(begun), ids_D)  # type: ignore[arg-type]
    torch.testing.assert_close(
        begun(torch.tensor([[3, 4, 5]])).logits[..., ids_D], whole[..., ids_D]
    )
    # A draft that has one gets no other, and that is said before anything is made.
    more = ["--draft", out / "jsd", "--out", tmp_path / "none", "--train.draft_vocab_size", 120]
    assert f"train.draft_vocab_size: {out / 'jsd'} already has one" in door.refused(
        "align", *words, *more
    )
    assert not (tmp_path / "none" / "align.yaml").exists()


def test_the_worst_set_stands_beside_the_pool():
    sets: dict[str, SuiteKind] = {"prose": "id", "code": "ood", "unicode": "ood"}
    results = view({"base": BASE, "jsd-balanced": {"id": 0.2, "ood": 0.1}}, sets)
    for row in results.rows("gain"):
        if row["domain"] == "unicode":
            row |= {"value": -0.022, "low": -0.036, "high": -0.009}
    config = AlignConfig(target="t", prompts="p", draft="d", out="o", policy="balanced")
    (line,) = (line for line in lines(config, results) if "out of distribution: alpha" in line)
    assert "worst on unicode, \u22120.022 [\u22120.036, \u22120.009]" in line
