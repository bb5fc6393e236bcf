"""The forward of the LLaMA family without modules, hooks and masks made inside.

A small draft model spends most of a forward in Python, and the target pays the same at every step.
This is the computation of `LlamaForCausalLM` and its relatives with the fewest tensor operations:
one product for queries, keys and values, rotary tables read instead of computed, keys and values
written straight into the `TreeCache`. It equals the model's own forward within rounding, and a
model that it might not equal is refused. If every matrix is packed for the kernel, everything but
the prefill is one call of `native/forward.c`, with weights and cache handed over as pointers.

Legend: B rows, q queries per row, X = B * q, R = B or 1, D hidden size, E head size, H query heads,
G key/value heads, P cells the attention reads, V vocabulary, N positions, I inputs and O outputs of
a linear layer.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

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
from decode.packed_weights import FusedLinear, PackedEmbedding, PackedLinear, Packs, is_four_bits
from drafts.draft_vocabulary import draft_vocabulary, to_target
from draftsmith_core.models import vocabulary_size

# Logits, and the hidden states of the layers asked for.
Forwarded: TypeAlias = tuple[Tensor, tuple[Tensor, ...]]
_FAMILY: dict[type, Any] = {
    modeling_llama.LlamaForCausalLM: modeling_llama,
    modeling_mistral.MistralForCausalLM: modeling_mistral,
    modeling_qwen2.Qwen2ForCausalLM: modeling_qwen2,
    modeling_qwen3.Qwen3ForCausalLM: modeling_qwen3,
}
# Other kinds choose their frequencies by the length of the input, so that no table holds.
_ROPES = ("default", "linear", "llama3", "yarn")
# From this many parameters on, matrices of any size are packed: a forward is then one call of the
# kernel.
_SMALLEST_MODEL = 1 << 18
# Tokens of one forward that the kernel takes in one call.
_MOST_TOKENS = 256
_PLAIN = (nn.Linear, nn.Embedding, nn.ModuleList, nn.SiLU, PackedLinear, PackedEmbedding)
# Known hooks: transformers' own for hidden states, otherwise silent, and the one that widens a
# trimmed draft's logits, which is done here too.
_KNOWN_HOOKS = ("transformers.utils.output_capturing", draft_vocabulary.__module__)


def lean_forward(model: PreTrainedModel, packs: Packs | None) -> "LeanForward | None":
    """The lean forward of `model` (by torch where `packs` is None), or None when only its own
    forward is sure to be right: another architecture, a subclass, hooks, adapters, quantised or
    scattered weights, layers with constants of their own, other attention, a frequency that depends
    on length.
    """
    family = _FAMILY.get(type(model))
    if (
        family is None
        or model.training
        or getattr(model.config, "_attn_implementation", "") != "sdpa"
    ):
        return None
    inner: Any = model.model
    if (
        type(inner.rotary_emb).__name__ not in vars(family)
        or inner.rotary_emb.rope_type not in _ROPES
    ):
        return None
    hooked = torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks
    if (
        hooked
        or not inner.layers
        or 2 * inner.rotary_emb.inv_freq.shape[0] != inner.layers[0].self_attn.head_dim
    ):
        return None
    epsilons = set()
    for module in model.modules():
        kind = type(module)
        known = kind in _PLAIN or vars(family).get(kind.__name__) is kind
        known = known or kind.__module__ == "transformers.activations"
        known = known or (packs is not None and packs.native and is_four_bits(module))
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        known = known and all(getattr(hook, "__module__", "") in _KNOWN_HOOKS for hook in hooks)
        if (
            not known
            or "forward" in module.__dict__
            or module.training
            or module._compiled_call_impl is not None
        ):
            return None
        epsilons.add(vars(module).get("variance_epsilon"))
    # The lean forward reads one of each for all layers.
    constants = {
        (layer.self_attn.head_dim, layer.self_attn.scaling, type(layer.mlp.act_fn))
        for layer in inner.layers
    }
    if len(constants) > 1 or len(epsilons - {None}) > 1:
        return None
    parameters = [weight for weight in model.parameters() if four_bit_state(weight) is None]
    if any(type(parameter) is not nn.Parameter for parameter in parameters):
        return None
    if len({(parameter.device, parameter.dtype) for parameter in parameters}) != 1:
        return None
    if not parameters[0].dtype.is_floating_point or parameters[0].device.type not in (
        "cpu",
        "cuda",
    ):
        return None
    return LeanForward(model, packs)


@dataclass(frozen=True)
class _Layer:
    """One decoder layer: its norms and its products."""

    kind: str
    norm_D: Tensor
    qkv: FusedLinear
    head_norms_E: tuple[Tensor, Tensor] | None
    out: FusedLinear
    ffn_norm_D: Tensor
    gate_up: FusedLinear
    down: FusedLinear


class LeanForward:
    """Run one model. Made for one `generate` call, because it holds the model's tensors.

    `dtype` is that of products, masks and cache: fp32 with the kernel, else the model's own, as
    hidden states have.
    """

    def __init__(self, model: PreTrainedModel, packs: Packs | None) -> None:
        body: Any = model.model
        head: Any = model.lm_head
        config: Any = model.config
        attention, weights = body.layers[0].self_attn, list(model.parameters())
        on_cpu = packs is not None and packs.native and weights[0].device.type == "cpu"
        self.packs, self._functions = packs, kernel() if on_cpu else None
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.size: int = attention.head_dim
        self.scale: float = attention.scaling
        self.eps: float = body.norm.variance_epsilon
        self.act = body.layers[0].mlp.act_fn
        self.silu = config.hidden_act in ("silu", "swish")
        self.embedding: nn.Module = body.embed_tokens
        self._state_dtype: torch.dtype = body.norm.weight.dtype
        self.dtype = self._state_dtype if self._functions is None else torch.float32
        # Torch would multiply 16 bits slowly on a CPU, and cannot multiply four.
        self._any_size = self.silu and sum(weight.numel() for weight in weights) >= _SMALLEST_MODEL
        self._any_size |= self.dtype != self._state_dtype
        self._any_size |= any(four_bit_state(weight) is not None for weight in weights)
        self.norm_D: Tensor = body.norm.weight.to(self.dtype)
        self.head = self._fused("head", head)
        # Of a trimmed draft: the tokens of the head's rows.
        self._ids_D, self._vocabulary = draft_vocabulary(model), vocabulary_size(model)
        self.rotary = body.rotary_emb
        self.device = self.norm_D.device
        self._half = self.dtype in (torch.float16, torch.bfloat16)
        self._table_N2E = torch.empty(0, 2 * self.size, dtype=self.dtype, device=self.device)
        kinds = getattr(config, "layer_types", None)
        plain = (
            "full_attention"
            if getattr(config, "sliding_window", None) is None
            else "sliding_attention"
        )
        self.layers = [
            self._layer(index, layer, plain if kinds is None else kinds[index])
            for index, layer in enumerate(body.layers[: config.num_hidden_layers])
        ]
        # One kind of mask for each of the two places of a forward.
        self.kinds = sorted({layer.kind for layer in self.layers})
        self._tied = head._parameters["weight"] is self.embedding._parameters["weight"]
        self._kernel = self._whole()

    def _layer(self, index: int, layer: Any, kind: str) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []
        norm_D, ffn_norm_D, *head_norms_E = [norm.weight.to(self.dtype) for norm in norms]
        return _Layer(
            kind=kind,
            norm_D=norm_D,
            qkv=self._fused(f"{index}.qkv", attention.q_proj, attention.k_proj, attention.v_proj),
            head_norms_E=(head_norms_E[0], head_norms_E[1]) if head_norms_E else None,
            out=self._fused(f"{index}.out", attention.o_proj),
            ffn_norm_D=ffn_norm_D,
            gate_up=self._fused(f"{index}.gate_up", mlp.gate_proj, mlp.up_proj),
            down=self._fused(f"{index}.down", mlp.down_proj),
        )

    def _fused(self, name: str, *linears: nn.Linear) -> FusedLinear:
        matrix = (
            None
            if self.packs is None
            else self.packs.matrix(name, linears, any_size=self._any_size)
        )
        return FusedLinear(linears, matrix, self.dtype)

    def _whole(self) -> "_WholeModel | None":
        """Return this model as one call of the kernel; None if the kernel does not know a part of
        it.
        """
        if self._functions is None or self.packs is None or not self.silu or len(self.kinds) > 2:
            return None
        products = [
            product
            for layer in self.layers
            for product in (layer.qkv, layer.out, layer.gate_up, layer.down)
        ]
        vectors = [
            self.norm_D,
            *(vector for layer in self.layers for vector in (layer.norm_D, layer.ffn_norm_D)),
        ]
        packed = all(product.matrix is not None for product in (self.head, *products))
        if not packed or not all(vector.is_contiguous() for vector in vectors):
            return None
        table: PackedMatrix | Tensor | None
        if isinstance(self.embedding, PackedEmbedding):
            table = self.embedding.place.matrix if self.embedding.place.whole else None
        elif self.dtype != self._state_dtype:
            # The kernel reads tables in fp32 or packed.
            table = (
                self.head.matrix
                if self._tied
                else self.packs.matrix("embedding", [self.embedding], any_size=True)
            )
        else:
            weight: Any = self.embedding.weight
            table = weight if weight.is_contiguous() else None
        return None if table is None else _WholeModel(self._functions, self, table)

    def run(
        self,
        tokens_Bq: Tensor,
        positions_Bq: Tensor,
        top_position: int,
        masks: Mapping[str, Tensor | None],
        cache: Any,
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
        rows, queries = tokens_Bq.shape
        heads, groups, size, last = self.heads, self.groups, self.size, len(self.layers)
        if self._kernel is not None and not prefill and rows * queries <= _MOST_TOKENS:
            return self._call(
                tokens_Bq, positions_Bq, top_position, masks, cache, keep_logits, hidden_layers
            )
        rope_Bq1E = F.embedding(positions_Bq, self.rotary_table(top_position)).unsqueeze(2)
        cos_Bq1E, sin_Bq1E = rope_Bq1E[..., :size], rope_Bq1E[..., size:]
        masks = {kind: self._folded(mask, queries) for kind, mask in masks.items()}
        numbers = [layer % (last + 1) for layer in hidden_layers]
        states: dict[int, Tensor] = {}
        x_XD = self.embedding(tokens_Bq).view(rows * queries, -1).to(self.dtype)
        for index, layer in enumerate(self.layers):
            if index in numbers:
                states[index] = x_XD
            h_XD = self._norm(x_XD, layer.norm_D)
            qkv_BqHE = layer.qkv(h_XD).view(rows, queries, heads + 2 * groups, size)
            qk_BqHE = qkv_BqHE[:, :, : heads + groups]
            if layer.head_norms_E is not None:
                sides = zip(qk_BqHE.split((heads, groups), dim=2), layer.head_norms_E, strict=True)
                qk_BqHE = torch.cat([self._norm(side, norm_E) for side, norm_E in sides], dim=2)
            # The sine carries the sign of the half that is rotated in.
            qk_BqHE = (qk_BqHE * cos_Bq1E).addcmul_(qk_BqHE.roll(size // 2, -1), sin_Bq1E)
            new_keys, new_values = qk_BqHE[:, :, heads:], qkv_BqHE[:, :, heads + groups :]
            keys, values = cache.layers[index].update(
                new_keys.transpose(1, 2), new_values.transpose(1, 2)
            )
            if prefill and index == last - 1 and last not in numbers:
                break  # Only the last layer's keys and values are needed.
            mixed_XD = self._attend(
                qk_BqHE[:, :, :heads].transpose(1, 2), keys, values, masks[layer.kind]
            )
            x_XD = layer.out.plus(mixed_XD, x_XD)
            gate, up = layer.gate_up.parts(self._norm(x_XD, layer.ffn_norm_D))
            gate = F.silu(gate) if self.silu else self.act(gate)
            x_XD = layer.down.plus(gate.mul_(up), x_XD)
        if last in numbers:
            x_XD = states[last] = self._norm(x_XD, self.norm_D)
        hidden = tuple(
            states[number].view(rows, queries, -1).to(self._state_dtype) for number in numbers
        )
        if prefill:
            return x_XD.new_empty(rows, 0, 0), hidden
        if 0 < keep_logits < queries:
            x_XD = x_XD.view(rows, queries, -1)[:, -keep_logits:].reshape(rows * keep_logits, -1)
        x_XD = x_XD if last in numbers else self._norm(x_XD, self.norm_D)
        logits = self.head(x_XD).view(rows, -1, sum(self.head.outputs))
        return self._over_all_tokens(logits), hidden

    def _call(
        self,
        tokens_Bq: Tensor,
        positions_Rq: Tensor,
        top_position: int,
        masks: Mapping[str, Tensor | None],
        cache: TreeCache,
        keep_logits: int,
        hidden_layers: Sequence[int],
    ) -> Forwarded:
        """Do what `run` does in one call of the kernel. IndexError for a token outside the
        vocabulary.
        """
        assert self._kernel is not None
        whole, (batch, queries) = self._kernel, tokens_Bq.shape
        numbers = [layer % (len(self.layers) + 1) for layer in hidden_layers]
        wanted = sorted(set(numbers))
        flags = (
            bytes(index in wanted for index in range(len(self.layers) + 1))
            if wanted
            else whole.nothing
        )
        kept = min(keep_logits or queries, queries)
        tokens_Bq, positions_Rq = tokens_Bq.contiguous(), positions_Rq.contiguous()
        keys_LBGPE, values_LBGPE = cache.whole(batch, self.groups, self.size, self.norm_D)
        logits = self.norm_D.new_empty(batch, kept, whole.outputs)
        states = self.norm_D.new_empty(len(wanted), batch, queries, len(self.norm_D))
        step = whole.step
        step.batch, step.queries, step.kept = batch, queries, kept
        step.tokens, step.positions = tokens_Bq.data_ptr(), positions_Rq.data_ptr()
        step.position_stride = queries if positions_Rq.shape[0] > 1 else 0
        step.rotary = self.rotary_table(top_position).data_ptr()
        step.keys, step.values, step.column = (
            keys_LBGPE.data_ptr(),
            values_LBGPE.data_ptr(),
            cache.column,
        )
        step.layer_stride, step.batch_stride, step.group_stride = keys_LBGPE.stride()[:3]
        for place, kind in enumerate(self.kinds):
            step.masks[place] = _Mask(None, 0, 0)
            if (mask := masks[kind]) is not None:
                step.masks[place] = _Mask(
                    mask.data_ptr(), mask.stride(0) if mask.shape[0] > 1 else 0, mask.stride(2)
                )
        step.states, step.logits = states.data_ptr(), logits.data_ptr()
        step.wanted = ctypes.cast(ctypes.c_char_p(flags), _POINTER)
        needed = whole.functions.scratch(ctypes.byref(whole.model), ctypes.byref(step))
        if whole.scratch.numel() < needed:
            whole.scratch = self.norm_D.new_empty(2 * needed)
        step.scratch = whole.scratch.data_ptr()
        if whole.functions.forward(ctypes.byref(whole.model), ctypes.byref(step)):
            raise IndexError(
                f"a token outside 0..{whole.model.vocabulary - 1}, the vocabulary of the embedding"
            )
        hidden = tuple(states[wanted.index(number)].to(self._state_dtype) for number in numbers)
        return self._over_all_tokens(logits), hidden

    def _over_all_tokens(self, logits: Tensor) -> Tensor:
        return logits if self._ids_D is None else to_target(logits, self._ids_D, self._vocabulary)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if self._half:
            # The model scales after rounding back to half precision.
            return F.rms_norm(x.float(), (x.shape[-1],), eps=self.eps).to(x.dtype) * weight
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps)

    def rotary_table(self, top: int) -> Tensor:
        """Return cosines and signed sines of the positions up to `top`, `[N, 2E]`; cached until
        `top` grows.
        """
        if self._table_N2E.shape[0] <= top:
            positions_1N = torch.arange(
                max(top + 1, 2 * self._table_N2E.shape[0], 256), device=self.device
            )[None]
            cos_1NE, sin_1NE = self.rotary(self.norm_D, positions_1N)
            half = self.size // 2
            sin_NE = torch.cat((-sin_1NE[0, :, :half], sin_1NE[0, :, half:]), dim=-1)
            self._table_N2E = torch.cat((cos_1NE[0], sin_NE), dim=-1)
        return self._table_N2E

    def _folds(self, mask: Tensor | None, queries: int) -> bool:
        # Query heads of one key/value head become more queries of that head, so that nothing is
        # repeated. A CPU does as well with several queries; masked CUDA kernels do not know grouped
        # heads.
        masked_on_gpu = mask is not None and self.device.type != "cpu"
        return self.heads > self.groups and (queries == 1 or masked_on_gpu)

    def _folded(self, mask: Tensor | None, queries: int) -> Tensor | None:
        if mask is None or queries == 1 or not self._folds(mask, queries):
            return mask
        ratio = self.heads // self.groups
        return mask.expand(-1, ratio, -1, -1).reshape(len(mask), 1, ratio * queries, mask.shape[3])

    def _attend(self, q_BHqE: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        rows, heads, queries, size = q_BHqE.shape
        if self._folds(mask, queries):
            q = q_BHqE.reshape(rows, self.groups, -1, size)
            mixed = F.scaled_dot_product_attention(q, keys, values, mask, scale=self.scale)
            mixed = mixed.reshape(rows, heads, queries, size)
        else:
            causal, grouped = mask is None and queries > 1, heads > self.groups
            mixed = F.scaled_dot_product_attention(
                q_BHqE, keys, values, mask, is_causal=causal, scale=self.scale, enable_gqa=grouped
            )
        return mixed.transpose(1, 2).reshape(rows * queries, -1)


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
    """The structures of one model. They hold addresses only: the `LeanForward` keeps the
    tensors.
    """

    def __init__(
        self, functions: Kernel, lean: LeanForward, embedding: PackedMatrix | Tensor
    ) -> None:
        packed = isinstance(embedding, PackedMatrix)
        table = embedding.values if isinstance(embedding, PackedMatrix) else embedding
        layers = (_LayerStruct * len(lean.layers))()
        for place, layer in enumerate(lean.layers):
            products = (layer.qkv, layer.out, layer.gate_up, layer.down)
            norms = (layer.norm_D, *(layer.head_norms_E or (None, None)), layer.ffn_norm_D)
            addresses = [None if norm is None else norm.data_ptr() for norm in norms]
            layers[place] = _LayerStruct(
                *map(_matrix, products), *addresses, lean.kinds.index(layer.kind)
            )
        self.functions, self._alive, self.scratch = functions, (layers, table), torch.empty(0)
        self.model = _Model(
            layers=ctypes.cast(layers, ctypes.POINTER(_LayerStruct)),
            count=len(lean.layers),
            head=_matrix(lean.head),
            norm=lean.norm_D.data_ptr(),
            embedding=table.data_ptr(),
            embedding_packed=packed,
            embedding_kind=embedding.kind if isinstance(embedding, PackedMatrix) else 0,
            vocabulary=embedding.outputs if isinstance(embedding, PackedMatrix) else len(embedding),
            width=len(lean.norm_D),
            heads=lean.heads,
            groups=lean.groups,
            size=lean.size,
            eps=lean.eps,
            scale=lean.scale,
        )
        self.step, self.outputs, self.nothing = (
            _Step(),
            self.model.head.outputs,
            bytes(len(lean.layers) + 1),
        )


def _matrix(product: FusedLinear) -> _Matrix:
    assert product.matrix is not None
    matrix, bias_O = product.matrix, product.bias_O
    return _Matrix(
        matrix.values.data_ptr(),
        None if bias_O is None else bias_O.data_ptr(),
        matrix.outputs,
        matrix.kind,
    )
