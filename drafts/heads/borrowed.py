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

    def check_sizes(self, hidden_size: int, vocab_size: int) -> None:
        """Raise InputError unless these sizes of a head are the target's."""
        for key, size in (("hidden_size", hidden_size), ("vocab_size", vocab_size)):
            if size != (target := getattr(self, key)):
                raise InputError(f"'{key}' is {size} and the target's is {target}; use the target it was trained for")

    def embed(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Embeddings `[..., H]` of token ids `[...]`, without gradients."""
        with torch.no_grad():
            embedded: Tensor = self.embedding(ids)
        return embedded.to(dtype)

    @property
    def embedding_weight(self) -> Tensor:
        """`[V, H]`, the target's own tensor."""
        weight = self.embedding.weight
        assert isinstance(weight, Tensor)
        return weight

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
        # Several rows, because one may be zero.
        rows = torch.arange(0, len(weight), max(1, len(weight) // 16), device=weight.device)
        return not torch.equal(self.embed(rows, weight.dtype), weight[rows])

    def project(self, states: Tensor) -> Tensor:
        """The target's logits `[..., V]` of states `[..., H]` after its final norm. Gradients reach the states only."""
        module, states = self.projection.module, states.to(self.projection.weight_VH.dtype)
        if torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
            detached = {name: p.detach() for name, p in module.named_parameters()}
            return self.finish(torch.func.functional_call(module, detached, (states,)))
        return self.finish(module(states))

    def finish(self, logits: Tensor) -> Tensor:
        """Logits scaled and capped as the target does with its own."""
        return self.projection.finish(logits)

    @property
    def bias_V(self) -> Tensor | None:
        """The bias of the target's output projection, detached; None for nearly all models."""
        bias = self.projection.bias_V
        return None if bias is None else bias.detach()


class ReadsLastState:
    """A head that reads one of the target's hidden states: the last, after the final norm."""

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
    """The parts of `target` that heads use. Raises InputError if its embedding has another width than its states."""
    embedding, lm_head = target.get_input_embeddings(), target.get_output_embeddings()
    assert isinstance(embedding, nn.Module) and isinstance(lm_head, nn.Module)
    config = text_config(target)
    borrowed = Borrowed(embedding, output_projection(lm_head, config), config.hidden_size, vocabulary_size(target))
    widths = {borrowed.embedding_weight.shape[-1], borrowed.projection.weight_VH.shape[-1]}
    if widths != {borrowed.hidden_size}:
        raise InputError(
            f"{type(target).__name__}: its embedding or output projection is not as wide as its hidden states "
            f"({borrowed.hidden_size}), and heads need one width; use a draft model for this target"
        )
    return borrowed
