"""What an export starts from, and what it can say about its own correctness."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from drafts.heads.store import write_tensors
from drafts.layouts.shapes import Shapes
from drafts.load import Draft, kind_of
from draftsmith_core.errors import InputError, RunError
from draftsmith_core.tokenization import Tokenizer

# The largest difference of an engine's logits from ours.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Source:
    """A draft that was loaded for export, its weights already rounded to `dtype` and held in fp32."""

    name: str
    draft: Draft
    dtype: torch.dtype
    tokenizer: Tokenizer | None
    target: PreTrainedModel | None = None
    target_name: str | None = None

    @property
    def kind(self) -> str:
        """`draft` for a language model, else the kind of head."""
        return kind_of(self.draft)


@dataclass(frozen=True)
class Proof:
    """What shows that an export is read as it was meant: by which engine, or None for its published layout alone."""

    engine: str | None
    how: str
    max_difference: float | None = None
    """The largest difference of its logits to ours, in fp32, where they were compared."""


Writer = Callable[[Source, Path], Proof]


def language_model(source: Source, form: str) -> PreTrainedModel:
    """The draft, or InputError where it is a head."""
    if isinstance(source.draft, PreTrainedModel):
        return source.draft
    forms = {"eagle": "eagle or sglang", "eagle3": "eagle, sglang, speculators or gguf", "medusa": "medusa"}
    instead = forms.get(source.kind)
    more = f"use {instead}" if instead else "no other engine reads such heads"
    raise InputError(f"--format {form}: {source.name} is a head ({source.kind}), not a language model; {more}")


def check_plain(source: Source, form: str, engine: str) -> None:
    """InputError where the target does to its logits what a head's layout has no word for."""
    assert not isinstance(source.draft, PreTrainedModel)
    projection = source.draft.borrowed.projection
    for found, what in (
        (projection.softcap is not None, f"caps its logits at {projection.softcap}"),
        (projection.scale != 1, f"scales its logits by {projection.scale:g}"),
        (projection.bias_V is not None and source.kind != "eagle3", "has a bias in its output projection"),
    ):
        if found:
            raise InputError(
                f"--format {form}: the target {what}, which this layout cannot say, so {engine} would compute other "
                f"logits; use the head here, or a draft that is a language model"
            )


def head_tensors(source: Source) -> dict[str, Tensor]:
    """The head's own tensors in the dtype of the export; masks and offsets stay whole numbers."""
    state = source.draft.state_dict()
    return {n: t.to(source.dtype) if t.is_floating_point() else t for n, t in state.items()}


def write_layout(
    out: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], expected: Shapes, readers: str
) -> Proof:
    """Write `config.json` and `model.safetensors`, checked by `check_layout`. readers: "vLLM reads", for the proof."""
    write_tensors(out, tensors, config)
    count = check_layout(out / "model.safetensors", expected)
    return Proof(None, f"published layout: names and shapes of {count} tensors are those that {readers}")


def check_layout(file: Path, expected: Shapes) -> int:
    """The number of tensors in a file whose names and shapes are exactly those that an engine reads.

    RunError otherwise: engines skip a name that they do not know without a word, so it must not be written.
    """
    with safe_open(file, framework="pt") as opened:
        there = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    for name in sorted(there.keys() | expected.keys()):
        if there.get(name) != expected.get(name):
            raise RunError(f"{file}: '{name}' is {there.get(name)} and the engine reads {expected.get(name)}")
    return len(there)


def compared(out: Path, engine: str, theirs: Tensor, ours: Tensor, how: str) -> Proof:
    """The proof that an engine computes our logits from what was written to `out`; RunError where it does not."""
    difference = float((theirs - ours).abs().max())
    if not difference <= TOLERANCE:
        raise RunError(f"{out}: {engine} computes other logits from it (off by {difference:.2g}); nothing was written")
    return Proof(engine, f"loaded it; logits of {ours.shape[1]} {how}", difference)
