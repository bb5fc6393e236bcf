"""Law 1 above temperature 0: the output distribution is the target's, by a chi-square test against the
enumerated distribution.

The same test must reject verifiers that are wrong in the ways that are known to happen.
"""

from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode import DraftModelProposer, SpeculativeDecoder
from decode.verify.tree_walk import residual
from draftsmith_core.sampling import Sampling, generator, probs
from tests.chi_square import chi_square, counts_of, exact_distribution
from tests.tiny_models import random_llama

VOCAB = 5
LENGTH = 3
DRAWS = 6_000
PROMPT = [1, 3]
SAMPLINGS = {
    "T=1": Sampling(temperature=1.0),
    "T=0.6": Sampling(temperature=0.6),
    "top_k=3": Sampling(temperature=1.0, top_k=3),
    "top_p=0.7": Sampling(temperature=1.3, top_p=0.7),
}
PAIRS = [
    ("speculative", "chain:1"),
    ("speculative", "chain:3"),
    ("exact", "chain:3"),
    ("exact", "kary:3,2"),
    ("mcsd", "chain:2"),
    ("mcsd", "kary:4,1"),
    ("mcsd", "kary:2,2,2"),
    ("naive", "kary:3,2"),
    ("mcsd_replacement", "kary:3,2"),
    ("specinfer", "kary:3,2"),
    ("kseq", "kary:3,2"),
    ("greedy", "kary:3,2"),
    ("block", "chain:3"),
    ("traversal", "kary:3,2"),
]


@cache
def tiny_llama(seed: int) -> PreTrainedModel:
    return random_llama(seed, VOCAB, hidden=8, layers=1, heads=1, positions=16, spread=0.45)


def law(seed: int, sampling: Sampling) -> Tensor:
    return exact_distribution(tiny_llama(seed), PROMPT, LENGTH, sampling)


def sample(verifier: str, tree: str, sampling: Sampling, draws: int = DRAWS) -> float:
    """Decode `draws` rows with the real engine and compare with the exact distribution of the target."""
    decoder = SpeculativeDecoder(tiny_llama(2), DraftModelProposer(tiny_llama(7)), tree=tree, verifier=verifier)
    generators = [generator(1000 + row) for row in range(draws)]
    batch = decoder.generate([PROMPT] * draws, sampling, LENGTH, generators)
    return chi_square(counts_of([g.output_ids for g in batch.generations], VOCAB), law(2, sampling))


def test_the_distributions_differ_enough_to_tell() -> None:
    """Guards the tests below: the draft is useful but far from the target, and no distribution is
    degenerate.
    """
    for sampling in SAMPLINGS.values():
        p, q = law(2, sampling), law(7, sampling)
        overlap = float(torch.minimum(p, q).sum())
        assert 0.1 < overlap < 0.8
        assert int((p * DRAWS > 8).sum()) >= 6
        assert abs(float(p.sum()) - 1) < 1e-5


# The fast tests hold every pair once and every distribution.
@pytest.mark.parametrize(
    ("verifier", "tree", "distribution"),
    [
        pytest.param(*pair, name, marks=[] if (number + place) % 4 == 0 else [pytest.mark.slow])
        for number, pair in enumerate(PAIRS)
        for place, name in enumerate(SAMPLINGS)
    ],
)
def test_output_distribution_is_the_targets(verifier: str, tree: str, distribution: str) -> None:
    assert sample(verifier, tree, SAMPLINGS[distribution]) < 1


@pytest.mark.slow
@pytest.mark.parametrize(("verifier", "tree"), [("speculative", "chain:3"), ("mcsd", "kary:3,2")])
def test_output_distribution_is_the_targets_in_a_large_sample(verifier: str, tree: str) -> None:
    assert sample(verifier, tree, SAMPLINGS["T=1"], draws=30_000) < 1


@pytest.mark.parametrize(
    ("verifier", "tree", "broken", "replacement"),
    [
        # After a refusal, draw from p instead of (p - q)+.
        ("speculative", "chain:3", "decode.verify.speculative.residual", lambda p, q: p),
        ("mcsd", "kary:2,2,2", "decode.verify.mcsd.residual", lambda p, q: p),
        # Siblings tested against the q of the first draw, as if drawn with replacement.
        ("mcsd", "kary:4,1", "decode.verify.mcsd.without", lambda q, x: q),
        # Draft greedily while the verifier believes it was sampled (transformers issue 32867).
        (
            "speculative",
            "chain:3",
            "decode.propose.static_tree.draw",
            lambda q, u: q.argmax(-1),
        ),
        # Last token from the raw distribution: temperature left out.
        (
            "exact",
            "kary:3,2",
            "decode.batch_run.probs",
            lambda logits, sampling: probs(1.5 * logits, sampling),
        ),
    ],
    ids=["residual-chain", "residual-tree", "q-not-renormalised", "greedy-draft", "temperature"],
)
def test_broken_verifiers_are_rejected(
    monkeypatch: pytest.MonkeyPatch,
    verifier: str,
    tree: str,
    broken: str,
    replacement: object,
) -> None:
    monkeypatch.setattr(broken, replacement)
    assert sample(verifier, tree, SAMPLINGS["T=0.6"], draws=16_000) > 3


def test_residual_without_mass_falls_back_to_p() -> None:
    """p and q that differ by rounding only leave nothing; the answer is p, never NaN."""
    p = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.8, 0.0]])
    q = torch.tensor([[0.5, 0.5000001, 0.0], [0.4, 0.6, 0.0]])
    assert torch.equal(residual(p, q), torch.tensor([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0]]))
