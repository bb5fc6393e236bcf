"""Parts of a decoder, for proposers, verifiers and trees of your own: `ds.decoding.Proposer`."""

from draftsmith.core.sampling import Sampling as Sampling
from draftsmith.decode import (
    PROPOSERS as PROPOSERS,
    TREES as TREES,
    VERIFIERS as VERIFIERS,
    DecodeStats as DecodeStats,
    Tree as Tree,
    Verifier as Verifier,
    parse_tree as parse_tree,
    take_over as take_over,
)
from draftsmith.decode.lossless import check_lossless as check_lossless
from draftsmith.decode.propose.protocol import (
    Outcome as Outcome,
    Proposal as Proposal,
    Proposer as Proposer,
    Session as Session,
    SessionSetup as SessionSetup,
)
from draftsmith.decode.tree_batch import TreeBatch as TreeBatch
from draftsmith.decode.verify.tree_walk import Verdict as Verdict
