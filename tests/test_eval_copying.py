"""Prompt lookup in an evaluation: what it proposes along a text, and what is predicted of it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from draftsmith.core.errors import RequirementError
from draftsmith.core.prompts import Prompt
from draftsmith.core.sampling import Sampling
from draftsmith.decode.method import Method
from draftsmith.decode.propose.sources import CopyingDraft, JoinedDraft
from draftsmith.drafts.draft_sources import is_copying, models_of
from draftsmith.drafts.load import load_models
from draftsmith.eval.alpha import measure_alphas
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.copying import copied_tokens, copied_traces
from draftsmith.eval.counts import of_method
from draftsmith.eval.formulas import Continuation
from draftsmith.eval.request import check
from draftsmith.eval.run import evaluate
from draftsmith.eval.summary import lead
from draftsmith.eval.timing import Task, answers, continuations
from tests.tiny_models import at_depth, stirred_head, tiny_llama

LOOKUP = CopyingDraft("prompt_lookup")
TEXT = Continuation("a", (3, 4, 5, 3, 4), (5, 3, 9))


def test_what_followed_earlier_is_proposed_at_its_depth():
    tokens_DPL, _ = copied_tokens([TEXT], 2, LOOKUP, beside=True)
    # After 3 4 came 5 3. After 4 5 came 3 4. After 5 3 came 4, and then 5.
    assert tokens_DPL.tolist() == [[[5, 3, 4]], [[-1, 3, 4]]]


def test_alpha_is_the_chance_of_the_copied_token_and_zero_without_one():
    p_NV = torch.full((4, 12), 0.05)
    p_NV[0, 5] = 0.45
    texts = [TEXT, Continuation("b", (7,), (8,))]
    traces = copied_traces(texts, p_NV, 2, ["exact"], LOOKUP)
    assert traces.sums("alpha") == pytest.approx([0.55, 0.0])
    assert traces.sums("offers") == [3, 0]
    assert traces.values["ratio"][0].tolist() == [[1, 1, 0], [0, 0, 0]]


def _write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module", params=["in-its-place", "beside"])
def results(request, target_dir, draft_dir, tmp_path_factory):
    """With lookup in the place of a draft, as on a CPU, and beside it, as on a GPU."""
    root = tmp_path_factory.mktemp("copying")
    texts = ["a b c a b c a" + " d e" * i for i in range(4)]
    _write(root / "prose.jsonl", [{"id": str(i), "prompt": text} for i, text in enumerate(texts)])
    pair = load_models(str(target_dir))
    prompts = [Prompt(str(i), "p", tuple(pair.tokenizer(texts[i])["input_ids"])) for i in range(2)]
    store: list[object] = []
    for temperature in (0.0, 1.0, 1.0):
        sampling = Sampling(temperature=temperature)
        for row in answers(pair.target, prompts, sampling, max_new_tokens=24, seed=len(store)):
            store.append({"prompt_ids": row.prompt_ids, "response_ids": row.output_ids})
    _write(root / "store.jsonl", store)
    config = EvalConfig(
        target=str(target_dir),
        draft=[
            "ahead=lookahead",
            f"found=retrieval:{root / 'store.jsonl'}",
            "lookup=prompt_lookup",
            f"both=prompt_lookup+{draft_dir}",
            f"mine={draft_dir}",
        ],
        id=[f"prose={root / 'prose.jsonl'}"],
        out=str(root / request.param),
        tree=["chain:3", "kary:2,2"],
        max_new_tokens=24,
        speed_prompts=2,
        bootstrap=100,
        device="cpu",
    )
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "beside":
            for file in ("decode.propose.lookup_first", "eval.alpha"):
                patch.setattr(f"draftsmith.{file}.stands_beside", lambda _, trees: trees)
        return evaluate(config)


@pytest.mark.parametrize("draft", ["lookup", "found"])
def test_it_is_compared_like_a_draft_and_predicted_as_it_decodes(results, draft):
    """Law 10: at temperature 0 the prediction is what is measured."""
    assert results.base == "mine" and results.aligned == []
    assert results.document["models"][draft]["parameters"] == 0
    for figure in ("accept", "tau"):
        measured = results.series(figure, draft, "prose", 0.0, "chain:3")
        predicted = results.series(f"{figure}_predicted", draft, "prose", 0.0, "chain:3")
        pairs = list(zip(measured, predicted, strict=True))
        assert pairs and all(a["value"] == pytest.approx(b["value"]) for a, b in pairs)
    assert results.figure("identical", draft, "prose", 0.0, "chain:3")["value"] == 1
    alpha, share, accepted = (
        results.figure(name, draft, "prose", 1.0)["value"]
        for name in ("alpha", "offered", "alpha_offered")
    )
    assert 0 < share <= 1 and alpha == pytest.approx(share * accepted)
    # Only the first candidate of a place is read, so trees are measured, not predicted.
    assert results.tau(draft, "prose", 1.0, "kary:2,2")["value"] >= 1
    predicted = [row for row in results.select("tau_predicted") if row["draft"] == draft]
    assert all(row["tree"].startswith("chain:") for row in predicted)
    run = results.figure("tau_run", draft, "prose", 1.0, "chain:3")
    assert run["low"] <= results.tau(draft, "prose", 1.0, "chain:3")["value"] <= run["high"]
    assert results.figure("speedup", draft, "prose", 1.0, "chain:3")["value"] > 0


def test_lookahead_is_decoded_with_its_own_tree_and_has_no_alpha(results, golden):
    """Law 1; and law 3: alpha is over no position."""
    assert results.figure("identical", "ahead", "prose", 0.0)["value"] == 1
    assert results.methods_of("ahead") == [("its own", "exact")]
    assert results.methods_of("mine") == [("chain:3", "speculative"), ("kary:2,2", "mcsd")]
    tau = results.tau("ahead", "prose", 1.0)
    assert tau["value"] > 1 and tau["low"] < tau["high"]
    assert tau["tree"] == "its own"
    assert results.figure("speedup", "ahead", "prose", 1.0)["value"] > 0
    assert results.alpha("ahead", "prose", 1.0)["value"] is None
    assert not [
        row for row in results.select("tau_predicted", "tau_gain") if row["draft"] == "ahead"
    ]
    trees = {row["tree"] for row in results.select("tau", "speedup") if row["draft"] != "ahead"}
    assert trees == {"chain:3", "kary:2,2"}
    results.require("tau[prose T=0 draft=ahead] >= 1")
    with golden.raises():
        results.require("tau[prose draft=ahead tree=chain:3] >= 1")


@pytest.mark.parametrize("tree", ["chain:3", "kary:2,2"])
def test_lookup_before_a_draft_is_predicted_as_it_decodes(results, tree):
    """Law 10, and law 1: at temperature 0 the outputs are the target's."""
    for figure in ("accept", "tau"):
        measured = results.series(figure, "both", "prose", 0.0, tree)
        predicted = results.series(f"{figure}_predicted", "both", "prose", 0.0, tree)
        pairs = list(zip(measured, predicted, strict=True))
        assert pairs and all(a["value"] == pytest.approx(b["value"]) for a, b in pairs)
    assert results.figure("identical", "both", "prose", 0.0, tree)["value"] == 1
    run = results.figure("tau_run", "both", "prose", 1.0, tree)
    assert run["low"] <= results.tau("both", "prose", 1.0, tree)["value"] <= run["high"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_lookup_and_the_draft_give_adds_up(results, temperature):
    def value(figure, draft="both", tree=None):
        found: float = results.figure(figure, draft, "prose", temperature, tree)["value"]
        return found

    share = value("offered")
    assert 0 < share < 1
    if results.directory.name == "beside":
        assert share == value("offered", "lookup")
        # What the copy adds, where the draft is asked at every position.
        assert value("alpha") >= value("alpha_drafted")
    else:
        # Where two tokens match lookup proposes, alone it does so where one does.
        assert share <= value("offered", "lookup")
        whole = share * value("alpha_offered") + (1 - share) * value("alpha_drafted")
        assert value("alpha") == pytest.approx(whole)
    counts = results.counts
    here = (counts["draft"] == "both") & (counts["temperature"] == temperature)
    sums = counts[here & (counts["tree"] == "chain:3")].groupby("key")["value"].sum()
    from_lookup = value("lookup_accepted", tree="chain:3")
    from_draft = value("draft_accepted", tree="chain:3")
    assert from_lookup > 0 and 0 < value("lookup_calls", tree="chain:3") < 1
    assert from_lookup + from_draft == pytest.approx(sums["accepted"] / sums["calls"])


def test_a_draft_is_loaded_once_and_lookup_before_it_is_no_alignment(results):
    models = results.document["models"]
    assert models["both"]["name"] == models["mine"]["name"]
    assert models["both"]["kind"] == "prompt_lookup+draft" and results.aligned == []
    joined = "prompt_lookup+mine"
    assert models_of({"a": "mine", "b": joined, "c": "prompt_lookup"}) == {"a": "mine"}
    assert models_of({"b": joined, "c": joined}) == {"b": "mine"}


def test_a_requirement_is_of_trained_drafts_unless_it_names_the_method(results, golden):
    with golden.raises(RequirementError) as unmet:
        results.require("alpha[prose T=1] >= 1.1")
    assert "lookup on prose" not in str(unmet.value)
    with golden.raises(RequirementError):
        results.require("alpha[prose T=1 draft=lookup] >= 1.1")


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        ("lookup", "--draft prompt_lookup --tree"),
        ("found", "--draft retrieval:{found} --tree"),
        ("ahead", "--draft lookahead --verifier exact"),
        ("both", "--draft prompt_lookup+{mine} --tree"),
    ],
)
def test_the_command_that_decodes_with_it_names_the_method(results, draft, words):
    for row in results.select("tau_needed"):
        row["value"], row["low"], row["high"] = 1.0, 0.999, 1.001
    for row in results.select("speedup"):
        speed = (1.5, 1.499, 1.501) if row["draft"] == draft else (0.5, 0.499, 0.501)
        row["value"], row["low"], row["high"] = speed
    for row in results.document["conditions"]:
        row["busy"] = False
    head = lead(results)
    assert head.headline.startswith(f"Ship {draft}")
    models = results.document["models"]
    sources = {name: models[name]["name"] for name in ("mine", "found")}
    assert words.format(**sources) in head.command


def test_a_directory_of_that_name_is_a_draft_and_a_method_is_no_base(tmp_path, monkeypatch, golden):
    monkeypatch.chdir(tmp_path)
    config = EvalConfig(
        target="t", draft=["a=b", "lookup=prompt_lookup"], id=["p.jsonl"], out="out", base="lookup"
    )
    with golden.raises():
        check(config)
    both = [*config.draft, "both=prompt_lookup+b"]
    with golden.raises():
        check(replace(config, draft=both, base="both"))
    assert check(replace(config, base=None)).base == "a"
    assert is_copying("prompt_lookup")
    Path("prompt_lookup").mkdir()
    assert not is_copying("prompt_lookup") and check(config).base == "lookup"


@pytest.mark.parametrize(
    ("draft", "tree"),
    [
        ("lookup=prompt_lookups", "chain:2"),
        ("prompt-lookup+d", "chain:2"),
        ("found=retrieval", "chain:2"),
        ("ahead=lookahead", "none"),
    ],
)
def test_what_is_no_method_without_weights_is_refused(draft, tree, golden):
    config = EvalConfig(target="t", draft=["a=b", draft], id=["p.jsonl"], out="o", tree=[tree])
    with golden.raises():
        check(config)


@pytest.mark.parametrize("kind", ["eagle", "medusa", "dspark"])
def test_a_head_behind_lookup_is_predicted_as_it_decodes(kind):
    """Heads guess each depth from the root, so what follows a copy is read at its own depth."""
    target = tiny_llama(0, layers=3, spread=0.5)
    draft = JoinedDraft(stirred_head(kind, target))
    prompts = [Prompt(str(i), "prose", (3, 4, 5, 3, 4, i)) for i in range(5, 9)]
    greedy = Sampling(temperature=0.0)
    task = Task(target, prompts, greedy, eos=(), max_new_tokens=16, seed=0)
    baseline = task.baseline()
    methods = [Method.of("chain:3", "speculative"), Method.of("kary:2,2", "mcsd")]
    rows = continuations(prompts, baseline)
    measured = measure_alphas(target, {"both": draft}, rows, greedy, methods, batch_size=2)["both"]
    for method in methods:
        counts = of_method(task.decoding(draft, method, baseline)["counts"], method)
        assert sum(counts["identical"]) == 4
        assert sum(counts["copied_calls"]) > 0
        predicted = of_method(measured, method)
        assert predicted["expected_calls"] == pytest.approx(counts["calls"])
        accepted = np.sum(at_depth(measured, "expected_accepted", method))
        assert accepted == pytest.approx(sum(counts["accepted"]))
