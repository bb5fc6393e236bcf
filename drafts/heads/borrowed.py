"""What a head borrows from its target: the embedding and the output projection, used in place and never trained.

Legend: B rows, T tokens, H hidden size, V vocabulary; `...` any leading shape.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith_core.errors import InputError
from draftsmith_core.models import vocabulary_size


def text_config(target: PreTrainedModel) -> Any:
    """The language model's part of the target's configuration."""
    return target.config.get_text_config(decoder=True)


def logit_scale(config: Any) -> float:
    """What a model of this text configuration multiplies its logits by."""
    return float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)


def _frozen(module: nn.Module, value: Tensor) -> Tensor:
    """`module(value)`: gradients reach `value` but never the module's parameters."""
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
    lm_head: nn.Module
    hidden_size: int
    vocab_size: int
    scale: float
    softcap: float | None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Borrowed":
        return self

    def embed(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Embeddings `[..., H]` of token ids `[...]`, without gradients."""
        with torch.no_grad():
            embedded: Tensor = self.embedding(ids)
        return embedded.to(dtype)

    def project(self, states: Tensor) -> Tensor:
        """The target's logits `[..., V]` of states `[..., H]` that are as after its final norm."""
        return self.finish(_frozen(self.lm_head, states.to(self.lm_head_weight.dtype)))

    def finish(self, logits: Tensor) -> Tensor:
        """Logits scaled (Cohere, Granite) and bounded (Gemma 2) as the target does with its own."""
        logits = logits if self.scale == 1 else logits * self.scale
        return logits if self.softcap is None else (logits / self.softcap).tanh() * self.softcap

    @property
    def lm_head_weight(self) -> Tensor:
        """`[V, H]`, the target's own tensor."""
        weight = self.lm_head.weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def embedding_weight(self) -> Tensor:
        """`[V, H]`, the target's own tensor."""
        weight = self.embedding.weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def lm_head_bias(self) -> Tensor | None:
        """`[V]`, for targets whose output projection has one (Phi)."""
        bias = getattr(self.lm_head, "bias", None)
        return bias.detach() if isinstance(bias, Tensor) else None


def borrow(target: PreTrainedModel) -> Borrowed:
    """The parts of `target` that heads use; InputError, one line, for a model that no head can sit on."""
    name = type(target).__name__
    embedding, lm_head = target.get_input_embeddings(), target.get_output_embeddings()
    if not isinstance(embedding, nn.Module) or not isinstance(lm_head, nn.Module):
        raise InputError(f"{name}: has no input embedding or no output projection; heads need a causal language model")
    config = text_config(target)
    borrowed = Borrowed(
        embedding=embedding,
        lm_head=lm_head,
        hidden_size=config.hidden_size,
        vocab_size=vocabulary_size(target),
        scale=logit_scale(config),
        softcap=getattr(config, "final_logit_softcapping", None),
    )
    for what, width in (
        ("embedding", borrowed.embedding_weight.shape[-1]),
        ("output projection", borrowed.lm_head_weight.shape[-1]),
    ):
        if width != borrowed.hidden_size:
            raise InputError(
                f"{name}: its {what} is {width} wide and its hidden states {borrowed.hidden_size}; "
                f"heads need one width, use a draft model for this target"
            )
    return borrowed
