"""What an export starts from, and what proves the result."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from drafts.draft_vocabulary import attach_draft_vocabulary, read_draft_vocabulary
from drafts.heads import head_kind, load_head
from drafts.load import Draft, check_draft_vocabulary, kind_of
from draftsmith_core.errors import InputError, RunError
from draftsmith_core.models import DTYPES, load_model, vocabulary_size
from draftsmith_core.runs import read_record
from draftsmith_core.tokenization import Tokenizer, find_tokenizer

# The largest difference of an engine's logits from ours.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Source:
    """A draft to export, its weights rounded to `dtype` and held in fp32."""

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
    """What shows that an engine reads an export as it was meant. `engine` is None if only the layout was compared."""

    engine: str | None
    how: str
    max_difference: float | None = None
    """The largest difference of the engine's logits from ours, in fp32."""


def compared(out: Path, engine: str, theirs: Tensor, ours: Tensor, how: str) -> Proof:
    """The proof that an engine computes our logits from `out`. Raises RunError if it does not."""
    difference = float((theirs - ours).abs().max())
    if not difference <= TOLERANCE:
        raise RunError(f"{out}: {engine} computes other logits from it (off by {difference:.2g}); nothing was written")
    return Proof(engine, f"loaded it; logits of {ours.shape[1]} {how}", difference)


@torch.no_grad()
def load_source(
    name: str, target_name: str | None = None, dtype: str = "auto", trust_remote_code: bool = False
) -> Source:
    """Load the draft, and the target of a head. dtype "auto" is the draft's own; of a head, its target's."""
    kind = head_kind(name)
    options: Any = {"device": "cpu", "dtype": "float32", "trust_remote_code": trust_remote_code}
    target, tokenizer = None, None
    target_name = target_name or (None if kind is None else read_record(Path(name)).get("target"))
    if target_name is not None:
        target, tokenizer = load_model(target_name, **options), find_tokenizer(target_name, trust_remote_code)
    draft: Draft
    if kind is not None:
        if target is None:
            raise InputError(f"--target: is missing; {name} is a head ({kind}), which belongs to one target")
        draft = load_head(name, target)
    else:
        draft = load_model(name, **options, quantize="none")
        if (ids_D := read_draft_vocabulary(name, vocabulary_size(draft))) is not None:
            attach_draft_vocabulary(draft, ids_D)
        if target is not None and tokenizer is not None:
            check_draft_vocabulary(name, draft, target, tokenizer, trust_remote_code)
        tokenizer = find_tokenizer(name, trust_remote_code) or tokenizer
        target = None
    if dtype == "auto":
        model = name if kind is None else str(target_name)
        config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
        weights_dtype = getattr(config.get_text_config(decoder=True), "dtype", None) or torch.float32
    else:
        weights_dtype = DTYPES[dtype]
    # In fp32 with the values that `dtype` will hold on disk, so that proofs compare what is written.
    for parameter in draft.parameters():
        parameter.copy_(parameter.to(weights_dtype))
    return Source(name, draft, weights_dtype, tokenizer, target, target_name)


def probe_ids(model: PreTrainedModel, count: int = 24) -> Tensor:
    """Token ids `[1, T]` spread over the vocabulary, for comparing logits."""
    size = vocabulary_size(model)
    return (torch.arange(count) * max(1, size // count) + 7)[None] % size
