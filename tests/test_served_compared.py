"""`doctor --served` compares tokens per target call: over all prompts, and by their length."""

import numpy as np
import pytest

from draftsmith.eval.bootstrap import PromptSums
from draftsmith.serving.compared import Compared
from draftsmith.serving.report import in_words
from tests.drafting_server import drafting
from tests.test_served import ask, pair_of, place  # noqa: F401

LENGTHS = range(20, 120, 8)


def made_up(calls):
    """60 tokens for every prompt, in these calls; 30 were predicted."""
    emitted = [60] * len(calls)
    served = PromptSums.of(emitted, list(calls))
    predicted = PromptSums.of(emitted, [30.0] * len(calls))
    return Compared(served, predicted, range(len(calls)))


def test_a_row_for_each_doubling_of_the_length():
    rows = made_up(np.where(np.array(LENGTHS) > 64, 50, 30)).by_length(LENGTHS)
    assert [(row["up_to"], row["prompts"]) for row in rows] == [(32, 2), (64, 4), (128, 7)]
    assert [row["served"]["value"] for row in rows] == [2.0, 2.0, pytest.approx(60 / 50)]
    assert {row["predicted"]["value"] for row in rows} == {2.0}


@pytest.mark.parametrize(("calls", "less"), [(30, False), (31, True), (27, False)])
def test_less_is_beyond_a_twentieth_of_the_accepted_tokens(calls, less):
    counts = made_up([calls] * 13)
    assert counts.is_less == less
    assert counts.as_predicted == (calls == 30)


@pytest.mark.slow
def test_the_table_by_length_is_printed(place):  # noqa: F811
    with drafting("vllm", pair_of(place)) as (url, _):
        found = ask(place, url, temperature=0)
    lines, missed = in_words(found)
    assert missed is None and len(found["by_length"]) > 1
    table = lines[next(n for n, line in enumerate(lines) if line.startswith("prompt tokens")) :]
    for row, line in zip(found["by_length"], table[1:], strict=False):
        assert line.startswith(f"up to {row['up_to']} ") and line.endswith(f" {row['prompts']}")
