"""Retrieval: what most often followed the last tokens in a corpus of the user's is drafted.

Legend: B rows, N drafted nodes, T prompt positions, H hidden size.

After REST (He et al. 2023, arXiv 2311.08252) and, for the frequencies, its trie of retrieved continuations.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.propose.protocol import Outcome, Proposal, Proposer
from decode.propose.text_proposer import NOTHING, Flat, Forest, Trie, check_static
from decode.suffix_index import SuffixIndex
from decode.tree import Drawing, TreeShape
from draftsmith_core.models import vocabulary_size
from draftsmith_core.sampling import Sampling

# More continuations than this change the frequencies of a trie of some dozen nodes no further.
CONTINUATIONS = 32


class RetrievalProposer(Proposer):
    """Drafts from a suffix index of token sequences.

    The longest end of the text, of at most `max_suffix` and at least `min_suffix` tokens, that occurs in the index is
    looked up; the prefixes of what followed it are kept by how often they occur.
    """

    def __init__(self, index: SuffixIndex, max_suffix: int = 16, min_suffix: int = 2) -> None:
        if not 1 <= min_suffix <= max_suffix:
            raise ValueError(f"max_suffix={max_suffix}, min_suffix={min_suffix}: needs 1 <= min_suffix <= max_suffix")
        self.index, self.max_suffix, self.min_suffix = index, max_suffix, min_suffix

    def check(self, target: PreTrainedModel, tree: TreeShape) -> None:
        """Refuse trees that grow by confidence, and an index of tokens that the target does not have."""
        check_static("retrieval", tree)
        if self.index.largest >= vocabulary_size(target):
            raise ValueError(
                f"retrieval index holds token {self.index.largest}, the target's vocabulary ends at "
                f"{vocabulary_size(target) - 1}: build the index with the target's tokenizer"
            )

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        tree: TreeShape,
        drawing: Drawing,
        sampling: Sampling,
        max_new_tokens: int,
        hidden_BTH: Sequence[Tensor],
        device: torch.device,
    ) -> "RetrievalSession":
        """Keep the ends of the prompts."""
        return RetrievalSession(self, prompts, Forest(check_static("retrieval", tree), device))


class RetrievalSession:
    """The last tokens of the rows; None for a row that has ended."""

    def __init__(self, proposer: RetrievalProposer, prompts: Sequence[Sequence[int]], forest: Forest) -> None:
        self._index, self._forest = proposer.index, forest
        self._longest, self._shortest = proposer.max_suffix, proposer.min_suffix
        self._ends: list[list[int] | None] = [list(prompt[-self._longest :]) for prompt in prompts]

    def propose(self, u_BN: Tensor | None) -> Proposal:
        """Look the ends up."""
        return self._forest.proposal([NOTHING if end is None else self._draft(end) for end in self._ends])

    def commit(self, outcome: Outcome) -> None:
        """Move the ends on."""
        self._ends = [
            [*end, *emitted][-self._longest :] if end is not None and emitted else None
            for end, emitted in zip(self._ends, outcome.tokens, strict=True)
        ]

    def select_rows(self, rows: Sequence[int]) -> None:
        """Go on with these rows, in this order."""
        self._ends = [self._ends[row] for row in rows]

    def _draft(self, end: list[int]) -> Flat:
        found = self._index.match(end)
        if found < self._shortest:
            return NOTHING
        trie = self._forest.trie()
        grow(trie, self._index.continuations(end[-found:], self._forest.tree.depth, CONTINUATIONS))
        return trie.flatten()


# Continuations merged where they begin alike: by token, how often it comes here and what comes behind it.
Below = dict[int, tuple[list[int], "Below"]]


def grow(trie: Trie, continuations: Sequence[tuple[tuple[int, ...], int]]) -> None:
    """Fill a trie with the prefixes of weighted continuations, the heaviest first; the first entered of equals."""
    root: Below = {}
    for tokens, weight in continuations:
        below = root
        for token in tokens:
            entry = below.get(token)
            if entry is None:
                entry = below[token] = ([0], {})
            entry[0][0] += weight
            below = entry[1]
    heap: list[tuple[int, int, int, int, int, Below]] = []
    entered = 0

    def offer(node: int, depth: int, below: Below) -> None:
        nonlocal entered
        for token, ((weight,), deeper) in below.items():
            heappush(heap, (-weight, entered, node, depth, token, deeper))
            entered += 1

    # What extends a prefix weighs no more than it, so nothing heavier than the heap's top is still to come.
    offer(0, 0, root)
    while heap and not trie.full:
        _, _, node, depth, token, deeper = heappop(heap)
        child = trie.put(node, depth, token)
        if child:
            offer(child, depth + 1, deeper)
