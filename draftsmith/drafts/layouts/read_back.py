"""An export is read back and compared with its draft before it gets its name.

Legend: T tokens, K tokens drafted at a position, V target vocabulary.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.core.errors import RunError
from draftsmith.core.hidden_states import forward_with_states
from draftsmith.core.models import vocabulary_size
from draftsmith.drafts.heads.block import BlockHead
from draftsmith.drafts.heads.feature_head import FeatureHead
from draftsmith.drafts.heads.medusa import MedusaHeads
from draftsmith.drafts.heads.store import Head, load_head

PROBE_TOKENS = 24
# The largest difference of logits, in fp32, that rounding explains.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Check:
    """How an export was read back, and the largest difference from the draft that was found."""

    how: str
    max_difference: float


def check_logits(out: Path, how: str, read: Tensor, ours: Tensor) -> Check:
    """Return the check of logits; RunError if what was read back computes others."""
    # Tokens outside a draft vocabulary have minus infinity on both sides.
    finite = read.nan_to_num(neginf=-1e9)
    difference = float(torch.dist(finite, ours.nan_to_num(neginf=-1e9), torch.inf))
    if not difference <= TOLERANCE:
        raise RunError(
            f"{out}: read back, it gives other logits (off by {difference:.2g}); nothing was "
            "written"
        )
    return Check(how, difference)


def check_head(
    out: Path, head: Head, target: PreTrainedModel, layout: str, source: str | None = None
) -> Check:
    """Read a head back from its layout and compare the logits of both behind the same states.

    source: what to read; default `out`.
    """
    ids_1T = probe_ids(target)
    _, states = forward_with_states(target, head.hidden_layers, input_ids=ids_1T)
    read = head_logits(load_head(source or out, target), ids_1T, list(states))
    ours = head_logits(head, ids_1T, list(states))
    return check_logits(out, f"read back as {layout}", read, ours)


def head_logits(head: Head, ids_1T: Tensor, states: list[Tensor]) -> Tensor:
    """Logits `[positions, K, V]` of what a head drafts along a text; K is 1 for EAGLE heads.

    states: the target's, one `[1, T, H]` per layer that the head reads.
    """
    if isinstance(head, BlockHead):
        # The Markov head reads the tokens before those that the slots draft.
        previous_TK = ids_1T[0].unfold(0, head.depths, 1)
        anchors_1T = torch.arange(len(previous_TK))[None]
        raw = head.raw_logits(head.drafted(ids_1T, states, anchors_1T)[0])
        return head.logits(raw, previous_TK)
    if isinstance(head, MedusaHeads):
        return head(states[0])[0]
    assert isinstance(head, FeatureHead)
    logits = head(ids_1T[:, 1:], head.fuse(states)[:, :-1])[0]
    return head.to_target(logits)[0, :, None]


def probe_ids(model: PreTrainedModel, count: int = PROBE_TOKENS) -> Tensor:
    """Token ids `[1, T]` spread over the vocabulary, for comparing logits."""
    size = vocabulary_size(model)
    return (torch.arange(count) * max(1, size // count) + 7)[None] % size
