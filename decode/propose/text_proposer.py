"""The base of the proposers that copy from text: candidates merged into a trie, and proposals made
from tries.

Plain Python on short lists: building a handful of nodes takes less time than launching one kernel.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.propose.protocol import Outcome, Proposal, Proposer, Session, SessionSetup
from decode.tree import Tree, TreeShape
from decode.tree_batch import TreeBatch, batch_of


def check_static(name: str, tree: TreeShape) -> Tree:
    """Return `tree` if proposer `name` can draft it; raise ValueError if it needs the confidence of
    a draft.
    """
    if not isinstance(tree, Tree) or tree.stop:
        raise ValueError(
            f"proposer '{name}' has no confidences; use a fixed tree without stop, such as "
            "kary:4,1,1"
        )
    return tree


class TextProposer(Proposer):
    """A proposer that copies: prompts may have any length, and trees are static. name: as in
    `PROPOSERS`.
    """

    def check(self, target: PreTrainedModel, tree: TreeShape) -> None:
        check_static(self.name, tree)

    @abstractmethod
    def row(self, prompt: Sequence[int]) -> "TextRow":
        """What to keep of one prompt."""

    def start(self, setup: SessionSetup) -> Session:
        forest = Forest(check_static(self.name, setup.tree), setup.device)
        return TextSession([self.row(prompt) for prompt in setup.prompts], forest)


class TextRow(ABC):
    """The text of one row, as its proposer keeps it."""

    @abstractmethod
    def draft(self, forest: "Forest") -> "FlatTrie":
        """Draft the candidates of one step."""

    @abstractmethod
    def read(self, tokens: Sequence[int]) -> None:
        """Append emitted tokens."""


class TextSession(Session):
    """The rows of one `generate` call."""

    def __init__(self, rows: list[Any], forest: "Forest") -> None:
        self.rows, self.forest = rows, forest

    def propose(self, u_BN: Tensor | None) -> Proposal:
        return self.forest.proposal([row.draft(self.forest) for row in self.rows])

    def commit(self, outcome: Outcome) -> None:
        for row, emitted in zip(self.rows, outcome.tokens, strict=True):
            row.read(emitted)

    def select_rows(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in rows]


@dataclass(frozen=True)
class FlatTrie:
    """A trie in breadth-first order. indices: by the numbers that `Trie.add` gave, indices with the
    root.
    """

    parents: tuple[int, ...]
    tokens: tuple[int, ...]
    indices: tuple[int, ...]


EMPTY = FlatTrie((), (), (0,))


class Trie:
    """Candidates merged where they begin alike; at most `size` nodes, and `widths[d]` children of a
    node at depth d.

    The candidate that was added first is ranked first among its siblings.
    """

    def __init__(self, widths: Sequence[int], size: int) -> None:
        self.widths, self.size = widths, size
        self._below: list[dict[int, int]] = [{}]

    @property
    def full(self) -> bool:
        return len(self._below) > self.size

    def put(self, node: int, depth: int, token: int) -> int:
        """Find or add the child of `node`, at `depth`, that carries `token`; 0 if there is no
        room.
        """
        below = self._below[node]
        child = below.get(token, 0)
        if (
            not child
            and len(self._below) <= self.size
            and depth < len(self.widths)
            and len(below) < self.widths[depth]
        ):
            child = below[token] = len(self._below)
            self._below.append({})
        return child

    def add(self, tokens: Sequence[int]) -> int:
        """Add a candidate as far as there is room; return the number of the last node reached (0 is
        the root).
        """
        node = 0
        for depth, token in enumerate(tokens):
            child = self.put(node, depth, token)
            if not child:
                break
            node = child
        return node

    def flatten(self) -> FlatTrie:
        indices, queue = [0] * len(self._below), [0]
        parents: list[int] = []
        tokens: list[int] = []
        for above, node in enumerate(queue):
            for token, child in self._below[node].items():
                parents.append(above - 1)
                tokens.append(token)
                queue.append(child)
                indices[child] = len(tokens)
        return FlatTrie(tuple(parents), tuple(tokens), tuple(indices))


class Forest:
    """Turns one trie per row into proposals inside the bounds of `tree`.

    Verifiers assign uniforms by the widths of a proposal, so these are those of `tree`, cut at the
    deepest row: tighter ones would make a row depend on its batch mates.
    """

    def __init__(self, tree: Tree, device: torch.device) -> None:
        self.tree, self.device = tree, device
        self._chains: dict[int, TreeBatch] = {}
        self._last: tuple[tuple[tuple[int, ...], ...], TreeBatch] | None = None

    def trie(self) -> Trie:
        return Trie(self.tree.widths, self.tree.size)

    def proposal(self, rows: Sequence[FlatTrie]) -> Proposal:
        """One tree per row, no larger than the largest row needs; only the root when no row has
        candidates.
        """
        size = max(len(row.tokens) for row in rows)
        padded = [[-1, *row.tokens] + [-1] * (size - len(row.tokens)) for row in rows]
        return Proposal(
            self._batch(rows, size), torch.tensor(padded, device=self.device), None, "deterministic"
        )

    def _batch(self, rows: Sequence[FlatTrie], size: int) -> TreeBatch:
        if size == 0 or self.tree.is_chain:
            # Rows share the longest chain; in a shorter row the tokens behind its end are -1.
            if size not in self._chains:
                self._chains[size] = TreeBatch.build(Tree(tuple(range(-1, size - 1))), self.device)
            return self._chains[size]
        key = tuple(row.parents for row in rows)
        if self._last is None or self._last[0] != key:
            self._last = key, batch_of(key, self.tree.widths, self.device)
        return self._last[1]
