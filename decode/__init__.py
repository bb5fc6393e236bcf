"""Speculative decoding: proposers draft token trees, one forward of the target scores them, a
verifier keeps a path.

`SpeculativeDecoder` is the entrance. Names that need torch are imported when they are first used
(PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from decode.propose import (
    PROPOSERS as PROPOSERS,
    ProposerKind as ProposerKind,
    default_tree as default_tree,
)
from decode.tree import (
    Drawing as Drawing,
    DynamicTree as DynamicTree,
    Tree as Tree,
    TreeShape as TreeShape,
)
from decode.tree_spec import (
    TREES as TREES,
    TreeKind as TreeKind,
    Written as Written,
    parse_tree as parse_tree,
    tree_spec as tree_spec,
)
from decode.verify import (
    VERIFIERS as VERIFIERS,
    Verifier as Verifier,
    default_verifier as default_verifier,
)
from draftsmith_core import lazy_names

if TYPE_CHECKING:
    from decode.batch_run import (
        Generation as Generation,
        StopCondition as StopCondition,
        StopStrings as StopStrings,
    )
    from decode.engine import BatchOutput as BatchOutput, SpeculativeDecoder as SpeculativeDecoder
    from decode.packed_weights import take_over as take_over
    from decode.propose.draft_model import DraftModelProposer as DraftModelProposer
    from decode.propose.head_proposers import HeadProposer as HeadProposer
    from decode.propose.lookahead import LookaheadProposer as LookaheadProposer
    from decode.propose.lookup_first import LookupFirst as LookupFirst
    from decode.propose.prompt_lookup import PromptLookupProposer as PromptLookupProposer
    from decode.propose.protocol import (
        Outcome as Outcome,
        Proposal as Proposal,
        Proposer as Proposer,
        Session as Session,
        SessionSetup as SessionSetup,
    )
    from decode.propose.retrieval import RetrievalProposer as RetrievalProposer
    from decode.stats import DecodeStats as DecodeStats
    from decode.supported_models import takes_trees as takes_trees
    from decode.tree_batch import TreeBatch as TreeBatch
    from decode.verify.tree_walk import Verdict as Verdict

_LATER = lazy_names(__file__)


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'decode' has no attribute {name!r}")
    module, attribute = _LATER[name]
    return getattr(import_module(module), attribute)
