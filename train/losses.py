"""What a draft is trained to do, per token.

Legend: N valid response tokens, V vocabulary. A loss takes the draft's logits, the target's logits (or None) and the
tokens of the data, and returns one fp32 value a token; the loop sums them and divides by the number of valid tokens.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

LossFn = Callable[[Tensor, Tensor | None, Tensor], Tensor]


def cross_entropy(draft_NV: Tensor, target_NV: Tensor | None, tokens_N: Tensor) -> Tensor:
    """-log q(token): on the target's own outputs this is sequence-level KD (Kim & Rush 2016, section 3.2)."""
    return F.cross_entropy(draft_NV.float(), tokens_N, reduction="none")


def forward_kl(draft_NV: Tensor, target_NV: Tensor | None, tokens_N: Tensor) -> Tensor:
    """KL(p || q) over the whole vocabulary, p the target (Hinton et al. 2015; DistillSpec, section 4).

    Bounds what is lost in acceptance through Pinsker: 1 - alpha = TV(p, q) <= sqrt(KL / 2).
    """
    assert target_NV is not None, "forward_kl needs the target's logits"
    log_q = draft_NV.float().log_softmax(-1)
    log_p = target_NV.float().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


LOSSES: dict[str, LossFn] = {"ce": cross_entropy, "fkl": forward_kl}
NEEDS_TARGET = frozenset({"fkl"})
