"""The forward of a whole model of a known family, or of a draft head, as one call of the kernel
(`native/forward.c`).

Legend: B rows, q queries per row, R = B or 1, L layers, D hidden size, E head size, G key/value
heads, P slots the attention reads, N positions, V vocabulary.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from draftsmith.core.errors import InputError
from draftsmith.decode.cache import CachePlace
from draftsmith.decode.expected import expect
from draftsmith.decode.families import ACTIVATIONS, LLAMA, Family
from draftsmith.decode.native import Kernel, PackedMatrix, address, structures
from draftsmith.decode.packed_weights import FusedLinear, Packs

# Logits, and the hidden states of the layers asked for.
Forwarded: TypeAlias = tuple[Tensor, tuple[Tensor, ...]]
# What is added to the scores of attention, by kind of layer; None hides nothing.
Masks: TypeAlias = Mapping[str, Tensor | None]
# Limit of tokens per forward: prompts are read in parts, and the step of a larger batch is torch's.
MOST_TOKENS = 256
# From this many parameters on, matrices of any size are packed: a forward is then one call of the
# kernel.
SMALLEST_MODEL = 1 << 18


def joined(parts: Sequence[Sequence[Tensor]], dim: int = 0) -> tuple[Tensor, ...]:
    """Join the hidden states of several forwards, layer by layer."""
    return tuple(torch.cat(layer, dim=dim) for layer in zip(*parts, strict=True))


@dataclass(frozen=True)
class Sizes:
    """Heads and constants that all layers share, by the names of `struct model` in
    `native/model.h`. heads: query heads. groups: key/value heads. size: of a head. turned: the
    first elements of a head that are rotated.
    """

    heads: int
    groups: int
    size: int
    turned: int
    scale: float
    eps: float
    activation: int = ACTIVATIONS["silu"]
    gated: bool = True
    parallel: bool = False
    interleaved: bool = False
    embedding_scale: float = 1.0
    attention_cap: float = 0.0
    logit_cap: float = 0.0


@dataclass(frozen=True)
class Norm:
    """An RMS norm; with a bias, a layer norm."""

    weight_D: Tensor
    bias_D: Tensor | None


@dataclass(frozen=True)
class Layer:
    """One decoder layer: its norms and its products, by the names of `struct layer` in
    `native/model.h`. kind: of its mask and rotary table. query_norm, key_norm: `[E]`. out_norm,
    down_norm: `[D]`, of what these products add to the state.
    """

    kind: str
    norm: Norm | None
    qkv: FusedLinear
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: FusedLinear
    out_norm: Tensor | None
    ffn_norm: Norm
    gate_up: FusedLinear
    down: FusedLinear
    down_norm: Tensor | None

    @property
    def packed(self) -> bool:
        products = (self.qkv, self.out, self.gate_up, self.down)
        return all(product.matrix is not None for product in products)


@dataclass(frozen=True)
class LayerMaker:
    """Turns modules of a model into what its forward multiplies. any_size: pack small matrices too.
    dtype: of products. family: names of the modules.
    """

    packs: Packs
    any_size: bool
    dtype: torch.dtype
    family: Family = LLAMA

    def fused(self, linears: Sequence[nn.Module]) -> FusedLinear:
        """Linear layers with the same input."""
        matrix = self.packs.matrix(linears, any_size=self.any_size)
        return FusedLinear(linears, matrix, self.dtype)

    def vector(self, norm: Any) -> Tensor:
        """The weight of a norm."""
        weight: Tensor = norm.weight
        offset = self.family.norm_offset
        return (weight.detach().to(self.dtype) + offset).contiguous()

    def norm(self, module: Any) -> Norm:
        """An RMS norm or a layer norm."""
        bias = getattr(module, "bias", None)
        return Norm(
            weight_D=self.vector(module),
            bias_D=None if bias is None else bias.detach().to(self.dtype).contiguous(),
        )

    def layer(self, layer: nn.Module, kind: str, *, normed: bool = True) -> Layer:
        """A decoder layer of the family. normed: False if it reads its input as it is."""
        family = self.family
        names = {name for name, _ in layer.named_modules()}

        # Modules are not kept: packed ones take their place.
        def fused(parts: Sequence[str]) -> FusedLinear:
            return self.fused([layer.get_submodule(part) for part in parts])

        def weight(name: str | None) -> Tensor | None:
            return self.vector(layer.get_submodule(name)) if name and name in names else None

        return Layer(
            kind=kind,
            norm=self.norm(layer.get_submodule(family.norm)) if normed else None,
            qkv=fused(family.qkv),
            query_norm=weight(family.query_norm),
            key_norm=weight(family.key_norm),
            out=fused([family.out]),
            out_norm=weight(family.out_norm),
            ffn_norm=self.norm(layer.get_submodule(family.ffn_norm)),
            gate_up=fused(family.up),
            down=fused([family.down]),
            down_norm=weight(family.down_norm),
        )


@dataclass(frozen=True)
class Opening:
    """What a head makes of the embedding of a token and the feature before it, for its first layer.

    EAGLE: `fc` of both. EAGLE-3, without `fc`: the feature goes on, normed if `feature_normed`, and
    the layer reads both normed. A block drafter, without all: the embedding goes on.
    """

    fc: FusedLinear | None = None
    embedding_norm: Tensor | None = None
    feature_norm: Tensor | None = None
    feature_normed: bool = False


@dataclass(frozen=True)
class HeadInputs:
    """Embeddings and features of the tokens of a head's forward, contiguous fp32 `[B, q, D]`.

    A block drafter has embeddings alone in a block, and features alone in the text before it, whose
    keys and values are cached.
    """

    embedded_BqD: Tensor | None
    features_BqD: Tensor | None


class KernelForward:
    """One model whose products are all packed. The structures hold addresses only: the attributes
    keep the tensors.
    """

    def __init__(
        self,
        functions: Kernel,
        layers: Sequence[Layer],
        sizes: Sizes,
        *,
        norm: Norm | None,
        head: FusedLinear | None,
        embedding: PackedMatrix | Tensor | None = None,
        places_ND: Tensor | None = None,
        opening: Opening | None = None,
    ) -> None:
        """head: None for no logits. embedding: packed, or fp32; None with an `opening`. places_ND:
        learned positions, fp32.
        """
        self.functions = functions
        self.layers = layers
        self._holds = (norm, head, embedding, places_ND, opening)
        self._like = layers[0].ffn_norm.weight_D
        self.width = len(self._like)
        # One for each of the two places of a forward.
        self.kinds = sorted({layer.kind for layer in layers})
        self._scratch = torch.empty(0)
        self._step = structures.Step()
        self._layers = (structures.Layer * len(layers))()
        for index, layer in enumerate(layers):
            parts = vars(layer) | {"kind": self.kinds.index(layer.kind)}
            self._layers[index] = _filled(structures.Layer, parts)
        parts = {"head": head, "norm": norm, "places": places_ND, "width": self.width}
        self._model = _filled(structures.Model, vars(sizes) | parts)
        self._model.layers = self._layers
        self._model.count = len(layers)
        self._model.place_count = 0 if places_ND is None else len(places_ND)
        if opening is not None:
            self._opening = _filled(structures.Opening, vars(opening))
            self._model.opening = ctypes.pointer(self._opening)
        elif isinstance(embedding, PackedMatrix):
            self._model.embedding = address(embedding.values)
            self._model.embedding_packed = True
            self._model.embedding_kind = embedding.kind
            self._model.vocabulary = embedding.outputs
        elif embedding is not None:
            self._model.embedding = address(embedding)
            self._model.vocabulary = len(embedding)

    def run(
        self,
        tokens_Bq: Tensor,
        positions_Rq: Tensor,
        rotary: Mapping[str, Tensor],
        masks: Masks,
        place: CachePlace,
        kept: int,
        numbers: Sequence[int],
        inputs: HeadInputs | None = None,
        state_dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, list[Tensor]]:
        """Return logits of the last `kept` queries and the hidden states `numbers`, of which L is
        the last layer's output and L + 1 that after the last norm; see `LeanForward.run`.

        inputs: with an `opening`, instead of the tokens' embeddings. state_dtype: of the hidden
        states. rotary: the table `[N, 2E]` by kind of layer. IndexError for a token outside the
        vocabulary, and for a position beyond the learned ones or the rotary table.
        """
        self._check(tokens_Bq, positions_Rq, place)
        batch, queries = tokens_Bq.shape
        wanted = sorted(set(numbers))
        flags = bytes(number in wanted for number in range(len(self.layers) + 2))
        tokens_Bq = tokens_Bq.contiguous()
        positions_Rq = positions_Rq.contiguous()
        logits_BqV = self._like.new_empty(batch, kept, self._model.head.outputs)
        states = self._like.new_empty(len(wanted), batch, queries, self.width)
        step = self._step
        step.batch = batch
        step.queries = queries
        step.kept = kept
        step.tokens = tokens_Bq.data_ptr()
        step.positions = positions_Rq.data_ptr()
        step.position_stride = queries if len(positions_Rq) > 1 else 0
        if inputs is not None:
            step.embedded = address(inputs.embedded_BqD)
            step.features = address(inputs.features_BqD)
            step.remembers = inputs.embedded_BqD is None
        step.keys = place.keys_LBHCE.data_ptr()
        step.values = place.values_LBHCE.data_ptr()
        step.column = place.column
        step.layer_stride, step.batch_stride, step.group_stride = place.keys_LBHCE.stride()[:3]
        for number, kind in enumerate(self.kinds):
            shared = step.kinds[number]
            shared.rotary = rotary[kind].data_ptr()
            shared.rotary_count = len(rotary[kind])
            _show(shared, masks[kind], batch, queries, place.column + queries)
        step.states = states.data_ptr()
        step.logits = logits_BqV.data_ptr()
        step.wanted = ctypes.cast(ctypes.c_char_p(flags), ctypes.c_void_p)
        model_pointer = ctypes.byref(self._model)
        step_pointer = ctypes.byref(step)
        needed = self.functions.scratch(model_pointer, step_pointer)
        if self._scratch.numel() < needed:
            self._scratch = self._like.new_empty(2 * needed)
        step.scratch = self._scratch.data_ptr()
        if self.functions.forward(model_pointer, step_pointer):
            raise IndexError(
                f"a token outside 0..{self._model.vocabulary - 1}, the vocabulary of the "
                "embedding, or a position beyond the learned ones or the rotary table"
            )
        by_number = dict(zip(wanted, states.to(state_dtype).unbind(), strict=True))
        return logits_BqV, [by_number[number] for number in numbers]

    def _check(self, tokens_Bq: Tensor, positions_Rq: Tensor, place: CachePlace) -> None:
        """Raise InputError for tensors of other shapes than the kernel reads."""
        batch, queries = tokens_Bq.shape
        slots = place.keys_LBHCE.shape[3]
        end = place.column + queries
        if end > slots:
            raise InputError(f"cache: {end} slots are needed, and there are {slots}")
        cached = (len(self.layers), batch, self._model.groups, slots, self._model.size)
        positions = min(len(positions_Rq), batch)
        expect("tokens_Bq", tokens_Bq, (batch, queries), torch.long)
        expect("positions_Rq", positions_Rq, (positions, queries), torch.long)
        expect("keys_LBHCE", place.keys_LBHCE, cached, torch.float32)
        expect("values_LBHCE", place.values_LBHCE, cached, torch.float32)


def _show(
    shared: structures.Kind, mask: Tensor | None, batch: int, queries: int, slots: int
) -> None:
    """Let layers of a kind have this mask."""
    shared.mask = address(mask)
    if mask is not None:
        expect("mask", mask, (min(len(mask), batch), 1, queries, slots), torch.float32)
        shared.batch_stride = mask.stride(0) if len(mask) > 1 else 0
        shared.query_stride = mask.stride(2)


def causal_mask(like: Tensor, queries: int, slots: int) -> Tensor:
    """The additive mask `[1, 1, q, P]` of the last `queries` of `slots` tokens."""
    hidden_qP = like.new_full((queries, slots), -torch.inf)
    return hidden_qP.triu_(slots - queries + 1)[None, None]


def _filled(structure: Callable[..., Any], parts: Mapping[str, object]) -> Any:
    """A structure with these parts, by its names for them; what is None stays zero."""
    given = {name: _field(part) for name, part in parts.items() if part is not None}
    return structure(**given)


def _field(part: object) -> object:
    if isinstance(part, Norm):
        return structures.Norm(address(part.weight_D), address(part.bias_D))
    if isinstance(part, FusedLinear):
        matrix: Any = part.matrix
        return structures.Matrix(
            address(matrix.values), address(part.bias_O), matrix.outputs, matrix.kind
        )
    return address(part) if isinstance(part, Tensor) else part
