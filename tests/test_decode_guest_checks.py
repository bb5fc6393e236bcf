"""The shapes that a part of one's own gives are checked: one line with what was expected and given,
never a crash.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from draftsmith.core.sampling import Sampling
from draftsmith.decode import SpeculativeDecoder, Tree
from draftsmith.decode.kernel_sampling import draw, try_siblings
from draftsmith.decode.native import kernel
from draftsmith.decode.propose.protocol import (
    Proposal,
    Proposer,
    Session,
)
from draftsmith.decode.tree_batch import TreeBatch
from draftsmith.decode.verify import VERIFIERS
from tests.tiny_models import random_llama

V = 17
PROMPTS = [[1, 2], [3, 4, 5]]
CPU = torch.device("cpu")
CHAIN = Tree((-1, 0, 1))
Change = Callable[[Proposal], Any]


class Threes(Proposer):
    """Drafts token 3 everywhere, and hands over what `change` makes of it."""

    name = "threes"

    def __init__(self, change, drawing="deterministic"):
        self.change = change
        self.drawing = drawing

    def drawings(self, tree):
        return frozenset({self.drawing})

    def start(self, setup):
        return ThreesSession(self, TreeBatch.build(cast(Tree, setup.tree), CPU), len(setup.prompts))


class ThreesSession(Session):
    def __init__(self, proposer, tree, rows):
        self.proposer = proposer
        self.tree = tree
        self.rows = rows

    def propose(self, u_BN):
        size = self.tree.parents_RN.shape[1]
        tokens_BM = pad(torch.full((self.rows, size), 3), (1, 0), value=-1)
        q_BEV = None
        if self.proposer.drawing != "deterministic":
            q_BEV = torch.zeros(self.rows, size, V)
            q_BEV[:, :, 3] = 1
        made = self.proposer.change(Proposal(self.tree, tokens_BM, q_BEV, self.proposer.drawing))
        return made

    def commit(self, outcome):
        return

    def select_rows(self, rows):
        self.rows = len(rows)


def tokens(change):
    return lambda proposal: replace(proposal, tokens_BM=change(proposal.tokens_BM))


def q(change):
    def changed(proposal):
        assert proposal.q_BEV is not None
        return replace(proposal, q_BEV=change(proposal.q_BEV))

    return changed


def deeper(proposal):
    tree = Tree((-1, 0, 1, 2))
    return Proposal(
        TreeBatch.build(tree, CPU), pad(proposal.tokens_BM, (0, 1), value=3), None, "deterministic"
    )


PROPOSALS: dict[str, Change] = {
    "nothing": lambda _: None,
    "a tree of another class": lambda proposal: replace(proposal, tree=cast(Any, CHAIN)),
    "deeper": deeper,
    "a column too many": tokens(lambda x: pad(x, (0, 1), value=3)),
    "a row too few": tokens(lambda x: x[:1]),
    "int32": tokens(Tensor.int),
    "elsewhere": tokens(lambda x: x.to("meta")),
    "a list": tokens(Tensor.tolist),
}
DRAWN: dict[str, Change] = {
    "wider": q(lambda x: pad(x, (0, 1))),
    "half": q(Tensor.half),
    "of one row": q(lambda x: x[:1]),
    "flat": q(lambda x: x[:, 0]),
}


def decode(proposer, verifier, temperature):
    decoder = SpeculativeDecoder(random_llama(2, V), proposer, "chain:3", verifier)
    batch = decoder.generate(PROMPTS, Sampling(temperature=temperature), 6, eos_ids=())
    return [row.output_ids for row in batch.generations]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", PROPOSALS)
def test_a_proposal_that_does_not_fit_is_an_error(name, temperature, golden):
    with golden.raises(ValueError):
        decode(Threes(PROPOSALS[name]), "exact", temperature)


@pytest.mark.parametrize("name", DRAWN)
def test_distributions_that_do_not_fit_are_an_error(name, golden):
    with golden.raises(ValueError):
        decode(Threes(DRAWN[name], "without_replacement"), "mcsd", 1.0)


def test_what_fits_is_taken():
    for drawing in ("deterministic", "without_replacement"):
        proposer = Threes(lambda proposal: proposal, drawing)
        for temperature in (0.0, 1.0):
            assert len(decode(proposer, "mcsd", temperature)[0]) == 6


def own(change):
    exact = VERIFIERS["exact"]
    return replace(exact, name="own", run=lambda *given: change(exact.run(*given)))


VERDICTS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda _: None,
    "a token too few": lambda verdict: replace(verdict, tokens_BD1=verdict.tokens_BD1[:, :-1]),
    "floats": lambda verdict: replace(verdict, accepted_B=verdict.accepted_B.float()),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", VERDICTS)
def test_a_verdict_that_does_not_fit_is_an_error(name, temperature, golden):
    with golden.raises(ValueError):
        decode(Threes(lambda proposal: proposal), own(VERDICTS[name]), temperature)


@pytest.mark.skipif(kernel() is None, reason="no compiled kernel")
def test_the_kernel_refuses_other_sizes(golden):
    p = torch.full((2, 8), 1 / 8)
    offer = torch.tensor([[1, 2], [3, 8]])
    u = torch.rand(2, 2, dtype=torch.double)
    with golden.raises(ValueError):
        draw(p, torch.rand(1))
    with golden.raises(ValueError):
        try_siblings(p, torch.full((2, 7), 1 / 7), offer, u)
    with golden.raises(ValueError):
        try_siblings(p, p.clone(), offer, u[:, :1])
    with golden.raises(IndexError):
        try_siblings(p, p.clone(), offer, u)
