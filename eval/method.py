"""A decoding method, as options name it."""

from dataclasses import dataclass
from functools import cached_property

from decode import VERIFIERS, TreeShape, parse_tree
from draftsmith_core.io import read_tree_file


@dataclass(frozen=True)
class Method:
    """A decoding method: a tree and the rule that verifies it."""

    tree: str
    verifier: str

    @property
    def name(self) -> str:
        return f"{self.tree} {self.verifier}"

    @property
    def lossless(self) -> bool:
        """Whether the output distribution is the target's own."""
        return VERIFIERS[self.verifier].lossless

    @cached_property
    def shape(self) -> TreeShape:
        """The tree itself, read once, because its file may change during the run."""
        return parse_tree(self.tree, read_tree_file)
