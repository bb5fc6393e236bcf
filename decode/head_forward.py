"""The forward of an EAGLE, EAGLE-3 or MTP head or a block drafter as one call of the kernel;
`llama_forward` is that of a model.

In modules, a head's layer is some forty tensor operations, which cost several times what reading
its weights costs. It equals the head's own forward within rounding; a head that it might not equal
is refused.

Legend: B rows, q queries per row, k queries with logits, T tokens of a prompt, t tokens with
features, S slots of a block, D hidden size, E head size, N positions, P slots of the cache, R = B
or 1, V vocabulary of the head.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.core.transformers_api import FULL, Cache
from draftsmith.decode.cache import CachePlace, TreeCache
from draftsmith.decode.kernel_forward import (
    MOST_TOKENS,
    SMALLEST_MODEL,
    Forwarded,
    HeadInputs,
    KernelForward,
    Layer,
    LayerMaker,
    Masks,
    Norm,
    Opening,
    Sizes,
    causal_mask,
)
from draftsmith.decode.native import kernel
from draftsmith.decode.packed_weights import FusedLinear, PackedLinear, Packs
from draftsmith.decode.rotary_table import RotaryTable, has_table
from draftsmith.drafts.heads.block import BlockHead, DFlashHead, DSparkHead, JetSpecHead
from draftsmith.drafts.heads.borrowed import OutputProjection
from draftsmith.drafts.heads.eagle import EagleHead
from draftsmith.drafts.heads.eagle3 import Eagle3Head
from draftsmith.drafts.heads.mtp import MtpHead

# Heads, and layers of MTP heads, that the kernel knows.
_HEADS = (
    EagleHead,
    Eagle3Head,
    MtpHead,
    DFlashHead,
    DSparkHead,
    JetSpecHead,
)
_MTP_LAYERS = (
    "LlamaDecoderLayer",
    "MistralDecoderLayer",
    "Qwen2DecoderLayer",
    "Qwen3DecoderLayer",
)


@dataclass(frozen=True)
class _Parts:
    """A head as the kernel takes it. raw_features: its features are those before its norm. logits:
    None if the kernel does not multiply them.
    """

    layers: list[Layer]
    opening: Opening
    norm: Norm | None
    raw_features: bool = False
    logits: FusedLinear | None = None

    @property
    def packed(self) -> bool:
        products = [part for part in (self.opening.fc, self.logits) if part is not None]
        return all(layer.packed for layer in self.layers) and all(
            part.matrix is not None for part in products
        )


def head_forward(model: nn.Module, packs: Packs) -> "HeadForward | None":
    """Return the kernel's forward of a head wrapped as `model`; None without the kernel, and for
    other heads.
    """
    head: Any = model.head
    if not _is_plain(head) or not worth_packing(head, packs):
        return None
    parts = _parts(head, LayerMaker(packs, any_size=True, dtype=torch.float32))
    packs.prepare(head)
    if not parts.packed:
        return None
    kind = BlockHeadForward if isinstance(head, BlockHead) else EagleForward
    return kind(model, parts)


def _is_plain(head: Any) -> bool:
    """Whether a head is one of these, and nothing was hung on its modules."""
    if type(head) not in _HEADS:
        return False
    if isinstance(head, MtpHead) and type(head.layers[0]).__name__ not in _MTP_LAYERS:
        return False
    if head.config.hidden_act not in ("silu", "swish") or has_own_forward(head):
        return False
    # An MTP head has the target's.
    rotary = getattr(head.rotary, "module", head.rotary)
    return has_table(rotary, FULL, head.config.head_dim)


def has_own_forward(head: nn.Module) -> bool:
    """Whether something was hung on the modules of a head (a hook, an adapter)."""
    for module in head.modules():
        if module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__:
            return True
        if isinstance(module, nn.Linear) and type(module) not in (nn.Linear, PackedLinear):
            return True
    return False


def worth_packing(head: nn.Module, packs: Packs) -> bool:
    """Whether the kernel is there, and faster than torch."""
    if not packs.native:
        return False
    # Torch multiplies 16 bits slowly on a CPU.
    narrow = next(head.parameters()).dtype != torch.float32
    return narrow or packs.parameters >= SMALLEST_MODEL


def packed_projection(projection: OutputProjection) -> FusedLinear | None:
    """The linear module of the target's output projection; None unless the target gave its weights
    to the decoders, which then have it packed, and where the module does not read a head's states.
    """
    module = projection.module
    packed = isinstance(module, PackedLinear) and module.place.whole
    if not packed or projection.before is not None:
        return None
    return FusedLinear([module], module.place.matrix, torch.float32)


def _parts(head: Any, maker: LayerMaker) -> _Parts:
    if isinstance(head, Eagle3Head):
        layer = head.midlayer
        opening = Opening(
            embedding_norm=maker.vector(layer.input_layernorm),
            feature_norm=maker.vector(layer.hidden_norm),
            feature_normed=layer.norm_before_residual,
        )
        layers = [maker.layer(layer, FULL, normed=False)]
        layers += [maker.layer(each, FULL) for each in head.deeper]
        return _Parts(
            layers=layers,
            opening=opening,
            norm=maker.norm(head.norm),
            raw_features=not head.config.norm_output,
            logits=maker.fused([head.lm_head]),
        )
    normed = not isinstance(head, EagleHead)
    layers = [maker.layer(layer, FULL, normed=normed) for layer in head.layers]
    norm = maker.norm(head.norm) if normed else None
    if isinstance(head, BlockHead):
        return _Parts(layers=layers, opening=Opening(), norm=norm)
    return _Parts(
        layers=layers,
        opening=Opening(fc=maker.fused([head.fc])),
        norm=norm,
        logits=packed_projection(head.borrowed.projection),
    )


@dataclass(frozen=True)
class _Step:
    """One forward of a head behind `place`."""

    tokens_Bq: Tensor
    positions_Rq: Tensor
    rotary: Mapping[str, Tensor]
    mask: Tensor | None
    place: CachePlace
    features_BtD: Tensor


class HeadForward(ABC):
    """Run one head, as `LeanForward` runs a model. Made for one `generate` call, because it holds
    the head's tensors. `dtype`: of masks and cache.
    """

    dtype = torch.float32

    def __init__(self, model: Any, parts: _Parts) -> None:
        head = model.head
        config = head.config
        functions = kernel()
        assert functions is not None
        self._model = model
        self._head = head
        self._parts = parts
        self._like = parts.layers[0].ffn_norm.weight_D
        # Number of the kernel's state that is the head's feature.
        self._feature = len(parts.layers) + (not parts.raw_features)
        self.sizes = Sizes(
            heads=config.num_attention_heads,
            groups=config.num_key_value_heads,
            size=config.head_dim,
            turned=config.head_dim,
            scale=config.head_dim**-0.5,
            eps=config.rms_norm_eps,
        )
        self.rotary = RotaryTable(head.rotary, [FULL], self._like)
        self._kernel = KernelForward(
            functions,
            parts.layers,
            self.sizes,
            norm=parts.norm,
            head=parts.logits,
            opening=parts.opening,
        )

    def run(
        self,
        tokens_Bq: Tensor,
        positions_Rq: Tensor,
        top_position: int,
        masks: Masks,
        cache: Cache,
        keep_logits: int = 0,
        hidden_layers: Sequence[int] = (),
        *,
        features_BTH: Tensor,
        prefill: bool = False,
    ) -> Forwarded:
        """Return logits `[B, k, V]`, and the head's features `[B, q, D]` for each number in
        `hidden_layers`, of one forward behind `cache.column`; see `LeanForward.run`.

        prefill: cache a prompt and return empty tensors.
        """
        assert isinstance(cache, TreeCache)
        step = _Step(
            tokens_Bq=tokens_Bq,
            positions_Rq=positions_Rq,
            rotary=self.rotary.up_to(top_position),
            mask=masks[FULL],
            place=cache.place(len(tokens_Bq), self.sizes.groups, self.sizes.size, self._like),
            features_BtD=features_BTH.to(self.dtype).contiguous(),
        )
        if prefill:
            self._prefill(step)
            logits = features = self._like.new_empty(len(tokens_Bq), 0, 0)
        else:
            queries = tokens_Bq.shape[1]
            logits, features = self._forward(step, min(keep_logits or queries, queries))
        return logits, (features,) * len(hidden_layers)

    def _run(
        self,
        step: _Step,
        span: slice,
        inputs: HeadInputs,
        mask: Tensor | None,
        kept: int = 0,
        states: Sequence[int] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        """Forward the queries of a span; see `KernelForward.run`."""
        return self._kernel.run(
            step.tokens_Bq[:, span],
            step.positions_Rq[:, span],
            step.rotary,
            {FULL: mask},
            replace(step.place, column=step.place.column + span.start),
            kept,
            states,
            inputs,
            self._model.dtype,
        )

    @abstractmethod
    def _prefill(self, step: _Step) -> None:
        """Cache a prompt."""

    @abstractmethod
    def _forward(self, step: _Step, kept: int) -> tuple[Tensor, Tensor]:
        """Logits of the last `kept` queries, and features."""


def _spans(prompts_Bq: Tensor) -> Iterator[slice]:
    """Parts of prompts `[B, q, ...]` that fit into one call."""
    size = max(1, MOST_TOKENS // len(prompts_Bq))
    tokens = prompts_Bq.shape[1]
    for begin in range(0, tokens, size):
        yield slice(begin, min(begin + size, tokens))


class EagleForward(HeadForward):
    """Run an EAGLE or EAGLE-3 head, or an MTP head of a LLaMA-like layer."""

    def _inputs(self, step: _Step, span: slice) -> HeadInputs:
        embedded_BqD, features_BqD = self._head.inputs(
            step.tokens_Bq[:, span], step.features_BtD[:, span], self.dtype
        )
        return HeadInputs(embedded_BqD.contiguous(), features_BqD.contiguous())

    def _forward(self, step: _Step, kept: int) -> tuple[Tensor, Tensor]:
        projected = self._parts.logits is not None
        queries = slice(0, step.tokens_Bq.shape[1])
        logits_BkV, (features_BqD,) = self._run(
            step,
            queries,
            self._inputs(step, queries),
            step.mask,
            kept if projected else 0,
            [self._feature],
        )
        if projected:
            logits_BkV = self._head.borrowed.projection.finish(logits_BkV)
        else:
            logits_BkV = self._head.logits(features_BqD[:, -kept:])
        return logits_BkV, features_BqD

    def _prefill(self, step: _Step) -> None:
        for span in _spans(step.tokens_Bq):
            mask = causal_mask(self._like, span.stop - span.start, span.stop)
            self._run(step, span, self._inputs(step, span), mask)


class BlockHeadForward(HeadForward):
    """Run a block drafter. The first tokens are those of the features, the rest is one block. There
    are no logits; the features are the states `[B, depths, D]` of the slots that draft.
    """

    def _prefill(self, step: _Step) -> None:
        for span in _spans(step.features_BtD):
            features_BnD = step.features_BtD[:, span].contiguous()
            self._run(step, span, HeadInputs(embedded_BqD=None, features_BqD=features_BnD), None)

    def _forward(self, step: _Step, kept: int) -> tuple[Tensor, Tensor]:
        self._prefill(step)
        block = slice(step.features_BtD.shape[1], step.tokens_Bq.shape[1])
        embedded_BSD = self._head.borrowed.embed(step.tokens_Bq[:, block], self.dtype).contiguous()
        assert step.mask is not None
        _, (states_BSD,) = self._run(
            step,
            block,
            HeadInputs(embedded_BqD=embedded_BSD, features_BqD=None),
            step.mask[:, :, block],
            states=[self._feature],
        )
        drafting_BSD: Tensor = self._head.slots(states_BSD)
        return drafting_BSD[:, :0], drafting_BSD
