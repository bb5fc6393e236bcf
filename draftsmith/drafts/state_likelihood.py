"""Are states those of their tokens? A state gives a distribution of the next token, and the text
has that token: right states know it about as well as they claim to.

Both are in nats above what a state of zeros gives, so that states that know nothing claim nothing.
Any text is told from wrong states, the target's own or not.

Legend: T tokens, N sampled ones, H hidden size, V vocabulary.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.core.errors import RunError
from draftsmith.core.hidden_states import final_norm
from draftsmith.drafts.heads.borrowed import projection_of

# Tokens of a document that are looked at, evenly spread, and how many of them lie in a part of it.
_SAMPLED = 16
_PART = 4
# Impossible: standard errors below half of what is claimed, or so few nats a token.
_ERRORS = 4.0
_NOTHING = 1e-3


class StateLikelihood:
    """The ends of a target: final norm and output projection."""

    def __init__(self, ends: PreTrainedModel) -> None:
        self._norm = final_norm(ends)
        self._projection = projection_of(ends)
        self._dtype = ends.dtype

    @torch.no_grad()
    def check(self, document: str, raw_TH: Tensor, ids: Sequence[int]) -> float:
        """The share of the nats that the raw last states of a document claim which its tokens bear
        out: 1 for a text that the target drew. Raise RunError where no text has the share of a part
        of them.
        """
        count = min(len(raw_TH), len(ids) - 1)
        at_N = torch.linspace(0, count - 1, min(_SAMPLED, count)).round().long()
        next_N = torch.tensor(ids)[at_N + 1]
        raw_NH = F.pad(raw_TH[at_N].to(self._dtype), (0, 0, 1, 0))
        final_NH = self._projection.prepare(self._norm(raw_NH[None])[0])
        weight_VH = self._projection.weight_VH
        logits_NV = self._projection.finish(F.linear(final_NH, weight_VH, self._projection.bias_V))
        logprobs_NV = logits_NV.float().log_softmax(-1)
        nats_NV = logprobs_NV[1:] - logprobs_NV[0]
        probs_NV = logprobs_NV[1:].exp()
        known_N = nats_NV.gather(1, next_N[:, None])[:, 0]
        claimed_N = (probs_NV * nats_NV).sum(-1)
        variance_N = (probs_NV * nats_NV.square()).sum(-1) - claimed_N.square()
        sums_N3 = torch.stack([known_N, claimed_N, variance_N], dim=-1)
        for part_N3 in (*sums_N3.split(_PART), sums_N3):
            known, claimed, variance = part_N3.sum(0).tolist()
            nothing = _NOTHING * len(part_N3)
            share = known / max(claimed, nothing)
            # Not the other way round: NaN is not above it either.
            if not known > claimed / 2 - _ERRORS * max(variance, 0.0) ** 0.5 + nothing:
                raise RunError(
                    f"states: {document}, {len(ids)} tokens: they bear out {share:.0%} of what "
                    f"{len(part_N3)} of its last states claim ({claimed / len(part_N3):.2f} nats "
                    "each): these are of other tokens, of another model, or empty"
                )
        return float(share)
