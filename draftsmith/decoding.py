"""Parts of a decoder, for proposers, verifiers and trees of your own: `ds.decoding.Proposer`."""

from draftsmith.core.sampling import Sampling as Sampling
from draftsmith.decode import (
    PROPOSERS as PROPOSERS,
    TREES as TREES,
    VERIFIERS as VERIFIERS,
    DecodeStats as DecodeStats,
    Outcome as Outcome,
    Proposal as Proposal,
    Proposer as Proposer,
    Session as Session,
    SessionSetup as SessionSetup,
    Tree as Tree,
    TreeBatch as TreeBatch,
    Verdict as Verdict,
    Verifier as Verifier,
    check_lossless as check_lossless,
    parse_tree as parse_tree,
    take_over as take_over,
)
