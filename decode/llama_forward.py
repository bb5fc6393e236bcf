"""The forward of the LLaMA family without modules, hooks and masks made inside.

A small draft model spends most of a forward in Python, and the target pays the same at every step. This is the
computation of `LlamaForCausalLM` and its relatives with the fewest tensor operations: one product for queries, keys and
values, rotary tables read instead of computed, keys and values written straight into the `TreeCache`. It equals the
model's own forward within rounding, and a model that it might not equal is refused. If every matrix is packed for the
kernel, everything but the prefill is one call of `native/forward.c`, with weights and cache handed over as pointers.

Legend: B rows, q queries per row, X = B * q, R = B or 1, D hidden size, E head size, H query heads, G key/value heads,
P cells the attention reads, V vocabulary, N positions, I inputs and O outputs of a linear layer.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from decode.cache import TreeCache
from decode.native import Kernel, PackedMatrix, four_bit_state, kernel
from decode.packed_weights import FusedLinear, PackedEmbedding, PackedLinear, Packs, embedding_of, is_four_bits
from drafts.draft_vocabulary import draft_vocabulary, to_target
from draftsmith_core.models import vocabulary_size

_FAMILY: dict[type, Any] = {
    modeling_llama.LlamaForCausalLM: modeling_llama,
    modeling_mistral.MistralForCausalLM: modeling_mistral,
    modeling_qwen2.Qwen2ForCausalLM: modeling_qwen2,
    modeling_qwen3.Qwen3ForCausalLM: modeling_qwen3,
}
# Other kinds choose their frequencies by the length of the input, so that no table holds.
_ROPES = ("default", "linear", "llama3", "yarn")
# From this many parameters on, matrices of any size are packed: a forward is then one call of the kernel.
_SMALLEST_MODEL = 1 << 18
# Tokens of one forward that the kernel takes in one call.
_MOST_TOKENS = 256
_PLAIN = (nn.Linear, nn.Embedding, nn.ModuleList, nn.SiLU, PackedLinear, PackedEmbedding)
# Known hooks: transformers' own for hidden states, otherwise silent, and the one that widens a trimmed draft's logits,
# which is done here too.
_KNOWN_HOOKS = ("transformers.utils.output_capturing", draft_vocabulary.__module__)


def lean_forward(model: PreTrainedModel, packs: Packs | None) -> "LeanForward | None":
    """The lean forward of `model` (by torch where `packs` is None), or None when only its own forward is sure to be
    right: another architecture, a subclass, hooks, adapters, quantised or scattered weights, other attention, a
    frequency that depends on length.
    """
    family = _FAMILY.get(type(model))
    if family is None or model.training or getattr(model.config, "_attn_implementation", "") != "sdpa":
        return None
    inner: Any = model.model
    if type(inner.rotary_emb).__name__ not in vars(family) or inner.rotary_emb.rope_type not in _ROPES:
        return None
    if not inner.layers or 2 * inner.rotary_emb.inv_freq.shape[0] != inner.layers[0].self_attn.head_dim:
        return None
    for module in model.modules():
        kind = type(module)
        known = kind in _PLAIN or vars(family).get(kind.__name__) is kind
        known = known or kind.__module__ == "transformers.activations"
        known = known or (packs is not None and packs.native and is_four_bits(module))
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if (
            not known
            or "forward" in module.__dict__
            or any(getattr(hook, "__module__", "") not in _KNOWN_HOOKS for hook in hooks)
        ):
            return None
        if getattr(module, "_compiled_call_impl", None) is not None or module.training:
            return None
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return None
    parameters = [weight for weight in model.parameters() if four_bit_state(weight) is None]
    if any(type(parameter) is not nn.Parameter for parameter in parameters):
        return None
    if len({(parameter.device, parameter.dtype) for parameter in parameters}) != 1:
        return None
    if not parameters[0].dtype.is_floating_point or parameters[0].device.type not in ("cpu", "cuda"):
        return None
    return LeanForward(model, packs)


@dataclass(frozen=True)
class _Layer:
    """One decoder layer: its norms (the model's own tensors) and its products."""

    kind: str
    norm_D: Tensor
    qkv: FusedLinear
    head_norms_E: tuple[Tensor, Tensor] | None
    out: FusedLinear
    ffn_norm_D: Tensor
    gate_up: FusedLinear
    down: FusedLinear


def _end(x_XD: Tensor, rows: int, keep: int) -> Tensor:
    queries = x_XD.shape[0] // rows
    if not 0 < keep < queries:
        return x_XD
    return x_XD.view(rows, queries, -1)[:, queries - keep :].reshape(rows * keep, -1)


class LeanForward:
    """Run one model. Made for one `generate` call, because it holds the model's tensors."""

    def __init__(self, model: PreTrainedModel, packs: Packs | None) -> None:
        body: Any = model.model
        config: Any = model.config
        attention = body.layers[0].self_attn
        self.packs = packs
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.size: int = attention.head_dim
        self.scale: float = attention.scaling
        self.eps: float = body.norm.variance_epsilon
        self.act = body.layers[0].mlp.act_fn
        self.silu = config.hidden_act in ("silu", "swish")
        self.embedding: nn.Module = body.embed_tokens
        self.norm_D: Tensor = body.norm.weight
        head: Any = model.lm_head
        self._any_size = self.silu and sum(weight.numel() for weight in model.parameters()) >= _SMALLEST_MODEL
        # Only the kernel multiplies with four-bit codes.
        self._any_size = self._any_size or any(four_bit_state(weight) is not None for weight in model.parameters())
        self.head = self._fused("head", head)
        # Of a trimmed draft: the tokens of the head's rows.
        self._ids_D, self._vocabulary = draft_vocabulary(model), vocabulary_size(model)
        self.rotary = body.rotary_emb
        self.dtype, self.device = self.norm_D.dtype, self.norm_D.device
        self._half = self.dtype in (torch.float16, torch.bfloat16)
        self._on_cpu = self.device.type == "cpu"
        self._table_N2E = torch.empty(0, 2 * self.size, dtype=self.dtype, device=self.device)
        kinds = getattr(config, "layer_types", None)
        window = getattr(config, "sliding_window", None)
        plain = "full_attention" if window is None else "sliding_attention"
        self.layers = [
            self._layer(index, layer, plain if kinds is None else kinds[index])
            for index, layer in enumerate(body.layers[: config.num_hidden_layers])
        ]
        # One kind of mask for each of the two places of a forward.
        self._kinds = sorted({layer.kind for layer in self.layers})
        self._kernel = self._whole()

    def _layer(self, index: int, layer: Any, kind: str) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        head_norms = (attention.q_norm.weight, attention.k_norm.weight) if hasattr(attention, "q_norm") else None
        return _Layer(
            kind=kind,
            norm_D=layer.input_layernorm.weight,
            qkv=self._fused(f"{index}.qkv", attention.q_proj, attention.k_proj, attention.v_proj),
            head_norms_E=head_norms,
            out=self._fused(f"{index}.out", attention.o_proj),
            ffn_norm_D=layer.post_attention_layernorm.weight,
            gate_up=self._fused(f"{index}.gate_up", mlp.gate_proj, mlp.up_proj),
            down=self._fused(f"{index}.down", mlp.down_proj),
        )

    def _fused(self, name: str, *linears: nn.Linear) -> FusedLinear:
        matrix = None if self.packs is None else self.packs.matrix(name, linears, any_size=self._any_size)
        return FusedLinear.of(linears, matrix)

    def _whole(self) -> "_WholeModel | None":
        """Return this model as one call of the kernel; None if the kernel does not know a part of it."""
        functions = kernel() if self.packs is not None and self.packs.native and self.silu else None
        embedding = embedding_of(self.embedding)
        products = [product for layer in self.layers for product in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        vectors = [self.norm_D, *(vector for layer in self.layers for vector in (layer.norm_D, layer.ffn_norm_D))]
        if functions is None or embedding is None or any(product.matrix is None for product in (self.head, *products)):
            return None
        if len(self._kinds) > 2 or not all(vector.is_contiguous() for vector in vectors):
            return None
        return _WholeModel(functions, self, embedding)

    def run(
        self,
        tokens_Bq: Tensor,
        positions_Bq: Tensor,
        top_position: int,
        masks: Mapping[str, Tensor | None] | Tensor | None,
        cache: Any,
        keep_logits: int = 0,
        hidden_layers: Sequence[int] = (),
        *,
        prefill: bool = False,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return logits `[B, kept, V]` and hidden states `[B, q, D]` of one forward behind `cache.column`.

        positions_Bq: one row for all, or one each; none above `top_position`. masks: additive, `[1 or B, 1, q, P]`, by
        kind of layer or one for all; None sees everything, but is causal in a prefill. prefill: compute no logits.
        """
        rows, queries = tokens_Bq.shape
        heads, groups, size = self.heads, self.groups, self.size
        total = rows * queries
        if self._kernel is not None and not prefill and total <= _MOST_TOKENS:
            return self._call(tokens_Bq, positions_Bq, top_position, masks, cache, keep_logits, hidden_layers)
        cos_Bq1E, sin_Bq1E = self._rope(positions_Bq, top_position)
        attend = self._attention(masks, queries)
        wanted = {layer % (len(self.layers) + 1) for layer in hidden_layers}
        states: dict[int, Tensor] = {}
        x_XD = self.embedding(tokens_Bq).view(total, -1)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            if index in wanted:
                states[index] = x_XD
            h_XD = self._norm(x_XD, layer.norm_D)
            qkv_BqHE = layer.qkv(h_XD).view(rows, queries, heads + 2 * groups, size)
            qk_BqHE = qkv_BqHE[:, :, : heads + groups]
            if layer.head_norms_E is not None:
                qk_BqHE = torch.cat(
                    [
                        self._norm(qk_BqHE[:, :, :heads], layer.head_norms_E[0]),
                        self._norm(qk_BqHE[:, :, heads:], layer.head_norms_E[1]),
                    ],
                    dim=2,
                )
            # The sine carries the sign of the half that is rotated in.
            qk_BqHE = (qk_BqHE * cos_Bq1E).addcmul_(qk_BqHE.roll(size // 2, -1), sin_Bq1E)
            keys_BGqE, values_BGqE = (qk_BqHE[:, :, heads:], qkv_BqHE[:, :, heads + groups :])
            keys, values = cache.layers[index].update(keys_BGqE.transpose(1, 2), values_BGqE.transpose(1, 2))
            if prefill and index == last and last + 1 not in wanted:
                break  # Only the last layer's keys and values are needed.
            mixed_XD = attend(qk_BqHE[:, :, :heads].transpose(1, 2), keys, values, layer.kind)
            x_XD = layer.out.plus(mixed_XD, x_XD)
            h_XD = self._norm(x_XD, layer.ffn_norm_D)
            h_XI = self._inner(h_XD, layer)
            x_XD = layer.down.plus(h_XI, x_XD)
        if prefill and last + 1 not in wanted:
            return x_XD.new_empty(rows, 0, 0), self._hidden(states, hidden_layers, rows, queries)
        if last + 1 not in wanted:
            x_XD = _end(x_XD, rows, keep_logits)
        x_XD = self._norm(x_XD, self.norm_D)
        if last + 1 in wanted:
            states[last + 1] = x_XD
            x_XD = _end(x_XD, rows, keep_logits)
        if prefill:
            return x_XD.new_empty(rows, 0, 0), self._hidden(states, hidden_layers, rows, queries)
        logits = self.head(x_XD).view(rows, x_XD.shape[0] // rows, -1)
        return self._over_all_tokens(logits), self._hidden(states, hidden_layers, rows, queries)

    def _call(
        self,
        tokens_Bq: Tensor,
        positions_Rq: Tensor,
        top_position: int,
        masks: Mapping[str, Tensor | None] | Tensor | None,
        cache: TreeCache,
        keep_logits: int,
        hidden_layers: Sequence[int],
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Do what `run` does in one call of the kernel. IndexError for a token outside the vocabulary."""
        assert self._kernel is not None
        whole, (batch, queries) = self._kernel, tokens_Bq.shape
        numbers = [layer % (len(self.layers) + 1) for layer in hidden_layers]
        wanted = sorted(set(numbers))
        flags = bytes(index in wanted for index in range(len(self.layers) + 1)) if wanted else whole.nothing
        kept = min(keep_logits or queries, queries)
        tokens_Bq, positions_Rq = tokens_Bq.contiguous(), positions_Rq.contiguous()
        keys_LBGPE, values_LBGPE = cache.whole(batch, self.groups, self.size, self.norm_D)
        logits = torch.empty(batch, kept, whole.outputs)
        states = torch.empty(len(wanted), batch, queries, len(self.norm_D))
        step = whole.step
        step.batch, step.queries, step.kept = batch, queries, kept
        step.tokens, step.positions = tokens_Bq.data_ptr(), positions_Rq.data_ptr()
        step.position_stride = queries if positions_Rq.shape[0] > 1 else 0
        step.rotary = self.rotary_table(top_position).data_ptr()
        step.keys, step.values, step.column = keys_LBGPE.data_ptr(), values_LBGPE.data_ptr(), cache.column
        step.layer_stride, step.batch_stride, step.group_stride = keys_LBGPE.stride()[:3]
        for place, kind in enumerate(self._kinds):
            mask = masks.get(kind) if isinstance(masks, Mapping) else masks
            if mask is None:
                step.masks[place] = _Mask(None, 0, 0)
            else:
                step.masks[place] = _Mask(mask.data_ptr(), mask.stride(0) if mask.shape[0] > 1 else 0, mask.stride(2))
        step.states, step.logits = states.data_ptr(), logits.data_ptr()
        step.wanted = ctypes.cast(ctypes.c_char_p(flags), _POINTER)
        needed = whole.functions.scratch(ctypes.byref(whole.model), ctypes.byref(step))
        if whole.scratch.numel() < needed:
            whole.scratch = torch.empty(2 * needed)
        step.scratch = whole.scratch.data_ptr()
        if whole.functions.forward(ctypes.byref(whole.model), ctypes.byref(step)):
            raise IndexError(f"a token outside 0..{whole.model.vocabulary - 1}, the vocabulary of the embedding")
        return self._over_all_tokens(logits), tuple(states[wanted.index(number)] for number in numbers)

    def _over_all_tokens(self, logits: Tensor) -> Tensor:
        return logits if self._ids_D is None else to_target(logits, self._ids_D, self._vocabulary)

    def _hidden(
        self, states: Mapping[int, Tensor], layers: Sequence[int], rows: int, queries: int
    ) -> tuple[Tensor, ...]:
        return tuple(states[layer % (len(self.layers) + 1)].view(rows, queries, -1) for layer in layers)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if self._half:
            # The model scales after rounding back to half precision.
            return F.rms_norm(x.float(), (x.shape[-1],), eps=self.eps).to(x.dtype) * weight
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps)

    def _inner(self, h_XD: Tensor, layer: _Layer) -> Tensor:
        gate, up = layer.gate_up.parts(h_XD)
        gate = F.silu(gate) if self.silu else self.act(gate)
        return gate.mul_(up)

    def rotary_table(self, top: int) -> Tensor:
        """Return cosines and signed sines of the positions up to `top`, `[N, 2E]`; cached until `top` grows."""
        if self._table_N2E.shape[0] <= top:
            positions_1N = torch.arange(max(top + 1, 2 * self._table_N2E.shape[0], 256), device=self.device)[None]
            cos_1NE, sin_1NE = self.rotary(self.norm_D, positions_1N)
            half = self.size // 2
            sin_NE = torch.cat((-sin_1NE[0, :, :half], sin_1NE[0, :, half:]), dim=-1)
            self._table_N2E = torch.cat((cos_1NE[0], sin_NE), dim=-1)
        return self._table_N2E

    def _rope(self, positions_Bq: Tensor, top: int) -> tuple[Tensor, Tensor]:
        both = F.embedding(positions_Bq, self.rotary_table(top)).unsqueeze(2)
        return both[..., : self.size], both[..., self.size :]

    def _attention(self, masks: Mapping[str, Tensor | None] | Tensor | None, queries: int) -> Any:
        grouped = self.heads // self.groups
        # Query heads of one key/value head become more queries of that head, so that nothing is repeated. A CPU does as
        # well with several queries; masked CUDA kernels do not know grouped heads.
        folded: dict[str, Tensor] = {}

        def fold_mask(mask: Tensor, kind: str) -> Tensor:
            if queries == 1:
                return mask
            if kind not in folded:
                folded[kind] = mask.expand(-1, grouped, -1, -1).reshape(len(mask), 1, grouped * queries, mask.shape[3])
            return folded[kind]

        def attend(q_BHqE: Tensor, keys: Tensor, values: Tensor, kind: str) -> Tensor:
            mask = masks.get(kind) if isinstance(masks, Mapping) else masks
            rows = q_BHqE.shape[0]
            if grouped > 1 and (queries == 1 or (mask is not None and not self._on_cpu)):
                q = q_BHqE.reshape(rows, self.groups, grouped * queries, self.size)
                mask = None if mask is None else fold_mask(mask, kind)
                mixed = F.scaled_dot_product_attention(q, keys, values, mask, scale=self.scale)
                mixed = mixed.reshape(rows, self.heads, queries, self.size)
            else:
                causal = mask is None and queries > 1
                mixed = F.scaled_dot_product_attention(
                    q_BHqE, keys, values, mask, is_causal=causal, scale=self.scale, enable_gqa=grouped > 1
                )
            return mixed.transpose(1, 2).reshape(rows * queries, -1)

        return attend


# The structures of `forward.c`.
_SIZE, _POINTER = ctypes.c_size_t, ctypes.c_void_p


class _Matrix(ctypes.Structure):
    _fields_ = (("values", _POINTER), ("bias", _POINTER), ("outputs", _SIZE), ("kind", _SIZE))


class _LayerStruct(ctypes.Structure):
    _fields_ = (
        *((name, _Matrix) for name in ("qkv", "out", "gate_up", "down")),
        *((name, _POINTER) for name in ("norm", "query_norm", "key_norm", "ffn_norm")),
        ("mask", _SIZE),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(_LayerStruct)),
        ("count", _SIZE),
        ("head", _Matrix),
        ("norm", _POINTER),
        ("embedding", _POINTER),
        *((name, _SIZE) for name in ("embedding_packed", "embedding_kind", "vocabulary")),
        *((name, _SIZE) for name in ("width", "heads", "groups", "size")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
    )


class _Mask(ctypes.Structure):
    _fields_ = (("values", _POINTER), ("batch_stride", _SIZE), ("query_stride", _SIZE))


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, _SIZE) for name in ("batch", "queries", "kept")),
        *((name, _POINTER) for name in ("tokens", "positions")),
        ("position_stride", _SIZE),
        *((name, _POINTER) for name in ("rotary", "keys", "values")),
        *((name, _SIZE) for name in ("layer_stride", "batch_stride", "group_stride", "column")),
        ("masks", _Mask * 2),
        *((name, _POINTER) for name in ("states", "wanted", "logits", "scratch")),
    )


class _WholeModel:
    """The structures of one model. They hold addresses only: the `LeanForward` keeps the tensors."""

    def __init__(self, functions: Kernel, lean: LeanForward, embedding: PackedMatrix | Tensor) -> None:
        packed = isinstance(embedding, PackedMatrix)
        table = embedding.values if isinstance(embedding, PackedMatrix) else embedding
        layers = (_LayerStruct * len(lean.layers))(*(_layer_struct(layer, lean._kinds) for layer in lean.layers))
        self.functions, self._alive, self.scratch = functions, (layers, table), torch.empty(0)
        self.model = _Model(
            ctypes.cast(layers, ctypes.POINTER(_LayerStruct)),
            len(lean.layers),
            _matrix(lean.head),
            lean.norm_D.data_ptr(),
            table.data_ptr(),
            packed,
            embedding.kind if isinstance(embedding, PackedMatrix) else 0,
            embedding.outputs if isinstance(embedding, PackedMatrix) else len(embedding),
            len(lean.norm_D),
            lean.heads,
            lean.groups,
            lean.size,
            lean.eps,
            lean.scale,
        )
        self.step, self.outputs, self.nothing = _Step(), self.model.head.outputs, bytes(len(lean.layers) + 1)


def _matrix(product: FusedLinear) -> _Matrix:
    assert product.matrix is not None
    matrix = product.matrix
    return _Matrix(matrix.values.data_ptr(), _address(product.bias_O), matrix.outputs, matrix.kind)


def _layer_struct(layer: _Layer, kinds: Sequence[str]) -> _LayerStruct:
    query_norm, key_norm = layer.head_norms_E or (None, None)
    norms = (layer.norm_D, query_norm, key_norm, layer.ffn_norm_D)
    products = (layer.qkv, layer.out, layer.gate_up, layer.down)
    return _LayerStruct(*map(_matrix, products), *map(_address, norms), kinds.index(layer.kind))


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
