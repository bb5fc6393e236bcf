"""Prompt lookup: what followed the same few tokens earlier in the row's own text is drafted again.

Legend: B rows, N drafted nodes, T prompt positions, H hidden size.

After LLMA (Yang et al. 2023, arXiv 2304.04487) and prompt lookup decoding (Saxena 2023). It pays where the output
repeats the input: summaries, edits, code, answers over documents. A step in which no row finds anything drafts no
nodes and so costs a plain forward of the target.
"""

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.propose.protocol import Outcome, Proposal, Proposer
from decode.propose.text_proposer import NOTHING, Flat, Forest, NgramIndex, check_static
from decode.tree import Drawing, TreeShape
from draftsmith_core.sampling import Sampling


class PromptLookupProposer(Proposer):
    """Drafts from the prompt and the output so far.

    The longest match of the last `max_ngram` to `min_ngram` tokens comes first, then the most recent. A chain gets the
    best match's continuation; a tree that branches gets the continuations of several, merged where they begin alike,
    within its depth, its widths and its number of nodes.
    """

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"max_ngram={max_ngram}, min_ngram={min_ngram}: needs 1 <= min_ngram <= max_ngram")
        self.max_ngram, self.min_ngram = max_ngram, min_ngram

    def check(self, target: PreTrainedModel, tree: TreeShape) -> None:
        """Refuse trees that grow by confidence."""
        check_static("prompt_lookup", tree)

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        tree: TreeShape,
        drawing: Drawing,
        sampling: Sampling,
        max_new_tokens: int,
        hidden_BTH: Sequence[Tensor],
        device: torch.device,
    ) -> "PromptLookupSession":
        """Index the prompts."""
        rows = []
        for prompt in prompts:
            rows.append(NgramIndex(self.max_ngram, self.min_ngram))
            rows[-1].extend(prompt)
        return PromptLookupSession(rows, Forest(check_static("prompt_lookup", tree), device))


class PromptLookupSession:
    """The indexed texts of the rows; None for a row that has ended."""

    def __init__(self, rows: Sequence[NgramIndex], forest: Forest) -> None:
        self._rows: list[NgramIndex | None] = list(rows)
        self._forest = forest

    def propose(self, u_BN: Tensor | None) -> Proposal:
        """Copy what followed the matches."""
        return self._forest.proposal([NOTHING if row is None else self._draft(row) for row in self._rows])

    def commit(self, outcome: Outcome) -> None:
        """Append the emitted tokens to the texts."""
        for place, (row, emitted) in enumerate(zip(self._rows, outcome.tokens, strict=True)):
            if row is not None and emitted:
                row.extend(emitted)
            else:
                self._rows[place] = None

    def select_rows(self, rows: Sequence[int]) -> None:
        """Go on with these rows, in this order."""
        self._rows = [self._rows[row] for row in rows]

    def _draft(self, row: NgramIndex) -> Flat:
        tree, trie = self._forest.tree, self._forest.trie()
        # Many matches of a frequent token begin alike and add nothing; looking at all of them would make the cost of a
        # step grow with the text.
        for at in islice(row.matches(), 1 if tree.is_chain else 2 * tree.size):
            trie.add(row.copy_from(at, tree.depth))
            if trie.full:
                break
        return trie.flatten()
