"""Speculative decoding: proposers draft token trees, one forward of the target scores them, a verifier keeps a path.

`SpeculativeDecoder` is the entrance. Names that need torch are imported when they are first used (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from decode.defaults import default_tree, default_verifier
from decode.propose import PROPOSERS, ProposerKind
from decode.tree import Drawing, DynamicTree, Tree, TreeShape
from decode.tree_spec import TREES, TreeKind, parse_tree
from decode.verify import VERIFIERS, Verifier

if TYPE_CHECKING:
    from decode.batch_run import Generation, StopCondition, StopStrings
    from decode.engine import BatchOutput, SpeculativeDecoder
    from decode.packed_weights import take_over
    from decode.propose.draft_model import DraftModelProposer
    from decode.propose.head_proposers import HeadProposer
    from decode.propose.lookahead import LookaheadProposer
    from decode.propose.prompt_lookup import PromptLookupProposer
    from decode.propose.protocol import Outcome, Proposal, Proposer, Session, SessionSetup
    from decode.propose.retrieval import RetrievalProposer
    from decode.stats import DecodeStats
    from decode.tree_batch import TreeBatch
    from decode.verify.tree_walk import Verdict

# Where the names that need torch are, in the order of the search.
_MODULES = (
    *("engine", "batch_run", "packed_weights", "stats", "tree_batch", "verify.tree_walk"),
    *("propose.protocol", "propose.draft_model", "propose.head_proposers"),
    *("propose.lookahead", "propose.prompt_lookup", "propose.retrieval"),
)


def __getattr__(name: str) -> Any:
    for module in _MODULES if name in __all__ else ():
        if (value := getattr(import_module(f"decode.{module}"), name, None)) is not None:
            return value
    raise AttributeError(f"module 'decode' has no attribute {name!r}")


__all__ = [
    "PROPOSERS",
    "TREES",
    "VERIFIERS",
    "BatchOutput",
    "DecodeStats",
    "DraftModelProposer",
    "Drawing",
    "Generation",
    "DynamicTree",
    "HeadProposer",
    "LookaheadProposer",
    "Outcome",
    "PromptLookupProposer",
    "Proposal",
    "Proposer",
    "ProposerKind",
    "RetrievalProposer",
    "Session",
    "SessionSetup",
    "TreeShape",
    "SpeculativeDecoder",
    "StopCondition",
    "StopStrings",
    "Tree",
    "TreeBatch",
    "TreeKind",
    "Verdict",
    "Verifier",
    "default_tree",
    "default_verifier",
    "parse_tree",
    "take_over",
]
