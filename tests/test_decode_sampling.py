"""Law 1 above temperature 0: the output distribution is the target's, by a chi-square test against the
enumerated distribution.

The same test must reject verifiers that are wrong in the ways that are known to happen.
"""

import itertools
from functools import cache

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor
from transformers import PreTrainedModel

from decode import VERIFIERS, DraftModelProposer, Proposal, SpeculativeDecoder, Tree
from decode.tree_batch import TreeBatch
from decode.verify import Verifier
from decode.verify.tree_walk import residual
from draftsmith_core.sampling import Sampling, draw_without_replacement, generator, probs
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


@torch.inference_mode()
def exact_distribution(model: PreTrainedModel, sampling: Sampling) -> Tensor:
    """Probability of every continuation of PROMPT, `[V ** LENGTH]`, from teacher-forced forwards."""
    sequences = torch.tensor(list(itertools.product(range(VOCAB), repeat=LENGTH)))
    inputs = torch.cat([torch.tensor(PROMPT).expand(len(sequences), -1), sequences], dim=1)
    logits = model(input_ids=inputs).logits[:, len(PROMPT) - 1 : -1]
    distribution = probs(logits, sampling).gather(2, sequences.unsqueeze(-1)).squeeze(-1)
    return distribution.double().prod(1)


def statistic(counts: Tensor, distribution: Tensor) -> tuple[float, float]:
    """Chi-square over its 1e-4 critical value, and the number of impossible outcomes seen.

    Cells that expect fewer than 8 draws are pooled.
    """
    counts, total = counts.double(), float(counts.sum())
    impossible = float(counts[distribution == 0].sum())
    expected = distribution / distribution.sum() * total
    large = expected >= 8
    seen = torch.cat([counts[large], counts[~large].sum().unsqueeze(0)])
    wanted = torch.cat([expected[large], expected[~large].sum().unsqueeze(0)])
    used = wanted > 0
    value = float(((seen[used] - wanted[used]) ** 2 / wanted[used]).sum())
    return value / float(chi2.ppf(1 - 1e-4, int(used.sum()) - 1)), impossible


def sample(verifier: str, tree: str, sampling: Sampling, draws: int = DRAWS) -> tuple[float, float]:
    """Decode `draws` rows with the real engine and compare with the exact distribution of the target."""
    target, draft = tiny_llama(2), tiny_llama(7)
    decoder = SpeculativeDecoder(target, DraftModelProposer(draft), tree=tree, verifier=verifier)
    generators = [generator(1000 + row) for row in range(draws)]
    batch = decoder.generate([PROMPT] * draws, sampling, LENGTH, generators)
    ids = torch.tensor([g.output_ids for g in batch.generations])
    code = (ids * VOCAB ** torch.arange(LENGTH - 1, -1, -1)).sum(1)
    return statistic(torch.bincount(code, minlength=VOCAB**LENGTH), exact_distribution(target, sampling))


def test_the_distributions_differ_enough_to_tell() -> None:
    """Guards the tests below: the draft is useful but far from the target, and no distribution is
    degenerate.
    """
    for sampling in SAMPLINGS.values():
        p, q = exact_distribution(tiny_llama(2), sampling), exact_distribution(tiny_llama(7), sampling)
        overlap = float(torch.minimum(p, q).sum())
        assert 0.1 < overlap < 0.8
        assert int((p * DRAWS > 8).sum()) >= 6
        assert abs(float(p.sum()) - 1) < 1e-5


@pytest.mark.parametrize("distribution", SAMPLINGS)
@pytest.mark.parametrize(("verifier", "tree"), PAIRS)
def test_output_distribution_is_the_targets(verifier: str, tree: str, distribution: str) -> None:
    value, impossible = sample(verifier, tree, SAMPLINGS[distribution])
    assert value < 1
    assert impossible == 0


@pytest.mark.parametrize(("verifier", "tree"), [("speculative", "chain:3"), ("mcsd", "kary:3,2")])
def test_output_distribution_is_the_targets_in_a_large_sample(verifier: str, tree: str) -> None:
    value, impossible = sample(verifier, tree, SAMPLINGS["T=1"], draws=30_000)
    assert value < 1
    assert impossible == 0


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
    value, _ = sample(verifier, tree, SAMPLINGS["T=0.6"], draws=16_000)
    assert value > 3


# One node at a time, with distributions chosen by hand.
P = torch.tensor([0.05, 0.4, 0.0, 0.25, 0.3])
NODE_LAWS = {
    "full support": torch.tensor([0.3, 0.1, 0.2, 0.25, 0.15]),
    "support 2": torch.tensor([0.0, 0.7, 0.0, 0.3, 0.0]),
    "support 1": torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0]),
    "disjoint": torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0]),
    "equal to p": P,
}


def node_outcome(verifier: Verifier, q: Tensor | None, tokens: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """First emitted token and whether it was accepted, over rows of drafted siblings `[B, k]`."""
    rows = tokens.shape[0]
    tree = TreeBatch.build(Tree((-1,) * k), torch.device("cpu"))
    proposal = Proposal(
        tree=tree,
        tokens_BM=torch.cat([torch.full((rows, 1), -1), tokens], dim=1),
        q_BEV=None if q is None else q.expand(rows, 1, -1),
        drawing="deterministic" if q is None else "without_replacement",
    )
    u_BU = torch.rand(rows, verifier.uniforms(tree), generator=generator(7), dtype=torch.float64)
    # Leaf distributions are NaN: nothing may leak from a node that the walk does not stand on.
    p_BMV = torch.full((rows, k + 1, VOCAB), torch.nan)
    p_BMV[:, 0] = P
    p_BMV[:, 1:] = P.flip(0)
    verdict = verifier.run(proposal, p_BMV, u_BU)
    return verdict.tokens_BD1[:, 0], verdict.accepted_B


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("distribution", NODE_LAWS)
def test_mcsd_node_is_exact_when_support_is_smaller_than_k(distribution: str, k: int) -> None:
    q, rows = NODE_LAWS[distribution], 40_000
    u = torch.rand(rows, k, generator=generator(3), dtype=torch.float64)
    drawn = draw_without_replacement(q.expand(rows, -1), u)
    assert int((drawn >= 0).sum()) == rows * min(k, int((q > 0).sum()))
    emitted, accepted = node_outcome(VERIFIERS["mcsd"], q, drawn, k)
    value, impossible = statistic(torch.bincount(emitted, minlength=VOCAB), P.double())
    assert value < 1 and impossible == 0
    if k == 1:
        assert abs(float(accepted.double().mean()) - float(torch.minimum(P, q).sum())) < 0.01
        plain, _ = node_outcome(VERIFIERS["speculative"], q, drawn, k)
        assert torch.equal(plain, emitted)
    if distribution == "equal to p":
        assert int(accepted.sum()) == rows


@pytest.mark.parametrize("name", ["mcsd", "exact"])
def test_deterministic_children_are_exact_and_reach_their_mass(name: str) -> None:
    rows = 40_000
    tokens = torch.tensor([[4, 2, 3]]).expand(rows, -1)
    emitted, accepted = node_outcome(VERIFIERS[name], None, tokens, 3)
    value, impossible = statistic(torch.bincount(emitted, minlength=VOCAB), P.double())
    assert value < 1 and impossible == 0
    assert abs(float(accepted.double().mean()) - float(P[[4, 2, 3]].sum())) < 0.01


def test_residual_without_mass_falls_back_to_p() -> None:
    """p and q that differ by rounding only leave nothing; the answer is p, never NaN."""
    p = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.8, 0.0]])
    q = torch.tensor([[0.5, 0.5000001, 0.0], [0.4, 0.6, 0.0]])
    assert torch.equal(residual(p, q), torch.tensor([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0]]))
