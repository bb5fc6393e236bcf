"""Prompt lookup: what followed the same few tokens earlier in the row's own text is drafted again.

After LLMA (Yang et al. 2023, arXiv 2304.04487) and prompt lookup decoding (Saxena 2023). It pays where the output
repeats the input: summaries, edits, code, answers over documents. A step in which no row finds anything drafts no
nodes and so costs a plain forward of the target.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

from decode.propose.protocol import SessionSetup
from decode.propose.text_proposer import FlatTrie, Forest, TextProposer, TextSession, check_static


class PromptLookupProposer(TextProposer):
    """Drafts from the prompt and the output so far.

    The longest match of the last `max_ngram` to `min_ngram` tokens comes first, then the most recent. A chain gets the
    best match's continuation; a tree that branches gets the continuations of several, merged where they begin alike,
    within its depth, its widths and its number of nodes.
    """

    name = "prompt_lookup"

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"max_ngram={max_ngram}, min_ngram={min_ngram}: needs 1 <= min_ngram <= max_ngram")
        self.max_ngram, self.min_ngram = max_ngram, min_ngram

    def start(self, setup: SessionSetup) -> "PromptLookupSession":
        """Index the prompts."""
        rows = []
        for prompt in setup.prompts:
            rows.append(NgramIndex(self.max_ngram, self.min_ngram))
            rows[-1].extend(prompt)
        return PromptLookupSession(rows, Forest(check_static(self.name, setup.tree), setup.device))


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
        """Append tokens. An n-gram is entered once it has a follower, so that the text's end never matches itself."""
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
        """Positions whose preceding n tokens are also the last n of the text: the longest n first, then the most recent
        position; each position once.
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
        """`length` tokens that follow if the text goes on as it did at position `at`. Past the end of the text the copy
        reads what it has itself written, so that a phrase in repetition goes on repeating.
        """
        copied = self.text[at : at + length]
        period = len(copied)
        return copied if period == length else [copied[i % period] for i in range(length)]


class PromptLookupSession(TextSession[NgramIndex]):
    """The indexed texts of the rows."""

    def draft(self, row: NgramIndex) -> FlatTrie:
        """Copy what followed the matches."""
        tree, trie = self.forest.tree, self.forest.trie()
        # Many matches of a frequent token begin alike and add nothing; following all of them would make the cost of a
        # step grow with the text.
        for at in islice(row.matches(), 1 if tree.is_chain else 2 * tree.size):
            trie.add(row.copy_from(at, tree.depth))
            if trie.full:
                break
        return trie.flatten()

    def read(self, row: NgramIndex, tokens: Sequence[int]) -> None:
        """Index what was emitted."""
        row.extend(tokens)
