"""Which tree and which verifier suit a proposer when none is named: one answer for the command line, the evaluation,
the benchmarks and `SpeculativeDecoder`. Needs no torch.
"""

from decode.tree import Tree, TreeShape

CHAIN = 4  # tokens drafted per step when no tree is named


def default_tree(proposer: str = "draft", heads: int | None = None) -> Tree:
    """The tree for a proposer of `PROPOSERS`: four tokens one after another, fewer where there are fewer `heads`.
    Lookahead decoding has its own, which holds its window and its candidates.
    """
    if proposer == "lookahead":
        from decode.propose.lookahead import LookaheadProposer

        return LookaheadProposer().default_tree()
    return Tree(tuple(range(-1, min(CHAIN, heads or CHAIN) - 1)))


def default_verifier(tree: TreeShape, *, draws: bool = True, drafts: int = 1) -> str:
    """The lossless rule of `VERIFIERS` for a tree whose tokens are drawn at random (`draws`) by one or more `drafts`.

    exact: for tokens that the context determines, such as copied ones and those of trees that grow by confidence.
    Drawing from the target and looking whether a child carries the token then accepts as much as any rule can
    (Hu et al., ICLR 2025, arXiv 2502.18779). For drawn tokens a rule that knows q accepts more: specinfer, the one that
    takes siblings from several drafts; speculative on a chain; mcsd, for siblings drawn without replacement, on every
    other static tree, be it `kary:`, `static:` or `sequoia:`.

    `block` on chains and `traversal` on trees accept a little more per target call, but cost more time per step, and
    the acceptance that the evaluation predicts is that of the rules above. Name them to use them.
    """
    if not draws or tree.grows:
        return "exact"
    if drafts > 1:
        return "specinfer"
    return "speculative" if tree.is_chain else "mcsd"
