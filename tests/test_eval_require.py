"""`eval --require`: what is judged, on which bound, and what each unmet line says."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from draftsmith.core.errors import RequirementError
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.request import check
from draftsmith.eval.results import Results
from draftsmith.eval.run import without_timings
from tests.results_made_up import BASE, BOTH, made_up

GOOD = EvalConfig(
    target="t", draft=["base=b", "mine=m"], id=["prose=h.jsonl"], ood=["code=a.jsonl"], out="o"
)


def test_a_tree_that_is_written_short_is_measured_under_its_full_name():
    methods = check(replace(GOOD, tree=["4", "chain", "kary:2,2"])).asked
    assert [method.tree for method in methods] == ["chain:4", "kary:2,2"]


@pytest.fixture
def results():
    """Figures at T=1; at T=0 all of alpha is 0.1 higher. Nothing was timed."""
    document = made_up(
        {"base": BASE, "mine": {"id": 0.2, "ood": 0.1}}, BOTH, trees=("chain:4",), timed=False
    )
    alphas = {
        ("base", "id"): (0.30, 0.28, 0.32),
        ("base", "ood"): (0.20, 0.18, 0.22),
        ("mine", "id"): (0.50, 0.45, 0.55),
        ("mine", "ood"): (0.25, None, None),
    }
    for row in document["rows"]:
        if row["figure"] == "alpha":
            more = 0.1 * (1 - row["temperature"])
            value, low, high = (
                x if x is None else x + more for x in alphas[row["draft"], row["kind"]]
            )
            row |= {"value": value, "low": low, "high": high}
        elif row["figure"] == "gain":
            row |= {"value": 0.2, "low": 0.01 if row["kind"] == "ood" else None, "high": 0.3}
        elif row["figure"] == "transfer":
            row |= {"value": None, "low": None, "high": None}
    return Results(document, Path("nowhere"))


def _unmet(results, *texts):
    try:
        results.require(*texts)
    except RequirementError as error:
        return error.unmet
    return ()


def test_a_requirement_is_judged_on_the_bound_and_not_on_the_figure(results, golden):
    assert not _unmet(
        results, "alpha[prose T=1] >= 0.45", "alpha[prose T=1] <= 0.55", "alpha[prose T=1]>0.449"
    )
    (low,) = _unmet(results, "alpha[prose T=1] > 0.45")
    golden(low)
    (high,) = _unmet(results, "alpha[prose T=1] < 0.55")
    golden(high)


def test_what_is_left_open_is_required_of_every_draft_but_the_base(results):
    assert len(_unmet(results, "alpha[prose] >= 0.9")) == 2  # two temperatures, one draft
    assert len(_unmet(results, "alpha >= 0.9")) == 4  # two prompt sets
    assert not _unmet(results, "alpha[prose draft=base T=1] >= 0.28", "gain[ood] > 0")


def test_no_interval_and_no_value_are_unmet(results, golden):
    (line,) = _unmet(results, "alpha[code T=1] > 0.1")
    golden(line)
    (line,) = _unmet(results, "transfer[code T=1] > 0.1")
    golden(line)
    (line,) = _unmet(results, "speedup[prose T=1] > 1")
    golden(line)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("alpha[code] => 1", "expected FIGURE[DOMAIN] >= NUMBER"),
        ("alpha >= half", "expected FIGURE[DOMAIN] >= NUMBER"),
        ("alhpa > 0", "did you mean alpha?"),
        ("alpha[prse] > 0", "did you mean prose?"),
        (
            "alpha[prose code] > 0",
            "'code' selects nothing; alpha takes one prompt set and draft=, T=",
        ),
        ("alpha[prose tree=chain:4] > 0", "'tree=chain:4' selects nothing"),
        ("tau[prose tree=chain:9] > 0", "tree 'chain:9' is not measured"),
        ("alpha[T=0.5] > 0", "T '0.5' is not measured; there are 0, 1"),
        ("gain[draft=base] > 0", "draft 'base' is not measured"),
        ("transfer[prose] > 0", "domain 'prose' is not measured"),
    ],
)
def test_a_wrong_requirement_is_refused_before_anything_is_measured(text, message, golden):
    with golden.raises() as caught:
        check(replace(GOOD, require=[text]))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_the_run_would_not_measure_is_refused(golden):
    with golden.raises():
        check(replace(GOOD, require=["speedup > 1"], speed_prompts=0))
    with golden.raises():
        check(replace(GOOD, ood=[], require=["transfer > 1"]))
    with golden.raises():
        check(replace(GOOD, draft=["base=b"], require=["gain > 0"]))
    assert check(replace(GOOD, draft=["base=b"], require=["alpha[ood T=1.0] > 0"])).base == "base"


@pytest.mark.slow
def test_the_command_ends_with_3_and_one_line_for_each(
    door, target_dir, draft_dir, prompts_file, tmp_path
):
    words = (
        f"eval --target {target_dir} --draft mine={draft_dir} --id prose={prompts_file} "
        f"--out {tmp_path} --tree chain:1"
    )
    words += (
        " --speed_prompts 0 --max_new_tokens 4 --temperature 1 --bootstrap 100 --json --require"
    )
    code, out, err = door(
        *words.split(), "alpha[prose] > 0", "tau[id] >= 4", "--require", "alpha<=0.0001"
    )
    lines = [line for line in err.splitlines() if line.startswith("draftsmith eval:")]
    assert code == 3
    assert [line.split(": ")[1] for line in lines] == [
        "required tau[id] >= 4",
        "required alpha<=0.0001",
    ]
    assert json.loads(out.splitlines()[-1])["results"] == str(tmp_path / "results.json")
    assert door("eval", "--render", tmp_path, "--require", "alpha > 0")[0] == 0
    assert door("eval", "--render", tmp_path, "--require", "alpha > 1")[0] == 3
    (tmp_path / "report.html").unlink()
    assert door("eval", "--render", tmp_path, "--require", "alpha[nowhere] > 0")[0] == 2
    assert not (
        tmp_path / "report.html"
    ).exists()  # nothing is drawn for a requirement that cannot be judged


@pytest.mark.parametrize("text", ['{"schema_version": 1}', "[]"])
def test_results_of_another_version_are_refused_in_one_line(tmp_path, text, golden):
    (tmp_path / "results.json").write_text(text)
    with golden.raises():
        Results.load(tmp_path)


def test_what_was_never_timed_is_not_timed_again(tmp_path, golden):
    whole = made_up({"base": BASE}, BOTH, prompts=2)
    whole["config"]["speed_prompts"] = 0
    (tmp_path / "results.json").write_text(json.dumps(whole))
    with golden.raises():
        without_timings(tmp_path)
