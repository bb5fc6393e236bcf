"""The base of the proposers that copy from text: candidates merged into a trie, and proposals made
from tries.

Plain Python on short lists: building a handful of nodes takes less time than launching one kernel.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.propose.protocol import Outcome, Proposal, Proposer, Session, SessionSetup
from draftsmith.decode.tree import Tree, TreeShape
from draftsmith.decode.tree_batch import TreeBatch, batch_of, chain_batch

# Proposers that count what they copy, which gives a chain its stop.
COUNTING = ("prompt_lookup",)


def check_static(name: str, tree: TreeShape) -> Tree:
    """Return `tree` if proposer `name` can draft it; raise ValueError if it needs a confidence that
    the proposer does not have.
    """
    if isinstance(tree, Tree) and (not tree.stop or (name in COUNTING and tree.is_chain)):
        return tree
    if name in COUNTING:
        raise ValueError(
            f"proposer '{name}' has confidences on chains only; use a chain, such as "
            "chain:6,stop=0.4, or a fixed tree without stop, such as kary:4,1,1"
        )
    raise ValueError(
        f"proposer '{name}' has no confidences; use a fixed tree without stop, such as kary:4,1,1"
    )


class TextProposer(Proposer):
    """A proposer that copies: prompts may have any length, and trees are static. name: as in
    `PROPOSERS`.
    """

    def check(self, target: PreTrainedModel, tree: TreeShape) -> None:
        check_static(self.name, tree)

    @abstractmethod
    def row(self, prompt: Sequence[int]) -> "TextRow":
        """Return the state of a row that begins with this prompt."""

    def start(self, setup: SessionSetup) -> Session:
        return TextSession(self, setup)


class TextRow(ABC):
    """The text of one row, as its proposer keeps it."""

    @abstractmethod
    def draft(self, trie: "Trie") -> None:
        """Add the candidates of one step to an empty trie."""

    @abstractmethod
    def read(self, tokens: Sequence[int]) -> None:
        """Append emitted tokens."""


@dataclass(frozen=True)
class FlatTrie:
    """A trie in breadth-first order. indices: by the numbers that `Trie.add` gave, indices with the
    root.
    """

    parents: tuple[int, ...]
    tokens: tuple[int, ...]
    indices: tuple[int, ...]


class TextSession(Session):
    """The rows of one `generate` call.

    Verifiers assign uniforms by the widths of a proposal, so these are those of `tree`, cut at the
    deepest row: tighter ones would make a row depend on its batch mates.
    """

    rows: Sequence[TextRow]

    def __init__(self, proposer: TextProposer, setup: SessionSetup) -> None:
        self.tree = check_static(proposer.name, setup.tree)
        self.device = setup.device
        self.rows = [proposer.row(prompt) for prompt in setup.prompts]
        self.drafted: list[FlatTrie] = []
        self._last: tuple[list[tuple[int, ...]], TreeBatch] | None = None

    def propose(self, u_BN: Tensor | None) -> Proposal:
        """Draft one tree per row, no larger than the largest row needs; only the root if no row has
        candidates.
        """
        self.drafted = []
        for row in self.rows:
            trie = Trie(self.tree)
            row.draft(trie)
            self.drafted.append(trie.flatten())
        size = max(len(drafted.tokens) for drafted in self.drafted)
        rows = []
        for drafted in self.drafted:
            missing = size - len(drafted.tokens)
            rows.append([-1, *drafted.tokens, *[-1] * missing])
        tokens_BM = torch.tensor(rows, device=self.device)
        return Proposal(self._batch(size), tokens_BM, None, "deterministic")

    def commit(self, outcome: Outcome) -> None:
        for row, emitted in zip(self.rows, outcome.tokens, strict=True):
            row.read(emitted)

    def select_rows(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in rows]

    def _batch(self, size: int) -> TreeBatch:
        if size == 0 or self.tree.is_chain:
            # Rows share the longest chain; in a shorter row the tokens behind its end are -1.
            return chain_batch(size, self.tree.widths, self.device)
        parents = [drafted.parents for drafted in self.drafted]
        if self._last is None or self._last[0] != parents:
            self._last = parents, batch_of(parents, self.tree.widths, self.device)
        return self._last[1]


class Trie:
    """Candidates merged where they begin alike, inside the bounds of `tree`: at most `tree.size`
    nodes, and `tree.widths[d]` children of a node at depth d.

    The candidate that was added first is ranked first among its siblings.
    """

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self._below: list[dict[int, int]] = [{}]

    @property
    def full(self) -> bool:
        return len(self._below) > self.tree.size

    def put(self, node: int, depth: int, token: int) -> int:
        """Find or add the child of `node`, at `depth`, that carries `token`; 0 if there is no
        room.
        """
        below = self._below[node]
        child = below.get(token, 0)
        widths = self.tree.widths
        if not child and not self.full and depth < len(widths) and len(below) < widths[depth]:
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
        indices = [0] * len(self._below)
        queue = [0]
        parents = []
        tokens = []
        for above, node in enumerate(queue):
            for token, child in self._below[node].items():
                parents.append(above - 1)
                tokens.append(token)
                queue.append(child)
                indices[child] = len(tokens)
        return FlatTrie(tuple(parents), tuple(tokens), tuple(indices))
