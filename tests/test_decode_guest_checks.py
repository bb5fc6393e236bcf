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
from draftsmith.decode import DraftModelProposer, SpeculativeDecoder, Tree
from draftsmith.decode.kernel_sampling import draw, try_siblings
from draftsmith.decode.native import kernel
from draftsmith.decode.propose.protocol import Proposal
from draftsmith.decode.propose.static_tree import StaticTreeSession
from draftsmith.decode.tree_batch import TreeBatch
from draftsmith.decode.verify import VERIFIERS
from tests.tiny_models import random_llama

V = 17
PROMPTS = [[1, 2], [3, 4, 5]]
CPU = torch.device("cpu")
CHAIN = Tree((-1, 0, 1))
Change = Callable[[Proposal], Any]


@pytest.fixture
def handed_over(monkeypatch):
    """`handed_over(change)`: a proposer hands over what `change` makes of its proposals."""
    propose = StaticTreeSession.propose

    def patch(change):
        def changed(session, u_BN):
            return change(propose(session, u_BN))

        monkeypatch.setattr(StaticTreeSession, "propose", changed)

    return patch


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


def decode(verifier, temperature):
    drafting = DraftModelProposer(random_llama(3, V))
    decoder = SpeculativeDecoder(random_llama(2, V), drafting, "chain:3", verifier)
    decoder.generate(PROMPTS, Sampling(temperature=temperature), 6, eos_ids=())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", PROPOSALS)
def test_a_proposal_that_does_not_fit_is_an_error(name, temperature, handed_over, golden):
    handed_over(PROPOSALS[name])
    with golden.raises(ValueError):
        decode("exact", temperature)


@pytest.mark.parametrize("name", DRAWN)
def test_distributions_that_do_not_fit_are_an_error(name, handed_over, golden):
    handed_over(DRAWN[name])
    with golden.raises(ValueError):
        decode("mcsd", 1.0)


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
        decode(own(VERDICTS[name]), temperature)


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
