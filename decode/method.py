"""How one decodes with a draft: on which tree, under which rule."""

from collections.abc import Callable
from dataclasses import asdict, dataclass

from draftsmith.decode.tree import Tree, TreeShape
from draftsmith.decode.tree_spec import Written, parse_tree, tree_spec
from draftsmith.decode.verify import Verifier, default_verifier, find_verifier

OWN_TREE = "its own"
"""The tree of lookahead, which drafts no other."""


@dataclass(frozen=True)
class Method:
    """A tree, as written and as drafted, and the rule that verifies it."""

    tree: str
    shape: TreeShape
    rule: Verifier

    @classmethod
    def of(
        cls,
        tree: Written | TreeShape,
        verifier: str | Verifier | None = None,
        read: Callable[[str], object] | None = None,
    ) -> "Method":
        """Return the method of a spec, of `OWN_TREE` or of a shape; verifier: by default what suits
        the tree. read: as of `parse_tree`.
        """
        written = tree_spec(tree) if not isinstance(tree, TreeShape) else f"{tree.size} nodes"
        if isinstance(tree, TreeShape):
            shape = tree
        elif tree == OWN_TREE:
            from draftsmith.decode.propose.lookahead import LookaheadProposer

            shape = LookaheadProposer().default_tree()
        else:
            shape = parse_tree(tree, read)
        return cls(written, shape, find_verifier(verifier or default_verifier(shape)))

    @property
    def verifier(self) -> str:
        return self.rule.name

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
        return self.rule.lossless

    @property
    def most_tokens(self) -> float:
        """The greatest number of tokens of a target call: a path of the tree, and the target's
        own.
        """
        return 1.0 + self.shape.depth
