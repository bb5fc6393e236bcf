"""What a head borrows from its target: the embedding and the output projection, used in place and
never trained.

Legend: H hidden size, V vocabulary; `...` any leading shape.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith_core.errors import InputError
from draftsmith_core.models import text_config, vocabulary_size


@dataclass(frozen=True, eq=False)
class OutputProjection:
    """A linear module (lm_head), and what some models do to its result: scale (Cohere, Granite) or
    cap (Gemma 2) it.

    Holds the module and not its weight, because sharded training swaps the parameter under the
    module.
    """

    module: Any
    scale: float = 1.0
    softcap: float | None = None
    rows_D: Tensor | None = None
    """Only these rows count, for a draft vocabulary: V is D then, and gradients go to the whole
    weight.
    """

    @property
    def weight_VH(self) -> Tensor:
        """The weight; the embedding's own tensor if the two are tied."""
        weight: Tensor = self.module.weight
        return weight if self.rows_D is None else weight.index_select(0, self.rows_D)

    @property
    def bias_V(self) -> Tensor | None:
        """The bias that few models have (Phi)."""
        bias: Tensor | None = getattr(self.module, "bias", None)
        if bias is None or self.rows_D is None:
            return bias
        return bias.index_select(0, self.rows_D)

    @property
    def is_linear(self) -> bool:
        """Whether the result of the linear module is neither scaled nor capped."""
        return self.scale == 1 and self.softcap is None

    def finish(self, logits: Tensor) -> Tensor:
        """Scale and cap the linear module's logits `[..., V]`."""
        if self.scale != 1:
            logits = logits * self.scale
        if self.softcap is None:
            return logits
        return (logits / self.softcap).tanh() * self.softcap


def dtype_of(module: Any) -> torch.dtype:
    """The dtype of a module's weight. A module that decoding packed knows it without unpacking."""
    return getattr(module, "dtype", None) or module.weight.dtype


def output_projection(module: Any, config: Any) -> OutputProjection:
    """`module` as the output projection of a model with this text configuration."""
    multiplied = float(getattr(config, "logit_scale", None) or 1.0)
    divided = float(getattr(config, "logits_scaling", None) or 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    return OutputProjection(module, scale=multiplied / divided, softcap=softcap)


@dataclass(frozen=True, eq=False)
class Borrowed:
    """References to modules of the target, in a plain object so that the head does not register
    their parameters.

    A copy of a head borrows from the same target.
    """

    embedding: Any
    projection: OutputProjection
    hidden_size: int
    vocab_size: int

    def __deepcopy__(self, memo: dict[int, object]) -> "Borrowed":
        return self

    def check_sizes(self, hidden_size: int, vocab_size: int) -> None:
        """Raise InputError unless these sizes of a head are the target's."""
        for key, size in {"hidden_size": hidden_size, "vocab_size": vocab_size}.items():
            target = getattr(self, key)
            if size != target:
                raise InputError(
                    f"'{key}' is {size} and the target's is {target}; use the target it was "
                    "trained for"
                )

    def embed(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Embeddings `[..., H]` of token ids `[...]`, without gradients."""
        with torch.no_grad():
            embedded: Tensor = self.embedding(ids)
        return embedded.to(dtype)

    @property
    def embedding_weight(self) -> Tensor:
        """`[V, H]`, the target's own tensor, detached."""
        return self.embedding.weight.detach()

    @property
    def embedding_table(self) -> Tensor:
        """`[V, H]`, what `embed` gives for each token: scaled for the Gemma family, else the
        target's own tensor.
        """
        weight = self.embedding_weight
        if not self.scales_embedding:
            return weight
        ids_V = torch.arange(len(weight), device=weight.device)
        return self.embed(ids_V, weight.dtype)

    @property
    def scales_embedding(self) -> bool:
        """Whether the target multiplies its embedding, which other engines do outside of the
        table.
        """
        weight = self.embedding_weight
        # Several rows, because one may be zero.
        step = max(1, len(weight) // 16)
        rows = torch.arange(0, len(weight), step, device=weight.device)
        return not torch.equal(self.embed(rows, weight.dtype), weight[rows])

    def project(self, states: Tensor, finish: bool = True) -> Tensor:
        """The target's logits `[..., V]` of states `[..., H]` after its final norm. Gradients reach
        the states only.

        finish: scale and cap them as the target does.
        """
        module = self.projection.module
        states = states.to(dtype_of(module))
        if torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
            detached = {name: p.detach() for name, p in module.named_parameters()}
            logits: Tensor = torch.func.functional_call(module, detached, (states,))
        else:
            logits = module(states)
        return self.projection.finish(logits) if finish else logits

    @property
    def bias_V(self) -> Tensor | None:
        """The bias of the target's output projection, detached."""
        bias = self.projection.bias_V
        return None if bias is None else bias.detach()


class ReadsLastState:
    """A head that reads one of the target's hidden states: the last, after the final norm."""

    config: Any
    hidden_layers: tuple[int, ...] = (-1,)
    """Which of the target's `hidden_states` it needs."""

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        """The state itself, `[B, T, H]`, under the name that heads on several states give to their
        fusion.
        """
        return states[0]


def borrow(target: PreTrainedModel) -> Borrowed:
    """The parts of `target` that heads use. Raises InputError if its embedding has another width
    than its states.
    """
    config = text_config(target)
    projection = output_projection(target.get_output_embeddings(), config)
    borrowed = Borrowed(
        embedding=target.get_input_embeddings(),
        projection=projection,
        hidden_size=config.hidden_size,
        vocab_size=vocabulary_size(target),
    )
    widths = {borrowed.embedding_weight.shape[-1], projection.weight_VH.shape[-1]}
    if widths != {borrowed.hidden_size}:
        what = (
            f"{type(target).__name__}: its embedding or output projection is not as wide as "
            "its hidden states"
        )
        raise InputError(f"{what}, as heads need; use a draft model for this target")
    return borrowed
