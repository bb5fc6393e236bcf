"""A decoding method, as options name it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

from draftsmith.core.io import read_tree_file
from draftsmith.decode import VERIFIERS, Tree, TreeShape, default_tree, parse_tree
from draftsmith.drafts.draft_sources import JOINED, is_lookahead
from draftsmith.eval.schema import ModelRow

OWN_TREE = "its own"
"""The tree of lookahead, which drafts no other."""


def shape_of(tree: str) -> TreeShape:
    """Return the tree that a spec, or `OWN_TREE`, stands for."""
    return default_tree("lookahead") if tree == OWN_TREE else parse_tree(tree, read_tree_file)


@dataclass(frozen=True)
class Method:
    """A decoding method: a tree and the rule that verifies it."""

    tree: str
    verifier: str

    @property
    def name(self) -> str:
        return f"{self.tree} {self.verifier}"

    @property
    def facts(self) -> dict[str, object]:
        """The method as JSON, with the tree that its spec stood for."""
        return {"tree": self.tree, "shape": asdict(self.shape), "verifier": self.verifier}

    @property
    def is_chain(self) -> bool:
        """Whether the tree is a chain of fixed length."""
        return isinstance(self.shape, Tree) and self.shape.is_chain and not self.shape.stop

    @property
    def lossless(self) -> bool:
        """Whether the output distribution is the target's own."""
        return VERIFIERS[self.verifier].lossless

    @property
    def most_tokens(self) -> float:
        """The greatest number of tokens of a target call: a path of the tree, and the target's
        own.
        """
        return 1.0 + self.shape.depth

    @cached_property
    def shape(self) -> TreeShape:
        """The tree itself, read once, because its file may change during the run."""
        return shape_of(self.tree)


def methods_of(source: str, methods: Sequence[Method]) -> list[Method]:
    """Return the methods that a draft is decoded with, of those that are asked for: lookahead
    drafts its own tree only.
    """
    if is_lookahead(source) and methods:
        return [Method(OWN_TREE, "exact")]
    return list(methods)


def decode_options(model: ModelRow, tree: str, recorded: object) -> list[str]:
    """Return the options of `decode` that draft this tree as a draft of an evaluation or a plan
    does. recorded: whether its steps were.
    """
    source = model["name"]
    if not model["parameters"]:
        source = f"retrieval:{source}" if model["kind"] == "retrieval" else model["kind"]
    elif model["kind"].startswith(JOINED):
        source = JOINED + source
    options = ["--draft", source]
    if tree != OWN_TREE:
        options += ["--tree", tree]
    return [*options, "--compile"] if recorded else options
