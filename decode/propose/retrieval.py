"""Retrieval: draft what most often followed the last tokens in the user's corpus (REST, He et al.
2023, arXiv 2311.08252, and its trie of retrieved continuations).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from draftsmith.core.models import vocabulary_size
from draftsmith.decode.propose.text_proposer import TextProposer, TextRow, Trie
from draftsmith.decode.suffix_index import LONGEST, SAMPLE, SuffixIndex
from draftsmith.decode.tree import TreeShape


@dataclass(eq=False)
class RetrievalProposer(TextProposer):
    """Drafts from a suffix index of token sequences.

    Looks up the longest end of the text, of `min_suffix` to `max_suffix` tokens, that occurs in the
    index, and keeps the most frequent prefixes of what followed it.
    """

    name = "retrieval"
    index: SuffixIndex
    max_suffix: int = LONGEST
    min_suffix: int = 2

    def check(self, target: PreTrainedModel, tree: TreeShape) -> None:
        super().check(target, tree)
        if self.index.largest >= vocabulary_size(target):
            raise ValueError(
                f"retrieval index: the target has no token {self.index.largest}; use its tokenizer"
            )

    def row(self, prompt: Sequence[int]) -> "RecentTokens":
        return RecentTokens(self, list(prompt[-self.max_suffix :]))


@dataclass(eq=False)
class RecentTokens(TextRow):
    """The last `max_suffix` tokens of a row."""

    proposer: RetrievalProposer
    tokens: list[int]

    def draft(self, trie: Trie) -> None:
        index = self.proposer.index
        length = index.match(self.tokens)
        if length >= self.proposer.min_suffix:
            suffix = self.tokens[-length:]
            # All of them, so that a chain is the beginning of a longer one.
            grow(trie, index.continuations(suffix, trie.tree.depth, SAMPLE))

    def read(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        del self.tokens[: -self.proposer.max_suffix]


def grow(trie: Trie, continuations: Sequence[tuple[tuple[int, ...], int]]) -> None:
    """Fill a trie with the prefixes of weighted continuations, the heaviest first; of equals the
    shortest, then the smallest token.
    """
    weights: Counter[tuple[int, ...]] = Counter()
    for tokens, weight in continuations:
        for end in range(1, len(tokens) + 1):
            weights[tokens[:end]] += weight
    nodes: dict[tuple[int, ...], int] = {(): 0}
    # A prefix is at most as heavy as the shorter ones that it extends, so it is tried after them.
    for prefix in sorted(weights, key=lambda prefix: (-weights[prefix], len(prefix), prefix)):
        if trie.full:
            break
        above = nodes.get(prefix[:-1])
        if above is None:
            continue
        child = trie.put(above, len(prefix) - 1, prefix[-1])
        if child:
            nodes[prefix] = child
