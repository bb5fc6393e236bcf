"""Verification rules: `VERIFIERS` maps the name a user writes to the rule, its paper and where it
is valid.

Needs no torch; the code of a rule is imported when it first runs. To add a rule, write
`rule(proposal, p_BMV, u_BU)` for temperatures above 0 in a file of this package and enter it in the
table. From Python, pass a `Verifier` to `SpeculativeDecoder`; it needs no table.

Legend: B rows, D depth, M nodes with the root, V vocabulary, U uniforms per row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Literal

from draftsmith.core.errors import nearest
from draftsmith.decode.tree import Drawing, TreeShape

if TYPE_CHECKING:
    from torch import Tensor

    from draftsmith.decode.propose.protocol import Proposal
    from draftsmith.decode.tree_batch import TreeBatch
    from draftsmith.decode.verify.tree_walk import Verdict

# `run(proposal, p_BMV, u_BU)`, see `Verifier`.
Rule = Callable[["Proposal", "Tensor", "Tensor | None"], "Verdict"]


def uniforms_per_sibling(tree: "TreeBatch") -> int:
    """One uniform for each depth and sibling rank, one for the last token."""
    return sum(tree.widths) + 1


def uniforms_per_depth(tree: "TreeBatch") -> int:
    """One uniform per depth, one for the last token."""
    return tree.depth + 1


@dataclass(frozen=True, kw_only=True)
class Verifier:
    """A verification rule and its domain.

    name, title (at most 60 characters) and paper are shown to users. several_drafts: siblings may
    come from different distributions. drawings: the valid methods of drawing siblings, the
    preferred one first. predicted: how `eval` predicts its tau above temperature 0: it accepts a
    token with min(1, p/q), or with a chance of its rank that is drawn, or whole paths. run: takes
    the target's fp32 distributions at every node, `[B, M, V]`, and float64 uniforms
    `[B, uniforms(tree)]`; at temperature 0 these are None and p is one-hot, so that every lossless
    rule comes to `exact`. shared_noise: above temperature 0 too, target and draft take their most
    probable tokens, once noise by seed and place was added. root_uniform: which uniform draws the
    token of a root without children.
    """

    name: str
    title: str
    paper: str
    lossless: bool = True
    chains_only: bool = False
    several_drafts: bool = False
    drawings: tuple[Drawing, ...]
    uniforms: Callable[["TreeBatch"], int] = uniforms_per_depth
    predicted: Literal["by token", "by rank", "by path"] | None = None
    shared_noise: bool = False
    root_uniform: int = -1
    run: Rule

    def check(self, tree: TreeShape, drawing: Drawing | None, drafts: int = 1) -> None:
        """Raise ValueError if the rule is not valid for this tree, drawing (None: temperature 0) or
        count of drafts.
        """
        if self.chains_only and not tree.is_chain:
            other = "specinfer" if drafts > 1 else "mcsd"
            raise ValueError(
                f"verifier '{self.name}' is valid on chains only; use verifier {other} or exact, "
                f"or a tree such as chain:{tree.depth}"
            )
        if drawing is None:
            return
        drawing = "deterministic" if tree.grows else drawing
        if drawing not in self.drawings:
            raise ValueError(
                f"verifier '{self.name}' is not valid for drafts drawn '{drawing}'; use verifier "
                "exact"
            )
        if drafts > 1 and not self.several_drafts:
            raise ValueError(
                f"verifier '{self.name}' takes one draft, and there are {drafts}; use specinfer "
                "or exact"
            )


def _in(module: str, function: str) -> Rule:
    # Imported when first called; at temperature 0, where every rule equals it, `exact`.
    rules: dict[bool, Rule] = {}

    def run(proposal: "Proposal", p_BMV: "Tensor", u_BU: "Tensor | None") -> "Verdict":
        greedy = u_BU is None
        if greedy not in rules:
            name = "exact" if greedy else module
            rule = "exact" if greedy else function
            rules[greedy] = getattr(import_module(f"draftsmith.decode.verify.{name}"), rule)
        return rules[greedy](proposal, p_BMV, u_BU)

    return run


# Of rules that do not ask how siblings were chosen.
_ANY: tuple[Drawing, ...] = (
    "deterministic",
    "without_replacement",
    "top_and_one",
    "with_replacement",
)
_RULES = (
    Verifier(
        name="exact",
        title="draw from the target, accept the child that it hits",
        paper="Yang et al. 2024, arXiv 2401.06706 (naive sampling)",
        several_drafts=True,
        # Siblings that differ cover more of the vocabulary; beyond that the rule does not ask how
        # they were chosen.
        drawings=("without_replacement", "top_and_one", "with_replacement", "deterministic"),
        predicted="by rank",
        root_uniform=0,
        run=_in("exact", "exact"),
    ),
    Verifier(
        # EAGLE-2 tries the children in turn with q = 1 and drops each refused token from p. That
        # equals one draw from p that hits a child or not, so it runs as `exact`; it only prefers
        # other drawings.
        name="naive",
        title="EAGLE-2's rule: exact, on the most probable children",
        paper="Li et al. 2024, arXiv 2406.16858",
        several_drafts=True,
        drawings=_ANY,
        predicted="by token",
        root_uniform=0,
        run=_in("exact", "exact"),
    ),
    Verifier(
        name="speculative",
        title="accept with min(1, p/q), else draw from what q missed",
        paper="Leviathan et al. 2023, arXiv 2211.17192",
        chains_only=True,
        # One draw per node, so how a second one would be drawn does not matter.
        drawings=("without_replacement", "with_replacement", "deterministic"),
        predicted="by token",
        run=_in("chains", "speculative"),
    ),
    Verifier(
        name="mcsd",
        title="multi-candidate, siblings drawn without replacement",
        paper="Yang et al. 2024, arXiv 2401.06706",
        drawings=("without_replacement", "deterministic"),
        uniforms=uniforms_per_sibling,
        predicted="by rank",
        run=_in("siblings", "mcsd"),
    ),
    Verifier(
        name="mcsd_replacement",
        title="multi-candidate, siblings of one draft with replacement",
        paper="Yang et al. 2024, arXiv 2401.06706",
        drawings=("with_replacement",),
        uniforms=uniforms_per_sibling,
        run=_in("siblings", "independent"),
    ),
    Verifier(
        name="specinfer",
        title="siblings drawn independently, from one or several drafts",
        paper="Miao et al. 2023, arXiv 2305.09781",
        several_drafts=True,
        drawings=("with_replacement",),
        uniforms=uniforms_per_sibling,
        predicted="by rank",
        run=_in("siblings", "independent"),
    ),
    Verifier(
        name="kseq",
        title="SpecTr's K-SEQ: independent siblings, one common rule",
        paper="Sun et al. 2023, arXiv 2310.15141",
        drawings=("with_replacement",),
        uniforms=uniforms_per_sibling,
        run=_in("siblings", "kseq"),
    ),
    Verifier(
        name="greedy",
        title="top tokens and one drawn, in a single speculative step",
        paper="Hu et al. 2025, arXiv 2502.18779",
        drawings=("top_and_one",),
        uniforms=lambda tree: 2 * tree.depth + 1,
        run=_in("siblings", "greedy"),
    ),
    Verifier(
        name="block",
        title="a chain's tokens accepted jointly, the best on one path",
        paper="Sun et al. 2024, arXiv 2403.10444",
        chains_only=True,
        drawings=("without_replacement", "deterministic"),
        predicted="by path",
        run=_in("chains", "block"),
    ),
    Verifier(
        name="coupled",
        title="one text per seed, with any draft or none: shared noise",
        paper="Daliri et al. 2024, arXiv 2408.07978",
        several_drafts=True,
        drawings=_ANY,
        predicted="by rank",
        shared_noise=True,
        run=_in("exact", "exact"),
    ),
    Verifier(
        name="typical",
        title="LOSSY: keep the longest path of plausible tokens",
        paper="Cai et al. 2024, arXiv 2401.10774",
        lossless=False,
        several_drafts=True,
        drawings=_ANY,
        uniforms=lambda tree: 1,
        run=_in("exact", "typical"),
    ),
)
VERIFIERS: dict[str, Verifier] = {verifier.name: verifier for verifier in _RULES}


def find_verifier(verifier: object) -> Verifier:
    """Return the rule of a name, or the rule itself; raise ValueError for what is neither."""
    if isinstance(verifier, Verifier):
        return verifier
    if not isinstance(verifier, str):
        raise ValueError(f"verifier: expected a name or a Verifier, got {verifier!r}")
    if verifier not in VERIFIERS:
        raise ValueError(f"verifier: {verifier!r} is unknown; {nearest(verifier, VERIFIERS)}")
    return VERIFIERS[verifier]


def default_verifier(tree: TreeShape, *, draws: bool = True, drafts: int = 1) -> str:
    """Return the lossless rule of `VERIFIERS` for a tree whose tokens are drawn at random (`draws`)
    by `drafts` drafts.

    exact: for tokens that the context determines, such as copied ones and those of growing trees;
    no rule accepts more (Hu et al., ICLR 2025, arXiv 2502.18779). specinfer: for siblings from
    several drafts. speculative: for a chain.
    mcsd: for siblings drawn without replacement, on every other static tree.

    `block` accepts a little more of a chain per target call and takes more time per step. The
    evaluation predicts the acceptance of the default rules.
    """
    if not draws or tree.grows:
        return "exact"
    if drafts > 1:
        return "specinfer"
    return "speculative" if tree.is_chain else "mcsd"
