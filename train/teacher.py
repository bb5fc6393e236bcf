"""Where the target's laws come from: its hidden states, projected when they are needed, or rows that were stored.

A draft may know fewer tokens than its target, or more: vocabularies are padded to different sizes, or a head keeps the
commonest tokens only. Losses compare laws on the draft's tokens, the target's made to add up to one there; acceptance
is against its whole law, whose share outside the draft's vocabulary is always rejected.

Legend: N valid tokens, C tokens of a chunk, H hidden size, V vocabulary of the draft, K stored tokens a row, T tokens.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from drafts.heads.borrowed import logit_scale
from draftsmith_core.errors import InputError

# The logarithm of a mass that counts for nothing and does not vanish in fp32.
_LEAST = -80.0


class Teacher(Protocol):
    """Gives the target's logits for some rows at a time."""

    def logits(self, rows: slice, draft_CV: Tensor) -> Tensor:
        """`[C, V]`, no gradient, the caller's to overwrite. `draft_CV` are the draft's logits at the same rows.

        Of a teacher that `is_partial` they are log-probabilities, short of one by what the draft has no token for.
        """
        ...

    def select(self, rows_M: Tensor) -> "Teacher":
        """The teacher of these rows only."""
        ...


@dataclass(frozen=True, eq=False)
class Head:
    """The way from a model's last hidden state to its logits.

    Holds the module and not its weight: sharded training swaps the parameter under the module.
    """

    module: nn.Module
    scale: float = 1.0
    softcap: float | None = None

    @property
    def weight_VH(self) -> Tensor:
        """The output projection; the embedding's own tensor where the two are tied."""
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def bias_V(self) -> Tensor | None:
        """For the few models whose output projection has one (Phi)."""
        bias = getattr(self.module, "bias", None)
        return bias if isinstance(bias, Tensor) else None

    @property
    def is_plain(self) -> bool:
        """Whether the projection is all there is."""
        return self.scale == 1 and self.softcap is None

    def finish(self, logits_CV: Tensor) -> Tensor:
        """What the model does to the projection: scale it (Cohere, Granite) or bound it (Gemma 2)."""
        if self.scale != 1:
            logits_CV = logits_CV * self.scale
        if self.softcap is not None:
            logits_CV = (logits_CV / self.softcap).tanh() * self.softcap
        return logits_CV


def compute_dtype(weight: Tensor) -> torch.dtype:
    """The dtype that a matrix product with `weight` runs in here: autocast's, or its own."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


@dataclass(frozen=True, eq=False)
class LiveTeacher:
    """The target itself, as its last hidden states: `[N, H]` instead of `[N, V]` until a chunk is asked for."""

    hidden_NH: Tensor
    head: Head

    @torch.no_grad()
    def logits(self, rows: slice, draft_CV: Tensor) -> Tensor:
        """The target's logits, exactly as its own forward gives them."""
        weight, bias = self.head.weight_VH, self.head.bias_V
        dtype = compute_dtype(weight)
        projected = F.linear(self.hidden_NH[rows].to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        return self.head.finish(projected)

    def select(self, rows_M: Tensor) -> "LiveTeacher":
        """The teacher of these rows only."""
        return LiveTeacher(self.hidden_NH[rows_M], self.head)


@dataclass(frozen=True, eq=False)
class StoredTeacher:
    """Top-k rows of a distilled set: ids, their log-probabilities (-inf where a row has fewer), the mass of the rest.

    What the rest looked like is not known. It is given the draft's own shape, scaled to the stored tail mass and
    without gradient: then every loss is that of the laws over K + 1 cells (the K tokens and "any other"), the most
    that the row can tell, its gradient is exact for those, and nothing pulls on the draft inside the tail. A KL is
    then at most what the whole law would give. What is reported as alpha is not taken from this guess but from
    `overlap`, and is at most what the whole law would give.
    """

    top_ids_NK: Tensor
    top_logprobs_NK: Tensor
    tail_N: Tensor

    @torch.no_grad()
    def logits(self, rows: slice, draft_CV: Tensor) -> Tensor:
        """Log-probabilities `[C, V]`; stored tokens that the draft does not have are left out."""
        draft_CV, ids_CK = draft_CV.float(), self.top_ids_NK[rows]
        unknown_CK = ids_CK >= draft_CV.shape[-1]
        logprobs_CK = self.top_logprobs_NK[rows].float().masked_fill(unknown_CK, -math.inf)
        # amax, because padding repeats id 0 with -inf.
        top_CV = torch.full_like(draft_CV, -math.inf)
        top_CV = top_CV.scatter_reduce(1, ids_CK.masked_fill(unknown_CK, 0), logprobs_CK, "amax")
        rest_CV = draft_CV.masked_fill(top_CV > -math.inf, -math.inf)
        norm_C1 = rest_CV.logsumexp(-1, keepdim=True)
        tail_C1 = self.tail_N[rows, None].float().clamp_min(0).log()
        # All that a row names may be unknown to the draft, and nothing be left: a law must add up to more than zero.
        nothing_C1 = logprobs_CK.amax(-1, keepdim=True) == -math.inf
        tail_C1 = torch.where(nothing_C1, tail_C1.clamp_min(_LEAST), tail_C1)
        # A row may name every token, or the draft be able to give none of the rest: then there is no tail to place.
        tail_CV = torch.where(rest_CV > -math.inf, rest_CV - norm_C1 + tail_C1, -math.inf)
        return torch.maximum(top_CV, tail_CV)

    @torch.no_grad()
    def overlap(self, rows: slice, draft_CV: Tensor) -> Tensor:
        """The least that alpha can be, `[C]`: sum of min(p, q) over the stored tokens, nothing for the tail."""
        wide_CV = draft_CV if draft_CV.dtype == torch.float64 else draft_CV.float()
        ids_CK = self.top_ids_NK[rows]
        unknown_CK = ids_CK >= draft_CV.shape[-1]
        p_CK = self.top_logprobs_NK[rows].to(wide_CV.dtype).exp().masked_fill(unknown_CK, 0)
        # Padding has p = 0 and repeats id 0, which counts once.
        return torch.minimum(p_CK, wide_CV.softmax(-1).gather(-1, ids_CK.masked_fill(unknown_CK, 0))).sum(-1)

    def select(self, rows_M: Tensor) -> "StoredTeacher":
        """The teacher of these rows only."""
        return StoredTeacher(self.top_ids_NK[rows_M], self.top_logprobs_NK[rows_M], self.tail_N[rows_M])


@dataclass(frozen=True, eq=False)
class Reduced:
    """A teacher of whole laws for a draft that has some of its tokens only: these ids, in the draft's order."""

    whole: Teacher
    ids: Tensor | slice

    @torch.no_grad()
    def logits(self, rows: slice, draft_CV: Tensor) -> Tensor:
        """Log-probabilities `[C, V]` of the whole law, at the draft's tokens."""
        whole_CW = self.whole.logits(rows, draft_CV)
        whole_CW = whole_CW if whole_CW.dtype == torch.float64 else whole_CW.float()
        return whole_CW[:, self.ids] - whole_CW.logsumexp(-1, keepdim=True)

    def select(self, rows_M: Tensor) -> "Reduced":
        """The teacher of these rows only."""
        return Reduced(self.whole.select(rows_M), self.ids)


@dataclass(frozen=True, eq=False)
class Widened:
    """A teacher for a draft that has further tokens behind the target's `size`, which its laws never give.

    Decoding cuts those off the draft's law, so acceptance is measured without them.
    """

    narrow: Teacher
    size: int

    @torch.no_grad()
    def logits(self, rows: slice, draft_CV: Tensor) -> Tensor:
        """The target's logits `[C, V]`, minus infinity for the tokens that it lacks."""
        narrow_CW = self.narrow.logits(rows, draft_CV[:, : self.size])
        return F.pad(narrow_CW, (0, draft_CV.shape[-1] - self.size), value=-math.inf)

    def select(self, rows_M: Tensor) -> "Widened":
        """The teacher of these rows only."""
        return Widened(self.narrow.select(rows_M), self.size)


def fitted(teacher: LiveTeacher, size: int, draft_size: int) -> Teacher:
    """The teacher, of a vocabulary of `size` tokens, for a draft whose first tokens are the same but padded to
    `draft_size`.
    """
    if size == draft_size:
        return teacher
    return Reduced(teacher, slice(draft_size)) if size > draft_size else Widened(teacher, size)


def is_partial(teacher: Teacher | None) -> bool:
    """Whether its laws may lie partly outside the draft's vocabulary."""
    return isinstance(teacher, Reduced | StoredTeacher)


def vocabulary(teacher: Teacher | None) -> int:
    """How many logits a token the teacher makes on its way; 0 for one that makes none but the draft's."""
    match teacher:
        case LiveTeacher():
            return len(teacher.head.weight_VH)
        case Reduced():
            return vocabulary(teacher.whole)
        case Widened():
            return vocabulary(teacher.narrow)
    return 0


@torch.no_grad()
def find_head(model: PreTrainedModel, name: str) -> Head:
    """The head of a causal LM, checked: hidden states through it must give the logits that the model itself gives.

    Raises InputError, one line, for a model whose logits are made in a way that is not known here.
    """
    module = model.get_output_embeddings()
    if not isinstance(module, nn.Module) or model.base_model is model:
        raise InputError(f"{name}: has no output projection to train through; use a causal language model")
    config = model.config.get_text_config(decoder=True)
    head = Head(module, logit_scale(config), getattr(config, "final_logit_softcapping", None))
    ids_BT = torch.arange(4, device=model.device)[None] % config.vocab_size
    was_training = model.training
    model.eval()
    hidden_TH = model.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state[0]
    wanted_TV = model(input_ids=ids_BT, use_cache=False).logits[0].float()
    model.train(was_training)
    if hidden_TH.shape[-1] == head.weight_VH.shape[-1]:
        found_TV = LiveTeacher(hidden_TH.to(head.weight_VH.dtype), head).logits(slice(None), wanted_TV).float()
        if (found_TV - wanted_TV).abs().max() <= 0.02 * wanted_TV.abs().max() + 1e-6:
            return head
    raise InputError(
        f"{name}: {type(model).__name__} does not make its logits by its output projection alone; "
        f"it cannot be trained in chunks here, use another model"
    )
