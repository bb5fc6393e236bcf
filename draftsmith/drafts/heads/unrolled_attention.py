"""Attention of a head that unrolls, without a mask over pairs and keys.

At depth d pair t sees the pairs of its text up to t, as they are at depth 1, and its own draft: one
key of each further depth. The first are a causal block; the others are diagonals, dot products of a
query with a key. One softmax over both is the block's attention and the diagonals' values, weighed
by the log-sum-exp of each; and the gradient of the block is what its kernel gives for the joined
output and log-sum-exp. So d depths take d causal passes, and memory grows with the pairs.

The kernel of a block with its log-sum-exp is used on CPUs. Elsewhere torch's attention gets the
mask.

Legend: B rows, N heads, K heads of keys, W pairs, P keys (W of every depth), E width of a head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad
from transformers import AttentionInterface

from draftsmith.core.transformers_api import repeat_kv, sdpa_attention_forward

UNROLLED = "draftsmith_unrolled"
"""The name of this attention among transformers'."""

_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Text(NamedTuple):
    """Where neighbouring pairs of one text are in `[B, N, W, ...]`."""

    rows: slice
    heads: slice
    pairs: slice


@dataclass(frozen=True)
class Unrolling:
    """What stands in the place of an attention mask. texts: the text of each pair; None where each
    row is one.
    """

    width: int
    texts_BW: Tensor | None = None

    def texts(self) -> list[Text]:
        """The runs of equal numbers in each row; one for all rows where each is one text."""
        every = slice(None)
        if self.texts_BW is None:
            return [Text(every, every, every)]
        found = []
        for row, texts_W in enumerate(self.texts_BW):
            start = 0
            for pairs in texts_W.unique_consecutive(return_counts=True)[1].tolist():
                found.append(Text(slice(row, row + 1), every, slice(start, start + pairs)))
                start += pairs
        return found

    def mask(self, depths: int, device: torch.device) -> Tensor:
        """The same as a boolean mask `[B or 1, 1, W, P]`."""
        sees = torch.ones(1, self.width, self.width, dtype=torch.bool, device=device).tril()
        if self.texts_BW is not None:
            sees = sees & (self.texts_BW[:, :, None] == self.texts_BW[:, None, :])
        itself = torch.eye(self.width, dtype=torch.bool, device=device).expand_as(sees)
        return torch.cat([sees, *[itself] * (depths - 1)], dim=-1)[:, None]


class _Joined(torch.autograd.Function):
    """The causal block of every text and the diagonals, in one softmax."""

    @staticmethod
    def forward(
        ctx: Any, q_BNWE: Tensor, k_BKPE: Tensor, v_BKPE: Tensor, texts: Any, scale: float
    ) -> Tensor:
        out_BNWE = torch.empty_like(q_BNWE)
        wide = torch.promote_types(q_BNWE.dtype, torch.float32)
        sums_BNW = torch.empty(q_BNWE.shape[:3], dtype=wide)
        keys, values = _by_depth(k_BKPE, q_BNWE), _by_depth(v_BKPE, q_BNWE)
        for text in texts:
            block = [part[text] for part in (q_BNWE, keys[0], values[0])]
            out_BNWE[text], sums_BNW[text] = _attend(*block, 0.0, True, scale=scale)
        scores = [(q_BNWE * key).sum(-1, dtype=wide) * scale for key in keys[1:]]
        all_BNW = torch.stack([sums_BNW, *scores]).logsumexp(0)
        joined_BNWE = out_BNWE * (sums_BNW - all_BNW).exp()[..., None]
        for score_BNW, value_BNWE in zip(scores, values[1:], strict=True):
            joined_BNWE += value_BNWE * (score_BNW - all_BNW).exp()[..., None]
        joined_BNWE = joined_BNWE.to(q_BNWE.dtype)
        ctx.save_for_backward(q_BNWE, k_BKPE, v_BKPE, joined_BNWE, all_BNW)
        ctx.texts = texts
        ctx.scale = scale
        return joined_BNWE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BNWE: Tensor) -> tuple[Tensor | None, ...]:
        q_BNWE, k_BKPE, v_BKPE, joined_BNWE, all_BNW = ctx.saved_tensors
        keys, values = _by_depth(k_BKPE, q_BNWE), _by_depth(v_BKPE, q_BNWE)
        of_q, of_key, of_value = (torch.empty_like(q_BNWE) for _ in range(3))
        for text in ctx.texts:
            block = [
                part[text] for part in (grad_BNWE, q_BNWE, keys[0], values[0], joined_BNWE, all_BNW)
            ]
            of_q[text], of_key[text], of_value[text] = _attend_backward(
                *block, 0.0, True, scale=ctx.scale
            )
        wide = all_BNW.dtype
        of_keys, of_values = [of_key], [of_value]
        through_BNW = (grad_BNWE * joined_BNWE).sum(-1, dtype=wide)
        of_q = of_q.to(wide)
        for key_BNWE, value_BNWE in zip(keys[1:], values[1:], strict=True):
            score_BNW = (q_BNWE * key_BNWE).sum(-1, dtype=wide) * ctx.scale
            share_BNW = (score_BNW - all_BNW).exp()
            of_share_BNW = (grad_BNWE * value_BNWE).sum(-1, dtype=wide) - through_BNW
            of_score_BNW1 = (share_BNW * of_share_BNW * ctx.scale)[..., None]
            of_q += of_score_BNW1 * key_BNWE
            of_keys.append(of_score_BNW1 * q_BNWE)
            of_values.append(share_BNW[..., None] * grad_BNWE)
        return (
            of_q.to(q_BNWE.dtype),
            _by_key_head(of_keys, k_BKPE),
            _by_key_head(of_values, v_BKPE),
            None,
            None,
        )


def _by_depth(values_BKPE: Tensor, q_BNWE: Tensor) -> list[Tensor]:
    """Keys or values of each depth, `[B, N, W, E]`, those of a query's head."""
    queries = q_BNWE.shape[1] // values_BKPE.shape[1]
    return [repeat_kv(part, queries) for part in values_BKPE.split(q_BNWE.shape[2], dim=2)]


def _by_key_head(parts: Sequence[Tensor], like_BKPE: Tensor) -> Tensor:
    """The inverse of `_by_depth` for gradients: those of queries that share a key are added."""
    heads = like_BKPE.shape[1]
    summed = [part.unflatten(1, (heads, -1)).sum(2) for part in parts]
    return torch.cat(summed, dim=2).to(like_BKPE.dtype)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Unrolling | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """As transformers' attentions. An `Unrolling` in the place of the mask is attended as above,
    other masks as `sdpa` does.
    """
    if not isinstance(attention_mask, Unrolling):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
    if query.device.type != "cpu":
        mask = attention_mask.mask(key.shape[2] // query.shape[2], query.device)
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **options)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # The kernel takes heads of one width and type. Those of values may differ (DeepSeek, autocast).
    width = max(query.shape[-1], value.shape[-1])
    parts = [part.to(query.dtype) for part in (query, key, value)]
    q, k, v = (pad(part, (0, width - part.shape[-1])) for part in parts)
    joined: Tensor = _Joined.apply(q, k, v, attention_mask.texts(), scale)  # type: ignore[no-untyped-call]
    return joined[..., : value.shape[-1]].transpose(1, 2), None


AttentionInterface.register(UNROLLED, attention)
