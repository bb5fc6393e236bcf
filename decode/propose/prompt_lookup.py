"""Prompt lookup: draft again what followed the same few tokens earlier in the row's own text (LLMA,
Yang et al. 2023, arXiv 2304.04487; Saxena 2023). A step in which no row finds anything costs a
plain forward of the target.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

from decode.propose.text_proposer import FlatTrie, Forest, TextProposer, TextRow


class PromptLookupProposer(TextProposer):
    """Drafts from the prompt and the output so far.

    The longest match of the last `max_ngram` to `min_ngram` tokens comes first, then the most
    recent. A chain copies the best match, a tree several, merged where they begin alike.
    """

    name = "prompt_lookup"

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1) -> None:
        self.max_ngram, self.min_ngram = max_ngram, min_ngram

    def row(self, prompt: Sequence[int]) -> "NgramIndex":
        index = NgramIndex(self.max_ngram, self.min_ngram)
        index.read(prompt)
        return index


class NgramIndex(TextRow):
    """Where each n-gram of a growing text occurred before, for n from `shortest` to `longest`.

    As in a Lempel-Ziv compressor: the latest occurrence of an n-gram, and a link from each
    occurrence to the one before.
    """

    def __init__(self, longest: int, shortest: int) -> None:
        self.text: list[int] = []
        self._lengths = range(longest, shortest - 1, -1)
        self._latest: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in self._lengths}
        self._earlier: dict[int, list[int]] = {n: [] for n in self._lengths}

    def read(self, tokens: Sequence[int]) -> None:
        """Append tokens. An n-gram is entered once it has a follower, so the text's end never
        matches itself.
        """
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
        """Yield positions whose preceding n tokens are the last n of the text: the longest n first,
        then the most recent.
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
        """The `length` tokens after position `at`. Past the end of the text the copy reads
        itself.
        """
        copied = self.text[at : at + length]
        period = len(copied)
        return copied if period == length else [copied[i % period] for i in range(length)]

    def draft(self, forest: Forest) -> FlatTrie:
        tree, trie = forest.tree, forest.trie()
        # Many matches of a frequent token begin alike and add nothing; following all of them would
        # make the cost of a step grow with the text.
        for at in islice(self.matches(), 1 if tree.is_chain else 2 * tree.size):
            trie.add(self.copy_from(at, tree.depth))
            if trie.full:
                break
        return trie.flatten()
