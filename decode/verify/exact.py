"""Exact match: draw from the target, and accept the draft's token if it is the same.

Lossless for every tree, also for a pruned one. At temperature 0 it is plain token equality; for
deterministic drafts it reaches the best acceptance any rule can (see the identity for a
deterministic set in Hu et al., ICLR 2025).
"""

from decode.verify.rule import Verifier, match, one_a_depth

EXACT = Verifier(
    name="exact",
    title="draw from the target, accept the child that it hits",
    paper="Yang et al. 2024, arXiv 2401.06706 (naive sampling)",
    lossless=True,
    chains_only=False,
    several_drafts=True,
    # Siblings that differ cover more; beyond that the rule does not ask how they were chosen.
    drawings=("without_replacement", "top_and_one", "with_replacement", "deterministic"),
    uniforms=one_a_depth,
    run=match,
)
