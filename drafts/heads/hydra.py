"""Hydra heads: like Medusa's, but each head also reads the tokens drafted before its own.

Legend: B rows, T positions, K heads, d a head's number from 0, H hidden size, V vocabulary.

Source: Hydra (arXiv 2402.05109, section 3), the grounded MLP. Head d reads the target's feature h_t beside the
embeddings of tokens t + 1 .. t + d + 1 and predicts token t + d + 2. Logits go through the target's own output
projection; the authors' code gives every head one of its own (V * H parameters each), and a checkpoint of theirs keeps
them. A fresh head gives the target's logits at t, as Medusa's do.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from drafts.heads.borrowed import ReadsLastState, borrow
from drafts.heads.medusa import HeadsConfig, ResBlock

_EXTRAS = ("own_projection", "skip_bias")


@dataclass(frozen=True, kw_only=True)
class HydraConfig(HeadsConfig):
    """Number of heads, of residual blocks in each, and the extras of the authors' code."""

    kind, architecture = "hydra", "HydraHeads"

    own_projection: bool = False
    """Every head has an output projection, with a bias; otherwise all use the target's."""
    skip_bias: bool = False
    """The map beside the first block has a bias."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any], target: PreTrainedModel) -> Self:
        """Read config.json. Raises InputError if its sizes are not the target's."""
        return replace(super().from_json(values, target), **{key: bool(values.get(f"hydra_{key}")) for key in _EXTRAS})

    def to_json(self) -> dict[str, Any]:
        """The whole config.json."""
        return super().to_json() | {f"hydra_{key}": True for key in _EXTRAS if getattr(self, key)}


class _FirstBlock(ResBlock):
    """Sx + SiLU(Wx + b). S begins as the map to the first H inputs, W and b as zero."""

    def __init__(self, inputs: int, outputs: int, skip_bias: bool) -> None:
        super().__init__(inputs, outputs)
        self.skip = nn.Linear(inputs, outputs, bias=skip_bias)
        nn.init.eye_(self.skip.weight)
        if skip_bias:
            nn.init.zeros_(self.skip.bias)

    def forward(self, states: Tensor) -> Tensor:
        """Map states `[..., inputs]` to `[..., outputs]`."""
        return self.skip(states) + nn.functional.silu(self.linear(states))  # type: ignore[no-any-return]


class HydraHeads(ReadsLastState, nn.Module):
    """K grounded heads, over the target's own output projection unless they have their own."""

    kind: ClassVar[str] = "hydra"
    config_type = HydraConfig

    def __init__(self, config: HydraConfig, target: PreTrainedModel) -> None:
        super().__init__()
        self.config = config
        self.borrowed = borrow(target)
        hidden = config.hidden_size
        self.heads = nn.ModuleList(
            nn.Sequential(
                _FirstBlock((d + 2) * hidden, hidden, config.skip_bias),
                *(ResBlock(hidden, hidden) for _ in range(config.num_layers - 1)),
            )
            for d in range(config.num_heads)
        )
        if config.own_projection:
            self.projections = nn.ModuleList(nn.Linear(hidden, config.vocab_size) for _ in range(config.num_heads))

    @classmethod
    def fresh(cls, target: PreTrainedModel, *, num_heads: int = 4, num_layers: int = 1) -> "HydraHeads":
        """Untrained heads on the target's device, in its dtype and in training mode."""
        config = HydraConfig.fresh(target, num_heads, num_layers)
        return cls(config, target).to(device=target.device, dtype=target.dtype)

    def forward(self, features_BTH: Tensor, tokens_BTd: Tensor) -> Tensor:
        """Logits `[B, T, V]` of head number `tokens_BTd.shape[-1] - 1`, for the token after the last of `tokens_BTd`.

        `tokens_BTd[:, t, 0]` is the token right after the position of `features_BTH[:, t]`.
        """
        count_d = tokens_BTd.shape[-1]
        dtype = next(self.parameters()).dtype
        embedded_BTX = self.borrowed.embed(tokens_BTd, dtype).flatten(-2)
        states_BTH = self.heads[count_d - 1](torch.cat([features_BTH.to(dtype), embedded_BTX], dim=-1))
        if self.config.own_projection:
            return self.borrowed.projection.finish(self.projections[count_d - 1](states_BTH))
        return self.borrowed.project(states_BTH)
