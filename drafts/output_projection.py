"""The output projection (lm_head) of a model: from its last hidden state to its logits.

Legend: C rows, H hidden size, V vocabulary; `...` any leading shape.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class OutputProjection:
    """A linear module, and what some models do to its result: a scale (Cohere, Granite) and a soft cap (Gemma 2).

    Holds the module and not its weight, because sharded training swaps the parameter under the module; in a plain
    object, so that whatever owns this does not register the module's parameters as its own.
    """

    module: nn.Module
    scale: float = 1.0
    softcap: float | None = None
    rows_D: Tensor | None = None
    """Only these rows count, for a draft vocabulary: V is D then, and gradients go to the whole weight."""

    @property
    def weight_VH(self) -> Tensor:
        """The weight; the embedding's own tensor where the two are tied."""
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        return weight if self.rows_D is None else weight.index_select(0, self.rows_D)

    @property
    def bias_V(self) -> Tensor | None:
        """For the few models whose output projection has one (Phi)."""
        bias = getattr(self.module, "bias", None)
        if not isinstance(bias, Tensor):
            return None
        return bias if self.rows_D is None else bias.index_select(0, self.rows_D)

    @property
    def is_linear(self) -> bool:
        """Whether nothing is done to the result of the linear module."""
        return self.scale == 1 and self.softcap is None

    def finish(self, logits: Tensor) -> Tensor:
        """The model's logits `[..., V]`, from those that its linear module gives."""
        if self.scale != 1:
            logits = logits * self.scale
        return logits if self.softcap is None else (logits / self.softcap).tanh() * self.softcap


def output_projection(module: nn.Module, config: Any) -> OutputProjection:
    """`module` as the output projection of a model with this text configuration."""
    multiplied, divided = getattr(config, "logit_scale", None), getattr(config, "logits_scaling", None)
    scale = float(multiplied or 1.0) / float(divided or 1.0)
    return OutputProjection(module, scale, getattr(config, "final_logit_softcapping", None))
