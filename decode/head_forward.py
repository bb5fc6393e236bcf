"""The forward of an EAGLE head, an EAGLE-3 head or a block drafter as one call of the kernel;
`llama_forward` is that of a model.

In modules, a head's layer is some forty tensor operations, which cost several times what reading
its weights costs. It equals the head's own forward within rounding; a head that it might not equal
is refused.

Legend: B rows, q queries per row, k queries with logits, T tokens of a prompt, t tokens with
features, S slots of a block, D hidden size, E head size, N positions, P slots of the cache, R = B
or 1, V vocabulary of the head.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from decode.cache import CachePlace, TreeCache
from decode.kernel_forward import (
    MOST_TOKENS,
    SMALLEST_MODEL,
    Forwarded,
    HeadInputs,
    KernelForward,
    Layer,
    Opening,
    Sizes,
)
from decode.native import kernel
from decode.packed_weights import FusedLinear, PackedLinear, Packs
from decode.rotary_table import RotaryTable, has_table
from drafts.heads.block import BlockHead, DFlashHead, DSparkHead, JetSpecHead
from drafts.heads.eagle import EagleHead
from drafts.heads.eagle3 import Eagle3Head

_KIND = "full_attention"


@dataclass(frozen=True)
class _Parts:
    """A head as the kernel takes it. logits: None if the kernel does not multiply them."""

    layers: list[Layer]
    opening: Opening
    norm_D: Tensor | None
    raw_state: bool = False
    logits: FusedLinear | None = None

    @property
    def packed(self) -> bool:
        products = [part for part in (self.opening.fc, self.logits) if part is not None]
        return all(layer.packed for layer in self.layers) and all(
            part.matrix is not None for part in products
        )


def head_forward(model: nn.Module, packs: Packs) -> "HeadForward | BlockHeadForward | None":
    """Return the kernel's forward of a head wrapped as `model`; None without the kernel, and for
    other heads.
    """
    head: Any = model.head
    if not packs.native or kernel() is None or not _is_plain(head):
        return None
    parameters = list(head.parameters())
    large = sum(weight.numel() for weight in parameters) >= SMALLEST_MODEL
    # Torch multiplies 16 bits slowly on a CPU.
    if not large and parameters[0].dtype == torch.float32:
        return None
    parts = _PARTS[type(head)](head, packs)
    if packs.owned:
        packs.prepare(head)
    if not parts.packed:
        return None
    return (BlockHeadForward if isinstance(head, BlockHead) else HeadForward)(model, parts)


def _is_plain(head: Any) -> bool:
    """Whether a head is one of these, and nothing was hung on its modules."""
    if type(head) not in _PARTS or head.config.hidden_act not in ("silu", "swish"):
        return False
    for module in head.modules():
        if module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__:
            return False
        if isinstance(module, nn.Linear) and type(module) not in (nn.Linear, PackedLinear):
            return False
    return has_table(head.rotary, head.config.head_dim)


def _eagle(head: EagleHead, packs: Packs) -> _Parts:
    layer: Any = head.layers[0]
    projection = head.borrowed.projection
    # Only a target that gave its weights to the decoders has them packed already.
    packed = isinstance(projection.module, PackedLinear) and projection.module.place.whole
    logits = None
    if packed and projection.before is None:
        module = projection.module
        logits = FusedLinear([module], module.place.matrix, torch.float32)
    return _Parts(
        layers=[_layer(layer, packs, 0)],
        opening=Opening(fc=_fused(packs, "fc", head.fc)),
        norm_D=None,
        logits=logits,
    )


def _eagle3(head: Eagle3Head, packs: Packs) -> _Parts:
    layer = head.midlayer
    opening = Opening(
        embedding_norm_D=_vector(layer.input_layernorm),
        feature_norm_D=_vector(layer.hidden_norm),
        feature_normed=layer.norm_before_residual,
    )
    return _Parts(
        layers=[_layer(layer, packs, 0)],
        opening=opening,
        norm_D=_vector(head.norm),
        raw_state=not head.config.norm_output,
        logits=_fused(packs, "lm_head", head.lm_head),
    )


def _block(head: BlockHead, packs: Packs) -> _Parts:
    layers = []
    for index, layer in enumerate(head.layers):
        plain = _layer(layer, packs, index)
        layers.append(replace(plain, norm_D=_vector(layer.input_layernorm)))
    return _Parts(layers=layers, opening=Opening(), norm_D=_vector(head.norm))


def _layer(layer: Any, packs: Packs, index: int) -> Layer:
    """Return a decoder layer without its first norm."""
    attention = layer.self_attn
    mlp = layer.mlp
    normed = hasattr(attention, "q_norm")
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    return Layer(
        kind=_KIND,
        norm_D=None,
        qkv=_fused(packs, f"{index}.qkv", *projections),
        query_norm_E=_vector(attention.q_norm) if normed else None,
        key_norm_E=_vector(attention.k_norm) if normed else None,
        out=_fused(packs, f"{index}.out", attention.o_proj),
        ffn_norm_D=_vector(layer.post_attention_layernorm),
        gate_up=_fused(packs, f"{index}.gate_up", mlp.gate_proj, mlp.up_proj),
        down=_fused(packs, f"{index}.down", mlp.down_proj),
    )


def _fused(packs: Packs, name: str, *linears: nn.Module) -> FusedLinear:
    matrix = packs.matrix(name, linears, any_size=True)
    return FusedLinear(linears, matrix, torch.float32)


def _vector(norm: Any) -> Tensor:
    weight: Tensor = norm.weight
    return weight.detach().float().contiguous()


_PARTS: dict[type, Callable[[Any, Packs], _Parts]] = {
    EagleHead: _eagle,
    Eagle3Head: _eagle3,
    DFlashHead: _block,
    DSparkHead: _block,
    JetSpecHead: _block,
}


class _Forward:
    """What the forwards of heads share. Made for one `generate` call, because it holds the head's
    tensors. `dtype`: of masks and cache.
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
        self._like = parts.layers[0].ffn_norm_D
        self.sizes = Sizes(
            heads=config.num_attention_heads,
            groups=config.num_key_value_heads,
            size=config.head_dim,
            scale=config.head_dim**-0.5,
            eps=config.rms_norm_eps,
        )
        self.rotary = RotaryTable(head.rotary, self._like)
        self._kernel = KernelForward(
            functions,
            parts.layers,
            self.sizes,
            norm_D=parts.norm_D,
            head=parts.logits,
            opening=parts.opening,
            raw_state=parts.raw_state,
        )

    def _place(self, cache: TreeCache, batch: int) -> CachePlace:
        return cache.place(batch, self.sizes.groups, self.sizes.size, self._like)

    def _features(self) -> Tensor:
        features_BqD: Tensor = self._model.features_BTH
        return features_BqD.to(self.dtype).contiguous()


def _spans(batch: int, tokens: int) -> Iterator[slice]:
    """Parts of prompts that fit into one call."""
    step = max(1, MOST_TOKENS // batch)
    for begin in range(0, tokens, step):
        yield slice(begin, min(begin + step, tokens))


class HeadForward(_Forward):
    """Run an EAGLE or EAGLE-3 head, as `LeanForward` runs a model."""

    def run(
        self,
        tokens_Bq: Tensor,
        positions_Rq: Tensor,
        top_position: int,
        masks: Mapping[str, Tensor | None],
        cache: TreeCache,
        keep_logits: int = 0,
        hidden_layers: Sequence[int] = (),
        *,
        prefill: bool = False,
    ) -> Forwarded:
        """Return logits `[B, kept, V]` and the head's features `[B, q, D]` of one forward behind
        `cache.column`; see `LeanForward.run`. The features that it reads wait at the model.

        prefill: a prompt, whose features the caller does not need.
        """
        rotary_N2E = self.rotary.up_to(top_position)
        batch, queries = tokens_Bq.shape
        embedded_BqD = self._head.embedded(tokens_Bq, self.dtype).contiguous()
        inputs = HeadInputs(embedded_BqD, self._features())
        place = self._place(cache, batch)
        if prefill:
            self._prefill(tokens_Bq, positions_Rq, rotary_N2E, place, inputs)
            nothing = self._like.new_empty(batch, 0, 0)
            return nothing, (nothing,) * len(hidden_layers)
        kept = min(keep_logits or queries, queries)
        projected = self._parts.logits is not None
        logits_BkV, states = self._kernel.run(
            tokens_Bq,
            positions_Rq,
            rotary_N2E,
            masks,
            place,
            kept if projected else 0,
            [1],
            inputs,
        )
        features_BqD = states[0].to(self._model.dtype)
        if projected:
            logits_BkV = self._head.borrowed.projection.finish(logits_BkV)
        else:
            logits_BkV = self._head.logits(features_BqD[:, -kept:])
        return logits_BkV, (features_BqD,) * len(hidden_layers)

    def _prefill(
        self,
        tokens_BT: Tensor,
        positions_1T: Tensor,
        rotary_N2E: Tensor,
        place: CachePlace,
        inputs: HeadInputs,
    ) -> None:
        """Cache the tokens of prompts, some positions at a time."""
        assert inputs.embedded_BqD is not None and inputs.features_BqD is not None
        for span in _spans(*tokens_BT.shape):
            queries = span.stop - span.start
            hidden_qP = self._like.new_full((queries, span.stop), -torch.inf)
            self._kernel.run(
                tokens_BT[:, span],
                positions_1T[:, span],
                rotary_N2E,
                {_KIND: hidden_qP.triu(span.start + 1)[None, None]},
                replace(place, column=span.start),
                0,
                [],
                HeadInputs(
                    embedded_BqD=inputs.embedded_BqD[:, span].contiguous(),
                    features_BqD=inputs.features_BqD[:, span].contiguous(),
                ),
            )


class BlockHeadForward(_Forward):
    """Run a block drafter, as `LeanForward` runs a model. The first tokens are those of the
    features that wait at the model, the rest is one block.
    """

    def run(
        self,
        tokens_Bq: Tensor,
        positions_Rq: Tensor,
        top_position: int,
        masks: Mapping[str, Tensor | None],
        cache: TreeCache,
        keep_logits: int = 0,
        hidden_layers: Sequence[int] = (),
        *,
        prefill: bool = False,
    ) -> Forwarded:
        """Cache the features; return, in the place of logits, the states `[B, k, D]` of the slots
        that draft.
        """
        rotary_N2E = self.rotary.up_to(top_position)
        batch, queries = tokens_Bq.shape
        features_BtD = self._features()
        known = features_BtD.shape[1]
        place = self._place(cache, batch)
        for span in _spans(batch, known):
            self._kernel.run(
                tokens_Bq[:, span],
                positions_Rq[:, span],
                rotary_N2E,
                {_KIND: None},
                replace(place, column=place.column + span.start),
                0,
                [],
                HeadInputs(embedded_BqD=None, features_BqD=features_BtD[:, span].contiguous()),
            )
        if known == queries:
            return features_BtD[:, :0], ()
        mask = masks[_KIND]
        assert mask is not None
        block_BS = tokens_Bq[:, known:]
        embedded_BSD = self._head.borrowed.embed(block_BS, self.dtype).contiguous()
        _, states = self._kernel.run(
            block_BS,
            positions_Rq[:, known:],
            rotary_N2E,
            {_KIND: mask[:, :, known:]},
            replace(place, column=place.column + known),
            0,
            [len(self._parts.layers)],
            HeadInputs(embedded_BqD=embedded_BSD, features_BqD=None),
        )
        drafting_BkD: Tensor = self._head.slots(states[0].to(self._model.dtype))
        return drafting_BkD, ()
