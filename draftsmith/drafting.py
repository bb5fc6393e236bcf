"""Choose proposer, tree and verifier from their names and the kinds of the drafts, before a model is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass

from decode import PROPOSERS, VERIFIERS, TreeShape, Verifier, default_tree, default_verifier, parse_tree
from decode.propose.text_proposer import check_static
from drafts.heads import HEADS
from draftsmith_core.errors import InputError, nearest
from draftsmith_core.io import read_tree_file


@dataclass(frozen=True)
class DraftingMethod:
    """A proposer by name, its tree (`tree` as written, `shape` as used) and the rule that verifies it."""

    proposer: str
    tree: str
    shape: TreeShape
    verifier: Verifier


def planned_without_a_draft(tree: object) -> bool:
    """Whether `tree` is a plan (`auto:FILE`) that found the target alone to be faster."""
    if not isinstance(tree, str) or not tree.startswith("auto:"):
        return False
    plan = read_tree_file(tree.removeprefix("auto:"))
    return isinstance(plan, dict) and plan.get("pays") is False


def choose_method(
    kinds: Mapping[str, str],
    proposer: str | None = None,
    tree: str | TreeShape | None = None,
    verifier: str | Verifier | None = None,
    *,
    datastore: bool = False,
    heads: int | None = None,
) -> DraftingMethod | None:
    """Return how to draft, or None for the target alone.

    kinds: draft name -> "draft" for a language model, else the kind of head. datastore: whether there is a text to
    retrieve from. heads: number of heads, if known; a default tree is no deeper. The drafts choose a proposer that is
    None, the tree a verifier that is None. Raise InputError, one line with the fix, for parts that do not go together.
    """
    name = proposer or next(iter(kinds.values()), "none")
    if planned_without_a_draft(tree):
        return None
    try:
        shape = parse_tree(tree, read_tree_file) if isinstance(tree, str) else tree
        _check_proposer(name, kinds, datastore)
        if name == "none":
            if tree is not None or verifier is not None:
                key = "verifier" if tree is None else "tree"
                raise InputError(f"{key}: needs a proposer; add --draft or --proposer")
            return None
        if shape is None:
            shape = default_tree(name, heads)
            tree = "its own" if name == "lookahead" else f"chain:{shape.depth}"
        rule = verifier or default_verifier(shape, draws=PROPOSERS[name].draws, drafts=len(kinds))
        if isinstance(rule, str):
            if rule not in VERIFIERS:
                raise InputError(f"verifier: {rule!r} is unknown; {nearest(rule, VERIFIERS)}")
            rule = VERIFIERS[rule]
        _check_together(name, len(kinds), shape, rule)
    except ValueError as error:
        raise InputError(str(error)) from None
    return DraftingMethod(name, tree if isinstance(tree, str) else f"{shape.size} nodes", shape, rule)


def _check_proposer(proposer: str, kinds: Mapping[str, str], datastore: bool) -> None:
    """Refuse a proposer without its drafts or its text, and drafts that it cannot use."""
    for name, kind in kinds.items():
        if kind not in PROPOSERS:
            raise InputError(
                f"--draft {name}: is a head of kind {kind!r}; heads that draft here are {', '.join(HEADS)}"
            )
    if proposer not in (*PROPOSERS, "none"):
        raise InputError(f"proposer: {proposer!r} is unknown; {nearest(proposer, [*PROPOSERS, 'none'])}")
    needs = "nothing" if proposer == "none" else PROPOSERS[proposer].needs
    if (needs == "index") != datastore:
        fix = "only retrieval reads --datastore; leave it out" if datastore else "add --datastore FILE"
        raise InputError(f"proposer: {proposer}: {fix}")
    if needs not in ("models", "head"):
        return
    wanted = "draft" if needs == "models" else PROPOSERS[proposer].usual or proposer
    if not kinds:
        raise InputError(f"proposer: `{proposer}` needs --draft, {_in_words(wanted)}")
    for name, kind in kinds.items():
        if kind != wanted:
            fix = "draft with one of them" if len(kinds) > 1 else f"use --proposer {kind}"
            raise InputError(
                f"--draft {name}: is {_in_words(kind)}, and --proposer {proposer} needs {_in_words(wanted)}; {fix}"
            )
    if needs == "head" and len(kinds) > 1:
        raise InputError(f"draft: {len(kinds)} heads were given, and only language models draft together; give one")


def _in_words(kind: str) -> str:
    return "a language model" if kind == "draft" else f"a head of kind {kind}"


def _check_together(proposer: str, drafts: int, shape: TreeShape, rule: Verifier) -> None:
    """Refuse an invalid combination as far as names tell; the decoder checks the rest on the loaded models."""
    copies, usual = not PROPOSERS[proposer].draws, PROPOSERS[proposer].usual
    if copies:
        check_static(proposer, shape)
    if shape.grows and drafts > 1:
        raise InputError(f"tree: {drafts} drafts cannot grow one tree; use one draft, or a tree such as kary:4,2,2")
    if usual is not None and not shape.is_chain:
        raise InputError(f"tree: {proposer} drafts chains only; use chain:4, or --proposer {usual}")
    if drafts > 1 and not copies:
        rule.check(shape, "with_replacement", drafts)
    else:
        rule.check(shape, "deterministic" if copies or shape.grows else None)
