"""Default tree and verifier of a proposer, for all callers. Needs no torch."""

from decode.tree import Tree, TreeShape

CHAIN = 4  # tokens drafted per step when no tree is named


def default_tree(proposer: str = "draft", heads: int | None = None) -> Tree:
    """Return the tree for a proposer of `PROPOSERS`: a chain of four tokens, fewer if there are fewer `heads`; for
    lookahead, a tree that holds its window and its candidates.
    """
    if proposer == "lookahead":
        from decode.propose.lookahead import LookaheadProposer

        return LookaheadProposer().default_tree()
    return Tree(tuple(range(-1, min(CHAIN, heads or CHAIN) - 1)))


def default_verifier(tree: TreeShape, *, draws: bool = True, drafts: int = 1) -> str:
    """Return the lossless rule of `VERIFIERS` for a tree whose tokens are drawn at random (`draws`) by `drafts` drafts.

    exact: for tokens that the context determines, such as copied ones and those of growing trees; no rule accepts more
    (Hu et al., ICLR 2025, arXiv 2502.18779). specinfer: for siblings from several drafts. speculative: for a chain.
    mcsd: for siblings drawn without replacement, on every other static tree.

    `block` on chains and `traversal` on trees accept a little more per target call and take more time per step. The
    evaluation predicts the acceptance of the default rules.
    """
    if not draws or tree.grows:
        return "exact"
    if drafts > 1:
        return "specinfer"
    return "speculative" if tree.is_chain else "mcsd"
