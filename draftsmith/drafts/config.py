"""Options of `draftsmith export`, `doctor` and `merge`; reading them needs no torch."""

from pathlib import Path
from typing import Literal

from draftsmith.core.errors import InputError
from draftsmith.core.io import check_out, read_json
from draftsmith.core.options import CodeOptions, Out, RevisionOptions, options

# Kinds of draft that draft a block of tokens in one forward.
BLOCK_KINDS = ("dflash", "dspark", "jetspec")
Format = Literal["hf", "eagle", "sglang", "speculators", "medusa", "dflash", "mtp", "gguf"]


@options
class ExportConfig(RevisionOptions):
    """Write a draft in the layout that another engine reads, and read it back."""

    draft: str
    """The draft: a local directory or hub name of a language model or a head."""
    format: Format
    """hf: a directory for transformers, vLLM, SGLang, onnxruntime-genai's builder. eagle: EAGLE and
    EAGLE-3 heads as their authors' code and vLLM read them. sglang: the same heads for SGLang.
    speculators: EAGLE-3 heads, DFlash and DSpark for vLLM. medusa: Medusa heads for vLLM. dflash:
    block drafters for vLLM. mtp: the target with an MTP head in its checkpoint. gguf: llama.cpp.
    """
    out: Out
    """The directory to write; an earlier export there is replaced."""
    target: str | None = None
    """The target of a head. Default: the one in the record of the checkpoint."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights on disk; auto: the draft's own."""

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

    target: str
    """The target: a local directory or hub name."""
    draft: str
    """The draft: a local directory or hub name of a language model or a head."""
    plan: str | None = None
    """A plan of `draftsmith plan`, for the number of drafted tokens in the commands. Default: 4
    tokens.
    """


@options
class MergeConfig(CodeOptions):
    """Add up the weights of drafts of one shape: base + sum of weight x (draft - base).

    One draft with a base is an interpolation between the two (WiSE-FT, arXiv 2109.01903), several
    without a base and without weights are a uniform soup (arXiv 2203.05482), several with a base
    are task vectors (arXiv 2212.04089).
    """

    out: Out
    """The merged draft: an ordinary checkpoint directory."""
    draft: list[str]
    """The drafts, each MODEL or MODEL=WEIGHT. Default: equal weights that add up to 1."""
    base: str | None = None
    """The draft that the others were trained from. Without it the weights must add up to 1."""

    def __post_init__(self) -> None:
        check_out(Path(self.out))
        self.weights()

    def weights(self) -> list[tuple[str, float]]:
        """(model, weight) of every draft. Raises InputError if weights are missing or do not add
        up.
        """
        drafts = [_source_and_weight(word) for word in self.draft]
        weights = [weight for _, weight in drafts if weight is not None]
        if weights and len(weights) < len(drafts):
            without = next(source for source, weight in drafts if weight is None)
            raise InputError(
                f"--draft {without}: has no weight; write {without}=WEIGHT, or give no weights "
                "at all"
            )
        if self.base is None and weights and abs(sum(weights) - 1) > 1e-6:
            raise InputError(
                f"--draft: the weights add up to {sum(weights):g}; without --base they must add "
                "up to 1"
            )
        return [
            (source, 1 / len(drafts) if weight is None else weight) for source, weight in drafts
        ]

    def sources(self) -> list[str]:
        """The drafts, and after them the base if there is one."""
        return [source for source, _ in self.weights()] + ([] if self.base is None else [self.base])


def _source_and_weight(word: str) -> tuple[str, float | None]:
    source, _, text = word.rpartition("=")
    try:
        return source, float(text)
    except ValueError:
        return word, None  # the name of the directory holds the sign, or there is none
