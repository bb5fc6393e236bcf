"""Suites: every file of configs/prompts/ on rows with its data set's columns, logs of servers, and
what is refused.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml

from draftsmith.core import prompt_rows
from draftsmith.core.errors import InputError
from draftsmith.core.prompt_rows import iterate_rows, parse_named
from draftsmith.core.suites import expand, load_suite, suite_names
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.request import check
from tests.distilled import write_rows


def _user(text):
    return {"messages": [{"role": "user", "content": text}]}


def _spec_bench(category):
    other = "qa" if category == "rag" else "rag"
    return [
        {"question_id": 1, "category": other, "turns": ["another task"]},
        {
            "question_id": 2,
            "category": category,
            "turns": ["the first turn", "the second"],
            "reference": [],
        },
    ]


def _speed_bench(category):
    """As on the hub, filled; as NVIDIA's prepare.py of NeMo Skills writes it; another category."""
    row = {"question_id": "a", "category": category, "sub_category": "s", "multiturn": True}
    messages = [{"role": "user", "content": text} for text in ("another first turn", "then")]
    return [
        row | {"turns": ["the first turn", "the second"], "source": "x", "src_id": "1"},
        row | {"messages": messages, "difficulty": None},
        row | {"category": "other", "turns": ["not this"]},
    ]


SPEED_BENCH = (
    "coding humanities math multilingual qa rag reasoning roleplay stem summarization writing"
).split()
REDHAT = (
    "HumanEval math_reasoning qa question rag summarization tool_call translation writing"
).split()
LANGUAGES = "de en es fr ja mix vi zh".split()
FIRST = _user("the first turn")
# By suite: rows with the data set's own columns, and the prompts they make.
_FILE = Path(__file__).with_name("suites.yaml")
STAND_INS: dict[str, tuple[list[dict[str, Any]], list[Any]]] = {
    name: (suite["rows"], suite["prompts"])
    for name, suite in yaml.safe_load(_FILE.read_text(encoding="utf-8")).items()
}
STAND_INS |= {
    "spec-bench-mt-bench": (_spec_bench("roleplay"), [FIRST]),
    **{
        f"spec-bench-{task}": (_spec_bench(category), [FIRST])
        for task, category in {
            "translation": "translation",
            "summarization": "summarization",
            "qa": "qa",
            "math": "math_reasoning",
            "rag": "rag",
        }.items()
    },
    **{
        f"speed-bench-{category}": (_speed_bench(category), [FIRST, _user("another first turn")])
        for category in SPEED_BENCH
    },
    **{
        f"speed-bench-throughput-{length}k-{tier}": (
            _speed_bench(tier.replace("-", "_")),
            [FIRST, _user("another first turn")],
        )
        for length in (1, 2, 8, 16, 32)
        for tier in ("low-entropy", "mixed", "high-entropy")
    },
    **{
        f"redhat-{subset}": ([{"prompt": " def f():\n"}], [_user(" def f():\n")])
        for subset in REDHAT
    },
    **{f"multi-spec-{language}": (_spec_bench("qa")[1:], [FIRST]) for language in LANGUAGES},
    "alpaca": (
        [
            {"instruction": "Add.", "input": "1 and 2", "output": "3", "text": "Below is"},
            *(
                {"instruction": f"Do {i}.", "input": "", "output": "", "text": ""}
                for i in range(1, 501)
            ),
        ],
        [_user("Add.\n\n1 and 2"), _user("Do 500.")],
    ),
}


def test_every_suite_has_a_stand_in():
    assert suite_names() == sorted(STAND_INS)


@pytest.mark.parametrize("name", sorted(STAND_INS))
def test_a_suite_makes_its_prompts_of_its_data_sets_columns(name, tmp_path, monkeypatch, golden):
    rows, wanted = STAND_INS[name]
    file = write_rows(tmp_path / "rows.jsonl", *rows)
    assert list(iterate_rows(f"@{name}:{file}")) == wanted
    suite = load_suite(name)
    assert suite.version >= 1 and suite.citation and suite.licence and suite.prompts >= 80
    if suite.gated:
        with golden.raises():
            list(iterate_rows(f"@{name}"))
        return
    # From the hub the same rows make the same prompts.
    asked: list[Any] = []

    def hub(*names, **which):
        asked.append((*names, which))
        return (prompt_rows.Record(number, row) for number, row in enumerate(rows, 1))

    monkeypatch.setattr(prompt_rows, "_hub_records", hub)
    assert list(iterate_rows(f"@{name}")) == wanted
    assert asked == [
        (f"@{name}", suite.dataset, suite.split, {"name": suite.subset, "data_files": suite.files})
    ]


def test_a_family_stands_for_its_suites_and_a_directory_holds_their_files(tmp_path, golden):
    for subset in REDHAT:
        write_rows(tmp_path / f"{subset}.jsonl", {"prompt": subset})
    place = f"{tmp_path}"
    named = parse_named("--ood", [f"@redhat:{place}", f"x=@speed-bench:{place}"])
    assert list(named) == [
        *(f"redhat-{subset}" for subset in REDHAT),
        *(f"x-{category}" for category in SPEED_BENCH),
    ]
    assert named["x-qa"] == f"@speed-bench-qa:{place}"
    for subset in REDHAT:
        assert list(iterate_rows(named[f"redhat-{subset}"])) == [_user(subset)]
    with golden.raises():
        list(iterate_rows(named["x-qa"]))
    write_rows(tmp_path / "qualitative.jsonl", *_speed_bench("qa"))
    assert next(iterate_rows(named["x-qa"])) == FIRST
    # Only where sets are named; elsewhere one suite is wanted.
    with golden.raises():
        list(iterate_rows("@speed-bench"))
    assert expand("@gsm8k") == expand("gsm8k.jsonl") == {}


def test_rows_that_are_still_placeholders_name_the_script_that_fills_them(tmp_path, golden):
    """Some rows of SPEED-Bench hold the texts of others, whose licences forbid copies."""
    unfilled = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    for turns in ([unfilled, unfilled], [f"{unfilled}\n\nSummarize {{article}}"]):
        row = {"category": "qa", "turns": turns}
        file = write_rows(tmp_path / "qualitative.jsonl", row)
        with pytest.raises(InputError) as error:
            list(iterate_rows(f"@speed-bench-qa:{file}"))
        golden(str(error.value))
        # Rows of other categories may be unfilled.
        assert not list(iterate_rows(f"@speed-bench-rag:{file}"))


def test_a_suite_takes_every_nth_row_up_to_its_number_and_no_prompt_twice(tmp_path):
    rows = [{"question": f"q{index // 2}", "answer": ""} for index in range(4000)]
    found = [
        row["messages"][0]["content"]
        for row in iterate_rows(f"@gsm8k:{write_rows(tmp_path / 'r.jsonl', *rows)}")
    ]
    assert found == [f"q{13 * index}" for index in range(100)]


def test_options_name_suites_and_give_their_names_to_the_sets(golden):
    options: dict[str, Any] = {"target": "t", "draft": ["a=b"], "out": "o"}
    found = check(
        EvalConfig(id=["@gsm8k"], ood=["@humaneval:rows.jsonl", "talk=@mt-bench"], **options)
    )
    assert found.id_sets == {"gsm8k": "@gsm8k"}
    assert found.ood_sets == {"humaneval": "@humaneval:rows.jsonl", "talk": "@mt-bench"}
    # What has no name is called as its file or directory.
    values = [
        "a=x/y",
        "runs/Llama-3.2-1B",
        "p/code.train.jsonl",
        "hub/owner:test",
        "s3://b/d.jsonl.gz",
    ]
    assert list(check(EvalConfig(id=values, **options)).id_sets) == [
        "a",
        "Llama-3.2-1B",
        "code.train",
        "owner",
        "d",
    ]
    with golden.raises():
        check(EvalConfig(id=["maths=@gsm9k"], **options))
    with golden.raises():
        check(EvalConfig(id=["@gsm8k", "@gsm8k:rows.jsonl"], **options))
