"""Exact match (naive sampling): draw from the target, and accept the draft's token if it is the
same.

Lossless for every tree, also for a pruned one. At temperature 0 it is plain token equality; for
deterministic drafts it reaches the best acceptance any rule can (see the identity for a
deterministic set in Hu et al., ICLR 2025).
"""

from decode.verify.rule import Verifier, match

EXACT = Verifier(
    name="exact",
    lossless=True,
    chains_only=False,
    drawings=frozenset({"without_replacement", "deterministic"}),
    uniforms=lambda tree: tree.depth + 1,
    run=match,
)
