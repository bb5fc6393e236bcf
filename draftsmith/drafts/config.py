"""Options of `draftsmith export` and `doctor`; reading them needs no torch."""

from pathlib import Path
from typing import Literal

from draftsmith.core.errors import InputError
from draftsmith.core.io import check_out, read_json
from draftsmith.core.options import (
    Dtype,
    Model,
    Out,
    RevisionOptions,
    Text,
    options,
)
from draftsmith.drafts.draft_sources import check_sources, is_copying

# Kinds of draft that draft a block of tokens in one forward.
BLOCK_KINDS = ("dflash", "dspark", "jetspec")
Format = Literal["hf", "eagle", "sglang", "speculators", "medusa", "dflash", "mtp", "gguf"]
# Types of matrices that the gguf package rounds to.
GGUF_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")


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
    """Type of the weights on disk; auto is the draft's own."""
    type: Text | None = None
    """gguf: llama.cpp's type of the matrices: F32, F16, BF16, Q8_0, Q5_1, Q5_0, Q4_1 or Q4_0.
    Default: by `--dtype`.
    """

    def __post_init__(self) -> None:
        if self.type is not None:
            self._check_type(self.type)
        path = Path(self.out)
        check_out(path)
        record = path / "draftsmith.json"
        exported = record.is_file() and "export" in read_json(record, "the record of an export")
        if path.is_file() or (path.is_dir() and any(path.iterdir()) and not exported):
            raise InputError(
                f"out: {self.out} holds files that no export wrote; choose another directory"
            )

    def _check_type(self, kind: str) -> None:
        if self.format != "gguf" or self.dtype != "auto":
            reason = "is for --format gguf" if self.format != "gguf" else "stands for --dtype"
            raise InputError(f"type: {reason}; leave one of them out")
        if kind not in GGUF_TYPES:
            known = ", ".join(GGUF_TYPES)
            raise InputError(
                f"type: the gguf package writes no {kind}; take {known}, or `--type F16` and then "
                f"llama.cpp's own `llama-quantize {self.out}/model.gguf {kind}.gguf {kind}`"
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

    def __post_init__(self) -> None:
        check_sources([self.draft])
        if self.target is None and not self.reads_nothing:
            raise InputError("target: is missing; name the model that the draft is for")

    @property
    def reads_nothing(self) -> bool:
        """Whether the draft has no weights, so that no model is read."""
        return is_copying(self.draft)
