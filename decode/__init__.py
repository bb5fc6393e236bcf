"""Speculative decoding: proposers draft token trees, one target forward scores them, a verifier
keeps a path.
"""

from decode.engine import Batch, Generation, SpeculativeDecoder
from decode.propose import (
    PROPOSERS,
    DraftModelProposer,
    Drawing,
    HeadProposer,
    LookaheadProposer,
    Outcome,
    PromptLookupProposer,
    Proposal,
    Proposer,
    ProposerKind,
    RetrievalProposer,
    Session,
)
from decode.stats import DecodeStats
from decode.stop_strings import Stop, stop_at
from decode.tree import Growth, Shape, Tree
from decode.tree_spec import TREES, TreeKind, parse_tree
from decode.verify import VERIFIERS, Verdict, Verifier

__all__ = [
    "PROPOSERS",
    "TREES",
    "VERIFIERS",
    "Batch",
    "DecodeStats",
    "DraftModelProposer",
    "Drawing",
    "Generation",
    "Growth",
    "HeadProposer",
    "LookaheadProposer",
    "Outcome",
    "PromptLookupProposer",
    "Proposal",
    "Proposer",
    "ProposerKind",
    "RetrievalProposer",
    "Session",
    "Shape",
    "SpeculativeDecoder",
    "Stop",
    "Tree",
    "TreeKind",
    "Verdict",
    "Verifier",
    "parse_tree",
    "stop_at",
]
