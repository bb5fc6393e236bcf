"""Two evaluations side by side, and the published schema."""

import json
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

import draftsmith as ds
from draftsmith.cli.commands import run
from draftsmith_core.errors import InputError
from eval.compare import Comparison, compare
from eval.results import Results
from eval.schema import ResultsDocument, SuiteKind, json_schema_text
from tests.results_made_up import BASE, BOTH, made_up

ROOT = Path(__file__).parents[1]
GAINS: dict[str, dict[SuiteKind, float]] = {"base": BASE, "mine": {"id": 0.2, "ood": 0.1}}
BETTER: dict[str, dict[SuiteKind, float]] = {"base": BASE, "mine": {"id": 0.25, "ood": 0.1}}


def both(first: ResultsDocument, second: ResultsDocument) -> Comparison:
    return compare(Results(first, Path()), Results(second, Path()), bootstrap=300)


def test_a_draft_that_gained_in_distribution_is_found_to_have_and_the_others_are_not() -> None:
    found = both(made_up(GAINS, BOTH), made_up(BETTER, BOTH))
    # 2 drafts on 2 sets at 2 temperatures: alpha, tau and speedup of one method.
    assert len(found.rows) == 24 and all(row.paired and row.shared == 24 for row in found.rows)
    rows = {(r.figure, r.first["draft"], r.first["domain"], r.first["temperature"]): r for r in found.rows}
    for temperature in (0.0, 1.0):
        up = rows["alpha", "mine", "prose", temperature]
        assert up.sign == 1 and up.difference["value"] == pytest.approx(0.05, abs=0.01)
        assert rows["alpha", "base", "code", temperature].sign == 0
    fast = rows["speedup", "mine", "prose", 1.0]
    assert fast.first["value"] is not None and fast.second["value"] is not None
    assert fast.difference["value"] == pytest.approx(fast.second["value"] - fast.first["value"])
    assert ds.compare is compare


def test_an_evaluation_beside_itself_differs_in_nothing() -> None:
    found = both(made_up(GAINS, BOTH), made_up(GAINS, BOTH))
    assert found.remarks == [] and {row.difference["value"] for row in found.rows} == {0.0}
    assert {(row.difference["low"], row.difference["high"], row.sign) for row in found.rows} == {(0.0, 0.0, 0)}


def test_prompts_are_matched_by_their_tokens_and_sets_that_share_none_are_drawn_apart() -> None:
    first, second = made_up(GAINS, BOTH), made_up(GAINS, BOTH)
    prose, code = second["suites"]
    for suite in (prose, code):
        suite["digest"] = "another"
    # The same prompts in another order, three of them new; and a set of other prompts under the same name.
    prose["prompt_hashes"] = [*reversed(prose["prompt_hashes"][3:]), "a", "b", "c"]
    for counts in second["counts"]:
        if counts["domain"] == "prose" and counts["of"] == "alpha":
            counts["per_prompt"] = {
                key: [*reversed(values[3:]), 0, 0, 0] for key, values in counts["per_prompt"].items()
            }
    code["prompt_hashes"] = [f"{index:016x}" for index in range(24)]
    found = both(first, second)
    rows = [row for row in found.rows if row.figure == "alpha"]
    shared = {row.first["domain"]: (row.paired, row.shared) for row in rows}
    assert shared == {"prose": (True, 21), "code": (False, 0)}
    assert all(row.difference["value"] == pytest.approx(0.0) for row in rows if row.first["domain"] == "prose")
    apart = next(row for row in rows if row.first["domain"] == "code").difference
    assert apart["low"] is not None and apart["high"] is not None and apart["low"] < 0 < apart["high"]
    assert "12 of 24 rows are not paired: their sets share fewer than two prompts" in found.remarks


def test_what_else_differs_is_said() -> None:
    first, second = made_up(GAINS, BOTH), made_up(GAINS | {"new": BASE}, {**BOTH, "talk": "ood"})
    second["models"]["mine"]["fingerprint"] = "f" * 16
    second["config"]["max_new_tokens"] = 40
    second["conditions"][0]["busy"] = True
    second["clock"]["machine"]["cpu"] = "another"
    assert both(first, second).remarks == [
        "only the second has the drafts new",
        "only the second has the sets talk",
        "draft mine has other weights (mine, mine)",
        "--max_new_tokens was 20, then 40",
        "the machine was busy while the second was timed",
        "they were timed on different machines",
    ]
    with pytest.raises(InputError, match="nothing in common; the first has base, mine on prose, code at T = 0, 1, the"):
        both(first, made_up({"other": BASE}, BOTH))


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, gains in (("a", GAINS), ("b", BETTER)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps(made_up(gains, BOTH)))
    run("eval", ["--compare", str(tmp_path / "a" / "results.json"), str(tmp_path / "b"), "--json"])
    *lines, summary = capsys.readouterr().out.splitlines()
    assert len(json.loads(summary)["rows"]) == 24
    assert "Speedup over the target alone" in lines
    assert "method" not in lines[lines.index("Expected acceptance α") + 1]
    assert "method" in lines[lines.index("Tokens per target call τ") + 1]
    (row,) = [line for line in lines if line.split()[:4] == ["mine", "prose", "(ID)", "0"] and "chain" not in line]
    assert "+0.0" in row and row.endswith("24 shared prompts  higher")
    for words, said in (
        (["--compare", str(tmp_path / "a")], "--compare: List should have at least 2 items"),
        (["--compare", str(tmp_path / "a"), str(tmp_path / "gone")], "gone/results.json: no such file"),
    ):
        with pytest.raises(InputError, match=said):
            run("eval", words)


def test_the_published_schema_is_that_of_the_types_and_holds_for_results() -> None:
    text = (ROOT / "docs" / "results.schema.json").read_text()
    assert text == json_schema_text(), "write docs/results.schema.json again: `python -m eval.schema`"
    schema = json.loads(text)
    jsonschema.Draft202012Validator.check_schema(schema)
    document = json.loads(json.dumps(made_up(GAINS, BOTH)))
    jsonschema.validate(document, schema)
    changes: list[dict[str, Any]] = [{"rows": [{}]}, {"schema_version": 2}, {"more": 1}, {"base": None}]
    for change in changes:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**document, **change}, schema)


@pytest.mark.parametrize("text", ['{"schema_version": 1}', "[]"])
def test_results_of_another_version_are_refused_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(InputError, match="made by another version .*; evaluate again"):
        Results.load(tmp_path)
