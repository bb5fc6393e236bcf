"""Lookahead decoding (Fu et al. 2024, arXiv 2402.02057, section 3): the target drafts for itself.

Legend: B rows, W columns of the window.

The window is `ngram - 1` levels of W guessed tokens; the token at level l in column j stands l + j
positions after the root (level 0, column 0), and sees the root, level 0 up to its column, and the
levels above it in its column. The target's tokens after the last level become the next level, the
oldest level is dropped, and each column is an n-gram for the pool. The pool's n-grams that begin
with the root's token are the candidates of a step. Window and candidates are one tree, merged where
they begin alike, so a right guess in the window is accepted like any candidate.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from transformers import PreTrainedModel

from draftsmith.decode.kernel_sampling import largest
from draftsmith.decode.propose.protocol import Outcome, SessionSetup
from draftsmith.decode.propose.text_proposer import (
    TextProposer,
    TextRow,
    TextSession,
    Trie,
    check_static,
)
from draftsmith.decode.tree import Tree, TreeShape


@dataclass(eq=False)
class LookaheadProposer(TextProposer):
    """Drafts with `window` columns, n-grams of `ngram` tokens, and at most `candidates` of them per
    step.

    from_text: also put the n-grams of prompt and output into the pool.
    """

    name = "lookahead"
    window: int = 7
    ngram: int = 5
    candidates: int = 7
    from_text: bool = True

    def default_tree(self) -> Tree:
        """Return a tree with room at each depth for the siblings that window and candidates can
        need.
        """
        levels = self.ngram - 1
        parents: list[int] = []
        above = -1
        for depth in range(1, max(self.window + levels - 2, levels) + 1):
            # Level l of the window holds depths l to l + window - 1.
            siblings = min(depth, levels - 1) - max(depth - self.window, -1)
            if depth <= levels:
                siblings += self.candidates
            first = len(parents)
            parents += [above] * siblings
            above = first
        return Tree(tuple(parents))

    def check(self, target: PreTrainedModel, tree: TreeShape) -> None:
        needed = self.default_tree()
        given = check_static(self.name, tree).widths
        if any(have < need for have, need in zip_longest(given, needed.widths, fillvalue=0)):
            room = f"{needed.size} nodes {needed.depth} deep"
            raise ValueError(
                f"lookahead needs room for {room}; use its default tree, or a smaller window"
            )

    def row(self, prompt: Sequence[int]) -> "Window":
        return Window(self, prompt)

    def start(self, setup: SessionSetup) -> "LookaheadSession":
        return LookaheadSession(self, setup)


class Pool:
    """At most `most` n-grams for each first token; the least recently entered are dropped first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._rests: dict[int, dict[tuple[int, ...], None]] = {}

    def put(self, ngram: tuple[int, ...]) -> None:
        """Enter an n-gram, or make it the most recent."""
        rests = self._rests.setdefault(ngram[0], {})
        rests.pop(ngram[1:], None)
        rests[ngram[1:]] = None
        if len(rests) > self._most:
            del rests[next(iter(rests))]

    def get(self, token: int) -> list[tuple[int, ...]]:
        """Return what followed `token`, the most recent first."""
        return list(reversed(self._rests.get(token, {})))


class Window(TextRow):
    """One row: the levels, how often they have moved, and the pool. ends: numbers of the columns'
    last nodes in the trie.
    """

    def __init__(self, proposer: LookaheadProposer, prompt: Sequence[int]) -> None:
        self._ngram = proposer.ngram
        self._from_text = proposer.from_text
        # First guesses, from one generator per row, so that a row does not depend on its batch
        # mates.
        pick = random.Random(0)
        self.levels = [pick.choices(prompt, k=proposer.window) for _ in range(proposer.ngram - 1)]
        self.levels[0][0] = prompt[-1]
        self._moves = 0
        self.pool = Pool(proposer.candidates)
        self._tail: list[int] = []
        self.read(prompt)
        self.ends: list[int] = []

    def draft(self, trie: Trie) -> None:
        chain, *deeper = self.levels
        for rest in self.pool.get(chain[0]):
            trie.add(rest)
        self.ends = []
        for column in range(len(chain)):
            above = [level[column] for level in deeper]
            self.ends.append(trie.add(chain[1 : column + 1] + above))

    def advance(self, answers: Sequence[int], emitted: Sequence[int]) -> None:
        """Move the window on. answers: the target's tokens after `ends`. emitted: the row's new
        tokens.

        Columns enter the pool once all their tokens but the first are the target's. As in the
        paper's code the window moves by one position however many tokens were emitted; else most
        n-grams would end before they are whole.
        """
        if self._moves >= len(self.levels) - 1:
            levels = [*self.levels, answers]
            for column in range(len(answers)):
                self.pool.put(tuple(level[column] for level in levels))
        self._moves += 1
        self.levels = [*self.levels[1:], list(answers)]
        self.levels[0][0] = emitted[-1]
        self.read(emitted)

    def read(self, tokens: Sequence[int]) -> None:
        if not self._from_text:
            return
        text = [*self._tail, *tokens]
        for end in range(self._ngram, len(text) + 1):
            self.pool.put(tuple(text[end - self._ngram : end]))
        self._tail = text[-(self._ngram - 1) :]


class LookaheadSession(TextSession):
    """A session whose rows are lookahead windows."""

    rows: Sequence[Window]

    def commit(self, outcome: Outcome) -> None:
        device = outcome.p_BMV.device
        ends = []
        for row, drafted in zip(self.rows, self.drafted, strict=True):
            ends.append([drafted.indices[end] for end in row.ends])
        ends_BW = torch.tensor(ends, device=device)
        rows_B1 = torch.arange(len(ends), device=device).unsqueeze(1)
        best_BW = largest(outcome.p_BMV[rows_B1, ends_BW], 1).indices[..., 0]
        for row, answers, emitted in zip(self.rows, best_BW.tolist(), outcome.tokens, strict=True):
            row.advance(answers, emitted)
