"""Which proposer, tree and verifier decode: chosen from what was named and from what the drafts are.

What can be refused from names and small files alone is refused here, before a model is loaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from decode import PROPOSERS, VERIFIERS, TreeShape, Verifier, default_tree, default_verifier, parse_tree
from decode.propose.text_proposer import check_static
from drafts.heads import HEADS
from draftsmith_core.errors import InputError
from draftsmith_core.io import read_tree_file


@dataclass(frozen=True)
class DraftingMethod:
    """A proposer by name, the tree (`tree` as it is written, `shape` as it is used) and the rule that verifies it."""

    proposer: str
    tree: str
    shape: TreeShape
    verifier: Verifier


def tree_name(shape: TreeShape, proposer: str) -> str:
    """How a default tree is shown."""
    return "its own" if proposer == "lookahead" else f"chain:{shape.depth}"


def planned_without_a_draft(tree: str) -> bool:
    """Whether `tree` is a plan (`auto:FILE`) that found no draft to be faster than the target alone."""
    kind, _, file = tree.partition(":")
    plan = read_tree_file(file) if kind == "auto" and file else None
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
    """How to draft, or None for the target alone.

    kinds: draft name -> "draft" for a language model, else the kind of head. datastore: whether there is one to
    retrieve from. heads: how many there are, where that is known; a default tree is no deeper. Whatever is None is
    chosen: the proposer by the drafts, the verifier by the tree.
    Raises InputError, one line with the fix, for parts that do not go together.
    """
    name = proposer or next(iter(kinds.values()), "none")
    if isinstance(tree, str) and planned_without_a_draft(tree):
        return None
    try:
        shape = parse_tree(tree, read_tree_file) if isinstance(tree, str) else tree
        _check_needs(name, kinds, datastore)
        if name == "none":
            for key, value in (("tree", tree), ("verifier", verifier)):
                if value is not None:
                    raise InputError(f"{key}: nothing drafts here, so it would not be used; add --draft or --proposer")
            return None
        if shape is None:
            shape, tree = (own := default_tree(name, heads)), tree_name(own, name)
        rule = verifier or default_verifier(shape, draws=PROPOSERS[name].draws, drafts=len(kinds))
        if isinstance(rule, str):
            if rule not in VERIFIERS:
                raise InputError(f"verifier: {rule!r} is unknown; use one of {', '.join(VERIFIERS)}")
            rule = VERIFIERS[rule]
        _check_together(name, len(kinds), shape, rule)
    except ValueError as error:
        raise InputError(str(error)) from None
    return DraftingMethod(name, tree if isinstance(tree, str) else f"{shape.size} nodes", shape, rule)


def _check_needs(proposer: str, kinds: Mapping[str, str], datastore: bool) -> None:
    """Refuse a proposer without what it drafts from, and what it would not use."""
    for draft, kind in kinds.items():
        if kind not in PROPOSERS:
            raise InputError(
                f"--draft {draft}: is a head of kind {kind!r}; heads that draft here are {', '.join(HEADS)}"
            )
    if proposer not in (*PROPOSERS, "none"):
        raise InputError(f"proposer: {proposer!r} is unknown; use one of {', '.join(PROPOSERS)}, none")
    needs = "nothing" if proposer == "none" else PROPOSERS[proposer].needs
    if needs == "index" and not datastore:
        raise InputError(f"proposer: {proposer} drafts from a text of yours; add --datastore FILE")
    if needs != "index" and datastore:
        raise InputError("datastore: only --proposer retrieval reads it; use that, or leave out --datastore")
    if needs in ("models", "head"):
        _check_drafts(kinds, proposer, needs)


def _check_drafts(kinds: Mapping[str, str], proposer: str, needs: str) -> None:
    wanted = "draft" if needs == "models" else PROPOSERS[proposer].usual or proposer
    what = "a language model" if needs == "models" else f"a head of kind {wanted}"
    if not kinds:
        raise InputError(f"proposer: `{proposer}` needs --draft, {what}")
    for name, kind in kinds.items():
        if kind != wanted:
            found = "a language model" if kind == "draft" else f"a head of kind {kind}"
            if len(kinds) > 1:
                raise InputError(f"--draft {name}: is {found}, and {next(iter(kinds))} is not; draft with one of them")
            raise InputError(
                f"--draft {name}: is {found}, and --proposer {proposer} needs {what}; use --proposer {kind}"
            )
    if needs == "head" and len(kinds) > 1:
        raise InputError(f"draft: {len(kinds)} heads were given, and only language models draft together; give one")


def _check_together(proposer: str, drafts: int, shape: TreeShape, rule: Verifier) -> None:
    """What can be known without the models; the decoder checks the rest once they are there."""
    copies = not PROPOSERS[proposer].draws
    if copies:
        check_static(proposer, shape)
    if shape.grows and drafts > 1:
        raise InputError(f"tree: {drafts} drafts cannot grow one tree; use one draft, or a tree such as kary:4,2,2")
    usual = PROPOSERS[proposer].usual
    if usual is not None and not shape.is_chain:
        raise InputError(f"tree: {proposer} drafts chains only; use chain:4, or --proposer {usual}")
    if drafts > 1 and not copies:
        rule.check(shape, "with_replacement", drafts)
    else:
        rule.check(shape, "deterministic" if copies or shape.grows else None)
