"""What the proposers without a network share: a row's own n-grams, a trie of candidates, and proposals from tries.

Legend: B rows, N drafted nodes, M = N + 1 with the root, R = 1 when all rows share the tree, else B.

All of it runs on the host, once a step and a row, so it is plain Python on short lists: building a handful of nodes
takes less time than launching one kernel.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from decode.propose.protocol import Proposal
from decode.tree import Tree, TreeShape
from decode.tree_batch import TreeBatch


class NgramIndex:
    """Where each n-gram of a growing text occurred before, for n from `shortest` to `longest`.

    Like the hash chains of a Lempel-Ziv compressor: the latest occurrence of an n-gram, and from each occurrence a
    link to the one before. A new token costs one insertion for each n, whatever the length of the text.
    """

    def __init__(self, longest: int, shortest: int) -> None:
        self.text: list[int] = []
        self._lengths = range(longest, shortest - 1, -1)
        self._latest: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in self._lengths}
        self._earlier: dict[int, list[int]] = {n: [] for n in self._lengths}

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. An n-gram is entered once it has a follower, so the text's end never matches itself."""
        text = self.text
        for token in tokens:
            at = len(text)
            for n in self._lengths:
                if at < n:
                    self._earlier[n].append(-1)
                    continue
                ngram, latest = tuple(text[at - n :]), self._latest[n]
                self._earlier[n].append(latest.get(ngram, -1))
                latest[ngram] = at
            text.append(token)

    def matches(self) -> Iterator[int]:
        """Places whose preceding n tokens are also the last n of the text: the longest n first, then the most recent
        place; each place once.
        """
        text, seen = self.text, set[int]()
        for n in self._lengths:
            if len(text) < n:
                continue
            at = self._latest[n].get(tuple(text[-n:]), -1)
            while at >= 0:
                if at not in seen:
                    seen.add(at)
                    yield at
                at = self._earlier[n][at]

    def copy_from(self, at: int, length: int) -> list[int]:
        """`length` tokens that follow if the text goes on as it did at place `at`; past the end of the text the copy
        reads what it has written, so a repeated phrase goes on repeating.
        """
        copied = self.text[at : at + length]
        period = len(copied)
        return copied if period == length else [copied[i % period] for i in range(length)]


@dataclass(frozen=True)
class Flat:
    """A trie's nodes in breadth-first order: `parents` and `tokens` as in `Tree`; `places` maps the numbers that
    `Trie.add` gave to M indices.
    """

    parents: tuple[int, ...]
    tokens: tuple[int, ...]
    places: tuple[int, ...]


NOTHING = Flat((), (), (0,))


class Trie:
    """Candidates merged where they begin alike; at most `size` nodes, and `widths[d]` children of a node at depth d.

    First come, first served: what is added first is ranked first among its siblings.
    """

    def __init__(self, widths: Sequence[int], size: int) -> None:
        self.widths, self.size = widths, size
        self._below: list[dict[int, int]] = [{}]

    @property
    def full(self) -> bool:
        """True when no node can be added."""
        return len(self._below) > self.size

    def put(self, node: int, depth: int, token: int) -> int:
        """The child of `node`, at `depth`, that carries `token`, made if there is room; 0 if there is none."""
        below = self._below[node]
        child = below.get(token, 0)
        if not child and len(self._below) <= self.size and depth < len(self.widths) and len(below) < self.widths[depth]:
            child = below[token] = len(self._below)
            self._below.append({})
        return child

    def add(self, tokens: Sequence[int]) -> int:
        """Enter a candidate as far as there is room; the number of the last node reached (0 is the root)."""
        node = 0
        for depth, token in enumerate(tokens):
            child = self.put(node, depth, token)
            if not child:
                break
            node = child
        return node

    def flatten(self) -> Flat:
        """The nodes in breadth-first order."""
        places, queue = [0] * len(self._below), [0]
        parents: list[int] = []
        tokens: list[int] = []
        for above, node in enumerate(queue):
            for token, child in self._below[node].items():
                parents.append(above - 1)
                tokens.append(token)
                queue.append(child)
                places[child] = len(tokens)
        return Flat(tuple(parents), tuple(tokens), tuple(places))


class Forest:
    """Turns one trie a row into proposals inside the bounds of `tree`.

    The widths of a proposal are always those of `tree`, cut at the deepest row: verifiers lay out their uniforms by
    widths, and a tight bound would make a row's uniforms depend on what its batch mates found.
    """

    def __init__(self, tree: Tree, device: torch.device) -> None:
        self.tree, self.device = tree, device
        self.widths = tree.widths
        self._chains: dict[int, TreeBatch] = {}
        self._last: tuple[tuple[tuple[int, ...], ...], TreeBatch] | None = None

    def trie(self) -> Trie:
        """An empty trie with room for what `tree` has room for."""
        return Trie(self.widths, self.tree.size)

    def proposal(self, rows: Sequence[Flat]) -> Proposal:
        """One tree a row, no larger than the largest row needs; no cells but the root when no row has any."""
        size = max(len(row.tokens) for row in rows)
        padded = [[-1, *row.tokens] + [-1] * (size - len(row.tokens)) for row in rows]
        return Proposal(self._batch(rows, size), torch.tensor(padded, device=self.device), None, "deterministic")

    def _batch(self, rows: Sequence[Flat], size: int) -> TreeBatch:
        if size == 0 or self.tree.is_chain:
            # Rows share the longest chain; in a shorter row the tokens behind its end are -1.
            chain = self._chains.get(size)
            if chain is None:
                chain = self._chains[size] = TreeBatch.build(Tree(tuple(range(-1, size - 1))), self.device)
            return chain
        key = tuple(row.parents for row in rows)
        if self._last is None or self._last[0] != key:
            self._last = key, batch_of(key, self.widths, self.device)
        return self._last[1]


def batch_of(rows: Sequence[Sequence[int]], widths: tuple[int, ...], device: torch.device) -> TreeBatch:
    """What `grow_batch` makes of one list of parents a row, of different lengths, but built on the host and sent over:
    a few hundred assignments take less time than some thirty kernels. Its widths are the first of `widths`.
    """
    size, most = max(map(len, rows)), max(widths)
    parents = np.full((len(rows), size), -1)
    depths = np.zeros((len(rows), size), dtype=np.int64)
    children = np.zeros((len(rows), size + 1, most), dtype=np.int64)
    slots = np.zeros((len(rows), size + 1), dtype=np.int64)
    sees = np.zeros((len(rows), size + 1, size + 1), dtype=bool)
    sees[:] = np.eye(size + 1, dtype=bool)
    for row, listed in enumerate(rows):
        parents[row, : len(listed)] = listed
        depth_of, before, rank, slot = [0], -2, 0, -1
        below, masks, slot_of = children[row], sees[row], slots[row]
        for node, parent in enumerate(listed, 1):
            rank, slot = (rank + 1, slot) if parent == before else (0, slot + 1)
            before = parent
            below[parent + 1, rank] = node
            slot_of[parent + 1] = slot
            depth_of.append(depth_of[parent + 1] + 1)
            masks[node] |= masks[parent + 1]
        depths[row, : len(listed)] = depth_of[1:]
        # As in `grow_batch`: a node that does not exist counts as a leaf right below the root.
        depths[row, len(listed) :] = 1
        masks[:, 0] = True
    return TreeBatch(
        parents_RN=torch.from_numpy(parents).to(device),
        depths_RN=torch.from_numpy(depths).to(device),
        children_RMK=torch.from_numpy(children).to(device),
        groups_RM=torch.from_numpy(slots).to(device),
        sees_RMM=torch.from_numpy(sees).to(device),
        widths=widths[: int(depths.max())],
    )


def check_static(name: str, tree: TreeShape) -> Tree:
    """`tree` if it can bound what the proposer `name` copies, else ValueError: there are no confidences here."""
    if not isinstance(tree, Tree):
        raise ValueError(
            f"proposer '{name}' has no confidences to grow a tree from; use a fixed tree such as chain:8 or kary:4,1,1"
        )
    if tree.stop:
        raise ValueError(f"proposer '{name}' has no confidences to stop at; use the tree without stop={tree.stop}")
    return tree
