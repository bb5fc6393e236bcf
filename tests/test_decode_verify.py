"""Every verification rule on small worlds that can be enumerated: lossless ones give the target's
distribution whatever was drafted, wrong pairs of drawing and rule are told apart by the same test,
and no rule beats the transport bound.

Legend: B rows, E nodes with children, M nodes with the root, V = 4 tokens, L = 3 tokens of output.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.core.errors import RequirementError
from draftsmith.core.sampling import generator
from draftsmith.decode.lossless import (
    BUSHY,
    CHAIN,
    VOCABULARY as VOCAB,
    check_lossless,
    chi_square,
    outputs,
    propose as propose_rows,
    verify,
    world,
)
from draftsmith.decode.propose.protocol import Proposal
from draftsmith.decode.tree import Drawing, Tree
from draftsmith.decode.tree_batch import TreeBatch, grow_batch
from draftsmith.decode.verify import VERIFIERS
from draftsmith.decode.verify.siblings import _try_without_replacement
from draftsmith.decode.verify.tree_walk import Verdict, residual
from tests.transport import optimal_acceptance

LENGTH, ROWS = 3, 6_000
CPU = torch.device("cpu")
DRAWINGS: list[Drawing] = [
    "with_replacement",
    "without_replacement",
    "top_and_one",
    "deterministic",
]
LOSSLESS = [name for name, verifier in VERIFIERS.items() if verifier.lossless]
PAIRS = [(name, drawing) for name in LOSSLESS for drawing in VERIFIERS[name].drawings]


propose = partial(propose_rows, rows=ROWS)


def value(
    name: str, drawing: Drawing, kind: str, tree: Tree | None = None, seed: int = 0, drafts: int = 1
) -> float:
    verifier = VERIFIERS[name]
    made = world(kind, seed, drafts)
    proposal, p_BMV = propose(made, tree or (CHAIN if verifier.chains_only else BUSHY), drawing)
    return chi_square(outputs(made, verify(verifier, proposal, p_BMV)), made.distribution())


@pytest.mark.parametrize("name", LOSSLESS)
def test_output_distribution_is_the_targets(name):
    check_lossless(name, rows=ROWS)


def test_a_rule_that_is_not_lossless_is_named_with_its_tree_and_distributions(golden):
    rule = replace(VERIFIERS["typical"], drawings=("deterministic",))
    with pytest.raises(RequirementError) as caught:
        check_lossless(rule, rows=2_000)
    assert len(caught.value.unmet) > 3
    golden(caught.value.unmet[0])


def test_a_rule_that_errs_at_temperature_0_alone_is_named(golden):
    def second(proposal: Proposal, p_BMV: Tensor, u_BU: Tensor | None) -> Verdict:
        return VERIFIERS["exact"].run(proposal, p_BMV.flip(2) if u_BU is None else p_BMV, u_BU)

    rule = replace(VERIFIERS["exact"], drawings=("deterministic",), chains_only=True, run=second)
    with golden.raises(RequirementError):
        check_lossless(rule, rows=300)


def test_a_verdict_that_does_not_fit_is_an_error(golden):
    rule = replace(VERIFIERS["exact"], run=lambda proposal, p_BMV, u_BU: None)  # type: ignore
    with golden.raises():
        check_lossless(rule, rows=10)


@pytest.mark.parametrize(
    "tree", [Tree(()), Tree((-1,)), Tree((-1,) * 4), Tree((-1, -1, 0, 1, 1))], ids=str
)
@pytest.mark.parametrize(("name", "drawing"), PAIRS)
def test_output_distribution_is_the_targets_on_other_trees(name, drawing, tree):
    if VERIFIERS[name].chains_only and not tree.is_chain:
        with pytest.raises(ValueError, match="valid on chains only"):
            VERIFIERS[name].check(tree, drawing)
    else:
        assert value(name, drawing, "truncated", tree, seed=5) < 1


@pytest.mark.parametrize("name", VERIFIERS)
def test_temperature_0_is_token_equality(name):
    verifier, made = VERIFIERS[name], world("one-hot p", 8)
    proposal, p_BMV = propose(
        made, CHAIN if verifier.chains_only else BUSHY, "deterministic", rows=300
    )
    verdict = verifier.run(proposal, p_BMV, None)
    counts = outputs(made, verdict)
    assert int(counts.max()) == 300 and int(counts.argmax()) == int(made.distribution().argmax())


class NoQuestions(TorchDispatchMode):
    """Fails on what would make a device wait for the host: reading a number, or counting what is
    true.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.nonzero.default,
        )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("own_trees", [False, True])
@pytest.mark.parametrize("name", VERIFIERS)
def test_a_device_is_not_asked_and_answers_as_the_cpu(monkeypatch, name, own_trees):
    """Without the shortcuts that only a CPU may take, no rule reads anything back, and outcomes are
    the same.
    """
    with pytest.raises(AssertionError), NoQuestions():
        bool(torch.ones(1).any())
    verifier, made = VERIFIERS[name], world("random", 7)
    tree = CHAIN if verifier.chains_only else BUSHY
    for drawing in verifier.drawings:
        proposal, p_BMV = propose(made, tree, drawing, rows=400)
        if own_trees:
            parents_BN = torch.tensor(tree.parents).expand(400, -1)
            grown = grow_batch(
                parents_BN, torch.ones_like(parents_BN, dtype=torch.bool), tree.depth, 3
            )
            proposal = replace(proposal, tree=grown)
        u_BU = torch.rand(
            400, verifier.uniforms(proposal.tree), generator=generator(2), dtype=torch.double
        )
        usual = verifier.run(proposal, p_BMV, u_BU)
        with monkeypatch.context() as patch:
            for module in ("tree_walk", "exact", "siblings", "chains"):
                patch.setattr(f"draftsmith.decode.verify.{module}.known_empty", lambda mask: False)
            with NoQuestions():
                asked = verifier.run(proposal, p_BMV, u_BU)
        live = torch.arange(tree.depth + 1) <= usual.accepted_B.unsqueeze(1)
        assert torch.equal(usual.tokens_BD1 * live, asked.tokens_BD1 * live)
        assert torch.equal(usual.nodes_BD, asked.nodes_BD) and torch.equal(
            usual.open_B, asked.open_B
        )


@pytest.mark.parametrize(
    ("name", "drawing"),
    [
        ("specinfer", "without_replacement"),
        ("kseq", "without_replacement"),
        ("mcsd", "with_replacement"),
        ("greedy", "with_replacement"),
        ("mcsd", "top_and_one"),
        ("typical", "deterministic"),
        ("typical", "without_replacement"),
    ],
)
def test_rules_on_other_drawings_are_rejected(name, drawing):
    made = world("random", 6)
    proposal, p_BMV = propose(made, BUSHY, drawing, rows=40_000)
    assert (
        chi_square(outputs(made, verify(VERIFIERS[name], proposal, p_BMV)), made.distribution()) > 2
    )
    if name != "typical":
        with pytest.raises(
            ValueError, match=f"^verifier '{name}' is not valid for drafts drawn '{drawing}'"
        ):
            VERIFIERS[name].check(BUSHY, drawing)


@pytest.mark.parametrize("name", ["exact", "naive", "mcsd"])
def test_pruning_after_sampling_breaks_all_but_exact(name):
    made = world("random", 6)
    proposal, p_BMV = propose(made, Tree((-1,) * 3), "without_replacement", rows=40_000)
    # Of three drawn children the one that the draft holds most probable is kept.
    assert proposal.q_BEV is not None
    q_x = proposal.q_BEV[:, 0].gather(1, proposal.tokens_BM[:, 1:])
    kept = proposal.tokens_BM[:, 1:].gather(1, q_x.argmax(1, keepdim=True))
    pruned = Proposal(
        TreeBatch.build(Tree((-1,)), CPU),
        torch.nn.functional.pad(kept, (1, 0), value=-1),
        proposal.q_BEV,
        "without_replacement",
    )
    p_leaf = made.p[1][kept]
    verdict = verify(VERIFIERS[name], pruned, torch.cat([p_BMV[:, :1], p_leaf], dim=1))
    assert (chi_square(outputs(made, verdict), made.distribution()) < 1) == (
        name in ("exact", "naive")
    )


@pytest.mark.parametrize(
    ("name", "broken", "replacement"),
    [
        (
            "kseq",
            "draftsmith.decode.verify.siblings.solve_rho",
            lambda p, q, k: torch.ones(len(p), 1, dtype=torch.double),
        ),
        ("block", "draftsmith.decode.verify.chains.keep_probability", lambda w, mass: w),
        ("block", "draftsmith.decode.verify.chains.refuse", lambda p, q, share: (p, None)),
        ("greedy", "draftsmith.decode.verify.siblings.without", lambda q, x: q),
        ("greedy", "draftsmith.decode.verify.siblings.residual", lambda p, q: p),
        (
            "specinfer",
            "draftsmith.decode.verify.siblings.refuse",
            lambda p, q, share: (p, p.sum(1, True)),
        ),
        (
            "mcsd",
            "draftsmith.decode.verify.siblings._try_without_replacement",
            lambda node: (_try_without_replacement(node)[0], node.p_BV),
        ),
        ("speculative", "draftsmith.decode.verify.chains.refuse", lambda p, q, share: (p, None)),
    ],
)
def test_broken_rules_are_rejected(monkeypatch, name, broken, replacement):
    monkeypatch.setattr(broken, replacement)
    verifier, made = VERIFIERS[name], world("random", 6)
    proposal, p_BMV = propose(
        made, CHAIN if verifier.chains_only else BUSHY, verifier.drawings[0], rows=40_000
    )
    assert chi_square(outputs(made, verify(verifier, proposal, p_BMV)), made.distribution()) > 2


def accepted(name: str, proposal: Proposal, p_BMV: Tensor, seed: int = 2) -> tuple[float, float]:
    """Mean accepted length and four standard errors."""
    lengths = verify(VERIFIERS[name], proposal, p_BMV, seed).accepted_B.double()
    return float(lengths.mean()), 4 * float(lengths.std()) / len(lengths) ** 0.5


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize(("name", "drawing"), PAIRS)
def test_no_rule_beats_the_bound_and_some_reach_it(name, drawing, k):
    if VERIFIERS[name].chains_only and k > 1:
        k = 1
    for seed in range(3):
        made = world("random", seed)
        bound = optimal_acceptance(made.p[0][0], made.q[0][0, 0], k, drawing)
        mean, error = accepted(name, *propose(made, Tree((-1,) * k), drawing))
        assert mean <= bound + error
        # A rule that takes every drawing reads p alone.
        reads_q = set(VERIFIERS[name].drawings) < set(DRAWINGS)
        if drawing in ("top_and_one", "deterministic") and reads_q:
            assert mean >= bound - error
        if drawing == "deterministic" or (k == 1 and reads_q):
            assert mean >= bound - error
        if name == "kseq":
            assert mean >= (1 - np.exp(-1)) * bound - error


def test_block_accepts_more():
    gains = []
    for seed in range(12):
        proposal, p_BMV = propose(
            world("random", seed, length=4), Tree((-1, 0, 1)), "without_replacement"
        )
        one, error = accepted("speculative", proposal, p_BMV)
        more, _ = accepted("block", proposal, p_BMV)
        assert more > one - error
        gains.append(more - one)
    assert sum(gains) / len(gains) > 0.01


def test_typical_takes_what_is_plausible_and_draws_the_next_token_from_the_target():
    p = torch.tensor(
        [0.7, 0.2, 0.06, 0.04]
    )  # entropy 0.85: delta exp(-H) = 0.13, so that epsilon = 0.09 decides
    tree = Tree((-1, -1, 0, 1))
    tokens = torch.tensor(
        [[-1, 2, 1, 0, 0], [-1, 0, 1, 3, 2], [-1, 1, 0, 1, 1], [-1, 3, 2, 0, 0], [-1, 0, 0, -1, -1]]
    )
    rows = tokens.repeat(2_000, 1)
    p_BMV = p.expand(len(rows), 5, -1)
    verdict = verify(
        VERIFIERS["typical"],
        Proposal(TreeBatch.build(tree, CPU), rows, None, "deterministic"),
        p_BMV,
    )
    # Tokens 2 and 3 are implausible. Of two paths as long the more probable is taken.
    assert verdict.nodes_BD[:5].tolist() == [[2, 4], [1, 0], [2, 4], [0, 0], [1, 0]]
    last = verdict.tokens_BD1.gather(1, verdict.accepted_B.unsqueeze(1)).squeeze(1)
    assert chi_square(torch.bincount(last, minlength=VOCAB), p.double()) < 1
    assert not VERIFIERS["typical"].lossless


def test_residual_without_mass_falls_back_to_p():
    """p and q that differ by rounding only leave nothing; the answer is p, never NaN."""
    p = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.8, 0.0]])
    q = torch.tensor([[0.5, 0.5000001, 0.0], [0.4, 0.6, 0.0]])
    assert torch.equal(residual(p, q), torch.tensor([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0]]))
