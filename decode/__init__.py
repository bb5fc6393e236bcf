"""Speculative decoding: proposers draft token trees, one forward of the target scores them, a
verifier keeps a path.

`SpeculativeDecoder` is the entrance. Names that need torch are imported when they are first used
(PEP 562).
"""

if __name__ == "decode":
    raise ImportError("import draftsmith.decode: decode is no package of its own")

from importlib import import_module
from typing import TYPE_CHECKING, Any

from draftsmith.decode.propose import PROPOSERS as PROPOSERS
from draftsmith.decode.tree import Tree as Tree, TreeShape as TreeShape
from draftsmith.decode.tree_spec import (
    TREES as TREES,
    Written as Written,
    parse_tree as parse_tree,
    tree_spec as tree_spec,
)
from draftsmith.decode.verify import (
    VERIFIERS as VERIFIERS,
    Verifier as Verifier,
    default_verifier as default_verifier,
)

if TYPE_CHECKING:
    from draftsmith.decode.batch_run import (
        Generation as Generation,
        StopStrings as StopStrings,
    )
    from draftsmith.decode.engine import (
        BatchOutput as BatchOutput,
        SpeculativeDecoder as SpeculativeDecoder,
    )
    from draftsmith.decode.packed_weights import take_over as take_over
    from draftsmith.decode.propose.draft_model import DraftModelProposer as DraftModelProposer
    from draftsmith.decode.propose.head_proposers import HeadProposer as HeadProposer
    from draftsmith.decode.propose.lookahead import LookaheadProposer as LookaheadProposer
    from draftsmith.decode.propose.lookup_first import LookupFirst as LookupFirst
    from draftsmith.decode.propose.prompt_lookup import PromptLookupProposer as PromptLookupProposer
    from draftsmith.decode.propose.protocol import Proposer as Proposer
    from draftsmith.decode.stats import DecodeStats as DecodeStats
    from draftsmith.decode.supported_models import takes_trees as takes_trees

# The module of each name that needs torch.
_LATER = {
    "BatchOutput": "engine",
    "DecodeStats": "stats",
    "DraftModelProposer": "propose.draft_model",
    "Generation": "batch_run",
    "HeadProposer": "propose.head_proposers",
    "LookaheadProposer": "propose.lookahead",
    "LookupFirst": "propose.lookup_first",
    "PromptLookupProposer": "propose.prompt_lookup",
    "Proposer": "propose.protocol",
    "SpeculativeDecoder": "engine",
    "StopStrings": "batch_run",
    "take_over": "packed_weights",
    "takes_trees": "supported_models",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"draftsmith.decode.{_LATER[name]}"), name)
