"""Heads that draft from features (EAGLE, EAGLE-3, MTP), and how one unrolls: what it reads at each
depth of a draft.

A *pair* is the input of such a head: the feature of a position, and the token after it.

    pair t at depth d   reads
    feature             the target's at position t; from depth 2 on the one that it gave at d - 1
    token               t + d
    position            t + d - 1
    mask                the pairs of its text up to t, as they are at depth 1, and its own draft

`FeatureHead.unroll` does so for all pairs of a text at once, behind the text's own tokens: training
and evaluation call it. Decoding (`decode.propose.head_proposers`) drafts trees of its own tokens
behind a cache. There, the mask of a node is its path, its position follows from its depth, and its
feature is what its parent gave; a runner makes masks and positions of language models too.

Legend: B rows, T tokens, W pairs of a row, P cached tokens, H hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint
from transformers import Cache, DynamicCache

from draftsmith.core.transformers_api import LAYER_CACHE, layer_states
from draftsmith.drafts.heads.borrowed import Borrowed, dtype_of
from draftsmith.drafts.heads.unrolled_attention import Unrolling


class Depth(NamedTuple):
    """What all pairs give at a depth: features `[B, W, H]`, and each layer's keys and values."""

    features_BWH: Tensor
    keys: Sequence[Tensor]
    values: Sequence[Tensor]


class FeatureHead(nn.Module):
    """A head that makes its next features, through one decoder layer, from features and the tokens
    after them.
    """

    borrowed: Borrowed
    fc: nn.Linear
    layers: nn.ModuleList
    rotary: Callable[..., tuple[Tensor, Tensor]]
    fuse: Callable[[Sequence[Tensor]], Tensor]
    gradient_checkpointing: bool = False
    """Whether the backward through `unroll` computes each depth again."""

    def forward(
        self,
        input_ids_BT: Tensor,
        features_BTH: Tensor,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Logits of the token after each input token, and the features `[B, T, H]` under them, for
        a next step.

        `input_ids_BT[:, t]` is the token that follows the position of `features_BTH[:, t]`. mask,
        positions, cache: as for `states`.
        """
        states_BTH = self.states(input_ids_BT, features_BTH, mask, positions, cache)
        return self.logits(states_BTH), states_BTH

    def states(
        self,
        input_ids_BT: Tensor,
        features_BTH: Tensor,
        mask: Tensor | Unrolling | None = None,
        positions: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """The features `[B, T, H]` of `forward`.

        mask: additive or boolean, `[B or 1, 1, T, P + T]`, or that of an unrolled draft; default:
        causal. Several tokens after cached ones need it. positions: `[B or 1, T]`; default: those
        after the P cached tokens.
        """
        inputs = self.inputs(input_ids_BT, features_BTH, dtype_of(self.fc))
        opening = self.opening(inputs)
        if positions is None:
            past = 0 if cache is None else int(cache.get_seq_length())
            queries_T = torch.arange(input_ids_BT.shape[1], device=input_ids_BT.device)
            positions = (past + queries_T).unsqueeze(0)
        attending: dict[str, Any] = {
            "attention_mask": mask,
            "position_ids": positions,
            LAYER_CACHE: cache,
            "position_embeddings": self.rotary(opening[-1], positions),
        }
        read = opening
        for layer in [self.layer, *self.deeper]:
            read = [layer_states(layer(*read, **attending))]
        return self.ending(read[0])

    def embedded(self, input_ids_BT: Tensor, dtype: torch.dtype) -> Tensor:
        """Embeddings `[B, T, H]` of tokens: the target's."""
        return self.borrowed.embed(input_ids_BT, dtype)

    def inputs(
        self, input_ids_BT: Tensor, features_BTH: Tensor, dtype: torch.dtype
    ) -> Sequence[Tensor]:
        """What is joined of tokens and features, `[B, T, H]` each."""
        return self.embedded(input_ids_BT, dtype), features_BTH.to(dtype)

    def opening(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """What the layer reads of `inputs`."""
        return [self.fc(torch.cat(list(inputs), dim=-1))]

    @property
    def layer(self) -> nn.Module:
        """The decoder layer."""
        return self.layers[0]

    @property
    def deeper(self) -> Sequence[nn.Module]:
        """The layers that read its states."""
        return ()

    def ending(self, states_BTH: Tensor) -> Tensor:
        """The features that follow from the layer's output."""
        return states_BTH

    def normed(self, states: Tensor) -> Tensor:
        """What the output projection reads of features `[..., H]`."""
        return states

    def logits(self, states: Tensor) -> Tensor:
        """Logits `[..., V]` that the target's output projection gives for features."""
        return self.borrowed.project(states)

    def to_target(self, logits: Tensor) -> Tensor:
        """Logits over the target's vocabulary `[..., V]`: -inf for tokens that the head lacks."""
        return logits

    def unroll(
        self,
        input_ids_BW: Tensor,
        features_BWH: Tensor,
        depths: int,
        positions_BW: Tensor | None = None,
        texts_BW: Tensor | None = None,
    ) -> Iterator[Tensor]:
        """Yield the features `[B, W, H]` that every pair gives at depth 1, 2, ..., as above.

        input_ids, features, positions: of depth 1. texts: for rows that hold several texts, the
        number of each pair's. Beyond the end of a row there are no tokens; what its last pairs give
        there means nothing.
        """
        width = input_ids_BW.shape[1]
        if positions_BW is None:
            positions_BW = torch.arange(width, device=input_ids_BW.device).unsqueeze(0)
        mask = Unrolling(width, texts_BW)
        made: tuple[Depth, ...] = ()
        for depth in range(depths):
            if depth:
                input_ids_BW = pad(input_ids_BW[:, 1:], (0, 1))
                features_BWH = made[-1].features_BWH
            read = input_ids_BW, features_BWH, mask, positions_BW + depth, made
            if self.gradient_checkpointing and torch.is_grad_enabled():
                made += (checkpoint(self._depth, *read, use_reentrant=False),)
            else:
                made += (self._depth(*read),)
            yield made[-1].features_BWH

    def _depth(
        self,
        input_ids_BW: Tensor,
        features_BWH: Tensor,
        mask: Unrolling,
        positions_BW: Tensor,
        before: Sequence[Depth],
    ) -> Depth:
        """What a depth gives, behind the keys and values of those before it."""
        cache = DynamicCache()
        for index in range(1 + len(self.deeper) if before else 0):
            keys = torch.cat([depth.keys[index] for depth in before], dim=2)
            values = torch.cat([depth.values[index] for depth in before], dim=2)
            cache.update(keys, values, index)
        states_BWH = self.states(input_ids_BW, features_BWH, mask, positions_BW, cache)
        layers: Any = cache.layers
        return Depth(
            features_BWH=states_BWH,
            keys=[layer.keys[:, :, -mask.width :] for layer in layers],
            values=[layer.values[:, :, -mask.width :] for layer in layers],
        )
