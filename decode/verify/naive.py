"""What EAGLE-2 does above temperature 0: try the children in turn with q = 1, dropping each refused token from p.

That telescopes to one draw from p and a look whether a child carries it, so the rule has the law of `exact` and runs
as `exact`; they differ in the trees they ask for first. For the most probable tokens as children it is lossless and
the best that can be done at a node, as the children are a function of the context.
"""

from decode.verify.rule import Verifier, match, one_a_depth

NAIVE = Verifier(
    name="naive",
    title="EAGLE-2's rule: exact, on the most probable children",
    paper="Li et al. 2024, arXiv 2406.16858",
    lossless=True,
    chains_only=False,
    several_drafts=True,
    drawings=("deterministic", "without_replacement", "top_and_one", "with_replacement"),
    uniforms=one_a_depth,
    run=match,
)
