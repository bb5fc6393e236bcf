"""Medusa heads: K independent predictions, of the tokens two, three, ... places ahead, from one feature.

Legend: B rows, T positions, K heads, H hidden size, V vocabulary.

Source: Medusa (arXiv 2401.10774, section 2.1). Head i at position t is for token t + 2 + i (t + 1 is the target's
own). A fresh head gives the target's own logits: its blocks begin as the identity and its projection as the target's.
Tensor names are those of the authors' checkpoints: `{i}.{j}.linear.*` for block j of head i, then
`{i}.{blocks}.weight`.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from drafts.heads.borrowed import ReadsLastState, borrow
from drafts.heads.head_config import HeadsConfig


class MedusaConfig(HeadsConfig):
    """How many heads, and how many residual blocks each has."""

    kind, architecture = "medusa", "MedusaModel"

    def to_json(self) -> dict[str, Any]:
        """The whole config.json."""
        # Serving engines read the one pair of names or the other.
        return {**super().to_json(), "num_heads": self.num_heads, "num_hidden_layers": self.num_layers}


class ResBlock(nn.Module):
    """x + SiLU(Wx + b), which is the identity while W and b are zero."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, states: Tensor) -> Tensor:
        """`[..., inputs]` to `[..., outputs]`, which are as many here."""
        return states + nn.functional.silu(self.linear(states))


class MedusaHeads(ReadsLastState, nn.ModuleList):
    """K heads side by side; a list of modules, so that tensors carry the names of the authors' checkpoints."""

    kind: ClassVar[str] = "medusa"
    config_type = MedusaConfig

    def __init__(self, config: MedusaConfig, target: PreTrainedModel) -> None:
        hidden = config.hidden_size
        super().__init__(
            nn.Sequential(
                *(ResBlock(hidden, hidden) for _ in range(config.num_layers)),
                nn.Linear(hidden, config.vocab_size, bias=False),
            )
            for _ in range(config.num_heads)
        )
        self.config = config
        self.borrowed = borrow(target)

    @classmethod
    def fresh(cls, target: PreTrainedModel, *, num_heads: int = 4, num_layers: int = 1) -> "MedusaHeads":
        """Untrained heads, each the target's own output, on its device, in its dtype and in training mode."""
        heads = cls(MedusaConfig.fresh(target, num_heads, num_layers), target)
        with torch.no_grad():
            for head in heads:
                assert isinstance(head, nn.Sequential)
                projection = head[-1]
                assert isinstance(projection, nn.Linear)
                projection.weight.copy_(heads.borrowed.projection.weight_VH)
        return heads.to(device=target.device, dtype=target.dtype)

    def forward(self, features_BTH: Tensor) -> Tensor:
        """Logits `[B, T, K, V]`; `[:, t, i]` is for the token at t + 2 + i."""
        features_BTH = features_BTH.to(next(self.parameters()).dtype)
        logits_BTKV = torch.stack([head(features_BTH) for head in self], dim=2)
        if self.borrowed.bias_V is not None:
            # The checkpoint format has no place for a bias, so the target's is used.
            logits_BTKV = logits_BTKV + self.borrowed.bias_V
        return self.borrowed.finish(logits_BTKV)
