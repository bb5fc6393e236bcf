"""Prompt lookup: draft again what followed the same few tokens earlier in the row's own text (LLMA,
Yang et al. 2023, arXiv 2304.04487; Saxena 2023). A step in which no row finds anything costs a
plain forward of the target.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice

from draftsmith.decode.propose.text_proposer import TextProposer, TextRow, Trie

# With a stop, matches that are counted, the most recent ones.
COUNTED = 64


class PromptLookupProposer(TextProposer):
    """Drafts from the prompt and the output so far.

    The longest match of the last `max_ngram` to `min_ngram` tokens comes first, then the most
    recent. A chain copies the best match, a tree several, merged where they begin alike. A chain
    with a stop copies what most of the longest matches go on with.
    """

    name = "prompt_lookup"

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1) -> None:
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram

    def row(self, prompt: Sequence[int]) -> "NgramIndex":
        index = NgramIndex(self.max_ngram, self.min_ngram)
        index.read(prompt)
        return index


class NgramIndex(TextRow):
    """The positions after each n-gram of a growing text, for n from `shortest` to `longest`."""

    def __init__(self, longest: int, shortest: int) -> None:
        self.text: list[int] = []
        self._lengths = range(longest, shortest - 1, -1)
        self._after: dict[tuple[int, ...], list[int]] = {}

    def read(self, tokens: Sequence[int]) -> None:
        """Append tokens. An n-gram is entered once it has a follower, so the text's end never
        matches itself.
        """
        text = self.text
        for token in tokens:
            at = len(text)
            for n in self._lengths:
                if n <= at:
                    self._after.setdefault(tuple(text[at - n :]), []).append(at)
            text.append(token)

    def matches(self) -> Iterator[int]:
        """Yield positions whose preceding n tokens are the last n of the text: the longest n first,
        then the most recent.
        """
        seen = set[int]()
        for n in self._lengths:
            for at in reversed(self._after.get(tuple(self.text[-n:]), [])):
                if at not in seen:
                    seen.add(at)
                    yield at

    def matching(self, most: int) -> int:
        """Return how many of the last tokens, at most `most`, precede the best match too."""
        text = self.text
        at = next(self.matches(), 0)
        count = 0
        while count < min(most, at) and text[at - 1 - count] == text[-1 - count]:
            count += 1
        return count

    def copy_from(self, at: int, length: int) -> list[int]:
        """Return the `length` tokens after position `at`. Past the end of the text the copy reads
        itself.
        """
        copied = self.text[at : at + length]
        period = len(copied)
        return copied if period == length else [copied[i % period] for i in range(length)]

    def copied(self, length: int, stop: float) -> list[int]:
        """Return what a chain copies: nothing without a match, else up to `length` tokens."""
        if stop:
            return self.likely(length, stop)
        at = next(self.matches(), None)
        return [] if at is None else self.copy_from(at, length)

    def likely(self, length: int, stop: float) -> list[int]:
        """Return what most of the longest matches go on with, `length` tokens, or as many as until
        the chance of the path is below `stop`.

        That chance is the share of these matches that go on so, where one more is counted that does
        not: a single match is even odds.
        """
        matches = self._longest()
        total = len(matches) + 1
        path: list[int] = []
        while len(path) < length and matches:
            following = {at: self.copy_from(at, len(path) + 1)[-1] for at in matches}
            # The most recent of equals, which `matches` has first.
            token, _ = Counter(following.values()).most_common(1)[0]
            path.append(token)
            matches = [at for at in matches if following[at] == token]
            if len(matches) / total < stop:
                break
        return path

    def _longest(self) -> list[int]:
        for n in self._lengths:
            positions = self._after.get(tuple(self.text[-n:]), [])
            if positions:
                return positions[: -COUNTED - 1 : -1]
        return []

    def draft(self, trie: Trie) -> None:
        tree = trie.tree
        if tree.stop:
            trie.add(self.likely(tree.depth, tree.stop))
            return
        # Many matches of a frequent token begin alike and add nothing; following all of them would
        # make the cost of a step grow with the text.
        for at in islice(self.matches(), 1 if tree.is_chain else 2 * tree.size):
            trie.add(self.copy_from(at, tree.depth))
            if trie.full:
                break
