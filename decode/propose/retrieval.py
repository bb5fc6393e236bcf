"""Retrieval: what most often followed the last tokens in a corpus of the user's is drafted.

After REST (He et al. 2023, arXiv 2311.08252) and, for the frequencies, its trie of retrieved continuations.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

from transformers import PreTrainedModel

from decode.propose.protocol import SessionSetup
from decode.propose.text_proposer import EMPTY, FlatTrie, Forest, TextProposer, TextSession, Trie, check_static
from decode.suffix_index import SuffixIndex
from decode.tree import TreeShape
from draftsmith_core.models import vocabulary_size

# More continuations than this change the frequencies of a trie of some dozen nodes no further.
CONTINUATIONS = 32


class RetrievalProposer(TextProposer):
    """Drafts from a suffix index of token sequences.

    The longest end of the text, of at most `max_suffix` and at least `min_suffix` tokens, that occurs in the index is
    looked up; the prefixes of what followed it are kept by how often they occur.
    """

    name = "retrieval"

    def __init__(self, index: SuffixIndex, max_suffix: int = 16, min_suffix: int = 2) -> None:
        if not 1 <= min_suffix <= max_suffix:
            raise ValueError(f"max_suffix={max_suffix}, min_suffix={min_suffix}: needs 1 <= min_suffix <= max_suffix")
        self.index, self.max_suffix, self.min_suffix = index, max_suffix, min_suffix

    def check(self, target: PreTrainedModel, tree: TreeShape) -> None:
        """Refuse trees that grow by confidence, and an index of tokens that the target does not have."""
        super().check(target, tree)
        if self.index.largest >= vocabulary_size(target):
            raise ValueError(
                f"retrieval index holds token {self.index.largest}, the target's vocabulary ends at "
                f"{vocabulary_size(target) - 1}: build the index with the target's tokenizer"
            )

    def start(self, setup: SessionSetup) -> "RetrievalSession":
        """Keep the ends of the prompts."""
        ends = [list(prompt[-self.max_suffix :]) for prompt in setup.prompts]
        return RetrievalSession(self, ends, Forest(check_static(self.name, setup.tree), setup.device))


class RetrievalSession(TextSession[list[int]]):
    """The last tokens of the rows."""

    def __init__(self, proposer: RetrievalProposer, ends: Sequence[list[int]], forest: Forest) -> None:
        super().__init__(ends, forest)
        self.proposer = proposer

    def draft(self, row: list[int]) -> FlatTrie:
        """Look up the end of the text."""
        index = self.proposer.index
        found = index.match(row)
        if found < self.proposer.min_suffix:
            return EMPTY
        trie = self.forest.trie()
        grow(trie, index.continuations(row[-found:], self.forest.tree.depth, CONTINUATIONS))
        return trie.flatten()

    def read(self, row: list[int], tokens: Sequence[int]) -> None:
        """Append what was emitted, and forget what is too far back to be searched for."""
        row += tokens
        del row[: -self.proposer.max_suffix]


# Continuations merged where they begin alike: for each token, how often it comes here and what follows it.
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

    # A longer prefix is at most as frequent as the prefix it extends, so the top of the heap is the most frequent left.
    offer(0, 0, root)
    while heap and not trie.full:
        _, _, node, depth, token, deeper = heappop(heap)
        child = trie.put(node, depth, token)
        if child:
            offer(child, depth + 1, deeper)
