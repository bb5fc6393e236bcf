"""Medusa heads: K independent predictions, of the tokens two, three, ... places ahead, from one feature.

Legend: B rows, T positions, K heads, H hidden size, V vocabulary.

Source: Medusa (arXiv 2401.10774, section 2.1). Head i at position t is for token t + 2 + i (t + 1 is the target's
own). A fresh head gives the target's own logits: its blocks begin as the identity and its projection as the target's.
Tensor names are those of the authors' checkpoints: `{i}.{j}.linear.*` for block j of head i, then
`{i}.{blocks}.weight`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from drafts.heads.borrowed import borrow
from drafts.heads.head_config import check_equal, count
from draftsmith_core.errors import InputError


@dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    """How many heads, and how many residual blocks each has."""

    hidden_size: int
    vocab_size: int
    num_heads: int = 4
    num_layers: int = 1

    def to_json(self) -> dict[str, Any]:
        """The whole config.json."""
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "medusa_num_heads": self.num_heads,
            "medusa_num_layers": self.num_layers,
            # Both names are read by serving engines.
            "num_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any], where: str, target: PreTrainedModel) -> "MedusaConfig":
        """Read and checked against the target; the authors' own files leave the sizes to the target."""
        parts = borrow(target)
        config = cls(
            hidden_size=count(values, "hidden_size", where, parts.hidden_size),
            vocab_size=count(values, "vocab_size", where, parts.vocab_size),
            num_heads=count(values, "medusa_num_heads", where),
            num_layers=count(values, "medusa_num_layers", where, 1),
        )
        check_equal(where, "hidden_size", config.hidden_size, parts.hidden_size)
        check_equal(where, "vocab_size", config.vocab_size, parts.vocab_size)
        return config


class ResBlock(nn.Module):
    """x + SiLU(Wx + b), which is the identity while W and b are zero."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, states: Tensor) -> Tensor:
        """`[..., H]` to `[..., H]`."""
        return states + nn.functional.silu(self.linear(states))


class MedusaHeads(nn.ModuleList):
    """K heads side by side; a list of modules, so that tensors carry the names of the authors' checkpoints."""

    kind: ClassVar[str] = "medusa"

    def __init__(self, config: MedusaConfig, target: PreTrainedModel) -> None:
        hidden = config.hidden_size
        super().__init__(
            nn.Sequential(
                *(ResBlock(hidden) for _ in range(config.num_layers)), nn.Linear(hidden, config.vocab_size, bias=False)
            )
            for _ in range(config.num_heads)
        )
        self.config = config
        self.borrowed = borrow(target)

    @classmethod
    def fresh(cls, target: PreTrainedModel, *, num_heads: int = 4, num_layers: int = 1) -> "MedusaHeads":
        """Untrained heads, each the target's own output, on its device, in its dtype and in training mode."""
        if num_heads < 1 or num_layers < 1:
            raise InputError(f"num_heads {num_heads}, num_layers {num_layers}: medusa needs at least one of each")
        parts = borrow(target)
        config = MedusaConfig(
            hidden_size=parts.hidden_size, vocab_size=parts.vocab_size, num_heads=num_heads, num_layers=num_layers
        )
        heads = cls(config, target)
        with torch.no_grad():
            for head in heads:
                assert isinstance(head, nn.Sequential)
                projection = head[-1]
                assert isinstance(projection, nn.Linear)
                projection.weight.copy_(parts.lm_head_weight)
        return heads.to(device=target.device, dtype=target.dtype)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Which of the target's `hidden_states` it needs: the last, after the final norm."""
        return (-1,)

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.config.vocab_size

    def forward(self, features_BTH: Tensor) -> Tensor:
        """Logits `[B, T, K, V]`; `[:, t, i]` is for the token at t + 2 + i."""
        features_BTH = features_BTH.to(next(self.parameters()).dtype)
        logits_BTKV = torch.stack([head(features_BTH) for head in self], dim=2)
        bias = self.borrowed.lm_head_bias
        if bias is not None:
            # The checkpoint format has no room for a bias; where the target's projection has one it is the target's.
            logits_BTKV = logits_BTKV + bias
        return self.borrowed.finish(logits_BTKV)
