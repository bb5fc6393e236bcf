"""Checks of what a part hands over: a proposer its proposals, a verifier its verdicts.

Legend: B rows, N drafted nodes, M = N + 1 with the root, E groups of siblings, R = 1 when all rows
share a tree, else B, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import PreTrainedModel

from draftsmith.core.errors import InputError
from draftsmith.decode.expected import expect
from draftsmith.decode.propose.protocol import Proposal, Proposer
from draftsmith.decode.tree import Drawing, TreeShape
from draftsmith.decode.tree_batch import TreeBatch
from draftsmith.decode.verify import Verifier
from draftsmith.decode.verify.tree_walk import Verdict, Walk

# How far the sum of probabilities in fp32 may be from 1.
_ROUNDING = 1e-3


class Parts(Protocol):
    """What a decoder decodes with. drawing: how children are chosen above temperature 0."""

    target: PreTrainedModel
    proposer: Proposer | None
    tree: TreeShape
    drawing: Drawing
    verifier: Verifier
    compile: bool | str


def is_foreign(part: object) -> bool:
    """Whether an object or a function comes from outside draftsmith."""
    return not str(getattr(part, "__module__", "")).startswith("draftsmith.")


@dataclass(frozen=True)
class Handover:
    """What must fit the parts of a decoder, a vocabulary and a device."""

    parts: Parts
    vocabulary: int
    device: torch.device

    @property
    def _where(self) -> str:
        return f"proposer {self.parts.proposer and self.parts.proposer.name}"

    def check_proposal(self, proposal: Proposal, rows: int) -> None:
        """Raise InputError for tensors that do not fit each other, the batch, or the decoder's
        tree.
        """
        where = self._where
        if not isinstance(proposal, Proposal) or not isinstance(proposal.tree, TreeBatch):
            kind = type(getattr(proposal, "tree", proposal)).__name__
            raise InputError(f"{where}: expected a Proposal with a TreeBatch, got {kind}")
        asked = self.parts.tree
        tree = proposal.tree
        nodes = tree.parents_RN.shape[1]
        trees = (min(tree.rows, rows), nodes)
        expect(f"{where}: tree", tree.parents_RN, trees, torch.long, self.device)
        if nodes > asked.size or tree.depth > asked.depth:
            raise InputError(
                f"{where}: tree: expected at most {asked.size} nodes and depth {asked.depth}, "
                f"got {nodes} and {tree.depth}"
            )
        drafted = (rows, nodes + 1)
        expect(f"{where}: tokens_BM", proposal.tokens_BM, drafted, torch.long, self.device)
        q_BEV = proposal.q_BEV
        if q_BEV is not None:
            drawn = (rows, q_BEV.shape[1:2].numel(), self.vocabulary)
            expect(f"{where}: q_BEV", q_BEV, drawn, torch.float32, self.device)

    def check_drafted(self, proposal: Proposal, *, drawn: bool) -> None:
        """Raise InputError for tokens that do not exist, distributions that are none, and a drawing
        that the verifier does not take. On an accelerator nothing is read, which would make it
        wait.
        """
        where = self._where
        drafted_BN = proposal.tokens_BM[:, 1:]
        q_BEV = proposal.q_BEV
        if not drafted_BN.numel():
            return
        if drawn:
            self.parts.verifier.check(self.parts.tree, proposal.drawing, proposal.drafts)
        if (q_BEV is None) != (proposal.drawing == "deterministic"):
            raise InputError(
                f"{where}: q_BEV: expected None for 'deterministic' tokens, else a tensor, "
                f"got {type(q_BEV).__name__} for '{proposal.drawing}'"
            )
        if self.device.type != "cpu":
            return
        low, high = map(int, drafted_BN.aminmax())
        if not -1 <= low <= high < self.vocabulary:
            raise InputError(
                f"{where}: tokens_BM: expected -1 to {self.vocabulary - 1}, got {low} to {high}"
            )
        if q_BEV is None:
            return
        above_RN = proposal.tree.parents_RN + 1
        slots_RN = proposal.tree.groups_RM.gather(1, above_RN) * proposal.drafts
        count = int(slots_RN.max()) + proposal.drafts
        if count > q_BEV.shape[1]:
            raise InputError(f"{where}: q_BEV: expected {count} of a row, got {q_BEV.shape[1]}")
        sound_BE = ((q_BEV.sum(2) - 1).abs() < _ROUNDING) & (q_BEV.amin(2) >= 0)
        sound_BN = sound_BE.gather(1, slots_RN.expand_as(drafted_BN))
        if not bool((sound_BN | (drafted_BN < 0)).all()):
            raise InputError(f"{where}: q_BEV: expected probabilities that sum to 1")

    def check_walks(self, walks: Sequence[Walk], proposal: Proposal) -> None:
        """Raise InputError for accepted nodes that are no path, and tokens that are not theirs, or
        none.
        """
        children_RMK, _ = proposal.tree.on_host
        for row, tokens_M in enumerate(proposal.tokens_BM.tolist()):
            path = walks[row].path
            *drafted, last = walks[row].emitted or [-1]
            children_MK = children_RMK[row % len(children_RMK)]
            steps = zip([0, *path], path, strict=False)
            if (
                not all(node and node in children_MK[at] for at, node in steps)
                or drafted != [tokens_M[node] for node in path]
                or not 0 <= last < self.vocabulary
            ):
                raise InputError(
                    f"verifier {self.parts.verifier.name}: expected a path of the tree with its "
                    f"tokens, then one below {self.vocabulary}, got nodes {path} and tokens "
                    f"{walks[row].emitted} in row {row}"
                )


def check_verdict(name: str, verdict: Verdict, proposal: Proposal) -> None:
    """Raise InputError for a verdict whose tensors are of other shapes or types."""
    if not isinstance(verdict, Verdict):
        raise InputError(f"verifier {name}: expected a Verdict, got {type(verdict).__name__}")
    rows = len(proposal.tokens_BM)
    depth = proposal.tree.depth
    shapes = {"tokens_BD1": (rows, depth + 1), "nodes_BD": (rows, depth), "accepted_B": (rows,)}
    device = proposal.tokens_BM.device
    for key, shape in shapes.items():
        expect(f"verifier {name}: {key}", getattr(verdict, key), shape, torch.long, device)
    expect(f"verifier {name}: open_B", verdict.open_B, (rows,), torch.bool, device)
