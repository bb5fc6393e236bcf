"""Drafts without weights, which copy from the text: what they would have proposed along the
target's own continuations.

A copied token y has q(y) = 1, so alpha at its position is p(y), and 0 where nothing is proposed.
Given that the text's token x was output, it was accepted if and only if it is y.

Legend: N positions, V vocabulary, P prompts, L positions of the longest continuation, D depths.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from decode.propose.prompt_lookup import PromptLookupProposer
from decode.propose.text_proposer import Trie
from decode.tree import chain
from eval.acceptance import Continuation
from eval.predict import Floats, Traces


@dataclass(frozen=True)
class CopyingDraft:
    """A method of drafting without weights. kind: its name in `PROPOSERS`."""

    kind: str


@dataclass(frozen=True, eq=False)
class CopiedTexts:
    """What was proposed below every position of some texts, as a chain.

    tokens: `[D, P, L]`, -1 where nothing was: entry (d, i, t) was proposed for token t of text i
    from d tokens before.
    """

    tokens_DPL: np.ndarray[tuple[int, ...], np.dtype[np.int64]]

    @classmethod
    def of(cls, texts: Sequence[Continuation], depths: int) -> "CopiedTexts":
        longest = max(len(text.output_ids) for text in texts)
        tokens_DPL = np.full((depths, len(texts), longest), -1)
        tree = chain(depths)
        for i, text in enumerate(texts):
            row = PromptLookupProposer().row(text.prompt_ids)
            for root, token in enumerate(text.output_ids):
                trie = Trie(tree)
                row.draft(trie)
                proposed = trie.flatten().tokens[: len(text.output_ids) - root]
                for d, copied in enumerate(proposed):
                    tokens_DPL[d, i, root + d] = copied
                row.read([token])
        return cls(tokens_DPL)


def copied_traces(
    texts: Sequence[Continuation],
    p_NV: Tensor,
    row_N: Tensor,
    place_N: Tensor,
    depths: int,
    rules: Sequence[str],
) -> Traces:
    """Return the traces of prompt lookup on texts whose target distributions are `p_NV`.

    row, place: text and token of each position. rules: those of `ranks_needed`; on a chain each
    accepts the one candidate alike.
    """
    tokens_DPL = CopiedTexts.of(texts, depths).tokens_DPL
    lengths_P = np.array([len(text.output_ids) for text in texts])
    x_PL = np.full(tokens_DPL.shape[1:], -2)
    for i, text in enumerate(texts):
        x_PL[i, : len(text.output_ids)] = text.output_ids
    same_DPL = (tokens_DPL == x_PL).astype(np.float64)
    offers_DPL = (tokens_DPL >= 0).astype(np.float64)
    rows = row_N.tolist()
    places = place_N.tolist()
    y_N1 = torch.tensor(tokens_DPL[0, rows, places], device=p_NV.device).unsqueeze(1)
    p_y_N1 = p_NV.gather(1, y_N1.clamp(min=0)) * (y_N1 >= 0)
    alpha_1PL = np.zeros((1, *x_PL.shape))
    alpha_1PL[0, rows, places] = p_y_N1[:, 0].double().cpu().numpy()
    values: dict[str, Floats] = dict.fromkeys(("alpha", "greedy", "match"), alpha_1PL)
    values |= {"missing": np.zeros_like(alpha_1PL), "offers": offers_DPL}
    values |= {"ratio": same_DPL, "place": 2 - same_DPL, "belief": same_DPL}
    values |= {rule: same_DPL[..., None] for rule in rules}
    return Traces(lengths_P, False, values)
