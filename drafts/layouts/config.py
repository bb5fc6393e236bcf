"""Options of `draftsmith export`, without torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from draftsmith_core.errors import InputError
from draftsmith_core.io import check_dir_replaceable, read_json
from draftsmith_core.option_types import check_types

Format = Literal["hf", "eagle", "sglang", "speculators", "medusa", "gguf"]


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Write a draft in the layout that another engine reads, and say how that was proven."""

    draft: str
    """The draft: a local directory or hub name of a language model, or a directory of a head."""
    format: Format
    """hf: a directory for transformers, vLLM, SGLang, onnxruntime-genai's builder. eagle: EAGLE and EAGLE-3 heads as
    their authors' code and vLLM read them. sglang: the same heads for SGLang. speculators: EAGLE-3 heads for vLLM.
    medusa: Medusa heads for vLLM. gguf: one file for llama.cpp."""
    out: str
    """The directory to write; an earlier export there is replaced."""
    target: str | None = None
    """The target of a head. Default: the one in the record of the checkpoint."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of the weights on disk; auto: as the draft's are."""
    trust_remote_code: bool = False
    """Run model code that comes with a checkpoint."""

    def __post_init__(self) -> None:
        check_types(self)
        path = Path(self.out)
        if path.is_file():
            raise InputError(f"out: {self.out} is a file; name a directory")
        if path.resolve() == Path(self.draft).resolve():
            raise InputError(f"out: {self.out} is the draft itself; choose another directory")
        check_dir_replaceable(path, "--out")
        record = path / "draftsmith.json"
        earlier = record.is_file() and "export" in read_json(record, "the record of an export")
        if path.is_dir() and any(path.iterdir()) and not earlier:
            raise InputError(f"out: {self.out} holds files that no export wrote; choose another directory")
