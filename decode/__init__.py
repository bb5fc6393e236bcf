"""Speculative decoding: proposers draft token trees, one target forward scores them, a verifier
keeps a path.
"""

from decode.engine import Batch, Generation, SpeculativeDecoder
from decode.propose import PROPOSERS, DraftModelProposer, Drawing, Proposal, Proposer, Session
from decode.stats import DecodeStats
from decode.tree import Tree, parse_tree
from decode.verify import VERIFIERS, Verdict, Verifier

__all__ = [
    "PROPOSERS",
    "VERIFIERS",
    "Batch",
    "DecodeStats",
    "DraftModelProposer",
    "Drawing",
    "Generation",
    "Proposal",
    "Proposer",
    "Session",
    "SpeculativeDecoder",
    "Tree",
    "Verdict",
    "Verifier",
    "parse_tree",
]
