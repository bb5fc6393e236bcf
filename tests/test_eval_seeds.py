"""Drafts of several training seeds: names, figures over all runs, and their two sources of
variation.
"""

from typing import Any

import numpy as np
import pytest

from draftsmith.core.errors import InputError, RequirementError
from draftsmith.core.sampling import row_seed
from draftsmith.eval.bootstrap import PromptSums, estimate, resamples
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.evaluate import evaluate
from draftsmith.eval.report.findings import lead
from draftsmith.eval.report.page import render_page
from draftsmith.eval.request import check
from draftsmith.eval.results import Results
from draftsmith.eval.schema import SuiteKind
from draftsmith.eval.seeds import Spread, named_runs
from draftsmith.eval.summary import headline_and_table
from tests.results_made_up import BASE, BOTH, view
from tests.tiny_models import near, save_word_tokenizer, tiny_llama

RUNS: dict[str, dict[SuiteKind, float]] = {
    "base": BASE,
    "jsd#1": {"id": 0.20, "ood": 0.10},
    "jsd#2": {"id": 0.24, "ood": 0.06},
    "jsd#3": {"id": 0.22, "ood": 0.08},
}


@pytest.fixture(scope="module")
def results() -> Results:
    return view(RUNS, BOTH)


def _alpha(results: Results, draft: str) -> float:
    value = results.alpha(draft, "prose")["value"]
    assert value is not None
    return value


def _sums(results: Results, draft: str, of: str, key: str) -> float:
    counts = results.counts(of)
    (found,) = [
        row["per_prompt"][key]
        for about, row in counts.items()
        if (about.draft, about.domain, about.temperature) == (draft, "prose", 1.0)
    ]
    return float(np.sum(found))


def test_figures_of_a_draft_add_up_the_counts_of_its_runs(results):
    runs = ["jsd#1", "jsd#2", "jsd#3"]
    assert results.drafts == ["base", *runs]
    assert (results.shown, results.aligned) == (["base", "jsd"], ["jsd"])
    alpha = results.alpha("jsd", "prose")
    of_runs = [results.alpha(run, "prose")["value"] for run in runs]
    assert alpha["value"] == pytest.approx(np.mean(of_runs))
    assert results.spread(alpha) == Spread(min(of_runs), max(of_runs), "3")
    emitted = sum(_sums(results, run, "decoding", "emitted") for run in runs)
    calls = sum(_sums(results, run, "decoding", "target_calls") for run in runs)
    assert results.tau("jsd", "prose")["value"] == pytest.approx(emitted / calls)
    rate = emitted / sum(_sums(results, run, "speed", "decode_s") for run in runs)
    alone = _sums(results, "target", "speed", "emitted") / _sums(
        results, "target", "speed", "decode_s"
    )
    speedup = results.speedup("jsd", "prose")
    assert speedup is not None and speedup["value"] == pytest.approx(rate / alone)
    gain = results.gain("jsd", "prose")
    assert gain is not None
    base = results.alpha("base", "prose")["value"]
    assert gain["value"] == pytest.approx(alpha["value"] - base)
    spread = results.spread(gain)
    assert spread is not None
    assert spread[:2] == pytest.approx((min(of_runs) - base, max(of_runs) - base))
    assert results.spread(results.alpha("jsd#1", "prose")) is None
    assert results.spread(results.alpha("base", "prose")) is None


def test_the_interval_is_over_prompts_which_are_drawn_for_all_runs_at_once(results):
    of_prompt = [
        counts["per_prompt"]["sum"]
        for key, counts in results.counts("alpha").items()
        if key.draft.startswith("jsd#") and (key.domain, key.temperature) == ("prose", 1.0)
    ]
    mean_P = np.mean(of_prompt, axis=0)
    picks = resamples(range(24), 300, row_seed(0, "bootstrap/prose/24"))
    by_hand = estimate(PromptSums.of(mean_P, [20] * 24), picks)
    alpha = results.alpha("jsd", "prose")
    assert len(of_prompt) == 3
    assert [alpha[key] for key in by_hand] == pytest.approx(list(by_hand.values()))


def test_a_gain_over_a_base_with_seeds_spreads_over_every_pair_of_runs():
    more: dict[SuiteKind, float] = {"id": 0.02, "ood": 0.0}
    results = view({"kl#1": BASE, "kl#2": more, "jsd#1": RUNS["jsd#1"], "jsd#2": BASE}, BOTH)
    assert (results.base, results.aligned) == ("kl", ["jsd"])
    one, two, *mine = [_alpha(results, run) for run in results.drafts]
    gain = results.gain("jsd", "prose")
    assert gain is not None and gain["value"] == pytest.approx(np.mean(mine) - np.mean([one, two]))
    spread = results.spread(gain)
    assert spread is not None and spread.seeds == "2 x 2"
    pairs = [new - old for new in mine for old in (one, two)]
    assert spread[:2] == pytest.approx((min(pairs), max(pairs)))
    assert results.gain("kl", "prose") is None


def test_a_requirement_is_of_the_draft_and_of_every_run(results):
    results.require(
        "alpha[prose T=1] > 0.5", "gain[id T=1] > 0.1", "alpha[draft=jsd#2 prose] > 0.5"
    )
    value = results.alpha("jsd", "prose")["value"]
    with pytest.raises(RequirementError) as caught:
        results.require(f"alpha[prose T=1] > {value - 0.015:.4f}")
    (line,) = caught.value.unmet
    assert "seeds from" in line and "its lowest seed is not >" in line
    with pytest.raises(RequirementError) as caught:
        results.require("gain[prose T=1] > 0.9")
    (line,) = caught.value.unmet
    assert line.startswith("required gain[prose T=1] > 0.9: jsd on prose") and "low bound" in line


def test_what_is_quoted_has_both_sources_of_variation(results):
    page = render_page(results)
    alpha = results.alpha("jsd", "id")
    spread = results.spread(alpha)
    assert spread is not None
    quoted = f"3 seeds {spread.low:.3f} to {spread.high:.3f}"
    assert quoted.replace(" seeds", "\N{NO-BREAK SPACE}seeds") in page
    assert "95 % interval over prompts" in lead(results).seeds
    lines = headline_and_table(results)
    assert any(quoted in line for line in lines) and lead(results).seeds in lines
    assert not any("jsd#1 " in line for line in lines[1:])
    assert not lead(view({"base": BASE, "jsd": RUNS["jsd#1"]}, BOTH)).seeds
    # What is shipped is one run.
    assert "Ship jsd#" in lead(results).headline


@pytest.mark.parametrize(
    ("drafts", "message"),
    [
        (["a=x", "a=x"], "is given twice"),
        (["a=x", "a=nowhere/*"], "fits no directory"),
        (["runs/a", "other/a"], "the name 'a' is used twice"),
        (["a=x", "b=y", "a=x"], "is given twice"),
    ],
)
def test_wrong_runs_are_one_line(drafts, message):
    with pytest.raises(InputError, match=message):
        named_runs(drafts)


def test_runs_are_numbered_and_a_pattern_is_all_that_fit(tmp_path):
    for name in ("s2", "s1", "t1"):
        (tmp_path / name).mkdir()
    named = named_runs([f"a={tmp_path}/s*", "base=b", "c=x", "c=y"])
    assert named == {
        "a#1": f"{tmp_path}/s1",
        "a#2": f"{tmp_path}/s2",
        "base": "b",
        "c#1": "x",
        "c#2": "y",
    }
    config = EvalConfig(target="t", draft=[f"a={tmp_path}/s*", "b=b"], id=["p.jsonl"], out="o")
    request = check(config)
    assert request.base == "a" and request.config.draft[:2] == [
        f"a={tmp_path}/s{i}" for i in (1, 2)
    ]
    with pytest.raises(InputError, match="--base a#1"):
        check(EvalConfig(target="t", draft=["a=x", "a=y"], base="a#1", id=["p.jsonl"], out="o"))


def test_two_seeds_are_evaluated_as_one_draft(tmp_path, capsys):
    target = tiny_llama(0, 17)
    target.save_pretrained(tmp_path / "target")
    save_word_tokenizer(tmp_path / "target", 17)
    for name, noise, seed in (("base", 0.5, 1), ("one", 0.1, 2), ("two", 0.1, 3)):
        near(target, noise, seed).save_pretrained(tmp_path / name)
    tiny_llama(1, 17, layers=2).save_pretrained(tmp_path / "small")
    prompts = [f'{{"prompt": "w{3 + i} w{4 + i} w{9 + i % 3}"}}\n' for i in range(6)]
    (tmp_path / "prose.jsonl").write_text("".join(prompts))

    def options(*runs: str, **more: object) -> dict[str, Any]:
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
    assert "draft jsd: its runs differ in no recorded option" in capsys.readouterr().err
    runs = [_alpha(results, f"jsd#{number}") for number in (1, 2)]
    assert results.alpha("jsd", "prose")["value"] == pytest.approx(np.mean(runs))
    for figure in ("tau", "speedup", "tau_predicted", "headroom"):
        assert results.figure(figure, "jsd", "prose", tree="chain:2") is not None
    gain = results.gain("base", "prose")
    assert gain is not None
    assert gain["value"] == pytest.approx(_alpha(results, "base") - np.mean(runs))
    spread = results.spread(gain)
    assert spread is not None and spread.seeds == "1 x 2"
    assert {row["draft"] for row in results.rows("gain_by_part")} == {"base"}
    with pytest.raises(InputError, match=r"--draft jsd: its runs are llama of [\d,]+ and llama of"):
        evaluate(**options("one", "small"))
