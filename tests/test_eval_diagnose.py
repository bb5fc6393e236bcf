"""Why a draft is accepted or not: what is taken from p and q against what can be counted, its rows,
and the page.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.core.prompts import Prompt
from draftsmith.core.sampling import Sampling, acceptance, probs
from draftsmith.eval.acceptance import Continuation, Positions
from draftsmith.eval.bootstrap import signs
from draftsmith.eval.diagnosis.diagnose import Diagnosis, diagnosis_of
from draftsmith.eval.diagnosis.rows import bin_names, diagnosis_rows, similarities, token_class
from draftsmith.eval.method import Method
from draftsmith.eval.report.page import render_page
from draftsmith.eval.results import Results
from draftsmith.eval.rows import Measured, Setting
from draftsmith.eval.schema import Row, SuiteKind
from draftsmith.eval.suites import Suite
from tests.results_made_up import BASE, BOTH, made_up

V, N = 9, 6
HOT, GREEDY = Sampling(temperature=1.0), Sampling(temperature=0.0)


def pair(sampling: Sampling, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """p, q and the draft's logits at N positions."""
    one = torch.Generator().manual_seed(seed)
    p, q = 2 * torch.randn(N, V, generator=one), 2 * torch.randn(N, V, generator=one)
    return probs(p, sampling), probs(q, sampling), q


def diagnosed(sampling: Sampling) -> tuple[Diagnosis, torch.Tensor, torch.Tensor, torch.Tensor]:
    p, q, logits = pair(sampling)
    texts = [Continuation("a", [1], [0, 1, 2, 3]), Continuation("b", [1], [4, 5])]
    return diagnosis_of(sampling, Positions(0, texts, p, q, logits)), p, q, logits


@pytest.mark.parametrize("sampling", [HOT, GREEDY])
def test_what_is_kept_of_every_position(sampling):
    found, p, q, logits = diagnosed(sampling)
    alpha = acceptance(p, q).tolist()
    assert found["alpha"] == [pytest.approx(alpha[:4]), pytest.approx(alpha[4:])]
    entropy = -(p * p.clamp(min=1e-30).log2()).sum(1)
    assert found["entropy"][0] == pytest.approx(entropy[:4].tolist(), abs=1e-5)
    sums = torch.tensor(found["confidence"][0]).sum(0)
    # All of q is drafted, and the target takes a token of it with the chance sum_x p q.
    assert sums[0] == pytest.approx(4.0, abs=1e-5) and sums[2] == pytest.approx(
        float((p * q)[:4].sum()), abs=1e-5
    )
    if sampling.greedy:
        sure = logits.softmax(1).max(1).values
        assert sums[1] == pytest.approx(float(sure[:4].sum()), abs=1e-5)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (" the", "words"),
        ("é", "words"),
        ("12", "digits"),
        ("x1", "digits"),
        (" {", "code"),
        ("self._", "code"),
        (".", "punctuation"),
        (" \n", "whitespace"),
        ("", "whitespace"),
        ("мир", "non-Latin"),
        ("\ufffd", "non-Latin"),
    ],
)
def test_classes_of_tokens(text, name):
    assert token_class(text) == name


def suite(name: str, kind: SuiteKind, *ids: tuple[int, ...]) -> Suite:
    return Suite(
        name,
        kind,
        "f",
        tuple(Prompt(f"{name}{i}", name, each) for i, each in enumerate(ids)),
        (),
        len(ids),
    )


def test_similarity_is_the_share_of_trigrams_that_the_nearest_other_id_prompt_has():
    prose = suite("prose", "id", (1, 2, 3, 4, 5), (1, 2, 3, 4, 9), (7, 7))
    code = suite("code", "ood", (2, 3, 4, 5, 6), (8, 8, 8, 8))
    assert similarities([prose, code]) == {"prose": [2 / 3, 2 / 3, 0.0], "code": [2 / 3, 0.0]}


def world(gain: float) -> tuple[Setting, Measured]:
    """Two drafts on one set: the second has `gain` more acceptance where the text's token is a
    digit, else as much.
    """
    prompts, length = 12, 10
    prose = suite("prose", "id", *((i, 1, 2) for i in range(prompts)))
    tokens = [5 if place % 2 else 6 for place in range(length)]
    measured = Measured({}, {}, {}, {})
    measured.baselines["prose", 1.0] = {
        "output_ids": [tokens] * prompts,
        "finish_reason": ["length"] * prompts,
    }
    for draft, more in (("base", 0.0), ("mine", gain)):
        alpha = [
            [0.5 + more * (token == 5) + 0.01 * row for token in tokens] for row in range(prompts)
        ]
        measured.alphas["prose", 1.0, draft] = {
            "sum": [sum(row) for row in alpha],
            "greedy": [],
            "match": [],
            "count": [length] * prompts,
            "roots": {},
            "missing": [],
            "predicted": {},
            "diagnosis": {
                "alpha": alpha,
                "entropy": [[1.0] * length] * prompts,
                "confidence": [[[0.0, 0.0, 0.0]] * 5 + [[8.0, 4.4, 6.4]] + [[0.0, 0.0, 0.0]] * 4]
                * prompts,
            },
        }
    methods = dict.fromkeys(("base", "mine"), [Method.of("chain:2", "speculative")])
    return Setting([prose], "base", [1.0], methods, 300, 0), measured


def text_of(token: int) -> str:
    return {5: "7", 6: " a"}[token]


def by_part(rows: Iterable[Row]) -> dict[tuple[str, str, str | int | None], Any]:
    return {(row["figure"], row["draft"], row["part"] or row["at"]): row for row in rows}


def test_rows_say_where_a_draft_lost_and_the_other_tokens_did_not():
    rows = by_part(diagnosis_rows(*world(-0.3), text_of))
    digits, words = (
        rows["gain_by_part", "mine", f"class of the token: {name}"] for name in ("digits", "words")
    )
    assert digits["value"] == pytest.approx(-0.3) and signs([digits, words]) == [-1, 0]
    assert ("gain_by_part", "base", "class of the token: digits") not in rows
    assert {
        ("gain_by_part", "mine", f"position in the answer: {name}")
        for name in ("4 to 16", "below 4")
    } <= set(rows)
    assert (
        rows["positions_by_part", "mine", "entropy of the target, bits: 0.5 to 1.5"]["value"] == 120
    )
    lost, new, old = (rows[name, "mine", "7"] for name in ("lost", "lost_alpha", "lost_base_alpha"))
    assert lost["n"] == 60 and lost["value"] == pytest.approx(-18.0)
    assert old["value"] - new["value"] == pytest.approx(0.3)
    assert [part for figure, _, part in rows if figure == "lost"] == ["7"]
    ece = rows["ece", "base", None]
    assert ece["value"] == pytest.approx(0.25) and ece["low"] == pytest.approx(0.25)
    sixth = [
        rows[name, "base", 5]["value"] for name in ("drafted_mass", "confidence", "acceptance")
    ]
    assert sixth == pytest.approx([96.0, 0.55, 0.8])
    assert not any(row["figure"] == "lost" for row in diagnosis_rows(*world(0.3), text_of))


def test_acceptance_is_shown_by_the_tokens_before_it_where_texts_are_long(tmp_path):
    setting, measured = world(0.1)
    rows = by_part(diagnosis_rows(setting, measured, text_of))
    assert not any("tokens before" in str(part) for _, _, part in rows)
    lengths = [3] * 4 + [300] * 4 + [4095] * 4
    prose = suite("prose", "id", *((i,) * tokens for i, tokens in enumerate(lengths)))
    longer = list(diagnosis_rows(replace(setting, suites=[prose]), measured, text_of))
    rows = by_part(longer)
    parts = [f"tokens before: {name}" for name in bin_names("tokens before")]
    alphas = [rows.get(("alpha_by_part", "base", part)) for part in parts]
    # Acceptance rises by .01 a prompt; the first position of the longest is still below 4,096.
    values = [0.515, 0.555, None, None, 0.595, 0.595, None]
    for row, value in zip(alphas, values, strict=True):
        assert (row and row["value"]) == (value and pytest.approx(value))
    counts = rows["positions_by_part", "mine", "tokens before: 2048 to 4096"]
    assert counts["value"] == 4
    document = made_up({"base": BASE, "mine": {"id": 0.2, "ood": 0.1}}, BOTH)
    assert 'id="context-' not in render_page(Results(document, tmp_path))
    document["rows"] += longer
    assert 'id="context-' in render_page(Results(document, tmp_path), tmp_path)


@pytest.fixture
def shown():
    document = made_up({"base": BASE, "mine": {"id": 0.2, "ood": 0.1}}, BOTH)
    document["rows"] += diagnosis_rows(*world(-0.3), lambda token: {5: "<b>\n", 6: " a"}[token])
    return Results(document, Path())


def test_the_page_says_why_acceptance_moved_and_escapes_tokens(shown):
    page = render_page(shown)
    assert "&lt;b&gt;" in page and "<b>" not in page and "<script" not in page
    assert "Why it moved" in page and "Tokens that lost most" in page and "ECE" in page
    assert 'id="calibration-' in page
