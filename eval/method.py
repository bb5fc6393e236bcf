"""A decoding method, as options name it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from decode import VERIFIERS, Tree, TreeShape, parse_tree
from draftsmith_core.io import read_tree_file
from eval.schema import JOINED

# Sources of drafts that name a method without weights, unless a directory has the name.
COPYING = ("prompt_lookup",)


def is_copying(source: str) -> bool:
    """Whether the source of a draft names a method without weights."""
    return source in COPYING and not Path(source).is_dir()


def is_joined(source: str) -> bool:
    """Whether the source is `prompt_lookup+MODEL`: lookup, and a draft where it finds nothing."""
    return source.startswith(JOINED) and source != JOINED and not Path(source).is_dir()


def copies_first(source: str) -> bool:
    """Whether a draft copies from the text, alone or before a model drafts."""
    return is_copying(source) or is_joined(source)


def models_of(drafts: Mapping[str, str]) -> dict[str, str]:
    """Return the models to load for some sources of drafts, by name.

    The model of a joined draft is loaded under the joined name only if no other draft is that
    model.
    """
    models = {name: source for name, source in drafts.items() if not copies_first(source)}
    for name, source in drafts.items():
        model = source.removeprefix(JOINED)
        if is_joined(source) and model not in models.values():
            models[name] = model
    return models


@dataclass(frozen=True)
class Method:
    """A decoding method: a tree and the rule that verifies it."""

    tree: str
    verifier: str

    @property
    def name(self) -> str:
        return f"{self.tree} {self.verifier}"

    @property
    def is_chain(self) -> bool:
        """Whether the tree is a chain of fixed length."""
        return isinstance(self.shape, Tree) and self.shape.is_chain and not self.shape.stop

    @property
    def lossless(self) -> bool:
        """Whether the output distribution is the target's own."""
        return VERIFIERS[self.verifier].lossless

    @cached_property
    def shape(self) -> TreeShape:
        """The tree itself, read once, because its file may change during the run."""
        return parse_tree(self.tree, read_tree_file)
