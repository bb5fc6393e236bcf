"""Options of `draftsmith export` and `doctor`; reading them needs no torch."""

from pathlib import Path
from typing import Literal

from draftsmith.core.errors import InputError
from draftsmith.core.io import check_out, read_json
from draftsmith.core.options import (
    Dtype,
    File,
    Model,
    Out,
    RevisionOptions,
    options,
)
from draftsmith.drafts.draft_sources import check_sources, is_copying

# Kinds of draft that draft a block of tokens in one forward.
BLOCK_KINDS = ("dflash", "dspark", "jetspec")
Format = Literal["hf", "eagle", "sglang", "speculators", "medusa", "dflash", "mtp", "gguf"]


@options
class ExportConfig(RevisionOptions):
    """Write a draft in the layout that another engine reads, and read it back."""

    draft: Model
    """The draft: a local directory or hub name of a language model or a head."""
    format: Format
    """hf: a directory for transformers, vLLM, SGLang, onnxruntime-genai's builder. eagle: EAGLE and
    EAGLE-3 heads as their authors' code and vLLM read them. sglang: the same heads for SGLang.
    speculators: EAGLE-3 heads, DFlash and DSpark for vLLM. medusa: Medusa heads for vLLM. dflash:
    block drafters for vLLM. mtp: the target with an MTP head in its checkpoint. gguf: llama.cpp.
    """
    out: Out
    """The directory to write; an earlier export there is replaced."""
    target: Model | None = None
    """The target of a head. Default: the one in the record of the checkpoint."""
    dtype: Dtype = "auto"
    """Type of the weights on disk: float32, bfloat16, float16; auto: the draft's own."""

    def __post_init__(self) -> None:
        path = Path(self.out)
        check_out(path)
        record = path / "draftsmith.json"
        exported = record.is_file() and "export" in read_json(record, "the record of an export")
        if path.is_file() or (path.is_dir() and any(path.iterdir()) and not exported):
            raise InputError(
                f"out: {self.out} holds files that no export wrote; choose another directory"
            )


@options
class DoctorConfig(RevisionOptions):
    """Print which engines will load a target with a draft, which will not and why, and the commands
    that serve it.
    """

    target: Model | None = None
    """The target: a local directory or hub name. Only a method without weights needs none."""
    draft: Model
    """The draft: a local directory or hub name of a language model or a head; or a method without
    weights, prompt_lookup, lookahead or prompt_lookup+MODEL.
    """
    plan: File | None = None
    """A plan of `draftsmith plan`, for the number of drafted tokens in the commands. Default: 4
    tokens.
    """

    def __post_init__(self) -> None:
        check_sources([self.draft])
        if self.target is None and not self.reads_nothing:
            raise InputError("target: is missing; name the model that the draft is for")

    @property
    def reads_nothing(self) -> bool:
        """Whether the draft has no weights, so that no model is read."""
        return is_copying(self.draft)
