"""One step of a batch: a proposal is scored by the target, and judged.

`batch_run` puts it together: propose -> score -> judge -> emit. There are two judges. `by_rule`
runs a verification rule on tensors, so that a step can be recorded. `by_own_tokens` follows the
tokens that the target itself takes, on lists: what every lossless rule comes to at temperature 0,
where p is one-hot, and where nothing is drafted. `benchmarks/speed/judges.py` times both.

Legend: B rows, N drafted nodes, M = N + 1 with the root, C copied tokens, D depth, H hidden size, V
vocabulary, U uniforms per row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftsmith.core.penalties import Seen, penalised
from draftsmith.core.sampling import Sampling, noised, probs
from draftsmith.decode.guest_checks import check_verdict
from draftsmith.decode.kernel_sampling import draw, largest
from draftsmith.decode.propose.protocol import Proposal
from draftsmith.decode.runner import BlockForward
from draftsmith.decode.verify import Verifier
from draftsmith.decode.verify.copies import along_copies, beside
from draftsmith.decode.verify.exact import follow
from draftsmith.decode.verify.tree_walk import Walk, row_numbers


@dataclass(frozen=True, eq=False)
class Question:
    """What the target scores. last_B1: the root's tokens. block: inputs of the block's forward.
    seen: counts of tokens for penalties. noise: by depth, copies included; None to draw.
    """

    proposal: Proposal
    last_B1: Tensor
    block: tuple[Tensor, ...]
    seen: Seen | None
    noise_BDV: Tensor | None


@dataclass(frozen=True, eq=False)
class Scored:
    """The target's logits `[B, M + C, V]`, with penalties and noise, and states `[B, M + C, H]` per
    layer.
    """

    logits_BMV: Tensor
    states: tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Ruled:
    """The verdict of a rule, as tensors.

    facts: integers for the host, by row: see `by_rule`. p: the target's distributions, `[B, M + C,
    V]`. states: at the root, on the accepted path and at copies, `[B, 1 + D + C, H]` per layer.
    """

    facts_BF: Tensor
    p_BMV: Tensor
    states: tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Judged:
    """The outcome of a step on the host.

    finite_B: see `_finite`. states: the target's at the root and on the accepted path, `[B, D + 1,
    H]` per layer. distributions: returns the target's, `[B, M, V]`.
    """

    finite_B: list[int]
    walks: list[Walk]
    states: Sequence[Tensor]
    distributions: Callable[[], Tensor]


def score(forward: BlockForward, question: Question, sampling: Sampling, least: int) -> Scored:
    """Forward the root and all drafted tokens; those that a row lacks as `least` or more."""
    proposal = question.proposal
    drafted_BN = proposal.whole_BM[:, 1:].clamp(min=least)
    tokens_BM = torch.cat([question.last_B1, drafted_BN], dim=1)
    logits_BMV, states = forward.run(tokens_BM, question.block)
    if question.seen is None and question.noise_BDV is None:
        return Scored(logits_BMV, states)
    tree = beside(proposal.tree, proposal.num_copied)
    if question.seen is not None:
        at = question.seen.in_tree(proposal.whole_BM, tree.sees_RMM)
        logits_BMV = penalised(logits_BMV, sampling, at)
    if question.noise_BDV is not None:
        depths_RM = pad(tree.depths_RN, (1, 0))
        noise_BMV = question.noise_BDV[row_numbers(logits_BMV).unsqueeze(1), depths_RM]
        logits_BMV = noised(logits_BMV, sampling, noise_BMV)
    return Scored(logits_BMV, states)


def by_own_tokens(
    proposal: Proposal, scored: Scored, sampling: Sampling, u_BU: Tensor | None
) -> Judged:
    """Follow the target's most probable tokens. With uniforms, one for the root and one for each
    copied token, follow those that they draw; nothing but copies is drafted then.
    """
    logits_BMV = scored.logits_BMV
    if u_BU is None:
        best = largest(logits_BMV, 1)
        own_BM = best.indices[..., 0]
        largest_BM = best.values[..., 0]
    else:
        p_BMV = probs(logits_BMV, sampling)
        own_BM = draw(p_BMV, u_BU)
        largest_BM = logits_BMV.amax(2)
    own = own_BM.tolist()
    copied = [row[proposal.nodes :] for row in own]
    walks = along_copies(proposal, follow(proposal, own), copied)
    states = _at_paths(scored.states, [walk.path for walk in walks])
    finite_B = _finite(largest_BM, proposal.finite)
    return Judged(finite_B.tolist(), walks, states, lambda: probs(logits_BMV, sampling))


def by_rule(
    verifier: Verifier,
    proposal: Proposal,
    scored: Scored,
    sampling: Sampling,
    u_BU: Tensor | None,
    most_copied: int,
    *,
    checks: bool,
) -> Ruled:
    """Verify by a rule. The facts are: whether logits are finite, accepted tokens, whether the walk
    ended on a rejection, drafted nodes, their depth; the path's nodes `[D]`; its tokens and the
    target's `[D + 1]`; the target's own tokens at copies `[C]`.

    most_copied: uniforms for copies, the last ones. checks: of the verdict's shapes.
    """
    p_BMV = probs(scored.logits_BMV, sampling)
    nodes = proposal.nodes
    u_BC = None
    if u_BU is not None and most_copied:
        u_BU, u_BC = u_BU.tensor_split([u_BU.shape[1] - most_copied], dim=1)
    verdict = verifier.run(proposal, p_BMV[:, :nodes], u_BU)
    if checks:
        check_verdict(verifier.name, verdict, proposal)
    exists_BM = proposal.tokens_BM >= 0
    depths_RM = pad(proposal.tree.depths_RN, (1, 0))
    finite_B = _finite(scored.logits_BMV.amax(2), proposal.finite)
    drafted_B = exists_BM.sum(1)
    offered_B = (exists_BM * depths_RM).amax(1)
    counts = [finite_B, verdict.accepted_B, verdict.open_B, drafted_B, offered_B]
    facts = [torch.stack(counts, dim=1), verdict.nodes_BD, verdict.tokens_BD1]
    nodes_BD = verdict.nodes_BD
    if proposal.num_copied:
        p_BCV = p_BMV[:, nodes:]
        if u_BC is None:
            facts.append(largest(p_BCV, 1).indices[..., 0])
        else:
            u_BC = u_BC[:, : proposal.num_copied]
            facts.append(draw(p_BCV, u_BC))
        copies_C = torch.arange(nodes, p_BMV.shape[1], device=p_BMV.device)
        nodes_BD = torch.cat([nodes_BD, copies_C.expand(len(p_BMV), -1)], dim=1)
    return Ruled(torch.cat(facts, dim=1), p_BMV, _on_path(scored.states, nodes_BD))


def on_host(proposal: Proposal, ruled: Ruled, nodes: int) -> Judged:
    """Read a verdict. nodes: of the proposal before it was padded."""
    finite_B: list[int] = []
    walks: list[Walk] = []
    own_BC: list[list[int]] = []
    depth = proposal.tree.depth
    # One transfer, so that a step waits only once.
    for finite, accepted, is_open, drafted, offered, *rest in ruled.facts_BF.tolist():
        finite_B.append(finite)
        emitted = rest[depth : depth + accepted + 1]
        walks.append(Walk(rest[:accepted], emitted, bool(is_open), drafted, offered))
        own_BC.append(rest[2 * depth + 1 :])
    states = ruled.states
    if proposal.num_copied:
        walks = along_copies(proposal, walks, own_BC)
        places = []
        for walk in walks:
            start = 1 + depth * walk.copied
            numbers = range(start, start + len(walk.path))
            places.append(list(numbers))
        states = _at_paths(states, places)
    return Judged(finite_B, walks, states, lambda: ruled.p_BMV[:, :nodes])


def _at_paths(states: Sequence[Tensor], paths: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
    """Return states at the root and at the nodes of each row's path; the root's behind a shorter
    one.
    """
    if not states:
        return ()
    depth = max(map(len, paths))
    padded = [[*path, *[0] * (depth - len(path))] for path in paths]
    nodes_BD = torch.tensor(padded, dtype=torch.long, device=states[0].device)
    return _on_path(states, nodes_BD)


def _on_path(states: Sequence[Tensor], nodes_BD: Tensor) -> tuple[Tensor, ...]:
    """Return states at the root and at these nodes."""
    path_BD1 = pad(nodes_BD, (1, 0)).unsqueeze(2)
    return tuple(layer.gather(1, path_BD1.expand(-1, -1, layer.shape[2])) for layer in states)


def _finite(largest_BM: Tensor, draft: Tensor | None) -> Tensor:
    """`[B]`: 1 if the target's logits are finite, plus 2 if the draft's are. The largest logit of
    a node shows any NaN or plus infinity; minus infinity marks an impossible token.
    """
    largest_B = largest_BM.amax(1)
    target_B = largest_B.isfinite().long()
    return target_B + 2 if draft is None else target_B + 2 * draft
