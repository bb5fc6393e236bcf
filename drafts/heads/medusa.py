"""Medusa heads: K independent predictions, of the tokens two, three, ... places ahead, from one feature.

Legend: B rows, T positions, K heads, H hidden size, V vocabulary.

Source: Medusa (arXiv 2401.10774, section 2.1). Head i at position t is for token t + 2 + i (t + 1 is the target's
own). A fresh head gives the target's own logits: its blocks begin as the identity and its projection as the target's.
Tensor names are those of the authors' checkpoints: `{i}.{j}.linear.*` for block j of head i, then
`{i}.{blocks}.weight`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from drafts.heads.borrowed import ReadsLastState, borrow


@dataclass(frozen=True, kw_only=True)
class HeadsConfig:
    """Number of heads, and of residual blocks in each; for Medusa and Hydra."""

    kind: ClassVar[str]
    architecture: ClassVar[str]

    hidden_size: int
    vocab_size: int
    num_heads: int = 4
    num_layers: int = 1

    @classmethod
    def from_json(cls, values: Mapping[str, Any], target: PreTrainedModel) -> Self:
        """Read config.json; sizes that it lacks are the target's. Raises InputError if its sizes are others."""
        parts = borrow(target)
        present = {key: value for key, value in values.items() if value is not None}
        hidden_size = present.get("hidden_size", parts.hidden_size)
        vocab_size = present.get("vocab_size", parts.vocab_size)
        parts.check_sizes(hidden_size, vocab_size)
        return cls(
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            num_heads=present[f"{cls.kind}_num_heads"],
            num_layers=present.get(f"{cls.kind}_num_layers", 1),
        )

    def to_json(self) -> dict[str, Any]:
        """The whole config.json."""
        return {
            "architectures": [self.architecture],
            "model_type": self.kind,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            f"{self.kind}_num_heads": self.num_heads,
            f"{self.kind}_num_layers": self.num_layers,
        }

    @classmethod
    def fresh(cls, target: PreTrainedModel, num_heads: int, num_layers: int) -> Self:
        """For untrained heads on this target."""
        return cls.from_json({f"{cls.kind}_num_heads": num_heads, f"{cls.kind}_num_layers": num_layers}, target)


class MedusaConfig(HeadsConfig):
    """Number of heads, and of residual blocks in each."""

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
        """Map states `[..., H]` to `[..., H]`."""
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
                head[-1].weight.copy_(heads.borrowed.projection.weight_VH)  # type: ignore[index]
        return heads.to(device=target.device, dtype=target.dtype)

    def forward(self, features_BTH: Tensor) -> Tensor:
        """Logits `[B, T, K, V]`; `[:, t, i]` is for the token at t + 2 + i."""
        features_BTH = features_BTH.to(next(self.parameters()).dtype)
        logits_BTKV = torch.stack([head(features_BTH) for head in self], dim=2)
        if self.borrowed.bias_V is not None:
            # The checkpoint format has no place for a bias, so the target's is used.
            logits_BTKV = logits_BTKV + self.borrowed.bias_V
        return self.borrowed.projection.finish(logits_BTKV)
