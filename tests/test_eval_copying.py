"""Prompt lookup in an evaluation: what it proposes along a text, and what is predicted of it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftsmith_core.errors import InputError, RequirementError
from eval.acceptance import Continuation
from eval.config import EvalConfig
from eval.copying import CopiedTexts, copied_traces
from eval.evaluate import evaluate
from eval.method import is_copying
from eval.report.findings import lead
from eval.request import check

TEXT = Continuation("a", (3, 4, 5, 3, 4), (5, 3, 9))


def test_what_followed_earlier_is_proposed_at_its_depth():
    tokens_DPL = CopiedTexts.of([TEXT], 2).tokens_DPL
    # After 3 4 came 5 3. After 4 5 came 3 4. After 5 3 came 4, and then 5.
    assert tokens_DPL.tolist() == [[[5, 3, 4]], [[-1, 3, 4]]]


def test_alpha_is_the_chance_of_the_copied_token_and_zero_without_one():
    p_NV = torch.full((4, 12), 0.05)
    p_NV[0, 5] = 0.45
    new = Continuation("b", (7,), (8,))
    traces = copied_traces(
        [TEXT, new],
        p_NV,
        row_N=torch.tensor([0, 0, 0, 1]),
        place_N=torch.tensor([0, 1, 2, 0]),
        depths=2,
        rules=["exact"],
    )
    assert traces.sums("alpha") == pytest.approx([0.55, 0.0])
    assert traces.sums("offers") == [3, 0]
    assert traces.values["ratio"][0].tolist() == [[1, 1, 0], [0, 0, 0]]


@pytest.fixture(scope="module")
def results(target_dir, draft_dir, tmp_path_factory):
    root = tmp_path_factory.mktemp("copying")
    rows = [{"id": str(i), "prompt": "a b c a b c a" + " d e" * i} for i in range(4)]
    (root / "prose.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = EvalConfig(
        target=str(target_dir),
        draft=["lookup=prompt_lookup", f"mine={draft_dir}"],
        id=[f"prose={root / 'prose.jsonl'}"],
        out=str(root / "out"),
        tree=["chain:3", "kary:2,2"],
        max_new_tokens=24,
        speed_prompts=2,
        bootstrap=100,
        device="cpu",
    )
    return evaluate(config)


def test_it_is_compared_like_a_draft_and_predicted_as_it_decodes(results):
    """Law 10: at temperature 0 the prediction is what is measured."""
    assert results.base == "mine" and results.aligned == []
    assert results.document["models"]["lookup"]["parameters"] == 0
    for figure in ("accept", "tau"):
        measured = results.series(figure, "lookup", "prose", 0.0, "chain:3")
        predicted = results.series(f"{figure}_predicted", "lookup", "prose", 0.0, "chain:3")
        pairs = list(zip(measured, predicted, strict=True))
        assert pairs and all(a["value"] == pytest.approx(b["value"]) for a, b in pairs)
    same = results.figure("identical", "lookup", "prose", 0.0, "chain:3")
    assert same["value"] == same["n"] == 4
    alpha, share, accepted = (
        results.figure(name, "lookup", "prose", 1.0)["value"]
        for name in ("alpha", "offered", "alpha_offered")
    )
    assert 0 < share <= 1 and alpha == pytest.approx(share * accepted)
    # Only the first candidate of a place is read, so trees are measured, not predicted.
    assert results.tau("lookup", "prose", 1.0, "kary:2,2")["value"] >= 1
    predicted = [row for row in results.rows("tau_predicted") if row["draft"] == "lookup"]
    assert all(row["tree"].startswith("chain:") for row in predicted)
    run = results.figure("tau_run", "lookup", "prose", 1.0, "chain:3")
    assert run["low"] <= results.tau("lookup", "prose", 1.0, "chain:3")["value"] <= run["high"]
    assert results.speedup("lookup", "prose", 1.0, "chain:3")["value"] > 0
    page = (results.directory / "report.html").read_text()
    assert "Where a method without weights proposes" in page


def test_a_requirement_is_of_trained_drafts_unless_it_names_the_method(results):
    with pytest.raises(RequirementError, match="mine on prose") as unmet:
        results.require("alpha[prose T=1] >= 1.1")
    assert "lookup on prose" not in str(unmet.value)
    with pytest.raises(RequirementError, match="lookup on prose"):
        results.require("alpha[prose T=1 draft=lookup] >= 1.1")


def test_the_command_that_decodes_with_it_names_the_method(results):
    for row in results.rows("speedup"):
        speed = (1.5, 1.499, 1.501) if row["draft"] == "lookup" else (0.5, 0.499, 0.501)
        row["value"], row["low"], row["high"] = speed
    head = lead(results)
    assert head.headline.startswith("Ship lookup")
    assert "--proposer prompt_lookup --tree" in head.command


def test_a_directory_of_that_name_is_a_draft_and_a_method_is_no_base(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = EvalConfig(
        target="t", draft=["a=b", "lookup=prompt_lookup"], id=["p.jsonl"], out="out", base="lookup"
    )
    with pytest.raises(InputError, match="--base lookup: has no weights"):
        check(config)
    assert check(replace(config, base=None)).base == "a"
    assert is_copying("prompt_lookup")
    Path("prompt_lookup").mkdir()
    assert not is_copying("prompt_lookup") and check(config).base == "lookup"
