"""The algorithm in one file, `draftsmith.decode.reference`, as the oracle of the decoder.

Its own output has the target's law, and above temperature 0 its calls are as long as the decoder's
with the same probability. Worlds of five tokens. tests/test_decode_lossless.py has the tokens of
greedy calls.
"""

from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch
from scipy.stats import chi2_contingency

from draftsmith.core.sampling import Sampling, generator, probs
from draftsmith.decode import DraftModelProposer, SpeculativeDecoder, reference
from tests.chi_square import chi_square, counts_of, exact_distribution
from tests.test_decode_lossless import PROMPT, VOCAB, llama, most_probable_tree, steps_of

ROOT = Path(__file__).parent.parent
DRAWS = 1_000
SAMPLED = Sampling(temperature=0.8)
TARGET, DRAFT = llama(2), llama(7)
WIDTHS = [(1, 1, 1), (2, 2), (3, 1)]


@cache
@torch.inference_mode()
def after(is_target, text, sampling):
    model = TARGET if is_target else DRAFT
    return probs(model(input_ids=torch.tensor([text])).logits[0, -1], sampling)


def steps_of_reference(prompt, widths, sampling, new, seed):
    return reference.decode(
        target=lambda text: after(True, tuple(text), sampling),
        draft=lambda text: after(False, tuple(text), sampling),
        prompt=prompt,
        widths=widths,
        max_new_tokens=new,
        generator=generator(seed),
    )


def chi_square_of_reference(widths):
    outputs = []
    for seed in range(DRAWS):
        steps = steps_of_reference(PROMPT, widths, SAMPLED, 3, seed)
        outputs.append([token for step in steps for token in step])
    return chi_square(counts_of(outputs, VOCAB), exact_distribution(TARGET, PROMPT, 3, SAMPLED))


@pytest.mark.parametrize("widths", WIDTHS)
def test_the_reference_has_the_targets_law(widths):
    assert chi_square_of_reference(widths) < 1


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("residual", lambda p_V, q_V: p_V),
        ("draft_tree", most_probable_tree),
    ],
)
def test_a_broken_reference_is_rejected(monkeypatch, name, broken):
    """A draw from p after a refusal; a greedy draft that the rule believes was drawn."""
    monkeypatch.setattr(reference, name, broken)
    assert chi_square_of_reference((2, 2)) > 1.5


@cache
def lengths_of_reference(widths):
    """How often four tokens came in calls of these lengths."""
    each = [steps_of_reference(PROMPT, widths, SAMPLED, 4, seed) for seed in range(DRAWS)]
    return Counter(tuple(map(len, steps)) for steps in each)


def p_value(widths, verifier):
    """Whether the decoder's calls are as long as the reference's."""
    decoder = SpeculativeDecoder(TARGET, DraftModelProposer(DRAFT), list(widths), verifier)
    each = steps_of(decoder, [PROMPT] * DRAWS, SAMPLED, 4)
    counts = [Counter(tuple(map(len, steps)) for steps in each), lengths_of_reference(widths)]
    lengths = [each for each in counts[0] | counts[1] if counts[0][each] + counts[1][each] >= 16]
    assert len(lengths) > 3
    return float(chi2_contingency([[count[each] for each in lengths] for count in counts]).pvalue)


@pytest.mark.parametrize("widths", WIDTHS)
def test_calls_are_as_long_as_those_of_the_reference(widths):
    assert p_value(widths, "speculative" if max(widths) == 1 else "specinfer") > 1e-4


@pytest.mark.parametrize(("widths", "verifier"), [((1, 1, 1), "exact"), ((2, 2), "exact")])
def test_another_rule_has_calls_of_other_lengths(widths, verifier):
    assert p_value(widths, verifier) < 1e-6


def test_the_page_quotes_the_file_whole():
    code = (ROOT / "decode/reference.py").read_text()
    page = (ROOT / "docs/how-it-works.md").read_text()
    assert f"```python\n{code}```\n" in page
    assert len(code.splitlines()) <= 80
    assert len(page.replace(code, "").split()) <= 500
