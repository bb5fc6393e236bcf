"""Whether a verifier keeps the target's distribution: the outputs of small worlds, against the
exact probability of each.

Legend: B rows, d drafts, K siblings, M nodes with the root, V vocabulary, L tokens of output.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from draftsmith.core.errors import InputError, RequirementError, counted
from draftsmith.core.sampling import generator
from draftsmith.decode.expected import CPU
from draftsmith.decode.guest_checks import check_verdict
from draftsmith.decode.kernel_sampling import draw
from draftsmith.decode.propose.protocol import Proposal
from draftsmith.decode.propose.static_tree import draw_children, most_probable
from draftsmith.decode.tree import Drawing, Tree, chain
from draftsmith.decode.tree_batch import TreeBatch
from draftsmith.decode.verify import Verifier, find_verifier
from draftsmith.decode.verify.tree_walk import Verdict

VOCABULARY = 4
LENGTH = 3
# Of one comparison: a check makes some 50.
LEVEL = 1e-6
CHAIN = chain(2)
BUSHY = Tree((-1, -1, -1, 0, 0, 1))


@dataclass(frozen=True)
class World:
    """The distributions behind every beginning of an output, by its length: of the target `[V **
    length, V]`, of the drafts `[d, V ** length, V]`.
    """

    p: list[Tensor]
    q: list[Tensor]

    def distribution(self) -> Tensor:
        """Probability of each output, `[V ** L]`."""
        whole = torch.ones(1, dtype=torch.double)
        for p in self.p:
            p = p.double()
            whole = (whole.unsqueeze(1) * p / p.sum(1, keepdim=True)).flatten()
        return whole


def truncated(distribution: Tensor, count: int) -> Tensor:
    """Only the `count` most probable tokens, as top-k leaves them."""
    best = distribution.topk(count, dim=-1)
    kept = torch.zeros_like(distribution).scatter_(-1, best.indices, best.values)
    return kept / kept.sum(-1, keepdim=True)


def _half(distribution: Tensor, first: bool) -> Tensor:
    """Only the first tokens, or only the others."""
    kept = (torch.arange(VOCABULARY) < VOCABULARY // 2) == first
    return distribution * kept / (distribution * kept).sum(-1, keepdim=True)


# What becomes of the distributions of target and drafts in each world. fp32 ones need not sum to 1.
_Change = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
WORLDS: dict[str, _Change] = {
    "random": lambda p, q: (p, q),
    "one-hot p": lambda p, q: (truncated(p, 1), q),
    "one-hot q": lambda p, q: (p, truncated(q, 1)),
    "disjoint": lambda p, q: (_half(p, first=True), _half(q, first=False)),
    "truncated": lambda p, q: (truncated(p, 3), truncated(q, 2)),
    "equal": lambda p, q: (p, p.expand_as(q)),
    "rounded": lambda p, q: (p * (1 + 4e-6), q * (1 - 4e-6)),
}


def world(kind: str, seed: int = 0, drafts: int = 1, length: int = LENGTH) -> World:
    """A world of `WORLDS`."""
    random = generator(seed)

    def drawn(count: int) -> list[Tensor]:
        shapes = [(count, VOCABULARY**depth, VOCABULARY) for depth in range(length)]
        logits = [torch.randn(shape, generator=random) for shape in shapes]
        return [(each * 1.2).softmax(-1) for each in logits]

    of_target = [law[0] for law in drawn(1)]
    p: list[Tensor] = []
    q: list[Tensor] = []
    for target_law, draft_laws in zip(of_target, drawn(drafts), strict=True):
        p_law, q_law = WORLDS[kind](target_law, draft_laws)
        p.append(p_law)
        q.append(q_law)
    return World(p, q)


def propose(
    world: World, tree: Tree, drawing: Drawing, rows: int, seed: int = 1
) -> tuple[Proposal, Tensor]:
    """A proposal drawn as the world's drafts would, and the target's distributions at all nodes."""
    random = generator(seed)
    drafts = len(world.q[0])
    tokens_BM = torch.full((rows, tree.size + 1), -1)
    code_BM = torch.zeros_like(tokens_BM)
    p_BMV = torch.empty(rows, tree.size + 1, VOCABULARY)
    q = [torch.empty(rows, 0, VOCABULARY)]
    for node, below in enumerate(tree.children):
        depth = tree.depths[node - 1] if node else 0
        code_B = code_BM[:, node]
        p_BMV[:, node] = world.p[depth][code_B]
        if not below:
            continue
        q_BdV = world.q[depth][:, code_B].transpose(0, 1)
        q.append(q_BdV)
        kids = list(below)
        absent_B1 = (tokens_BM[:, node : node + 1] < 0) & bool(node)
        if drawing == "deterministic":
            tokens_B1K = most_probable(q_BdV.log(), len(kids), drafts)
        else:
            u_B1K = torch.rand(rows, 1, len(kids), generator=random, dtype=torch.double)
            tokens_B1K = draw_children(drawing, q_BdV, u_B1K, [len(kids)], drafts)
        tokens_BM[:, kids] = tokens_B1K[:, 0].masked_fill(absent_B1, -1)
        code_BM[:, kids] = code_B.unsqueeze(1) * VOCABULARY + tokens_BM[:, kids].clamp(min=0)
    q_BEV = None if drawing == "deterministic" else torch.cat(q, dim=1)
    return Proposal(TreeBatch.build(tree, CPU), tokens_BM, q_BEV, drawing, drafts), p_BMV


def verify(verifier: Verifier, proposal: Proposal, p_BMV: Tensor, seed: int = 2) -> Verdict:
    """The verdict on a proposal above temperature 0."""
    count = verifier.uniforms(proposal.tree)
    u_BU = torch.rand(len(p_BMV), count, generator=generator(seed), dtype=torch.double)
    return verifier.run(proposal, p_BMV, u_BU)


def outputs(world: World, verdict: Verdict) -> Tensor:
    """How often each output came, `[V ** L]`: what a step emitted, continued by the target alone.
    Raise InputError for a token that does not exist.
    """
    random = generator(3)
    code_B = torch.zeros_like(verdict.accepted_B)
    for place, p in enumerate(world.p):
        tokens_B = draw(p[code_B], torch.rand(len(code_B), generator=random, dtype=torch.double))
        if place < verdict.tokens_BD1.shape[1]:
            is_emitted_B = place <= verdict.accepted_B
            tokens_B = torch.where(is_emitted_B, verdict.tokens_BD1[:, place], tokens_B)
        if not 0 <= int(tokens_B.min()) <= int(tokens_B.max()) < VOCABULARY:
            raise InputError(f"tokens_BD1: expected tokens from 0 to {VOCABULARY - 1}")
        code_B = code_B * VOCABULARY + tokens_B
    return torch.bincount(code_B, minlength=VOCABULARY ** len(world.p))


def chi_square(counts: Tensor, distribution: Tensor, significance: float = 1e-4) -> float:
    """Chi-square over its critical value; infinite if something impossible came. Cells below 8
    draws are pooled.
    """
    from scipy.stats import chi2  # takes half a second

    counts = counts.double()
    if float(counts[distribution == 0].sum()):
        return float("inf")
    expected = distribution / distribution.sum() * counts.sum()
    large = expected >= 8
    seen = torch.cat([counts[large], counts[~large].sum().unsqueeze(0)])
    wanted = torch.cat([expected[large], expected[~large].sum().unsqueeze(0)])
    used = wanted > 0
    value = float(((seen[used] - wanted[used]) ** 2 / wanted[used]).sum())
    freedom = int(used.sum()) - 1
    return value / float(chi2.ppf(1 - significance, freedom)) if freedom else value


def check_lossless(verifier: str | Verifier, *, rows: int = 20_000) -> None:
    """Raise RequirementError, a line a case, if outputs of a verifier are not distributed as the
    target's own: for every drawing that it names, on chains and trees, for distributions that are
    random, one-hot, disjoint, truncated or equal, for several drafts if it takes them, and at
    temperature 0. Each case draws `rows` outputs; all take seconds. Raise InputError for a verdict
    that does not fit its proposal.
    """
    rule = find_verifier(verifier)
    lossy = []
    trees = [CHAIN] if rule.chains_only else [CHAIN, BUSHY]
    for tree, drawing, kind in product(trees, rule.drawings, WORLDS):
        several = rule.several_drafts and drawing == "with_replacement"
        for drafts in (1, 2) if several else (1,):
            made = world(kind, drafts=drafts)
            proposal, p_BMV = propose(made, tree, drawing, rows)
            case = f"{kind} distributions, siblings drawn '{drawing}'"
            case += f" from {counted(drafts, 'draft')}, tree of parents {tree.parents}"
            verdicts = {case: verify(rule, proposal, p_BMV)}
            if kind == "one-hot p" and drawing == rule.drawings[0]:
                verdicts[f"temperature 0, tree of parents {tree.parents}"] = rule.run(
                    proposal, p_BMV, None
                )
            for name, verdict in verdicts.items():
                check_verdict(rule.name, verdict, proposal)
                lossy += _differences(f"verifier {rule.name}: {name}", made, verdict)
    if lossy:
        raise RequirementError(lossy)


def _differences(where: str, made: World, verdict: Verdict) -> list[str]:
    """A line if outputs do not follow the world's distribution."""
    counts = outputs(made, verdict)
    distribution = made.distribution()
    excess = chi_square(counts, distribution, LEVEL)
    if excess < 1:
        return []
    expected = distribution * counts.sum()
    code = int(((counts - expected) ** 2 / (expected + 1)).argmax())
    tokens = [code // VOCABULARY**place % VOCABULARY for place in reversed(range(LENGTH))]
    return [
        f"{where}: chi-square is {excess:.3g} times its limit; output {tokens} came "
        f"{int(counts[code])} times of {int(counts.sum())}, expected {float(expected[code]):.0f}"
    ]
