"""Parts of an answer: by place, by the tokens before, by span and by the draft's confidence."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from draftsmith.core.sampling import Sampling, probs
from draftsmith.eval.formulas import Continuation
from draftsmith.eval.parts import (
    BINS,
    CONTEXT,
    by_confidence,
    confidence_names,
    part_names,
    parts_of,
    span_marks,
)

THINK, END_THINK, CALL, END_CALL = 3, 4, 5, 6
VOCABULARY = {
    "<think>": THINK,
    "</think>": END_THINK,
    "<tool_call>": CALL,
    "</tool_call>": END_CALL,
    "<pad>": 0,
}
TOKENIZER = cast(Any, SimpleNamespace(get_added_vocab=lambda: VOCABULARY))


def test_spans_are_what_stands_between_the_marks_of_the_template():
    marks = span_marks(TOKENIZER)
    # The first answer begins inside the thinking that its prompt has opened.
    texts = [
        Continuation("a", [9, THINK], [9, END_THINK, 9, CALL, 9, END_CALL, 9]),
        Continuation("b", [9], [9, 9]),
    ]
    parts = parts_of(texts, marks)
    spans = {name: parts[f"span: {name}"].astype(int).tolist() for name in ("thinking", "call")}
    assert spans["thinking"] == [[1, 1, 0, 0, 0, 0, 0], [0] * 7]
    assert spans["call"] == [[0, 0, 0, 1, 1, 1, 0], [0] * 7]
    assert parts["span: answer"].sum(1).tolist() == [2, 2]
    # An answer without marks is one span; a tokenizer that marks none has no spans.
    assert parts_of(texts[1:], marks)["span: answer"].sum() == 2
    assert not any("span" in name for name in parts_of(texts, {}))


def test_places_and_the_tokens_before_them_are_binned():
    texts = [Continuation("a", [7] * 250, [8] * 20), Continuation("b", [7], [8] * 2)]
    parts = parts_of(texts, {})
    places = [
        parts[f"place in the answer: {name}"].sum(1).tolist() for name in ("below 4", "4 to 16")
    ]
    assert places == [[4, 2], [12, 0]]
    near_parts = {name: inside.sum() for name, inside in parts.items() if name.startswith(CONTEXT)}
    assert near_parts == {"tokens before: below 256": 8, "tokens before: 256 to 512": 14}
    assert parts_of(texts[1:], {})[part_names(CONTEXT)[0]].sum() == 2


def test_looping_texts_are_a_part_of_their_own():
    texts = [Continuation("a", [7], [8, 9] * 20), Continuation("b", [7], list(range(33)))]
    parts = parts_of(texts, {})
    assert parts["text: looping"].sum(1).tolist() == [40, 0]
    assert parts["text: other"].sum(1).tolist() == [0, 33]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_confidence_adds_up_to_what_is_drafted_and_taken(temperature):
    sampling = Sampling(temperature=temperature)
    random = torch.Generator().manual_seed(0)
    p_NV, logits_NV = (2 * torch.randn(6, 9, generator=random) for _ in range(2))
    p_NV, q_NV = probs(p_NV, sampling), probs(logits_NV, sampling)
    first_B3 = by_confidence(sampling, p_NV, q_NV, logits_NV)[:4].sum(0)
    drafted, sure, taken = first_B3.sum(0).tolist()
    assert len(first_B3) == BINS == len(confidence_names())
    # All of q is drafted, and the target takes a token of it with the chance sum_x p q.
    assert drafted == pytest.approx(4.0, abs=1e-5)
    assert taken == pytest.approx(float((p_NV * q_NV)[:4].sum()), abs=1e-5)
    if sampling.greedy:
        most = logits_NV.softmax(1).max(1).values
        assert sure == pytest.approx(float(most[:4].sum()), abs=1e-5)
