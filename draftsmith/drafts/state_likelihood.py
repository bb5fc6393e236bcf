"""Are states those of their tokens? A state gives a distribution of the next token, and the text
has that token: right states know it about as well as they claim to.

Both are in nats above what a state of zeros gives, so that states that know nothing claim nothing.
A text that the target drew tells right states from wrong ones; in another text it may know less
than it claims.

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

# Tokens that are looked at, evenly spread, and of a part.
_SAMPLED = 8
_PART = 4
# Impossible: standard errors below half of what is claimed, or so few nats claimed by a state.
_ERRORS = 4.0
_NOTHING = 1e-3


class StateLikelihood:
    """The ends of a target: final norm and output projection."""

    def __init__(self, ends: PreTrainedModel) -> None:
        self._norm = final_norm(ends)
        self._projection = projection_of(ends)
        self._dtype = ends.dtype

    @torch.no_grad()
    def check(self, document: str, raw_TH: Tensor, ids: Sequence[int], drawn: int) -> float:
        """The share of the nats that the raw last states of a document claim which its tokens bear
        out, about 1 for tokens that the target drew.

        drawn: how many of the last tokens it drew at temperature 1 or below. Raise RunError for
        states that claim nothing, and where it cannot have drawn these.
        """
        count = min(len(raw_TH), len(ids) - 1)
        drawn = min(drawn, count)
        judged = drawn or count
        at_N = torch.linspace(count - judged, count - 1, min(_SAMPLED, judged)).round().long()
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
        # NaN is above nothing.
        wrong = not bool((claimed_N > _NOTHING).all())
        sums_N3 = torch.stack([known_N, claimed_N, variance_N], dim=-1)
        for part_N3 in (*sums_N3.split(_PART), sums_N3):
            known, claimed, variance = part_N3.sum(0).tolist()
            share = known / max(claimed, _NOTHING)
            least = claimed / 2 - _ERRORS * max(variance, 0.0) ** 0.5
            if wrong or (drawn and known < least):
                raise RunError(
                    f"states: {document}, {len(ids)} tokens: they bear out {share:.0%} of what "
                    f"{len(part_N3)} of its last states claim; one claims {claimed_N.min():.2f} "
                    "nats: they are empty or of others, or the answer is not the target's own"
                )
        return float(share)
