"""The forward of known families (`families`) without modules, hooks and masks made inside.

A small draft model spends most of a forward in Python, and the target pays the same at every step.
If every matrix is packed for the kernel, a step is one call, and prompts are read in calls of a few
rows (`kernel_forward`). For `LlamaForCausalLM` and its relatives this is also the computation with
the fewest tensor operations of torch: one product for queries, keys and values, rotary tables read
instead of computed, keys and values written straight into the cache. It equals the model's own
forward within rounding, and a model that it might not equal is refused.

Legend: B rows, q queries per row, X = B * q, D hidden size, E head size, H query heads, G key/value
heads, P slots the attention reads, V vocabulary, N positions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from draftsmith.core.models import vocabulary_size
from draftsmith.core.transformers_api import ACT2FN, Cache, layer_kinds
from draftsmith.decode.cache import CachePlace, TreeCache
from draftsmith.decode.families import ACTIVATIONS, Family, family_of
from draftsmith.decode.kernel_forward import (
    MOST_TOKENS,
    SMALLEST_MODEL,
    Forwarded,
    KernelForward,
    Layer,
    LayerMaker,
    Masks,
    Sizes,
    causal_mask,
    joined,
)
from draftsmith.decode.native import PackedMatrix, four_bit_state, kernel
from draftsmith.decode.packed_weights import Packed, PackedEmbedding, Packs, is_four_bits
from draftsmith.decode.rotary_table import RotaryTable, has_table
from draftsmith.drafts.draft_vocabulary import draft_vocabulary, to_target

_PLAIN = {nn.Linear, nn.Embedding, nn.LayerNorm, nn.ModuleList, nn.SiLU, nn.ReLU, nn.Dropout}
# Known hooks: transformers' own for hidden states, otherwise silent, and the one that widens a
# trimmed draft's logits, which is done here too.
_KNOWN_HOOKS = ("transformers.utils.output_capturing", draft_vocabulary.__module__)


def lean_forward(model: PreTrainedModel, packs: Packs) -> "LeanForward | None":
    """Return the lean forward of a model.

    Return None if the model is not plainly of a known family: another class or attention, hooks,
    adapters, patched or quantised layers, several dtypes or devices, or frequencies that depend on
    the length. Families that torch does not compute here need the kernel.
    """
    family = family_of(model)
    # What transformers takes if nothing is asked for; Gemma 2 has no other.
    usual = "sdpa" if model._supports_sdpa else "eager"
    attention = getattr(model.config, "_attn_implementation", "")
    if family is None or model.training or attention != usual:
        return None
    kernel_only = not family.by_torch
    activation = getattr(model.config, family.activation)
    if kernel_only and not (packs.native and activation in ACTIVATIONS):
        return None
    if not _has_parts(model, family):
        return None
    if not all(_is_plain(module, type(model), packs) for module in model.modules()):
        return None
    # A list of the weights would keep those that packed ones replace.
    kinds = {
        (type(weight), weight.device, weight.dtype)
        for weight in model.parameters()
        if four_bit_state(weight) is None
    }
    kind, device, dtype = kinds.pop()
    plain = kind is nn.Parameter and dtype.is_floating_point
    if kinds or not plain or device.type not in ("cpu", "cuda"):
        return None
    lean = LeanForward(model, packs, family)
    return None if kernel_only and lean.kernel is None else lean


def _has_parts(model: PreTrainedModel, family: Family) -> bool:
    """Whether the parts of a model are put together as those of its family usually are."""
    body: Any = model.get_submodule(family.body)
    last_norm = getattr(body, family.last_norm)
    # OPT-350m norms behind its products, and projects its embedding.
    width = getattr(body, family.embedding).embedding_dim
    if getattr(last_norm, "weight", None) is None or len(last_norm.weight) != width:
        return False
    sizes = _sizes(model, family)
    kinds = set(layer_kinds(model.config)) if sizes.turned else set()
    return all(has_table(body.rotary_emb, kind, sizes.turned) for kind in kinds)


def _sizes(model: PreTrainedModel, family: Family) -> Sizes:
    config: Any = model.config
    body: Any = model.get_submodule(family.body)
    out: Any = body.layers[0].get_submodule(family.out)
    attention: Any = body.layers[0].get_submodule(family.out.partition(".")[0])
    last_norm = getattr(body, family.last_norm)
    scale = getattr(getattr(body, family.embedding), "embed_scale", torch.ones(()))
    size = out.in_features // config.num_attention_heads
    interleaved = len(family.qkv) == 1
    groups = config.num_attention_heads
    if not interleaved:
        # Not what the config says, which some classes do not read.
        groups = cast(Any, body.layers[0].get_submodule(family.qkv[1])).out_features // size

    def option(name: str | None) -> Any:
        return None if name is None else getattr(config, name)

    return Sizes(
        heads=config.num_attention_heads,
        groups=groups,
        size=size,
        turned=getattr(attention, "rotary_ndims", size) if hasattr(body, "rotary_emb") else 0,
        scale=attention.scaling,
        eps=getattr(last_norm, "variance_epsilon", None) or last_norm.eps,
        activation=ACTIVATIONS.get(option(family.activation), 0),
        gated=len(family.up) > 1,
        parallel=bool(option(family.parallel)),
        interleaved=interleaved,
        # Which the model rounds to its dtype.
        embedding_scale=float(scale.to(last_norm.weight.dtype)),
        # Early versions of transformers compute Gemma 2 by sdpa, which leaves the cap out.
        attention_cap=0.0 if model._supports_sdpa else option(family.attention_cap) or 0.0,
        logit_cap=option(family.logit_cap) or 0.0,
    )


def _is_plain(module: nn.Module, model: type, packs: Packs) -> bool:
    """Whether a module is torch's or transformers', as a model of this class has it, and nothing
    was hung on it.
    """
    kind = type(module)
    known = kind in _PLAIN or isinstance(module, Packed) or (packs.native and is_four_bits(module))
    known = known or kind.__module__ in (model.__module__, "transformers.activations")
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    hooked = any(getattr(hook, "__module__", "") not in _KNOWN_HOOKS for hook in hooks)
    return known and not hooked and "forward" not in module.__dict__


class LeanForward:
    """Run one model. Made for one `generate` call, because it holds the model's tensors.

    `dtype`: of products, masks and cache. fp32 with the kernel, else the model's.
    """

    def __init__(self, model: PreTrainedModel, packs: Packs, family: Family) -> None:
        body: Any = model.get_submodule(family.body)
        config: Any = model.config
        last_norm = getattr(body, family.last_norm)
        functions = kernel() if packs.native else None
        self.sizes = _sizes(model, family)
        self.act = ACT2FN[getattr(config, family.activation)]
        self._state_dtype: torch.dtype = last_norm.weight.dtype
        self.dtype = self._state_dtype if functions is None else torch.float32
        self._by_torch_too = family.by_torch
        # Torch would multiply 16 bits slowly on a CPU, and cannot multiply four.
        large = packs.parameters >= SMALLEST_MODEL
        four_bits = any(four_bit_state(weight) is not None for weight in model.parameters())
        known = getattr(config, family.activation) in ACTIVATIONS
        needed = self.dtype != self._state_dtype or four_bits or not family.by_torch
        self._any_size = needed or (known and large)
        maker = LayerMaker(packs, self._any_size, self.dtype, family)
        self.norm = maker.norm(last_norm)
        self.head = maker.fused([model.get_submodule("lm_head")])
        # Of a trimmed draft: the tokens of the head's rows.
        self._ids_D = draft_vocabulary(model)
        self._vocabulary = vocabulary_size(model)
        self.device = self.norm.weight_D.device
        kinds = layer_kinds(model.config)
        rotary = getattr(body, "rotary_emb", None)
        self.rotary = RotaryTable(rotary, set(kinds), self.norm.weight_D)
        layers = zip(body.layers, kinds, strict=False)
        self.layers = [maker.layer(layer, kind) for layer, kind in layers]
        packed = self.head.matrix is not None and all(layer.packed for layer in self.layers)
        table: PackedMatrix | Tensor | None = None
        if packed and known:
            table = self._embedding_table(getattr(body, family.embedding), packs)
        self.embedding: nn.Module = getattr(body, family.embedding)
        places_ND = None
        if family.places is not None:
            places = getattr(body, family.places)
            places_ND = places.weight[places.offset :].detach().to(self.dtype).contiguous()
        self.kernel: KernelForward | None = None
        if functions is not None and table is not None:
            self.kernel = KernelForward(
                functions,
                self.layers,
                self.sizes,
                norm=self.norm,
                head=self.head,
                embedding=table,
                places_ND=places_ND,
            )

    def _embedding_table(self, embedding: Any, packs: Packs) -> PackedMatrix | Tensor | None:
        """Return the embedding as the kernel reads it, packed or in fp32."""
        if self.dtype == self._state_dtype and not isinstance(embedding, PackedEmbedding):
            table: Tensor = embedding.weight.contiguous()
            return table
        return packs.matrix([embedding], any_size=True)

    def run(
        self,
        tokens_Bq: Tensor,
        positions_Bq: Tensor,
        top_position: int,
        masks: Masks,
        cache: Cache,
        keep_logits: int = 0,
        hidden_layers: Sequence[int] = (),
        *,
        prefill: bool = False,
    ) -> Forwarded:
        """Return logits `[B, kept, V]` and hidden states `[B, q, D]` of one forward behind
        `cache.column`.

        positions_Bq: one row for all, or one each; none above `top_position`. masks: additive, `[1
        or B, 1, q, P]`, by kind of layer; None sees everything, but is causal in a prefill.
        prefill: compute no logits.
        """
        rotary = self.rotary.up_to(top_position)
        # Behind the output of the last layer stands the normed last state, -1.
        numbers = [layer % (len(self.layers) + 2) for layer in hidden_layers]
        few = tokens_Bq.numel() <= MOST_TOKENS
        if self.kernel is not None and (prefill or few or not self._by_torch_too):
            assert isinstance(cache, TreeCache)
            like = self.norm.weight_D
            place = cache.place(len(tokens_Bq), self.sizes.groups, self.sizes.size, like)
            queries = tokens_Bq.shape[1]
            if prefill:
                causal = causal_mask(like, queries, place.column + queries)
                masks = {kind: causal if mask is None else mask for kind, mask in masks.items()}
            kept = 0 if prefill else min(keep_logits or queries, queries)
            logits, states = self._by_kernel(
                tokens_Bq, positions_Bq, rotary, masks, place, kept, numbers
            )
        else:
            rope_Bq1E = F.embedding(positions_Bq, rotary[self.layers[0].kind]).unsqueeze(2)
            x_BqD, by_number = self._by_torch(tokens_Bq, rope_Bq1E, masks, cache, numbers, prefill)
            states = [by_number[number].to(self._state_dtype) for number in numbers]
            if prefill:
                logits = x_BqD.new_empty(len(tokens_Bq), 0, 0)
            else:
                kept_BqD = x_BqD[:, -keep_logits:]
                logits = self.head(kept_BqD.flatten(0, 1))
                logits = logits.unflatten(0, kept_BqD.shape[:2])
        if self._ids_D is not None and not prefill:
            logits = to_target(logits, self._ids_D, self._vocabulary)
        return logits, tuple(states)

    def _by_kernel(
        self,
        tokens_Bq: Tensor,
        positions_Rq: Tensor,
        rotary: Mapping[str, Tensor],
        masks: Masks,
        place: CachePlace,
        kept: int,
        numbers: Sequence[int],
    ) -> tuple[Tensor, list[Tensor]]:
        """Forward as many rows at a time as fit into one call of the kernel."""
        assert self.kernel is not None
        rows, queries = tokens_Bq.shape
        size = max(1, MOST_TOKENS // queries)
        parts = []
        for begin in range(0, rows, size):
            some = slice(begin, begin + size)
            part = self.kernel.run(
                tokens_Bq[some],
                _rows(positions_Rq, some),
                rotary,
                {kind: mask if mask is None else _rows(mask, some) for kind, mask in masks.items()},
                replace(
                    place,
                    keys_LBHCE=place.keys_LBHCE[:, some],
                    values_LBHCE=place.values_LBHCE[:, some],
                ),
                kept,
                numbers,
                state_dtype=self._state_dtype,
            )
            if rows <= size:
                return part
            parts.append(part)
        logits, states = zip(*parts, strict=True)
        return torch.cat(logits), list(joined(states))

    def _by_torch(
        self,
        tokens_Bq: Tensor,
        rope_Bq1E: Tensor,
        masks: Masks,
        cache: Cache,
        numbers: Sequence[int],
        prefill: bool,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Return the normed last hidden state and the states `numbers`, `[B, q, D]`."""
        rows, queries = tokens_Bq.shape
        last = len(self.layers)
        folded = {kind: self._folded(mask, queries) for kind, mask in masks.items()}
        states: dict[int, Tensor] = {}
        x_BqD = self.embedding(tokens_Bq).to(self.dtype)
        x_XD = x_BqD.view(rows * queries, -1)
        for index, layer in enumerate(self.layers):
            if index in numbers:
                states[index] = x_XD.view(rows, queries, -1)
            assert layer.norm is not None
            h_XD = self._norm(x_XD, layer.norm.weight_D)
            qkv_BqHE = layer.qkv(h_XD).view(rows, queries, -1, self.sizes.size)
            q_BHqE, keys, values = self._cached(layer, qkv_BqHE, rope_Bq1E, cache.layers[index])
            if prefill and index == last - 1 and max(numbers, default=0) < last:
                # Only the last layer's keys and values are needed.
                return x_XD, states
            mixed_XD = self._attend(q_BHqE, keys, values, folded[layer.kind])
            x_XD = layer.out.plus(mixed_XD, x_XD)
            gate, up = layer.gate_up.parts(self._norm(x_XD, layer.ffn_norm.weight_D))
            gated = self.act(gate).mul_(up)
            x_XD = layer.down.plus(gated, x_XD)
        states[last] = x_XD.view(rows, queries, -1)
        states[last + 1] = self._norm(x_XD, self.norm.weight_D).view(rows, queries, -1)
        return states[last + 1], states

    def _cached(
        self, layer: Layer, qkv_BqHE: Tensor, rope_Bq1E: Tensor, cache: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotate queries and keys, and cache keys and values. Return the queries, and all keys and
        values.
        """
        heads = self.sizes.heads
        size = self.sizes.size
        rotated = heads + self.sizes.groups
        qk_BqHE = qkv_BqHE[:, :, :rotated]
        if layer.query_norm is not None and layer.key_norm is not None:
            queries = self._norm(qk_BqHE[:, :, :heads], layer.query_norm)
            keys = self._norm(qk_BqHE[:, :, heads:], layer.key_norm)
            qk_BqHE = torch.cat([queries, keys], dim=2)
        # The sine carries the sign of the half that is rotated in.
        cos_Bq1E = rope_Bq1E[..., :size]
        sin_Bq1E = rope_Bq1E[..., size:]
        qk_BqHE = (qk_BqHE * cos_Bq1E).addcmul_(qk_BqHE.roll(size // 2, -1), sin_Bq1E)
        qk_BHqE = qk_BqHE.transpose(1, 2)
        new_values = qkv_BqHE.transpose(1, 2)[:, rotated:]
        keys, values = cache.update(qk_BHqE[:, heads:], new_values)
        return qk_BHqE[:, :heads], keys, values

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        size, eps = (x.shape[-1],), self.sizes.eps
        if x.dtype == torch.float32:
            return F.rms_norm(x, size, weight, eps)
        # The model scales after rounding back to half precision; rms_norm computes in fp32.
        return F.rms_norm(x, size, eps=eps) * weight

    def _folds(self, mask: Tensor | None, queries: int) -> bool:
        # Query heads of one key/value head become more queries of that head, so that nothing is
        # repeated. With several queries a CPU gains nothing from folding. CUDA's masked kernels
        # have no grouped heads.
        masked_on_gpu = mask is not None and self.device.type != "cpu"
        return self.sizes.heads > self.sizes.groups and (queries == 1 or masked_on_gpu)

    def _folded(self, mask: Tensor | None, queries: int) -> Tensor | None:
        if mask is None or queries == 1 or not self._folds(mask, queries):
            return mask
        ratio = self.sizes.heads // self.sizes.groups
        return mask.expand(-1, ratio, -1, -1).reshape(len(mask), 1, ratio * queries, mask.shape[3])

    def _attend(self, q_BHqE: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        rows, heads, queries, size = q_BHqE.shape
        scale = self.sizes.scale
        if self._folds(mask, queries):
            q = q_BHqE.reshape(rows, self.sizes.groups, -1, size)
            mixed = F.scaled_dot_product_attention(q, keys, values, mask, scale=scale)
            mixed = mixed.reshape(rows, heads, queries, size)
        else:
            causal = mask is None and queries > 1
            grouped = heads > self.sizes.groups
            mixed = F.scaled_dot_product_attention(
                q_BHqE, keys, values, mask, is_causal=causal, scale=scale, enable_gqa=grouped
            )
        return mixed.transpose(1, 2).reshape(rows * queries, -1)


def _rows(shared_or_each: Tensor, some: slice) -> Tensor:
    """These rows of what has a row for each, or one for all."""
    return shared_or_each if len(shared_or_each) == 1 else shared_or_each[some]
