"""The forward of a LLaMA as one call of the kernel (`forward.c`): its weights and the cache, handed over as pointers.

Legend: B rows, q queries per row, X = B * q, D hidden size, E head size, V vocabulary, N positions, P slots read.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decode.native import Kernel, PackedMatrix, kind_of

# More tokens than this in one forward are the kernel's matrix by matrix.
MOST_TOKENS = 256

_SIZE, _POINTER = ctypes.c_size_t, ctypes.c_void_p


class _Matrix(ctypes.Structure):
    _fields_ = (("values", _POINTER), ("bias", _POINTER), ("outputs", _SIZE), ("kind", _SIZE))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Matrix) for name in ("qkv", "out", "gate_up", "down")),
        *((name, _POINTER) for name in ("norm", "query_norm", "key_norm", "ffn_norm")),
        ("mask", _SIZE),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(_Layer)),
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


@dataclass(frozen=True)
class Product:
    """A packed matrix and its bias."""

    matrix: PackedMatrix
    bias_O: Tensor | None

    def struct(self) -> _Matrix:
        """The same as the C structure that `forward.c` reads."""
        matrix = self.matrix
        return _Matrix(matrix.values.data_ptr(), _address(self.bias_O), matrix.outputs, kind_of(matrix))


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer; `mask` is the index of its mask among those of a forward."""

    qkv: Product
    out: Product
    gate_up: Product
    down: Product
    norm_D: Tensor
    query_norm_E: Tensor | None
    key_norm_E: Tensor | None
    ffn_norm_D: Tensor
    mask: int


class LlamaKernel:
    """The weights of one model; valid until a weight changes. `embedding` is packed, or an ordinary `[V, D]`."""

    def __init__(
        self,
        functions: Kernel,
        layers: Sequence[LayerWeights],
        head: Product,
        norm_D: Tensor,
        embedding: PackedMatrix | Tensor,
        *,
        heads: int,
        groups: int,
        size: int,
        eps: float,
        scale: float,
    ) -> None:
        self._functions = functions
        # The structures hold addresses only.
        self._alive = (tuple(layers), head, norm_D, embedding)
        self._layers = (_Layer * len(layers))(*map(_layer, layers))
        packed = isinstance(embedding, PackedMatrix)
        table = embedding.values if isinstance(embedding, PackedMatrix) else embedding
        vocabulary = embedding.outputs if isinstance(embedding, PackedMatrix) else embedding.shape[0]
        self._model = _Model(
            ctypes.cast(self._layers, ctypes.POINTER(_Layer)),
            len(layers),
            head.struct(),
            norm_D.data_ptr(),
            table.data_ptr(),
            packed,
            kind_of(embedding) if isinstance(embedding, PackedMatrix) else 0,
            vocabulary,
            norm_D.shape[0],
            heads,
            groups,
            size,
            eps,
            scale,
        )
        self.vocabulary, self.outputs, self.width = vocabulary, head.matrix.outputs, norm_D.shape[0]
        self._step = _Step()
        self._scratch = torch.empty(0)
        self._unwanted = bytes(len(layers) + 1)

    def run(
        self,
        tokens_Bq: Tensor,
        positions_Rq: Tensor,
        rotary_N2E: Tensor,
        keys_LBGPE: Tensor,
        values_LBGPE: Tensor,
        column: int,
        masks: Sequence[Tensor | None],
        kept: int,
        wanted: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """Logits `[B, kept, V]` and the hidden states `wanted` (numbers of layers, ascending), `[number, B, q, D]`.

        Keys and values of the tokens are written from slot `column` on. IndexError for a token outside the vocabulary.
        """
        batch, queries = tokens_Bq.shape
        tokens_Bq, positions_Rq = tokens_Bq.contiguous(), positions_Rq.contiguous()
        logits = torch.empty(batch, kept, self.outputs)
        states = torch.empty(len(wanted), batch, queries, self.width)
        flags = self._unwanted
        if wanted:
            flags = bytes(index in wanted for index in range(len(flags)))
        step = self._step
        step.batch, step.queries, step.kept = batch, queries, kept
        step.tokens, step.positions = tokens_Bq.data_ptr(), positions_Rq.data_ptr()
        step.position_stride = queries if positions_Rq.shape[0] > 1 else 0
        step.rotary = rotary_N2E.data_ptr()
        step.keys, step.values, step.column = keys_LBGPE.data_ptr(), values_LBGPE.data_ptr(), column
        step.layer_stride, step.batch_stride, step.group_stride = keys_LBGPE.stride()[:3]
        for place, mask in enumerate(masks):
            if mask is None:
                step.masks[place] = _Mask(None, 0, 0)
            else:
                step.masks[place] = _Mask(mask.data_ptr(), mask.stride(0) if mask.shape[0] > 1 else 0, mask.stride(2))
        step.states, step.logits = states.data_ptr(), logits.data_ptr()
        step.wanted = ctypes.cast(ctypes.c_char_p(flags), _POINTER)
        needed = self._functions.scratch(ctypes.byref(self._model), ctypes.byref(step))
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(2 * needed)
        step.scratch = self._scratch.data_ptr()
        if self._functions.forward(ctypes.byref(self._model), ctypes.byref(step)):
            raise IndexError(f"a token outside 0..{self.vocabulary - 1}, the vocabulary of the embedding")
        return logits, states


def _layer(weights: LayerWeights) -> _Layer:
    products = (weights.qkv, weights.out, weights.gate_up, weights.down)
    norms = (weights.norm_D, weights.query_norm_E, weights.key_norm_E, weights.ffn_norm_D)
    return _Layer(*(product.struct() for product in products), *map(_address, norms), weights.mask)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
