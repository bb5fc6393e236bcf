"""What a head borrows from its target: the embedding and the output projection, used in place and
never trained.

Legend: H hidden size, V vocabulary; `...` any leading shape.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.core.errors import InputError
from draftsmith.core.hidden_states import (
    before_projection,
    body,
    evaluating,
    layout_of,
    some_tokens,
)
from draftsmith.core.models import text_config, vocabulary_size


@dataclass(frozen=True, eq=False)
class OutputProjection:
    """A linear module (lm_head), and what some models do to its result: scale (Cohere, Granite) or
    cap (Gemma 2) it.

    Asks for the module each time, because sharded training swaps the parameter under it, and
    decoders put another in its place (`decode.packed_weights`).
    """

    get_module: Callable[[], Any]
    scale: float = 1.0
    softcap: float | None = None
    before: Callable[[Tensor], Tensor] | None = None
    """Layers between the final states `[N, H]` and the module (BERT)."""
    rows_D: Tensor | None = None
    """Only these rows count, for a draft vocabulary: V is D then, and gradients go to the whole
    weight.
    """

    @property
    def module(self) -> Any:
        return self.get_module()

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

    def prepare(self, states: Tensor) -> Tensor:
        """What the module reads, from final states `[..., H]`."""
        if self.before is None:
            return states
        prepared = self.before(states.reshape(-1, states.shape[-1]))
        return prepared.view(*states.shape[:-1], -1)

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


# Whether the output projection of a model reads its final states as they are; found by trying.
_reads_final: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


# Gemma; RecurrentGemma; xLSTM.
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


@torch.no_grad()
def projection_of(model: PreTrainedModel) -> OutputProjection:
    """The output projection of a causal model. Raise InputError if it does not give the model's own
    logits.
    """
    get_module: Callable[[], Any] = model.get_output_embeddings
    if not isinstance(get_module(), nn.Module):
        raise InputError(f"{type(model).__name__} has no output projection that gives its logits")
    config = text_config(model)
    multiplied = float(getattr(config, "logit_scale", None) or 1.0)
    divided = float(getattr(config, "logits_scaling", None) or 1.0)
    caps = [getattr(config, name, None) for name in _SOFTCAPS]
    softcap = next((cap for cap in caps if cap is not None), None)
    direct = OutputProjection(get_module, multiplied / divided, softcap)
    through = replace(direct, before=partial(before_projection, model))
    # A model without values (meta) cannot be tried.
    known = True if model.device.type == "meta" else _reads_final.get(model)
    if known is None:
        known = _reads_final[model] = _is_projection(direct, model)
        if not known and not _is_projection(through, model):
            del _reads_final[model]
            raise InputError(
                f"{type(model).__name__} has no output projection that gives its logits"
            )
    return direct if known else through


def _is_projection(projection: OutputProjection, model: PreTrainedModel) -> bool:
    """Whether a projection gives the model's logits on a few tokens."""
    ids_1T = some_tokens(model, rows=1, tokens=4)
    with evaluating(model):
        final_TH = body(model)(input_ids=ids_1T, use_cache=False).last_hidden_state[0]
        wanted_TV = model(input_ids=ids_1T, use_cache=False).logits[0].float()
        states_TH = projection.prepare(final_TH).to(dtype_of(projection.module))
        if states_TH.shape[-1] != projection.weight_VH.shape[-1]:
            return False
        logits_TV = projection.finish(projection.module(states_TH)).float()
    if logits_TV.shape != wanted_TV.shape:
        return False
    apart = (logits_TV - wanted_TV).abs().max()
    # What 16 bits round.
    tolerance = 1e-4 if model.dtype == torch.float32 else 0.02
    return bool(apart <= tolerance * wanted_TV.abs().max() + 1e-6)


@dataclass(frozen=True, eq=False)
class Borrowed:
    """References to modules of the target, in a plain object so that the head does not register
    their parameters.

    A copy of a head borrows from the same target.
    """

    target: PreTrainedModel
    projection: OutputProjection
    hidden_size: int
    vocab_size: int

    def __deepcopy__(self, memo: dict[int, object]) -> "Borrowed":
        return self

    @property
    def embedding(self) -> Any:
        return self.target.get_input_embeddings()

    def check_sizes(self, head: Mapping[str, object]) -> None:
        """Raise InputError unless the sizes in a head's config are the target's."""
        for key in ("hidden_size", "vocab_size"):
            target = getattr(self, key)
            if head[key] != target:
                raise InputError(
                    f"'{key}' is {head[key]} and the target's is {target}; use the target it was "
                    "trained for"
                )

    def embed(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Embeddings `[..., H]` of token ids `[...]`, without gradients; narrower ones are padded
        with zeros.
        """
        with torch.no_grad():
            embedded: Tensor = self.embedding(ids)
        missing = self.hidden_size - embedded.shape[-1]
        return (F.pad(embedded, (0, missing)) if missing else embedded).to(dtype)

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
        states = self.projection.prepare(states).to(dtype_of(module))
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


@torch.no_grad()
def start_as(weight: Tensor, borrowed: Borrowed, ids_D: Tensor | None = None) -> None:
    """Start a head's output projection as the target's, or these rows of it, if they are equally
    wide.
    """
    rows_DH = borrowed.projection.weight_VH
    if rows_DH.shape[-1] == weight.shape[-1]:
        weight.copy_(rows_DH if ids_D is None else rows_DH[ids_D.to(rows_DH.device)])


class ReadsLastState:
    """A head that reads one of the target's hidden states: the last, after the final norm."""

    config: Any
    hidden_layers: tuple[int, ...] = (-1,)
    """Which of the target's states it needs."""

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    def outputs(self) -> list[nn.Module]:
        """Its own modules with a row for each token that it drafts: none that draft with the
        target's.
        """
        return []

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        """The state itself, `[B, T, H]`, under the name that heads on several states give to their
        fusion.
        """
        return states[0]


def borrow(target: PreTrainedModel) -> Borrowed:
    """The parts of `target` that heads use."""
    return Borrowed(
        target=target,
        projection=projection_of(target),
        hidden_size=layout_of(target).width,
        vocab_size=vocabulary_size(target),
    )
