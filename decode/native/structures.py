"""The structures of `model.h`, field by field; loading the kernel compares their sizes."""

import ctypes

_SIZE = ctypes.c_size_t
_POINTER = ctypes.c_void_p


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class Matrix(ctypes.Structure):
    """A packed matrix, and the bias of its product."""

    _fields_ = _fields(_POINTER, "values bias") + _fields(_SIZE, "outputs kind")


class Norm(ctypes.Structure):
    """Weight and bias of a norm."""

    _fields_ = _fields(_POINTER, "weight bias")


class Layer(ctypes.Structure):
    """A layer."""

    _fields_ = (
        *_fields(Matrix, "qkv out gate_up down"),
        *_fields(Norm, "norm ffn_norm"),
        *_fields(_POINTER, "query_norm key_norm out_norm down_norm"),
        ("kind", _SIZE),
    )


class Opening(ctypes.Structure):
    """What a head makes of embedding and feature."""

    _fields_ = (
        ("fc", Matrix),
        *_fields(_POINTER, "embedding_norm feature_norm"),
        ("feature_normed", _SIZE),
    )


class Model(ctypes.Structure):
    """A model."""

    _fields_ = (
        ("layers", ctypes.POINTER(Layer)),
        ("count", _SIZE),
        ("head", Matrix),
        ("norm", Norm),
        ("opening", ctypes.POINTER(Opening)),
        ("embedding", _POINTER),
        *_fields(_SIZE, "embedding_packed embedding_kind vocabulary"),
        ("places", _POINTER),
        *_fields(_SIZE, "place_count width heads groups size turned"),
        *_fields(_SIZE, "activation gated parallel interleaved"),
        *_fields(ctypes.c_float, "eps scale embedding_scale attention_cap logit_cap"),
    )


class Kind(ctypes.Structure):
    """What layers of one kind share: what is added to their scores, and the rotary table."""

    _fields_ = (
        ("mask", _POINTER),
        *_fields(_SIZE, "batch_stride query_stride"),
        ("rotary", _POINTER),
        ("rotary_count", _SIZE),
    )


class Step(ctypes.Structure):
    """One forward."""

    _fields_ = (
        *_fields(_SIZE, "batch queries kept"),
        *_fields(_POINTER, "tokens positions embedded features"),
        *_fields(_SIZE, "remembers position_stride"),
        *_fields(_POINTER, "keys values"),
        *_fields(_SIZE, "layer_stride batch_stride group_stride column"),
        ("kinds", Kind * 2),
        *_fields(_POINTER, "states wanted logits scratch"),
    )


# In the order of `draftsmith_sizes`.
SHARED = (Matrix, Norm, Layer, Opening, Model, Kind, Step)
