"""What a head borrows from its target: the embedding and the output projection, used in place and never trained.

Legend: H hidden size, V vocabulary; `...` any leading shape.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from drafts.output_projection import OutputProjection, output_projection
from draftsmith_core.errors import InputError
from draftsmith_core.models import text_config, vocabulary_size


def _without_weight_gradient(module: nn.Module, value: Tensor) -> Tensor:
    """`module(value)` where gradients reach `value` and never the module's parameters."""
    if torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
        detached = {name: p.detach() for name, p in module.named_parameters()}
        out: Tensor = torch.func.functional_call(module, detached, (value,))
    else:
        out = module(value)
    return out


@dataclass(frozen=True, eq=False)
class Borrowed:
    """References to modules of the target, in a plain object so that the head does not register their parameters.

    A copy of a head borrows from the same target.
    """

    embedding: nn.Module
    projection: OutputProjection
    hidden_size: int
    vocab_size: int

    def __deepcopy__(self, memo: dict[int, Any]) -> "Borrowed":
        return self

    def embed(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Embeddings `[..., H]` of token ids `[...]`, without gradients."""
        with torch.no_grad():
            embedded: Tensor = self.embedding(ids)
        return embedded.to(dtype)

    @property
    def embedding_table(self) -> Tensor:
        """`[V, H]`, what `embed` gives for each token: scaled for the Gemma family, else the target's own tensor."""
        if not self.scales_embedding:
            return self.embedding_weight.detach()
        size = self.embedding_weight.shape[0]
        return self.embed(torch.arange(size, device=self.embedding_weight.device), self.embedding_weight.dtype)

    @property
    def scales_embedding(self) -> bool:
        """Whether the target multiplies its embedding, which other engines do outside of the table."""
        weight = self.embedding_weight.detach()
        # Some rows, because one may be zero.
        some = torch.arange(0, len(weight), max(1, len(weight) // 16), device=weight.device)
        return not torch.equal(self.embed(some, weight.dtype), weight[some])

    def project(self, states: Tensor) -> Tensor:
        """The target's logits `[..., V]` of states `[..., H]`, which are as after its final norm."""
        dtype = next(self.projection.module.parameters()).dtype  # reading a packed weight itself would unpack it
        return self.finish(_without_weight_gradient(self.projection.module, states.to(dtype)))

    def finish(self, logits: Tensor) -> Tensor:
        """Logits scaled and capped as the target does with its own."""
        return self.projection.finish(logits)

    @property
    def embedding_weight(self) -> Tensor:
        """`[V, H]`, the target's own tensor."""
        weight = self.embedding.weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def bias_V(self) -> Tensor | None:
        """The bias of the target's output projection, detached; None for nearly all models."""
        bias = self.projection.bias_V
        return None if bias is None else bias.detach()


class ReadsLastState:
    """A head that reads one of the target's hidden states, the last, after the final norm."""

    config: Any

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Which of the target's `hidden_states` it needs."""
        return (-1,)

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary (V)."""
        return int(self.config.vocab_size)


def borrow(target: PreTrainedModel) -> Borrowed:
    """The parts of `target` that heads use; InputError, one line, for a model that heads cannot be used with."""
    name = type(target).__name__
    embedding, lm_head = target.get_input_embeddings(), target.get_output_embeddings()
    if not isinstance(embedding, nn.Module) or not isinstance(lm_head, nn.Module):
        raise InputError(f"{name}: has no input embedding or no output projection; heads need a causal language model")
    config = text_config(target)
    borrowed = Borrowed(embedding, output_projection(lm_head, config), config.hidden_size, vocabulary_size(target))
    for what, width in (
        ("embedding", borrowed.embedding_weight.shape[-1]),
        ("output projection", borrowed.projection.weight_VH.shape[-1]),
    ):
        if width != borrowed.hidden_size:
            raise InputError(
                f"{name}: its {what} is {width} wide and its hidden states {borrowed.hidden_size}; "
                f"heads need one width, use a draft model for this target"
            )
    return borrowed
