"""What a draft of another tokenizer is worth by its text: string-level match, at some positions of the target's text.

At each of them the draft writes a few tokens, as `decode --proposer string_match` does, and the first token that the
target's tokenizer spells of that text is kept when the target samples it: p of that token is the expected acceptance.

Legend: L tokens of a continuation.
"""

from collections.abc import Sequence
from typing import TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from decode.propose.protocol import SessionSetup
from decode.propose.string_match import StringMatchProposer
from decode.tree_spec import kary
from drafts.load import Draft
from drafts.vocabulary import vocabulary_map
from draftsmith_core.sampling import Sampling
from eval.headroom import PER_PROMPT, spread

# Tokens that the draft writes ahead: what it writes later can still change how the first ones are spelled.
WRITTEN = 4


class StringMeasurement(TypedDict):
    """Per prompt, of a draft of another tokenizer: p of the drafted token summed (`sum`) over `count` positions; 1 in
    `whole` where the draft's tokens can write the target's continuation without loss, else 0.
    """

    sum: list[float]
    count: list[int]
    whole: list[int]


@torch.inference_mode()
def first_tokens(draft: PreTrainedModel, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> dict[int, int]:
    """By position of the continuation, at most `PER_PROMPT` evenly spread ones: the target's token that the text of
    the draft begins with there, -1 where it begins with none.
    """
    # Not fast: weights would be packed for a few forwards, whose rounding decides nothing here.
    proposer = StringMatchProposer(draft, fast=False)
    places = spread(len(output_ids), PER_PROMPT)
    if not places:
        return {}
    setup = SessionSetup(
        prompts=[[*prompt_ids, *output_ids[:place]] for place in places],
        tree=kary((1,) * WRITTEN),
        drawing="deterministic",
        sampling=Sampling(temperature=0.0),
        max_new_tokens=WRITTEN,
        hidden_BTH=(),
        device=draft.device,
        vocabulary=proposer.words.target_size,
    )
    drafted_BM = proposer.start(setup).propose(None).tokens_BM
    if drafted_BM.shape[1] < 2:
        return dict.fromkeys(places, -1)
    return dict(zip(places, drafted_BM[:, 1].tolist(), strict=True))


def by_text(
    draft: Draft, kept: Sequence[NDArray[np.float64]], outputs: Sequence[Sequence[int]]
) -> StringMeasurement | None:
    """The sums of what was measured, `[L]` per prompt with NaN where nothing was; None for a draft of the target's own
    tokenizer.
    """
    words = vocabulary_map(draft) if isinstance(draft, PreTrainedModel) else None
    if words is None:
        return None
    return StringMeasurement(
        sum=[float(np.nansum(row)) for row in kept],
        count=[int(np.isfinite(row).sum()) for row in kept],
        whole=[int(words.lost.isdisjoint(ids)) for ids in outputs],
    )
