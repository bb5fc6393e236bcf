"""Choose proposer, tree and verifier by name and kind of draft, before a model is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass

from draftsmith.core.errors import InputError, nearest
from draftsmith.core.io import read_tree_file
from draftsmith.decode import (
    PROPOSERS,
    TreeShape,
    Verifier,
    Written,
    default_tree,
    default_verifier,
    find_verifier,
    parse_tree,
    tree_spec,
)
from draftsmith.decode.propose.text_proposer import check_static
from draftsmith.drafts.heads import HEADS


@dataclass(frozen=True)
class DraftingMethod:
    """A proposer, its tree (`tree` as written, `shape` as used) and its verifier.

    lookup_first: prompt lookup copies beside the proposer.
    """

    proposer: str
    tree: str
    shape: TreeShape
    verifier: Verifier
    lookup_first: bool = False

    @property
    def name(self) -> str:
        return f"prompt_lookup+{self.proposer}" if self.lookup_first else self.proposer


def reads_drafts(proposer: object) -> bool:
    """Return whether a proposer, by name or as an object, may draft with the drafts of a pair."""
    kind = PROPOSERS.get(proposer) if isinstance(proposer, str) else None
    return kind is None or kind.draws or proposer == "prompt_lookup"


def planned_without_a_draft(tree: object) -> bool:
    """Return whether `tree` is a plan (`auto:FILE`) by which the target alone is faster."""
    if not isinstance(tree, str) or not tree.startswith("auto:"):
        return False
    plan = read_tree_file(tree.removeprefix("auto:"))
    return isinstance(plan, dict) and plan.get("pays") is False


def choose_method(
    kinds: Mapping[str, str],
    proposer: str | None = None,
    tree: Written | TreeShape | None = None,
    verifier: str | Verifier | None = None,
    *,
    datastore: bool = False,
    heads: int | None = None,
) -> DraftingMethod | None:
    """Return how to draft, or None for the target alone.

    kinds: draft name -> "draft" for a language model, else the kind of head. datastore: whether
    there is a text to retrieve from. proposer: by default the drafts choose it; prompt_lookup
    drafts before them. heads: number of heads, if known: the depth of tree `chain`; a default tree
    is no deeper. verifier: by default the tree chooses it. Raise InputError for parts that do not
    go together.
    """
    lookup_first = proposer == "prompt_lookup" and bool(kinds)
    if proposer is None or lookup_first:
        proposer = next(iter(kinds.values()), None)
    name = proposer or "none"
    if planned_without_a_draft(tree):
        return None
    try:
        if tree is not None and not isinstance(tree, TreeShape):
            tree = tree_spec(tree, heads)
        shape = parse_tree(tree, read_tree_file) if isinstance(tree, str) else tree
        _check_proposer(name, kinds, datastore)
        if name == "none":
            if tree is not None or verifier is not None:
                key = "verifier" if tree is None else "tree"
                raise InputError(f"{key}: needs a proposer; add --draft or --proposer")
            return None
        if shape is None:
            shape = default_tree(name, heads)
            tree = f"chain:{shape.depth}" if shape.is_chain else "its own"
        draws = PROPOSERS[name].draws
        if verifier is None:
            verifier = default_verifier(shape, draws=draws, drafts=len(kinds))
        rule = find_verifier(verifier)
        _check_tree(name, shape, rule, len(kinds))
    except ValueError as error:
        raise InputError(str(error)) from None
    written = tree if isinstance(tree, str) else f"{shape.size} nodes"
    return DraftingMethod(name, written, shape, rule, lookup_first)


def _check_tree(proposer: str, shape: TreeShape, rule: Verifier, drafts: int) -> None:
    """Check what needs no model; the decoder checks the rest on the loaded ones."""
    kind = PROPOSERS[proposer]
    if not kind.draws:
        check_static(proposer, shape)
    if shape.grows and drafts > 1:
        raise InputError(
            f"tree: {drafts} drafts cannot grow one tree; use one draft, or a tree such as "
            "kary:4,2,2"
        )
    if kind.usual is not None and not shape.is_chain:
        raise InputError(
            f"tree: {proposer} drafts chains only; use chain:4, or --proposer {kind.usual}"
        )
    if drafts > 1 and kind.draws:
        rule.check(shape, "with_replacement", drafts)
    else:
        rule.check(shape, None if kind.draws and not shape.grows else "deterministic")


def _check_proposer(proposer: str, kinds: Mapping[str, str], datastore: bool) -> None:
    if proposer not in (*PROPOSERS, "none", *kinds.values()):
        raise InputError(
            f"proposer: {proposer!r} is unknown; {nearest(proposer, [*PROPOSERS, 'none'])}"
        )
    for name, kind in kinds.items():
        if kind not in PROPOSERS:
            raise InputError(
                f"--draft {name}: is a head of kind {kind!r}; heads that draft here are "
                f"{', '.join(HEADS)}"
            )
    needs = "nothing" if proposer == "none" else PROPOSERS[proposer].needs
    if (needs == "index") != datastore:
        unread = "only retrieval reads --datastore; leave it out"
        fix = unread if datastore else "add --datastore FILE"
        raise InputError(f"proposer: {proposer}: {fix}")
    if needs not in ("models", "head"):
        if kinds and proposer != "none":
            raise InputError(
                f"draft: --proposer {proposer} does not read --draft; leave it out, or "
                "write --draft prompt_lookup+DRAFT, which looks up first"
            )
        return
    wanted = "draft" if needs == "models" else PROPOSERS[proposer].usual or proposer
    in_words = "language models" if wanted == "draft" else f"one head of kind {wanted}"
    if not kinds or set(kinds.values()) != {wanted} or (needs == "head" and len(kinds) > 1):
        words = {"draft": "language model"}
        given = ", ".join(f"{name} ({words.get(kind, kind)})" for name, kind in kinds.items())
        raise InputError(f"proposer: {proposer} needs {in_words}; --draft is {given or 'missing'}")
