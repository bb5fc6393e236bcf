"""What an evaluation refuses, in one line, before any model is loaded."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decode import VERIFIERS, DynamicTree, Tree
from draftsmith_core.errors import InputError
from draftsmith_core.prompts import Prompt
from eval.config import EvalConfig
from eval.measure import Suite, fit
from eval.request import Method, check

GOOD = EvalConfig(target="t", draft=["base=b", "mine=m"], id=["prose=h.jsonl"], ood=["code=a.jsonl"], out="o")


def test_defaults_choose_a_lossless_verifier_for_each_tree() -> None:
    request = check(replace(GOOD, tree=["chain:4", "kary:2,2"]))
    assert request.methods == [Method("chain:4", "speculative"), Method("kary:2,2", "mcsd")]
    assert all(method.lossless for method in request.methods)
    assert request.base == "base" and request.drafts == {"base": "b", "mine": "m"}
    assert [sampling.temperature for sampling in request.samplings] == [0.0, 1.0]


def test_trees_from_files_and_trees_that_grow_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "paths.json").write_text('{"paths": [[0], [1], [0, 0]], "stop": 0.1}')
    (tmp_path / "rates.json").write_text('{"acceptance": [0.6, 0.2], "nodes": 6, "depth": 3}')
    trees = [f"static:{tmp_path / 'paths.json'}", f"sequoia:{tmp_path / 'rates.json'}", "eagle2", "opt:nodes=8"]
    methods = check(replace(GOOD, tree=trees)).methods
    assert [method.verifier for method in methods] == ["mcsd", "mcsd", "exact", "exact"]
    assert methods[0].shape == Tree((-1, -1, 0), 0.1)
    assert methods[1].shape.size == 6 and methods[1].shape.depth <= 3
    assert methods[2].shape == DynamicTree(6, 10, 60)


def test_every_verifier_is_accepted_on_a_chain() -> None:
    methods = check(replace(GOOD, verifier=list(VERIFIERS))).methods
    assert [method.verifier for method in methods] == list(VERIFIERS)
    assert [method.verifier for method in methods if not method.lossless] == ["typical"]


def test_a_file_is_read_once(tmp_path: Path) -> None:
    (file := tmp_path / "tree.json").write_text('{"parents": [-1]}')
    (method,) = check(replace(GOOD, tree=[f"static:{file}"])).methods
    file.unlink()
    assert method.shape == Tree((-1,))


def test_a_value_may_hold_an_equals_sign() -> None:
    assert check(replace(GOOD, draft=["base=runs/lr=1"])).drafts == {"base": "runs/lr=1"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"draft": []}, "draft: List should have at least 1 item"),
        ({"draft": ["runs/a", "other/a"]}, "--draft other/a: the name 'a' is used twice; write NAME=other/a"),
        ({"draft": ["a=x", "a=y"]}, "the name 'a' is used twice"),
        ({"draft": ["target=x"]}, "this name is the target's"),
        ({"ood": ["prose=x"]}, "--ood prose: --id has this name"),
        ({"ood": ["id=x"]}, "stands for all sets of a kind"),
        ({"base": "bsae"}, "did you mean base?"),
        ({"tree": ["bush:3"]}, "unknown kind 'bush'"),
        ({"verifier": ["speculativ"]}, "did you mean speculative?"),
        ({"tree": ["kary:2,2"], "verifier": ["speculative"]}, "valid on chains only"),
        ({"tree": ["static:no/tree.json"]}, "no/tree.json: no such file"),
        ({"temperature": [-1.0]}, "temperature: Input should be greater than or equal to 0"),
        ({"bootstrap": 5}, "bootstrap: Input should be greater than or equal to 100"),
    ],
)
def test_bad_input_is_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        check(replace(GOOD, **change))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def _suite(*lengths: int) -> Suite:
    prompts = tuple(Prompt(f"p{i}", "d", (1,) * length) for i, length in enumerate(lengths))
    return Suite("d", "id", "d.jsonl", prompts, (("row 9", "empty"),), len(lengths) + 1)


def test_prompts_too_long_for_a_model_are_skipped_with_a_reason_and_counted() -> None:
    (fitted,) = fit([_suite(4, 30, 20)], 12, 32)
    assert [prompt.id for prompt in fitted.prompts] == ["p0", "p2"]
    assert fitted.skipped == (("row 9", "empty"), ("prompt p1", "30 tokens and 12 new ones exceed a context of 32"))
    assert len(fitted.prompts) + len(fitted.skipped) == fitted.rows == 4
    with pytest.raises(InputError, match=r"d\.jsonl: 9 tokens and 12 new ones exceed a context of 16"):
        fit([_suite(9)], 12, 16)
