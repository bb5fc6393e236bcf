"""Drafts of several training seeds: names, figures over all runs, and their two sources of
variation.
"""

import numpy as np
import pytest

from draftsmith.core.errors import RequirementError
from draftsmith.core.sampling import row_seed
from draftsmith.eval.bootstrap import PromptSums, estimate, resamples
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.request import check, named_runs
from draftsmith.eval.run import evaluate
from tests.results_made_up import BASE, BOTH, view
from tests.tiny_models import near, save_word_tokenizer, tiny_llama

RUNS = {
    "base": BASE,
    "jsd": {"id": 0.20, "ood": 0.10},
    "jsd#2": {"id": 0.24, "ood": 0.06},
    "jsd#3": {"id": 0.22, "ood": 0.08},
}


@pytest.fixture(scope="module")
def results():
    return view(RUNS, BOTH)


def _sums(results, draft, key):
    """A count of every seed on prose at T = 1."""
    counts = results.counts
    here = (counts["set"] == "prose") & (counts["temperature"] == 1.0)
    named = counts[here & (counts["draft"] == draft) & (counts["key"] == key)]
    return named.groupby("seed", observed=True)["value"].sum().to_numpy()


def test_figures_of_a_draft_add_up_the_counts_of_its_runs(results):
    assert (results.drafts, results.aligned) == (["base", "jsd"], ["jsd"])
    alpha = results.alpha("jsd", "prose")
    of_runs = _sums(results, "jsd", "alpha") / _sums(results, "jsd", "positions")
    assert alpha["value"] == pytest.approx(np.mean(of_runs))
    assert (alpha["seed_low"], alpha["seed_high"]) == pytest.approx((min(of_runs), max(of_runs)))
    assert alpha["seeds"] == 3
    emitted = _sums(results, "jsd", "emitted").sum()
    tau = results.tau("jsd", "prose")["value"]
    assert tau == pytest.approx(emitted / _sums(results, "jsd", "calls").sum())
    rate = emitted / _sums(results, "jsd", "decode_s").sum()
    alone = _sums(results, "target", "timed_tokens") / _sums(results, "target", "decode_s")
    speedup = results.figure("speedup", "jsd", "prose")
    assert speedup is not None and speedup["value"] == pytest.approx(rate / alone[0])
    gain = results.gain("jsd", "prose")
    base = results.alpha("base", "prose")["value"]
    assert gain is not None and base is not None
    assert gain["value"] == pytest.approx(alpha["value"] - base)
    ends = (gain["seed_low"], gain["seed_high"])
    assert ends == pytest.approx((min(of_runs) - base, max(of_runs) - base))
    assert results.alpha("base", "prose")["seeds"] is None


def test_the_interval_is_over_prompts_which_are_drawn_for_all_runs_at_once(results):
    counts = results.counts
    here = (counts["set"] == "prose") & (counts["temperature"] == 1.0)
    named = counts[here & (counts["draft"] == "jsd") & (counts["key"] == "alpha")]
    mean_P = named.groupby("prompt")["value"].sum().to_numpy() / 3
    picks = resamples(range(24), 300, row_seed(0, "bootstrap/prose/24"))
    by_hand = estimate(PromptSums.of(mean_P, [20] * 24), picks)
    alpha = results.alpha("jsd", "prose")
    assert [alpha[key] for key in by_hand] == pytest.approx(list(by_hand.values()))


def test_a_gain_over_a_base_with_seeds_spreads_over_every_pair_of_runs():
    more = {"id": 0.02, "ood": 0.0}
    results = view({"kl": BASE, "kl#2": more, "jsd": RUNS["jsd"], "jsd#2": BASE}, BOTH)
    assert (results.base, results.aligned) == ("kl", ["jsd"])
    base, mine = (
        _sums(results, draft, "alpha") / _sums(results, draft, "positions")
        for draft in ("kl", "jsd")
    )
    gain = results.gain("jsd", "prose")
    assert gain is not None and gain["value"] == pytest.approx(np.mean(mine) - np.mean(base))
    pairs = [new - old for new in mine for old in base]
    assert (gain["seed_low"], gain["seed_high"]) == pytest.approx((min(pairs), max(pairs)))
    assert gain["seeds"] == 2
    assert results.gain("kl", "prose") is None


def test_a_requirement_is_of_the_draft_and_of_every_run(results, golden):
    results.require("alpha[prose T=1] > 0.5", "gain[id T=1] > 0.1")
    value = results.alpha("jsd", "prose")["value"]
    with pytest.raises(RequirementError) as caught:
        results.require(f"alpha[prose T=1] > {value - 0.015:.4f}")
    (line,) = caught.value.unmet
    golden(line)
    with pytest.raises(RequirementError) as caught:
        results.require("gain[prose T=1] > 0.9")
    (line,) = caught.value.unmet
    golden(line)


@pytest.mark.parametrize(
    "drafts",
    [
        ["a=x", "a=x"],
        ["a=x", "a=nowhere/*"],
        ["runs/a", "other/a"],
        ["a=x", "b=y", "a=x"],
    ],
)
def test_wrong_runs_are_one_line(drafts, golden):
    with golden.raises():
        named_runs(drafts)


def test_runs_are_numbered_and_a_pattern_is_all_that_fit(tmp_path, golden):
    for name in ("s2", "s1", "t1"):
        (tmp_path / name).mkdir()
    named = named_runs([f"a={tmp_path}/s*", "base=b", "c=x", "c=y"])
    assert named == {
        "a": f"{tmp_path}/s1",
        "a#2": f"{tmp_path}/s2",
        "base": "b",
        "c": "x",
        "c#2": "y",
    }
    config = EvalConfig(target="t", draft=[f"a={tmp_path}/s*", "b=b"], id=["p.jsonl"], out="o")
    request = check(config)
    assert request.base == "a" and request.config.draft[:2] == [
        f"a={tmp_path}/s{i}" for i in (1, 2)
    ]
    with golden.raises():
        check(EvalConfig(target="t", draft=["a=x", "a=y"], base="a#2", id=["p.jsonl"], out="o"))


def test_two_seeds_are_evaluated_as_one_draft(tmp_path, capsys, golden):
    target = tiny_llama(0, 17)
    target.save_pretrained(tmp_path / "target")
    save_word_tokenizer(tmp_path / "target", 17)
    for name, noise, seed in (("base", 0.5, 1), ("one", 0.1, 2), ("two", 0.1, 3)):
        near(target, noise, seed).save_pretrained(tmp_path / name)
    prompts = [f'{{"prompt": "w{3 + i} w{4 + i} w{9 + i % 3}"}}\n' for i in range(6)]
    (tmp_path / "prose.jsonl").write_text("".join(prompts))

    def options(*runs, **more):
        drafts = [f"base={tmp_path / 'base'}", *(f"jsd={tmp_path / run}" for run in runs)]
        return dict(
            target=str(tmp_path / "target"),
            draft=drafts,
            id=[f"prose={tmp_path / 'prose.jsonl'}"],
            out=str(tmp_path / "out"),
            tree=["chain:2"],
            temperature=[1.0],
            max_new_tokens=8,
            speed_prompts=2,
            bootstrap=100,
            device="cpu",
            **more,
        )

    results = evaluate(**options("one", "two", base="jsd", require=["gain > -1"]))
    golden(capsys.readouterr().err, having="its runs")
    runs = _sums(results, "jsd", "alpha") / _sums(results, "jsd", "positions")
    alpha = results.alpha("jsd", "prose")
    assert alpha["value"] == pytest.approx(np.mean(runs)) and alpha["seeds"] == 2
    for figure in ("tau", "speedup", "tau_predicted"):
        assert results.figure(figure, "jsd", "prose", tree="chain:2") is not None
    gain = results.gain("base", "prose")
    assert gain is not None
    assert gain["value"] == pytest.approx(results.alpha("base", "prose")["value"] - np.mean(runs))
