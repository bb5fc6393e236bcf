"""The options of `draftsmith decode`. Needs no torch, so that help texts and option checks are quick."""

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from decode import PROPOSERS, VERIFIERS
from draftsmith_core.errors import InputError, nearest
from draftsmith_core.io import check_apart, check_replaceable
from draftsmith_core.model_options import Quantize
from draftsmith_core.option_types import check_least, check_types
from draftsmith_core.sampling_options import check_sampling


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """Generate with a target and a method of drafting; with a lossless verifier the output follows the target alone."""

    target: str
    """The target: a local directory or hub name."""
    draft: list[str] = field(default_factory=list)
    """A draft model (local directory or hub name), several of them, or a head (local directory)."""
    proposer: str | None = None
    """What drafts; the table below lists them. Default: what --draft is, else none (the target alone)."""
    tree: str | None = None
    """What is drafted per step; see below. auto plans first, auto:FILE is what `plan` chose. Default: chain:4, fewer
    for fewer heads; for lookahead its own."""
    verifier: str | None = None
    """What is kept of it; see below. Default: speculative on a chain, mcsd on a tree, specinfer for several drafts
    together, exact where nothing is drawn."""
    datastore: str | None = None
    """For --proposer retrieval: a .jsonl, .parquet or .txt file, or hub dataset, of text to draft from."""
    index: str | None = None
    """A .safetensors file that keeps the index of --datastore: read when it exists, else written."""
    prompt: str | None = None
    """A text to continue; to a target with a chat template it is what the user says."""
    raw: bool = False
    """Continue --prompt as it is, without the chat template."""
    prompts: str | None = None
    """Or a .jsonl/.parquet file or hub dataset of prompts."""
    out: str | None = None
    """Write one JSON object per output to this .jsonl file; a killed run then continues."""
    num_samples: int = 1
    """Outputs per prompt."""
    max_new_tokens: int = 128
    """The longest output, in tokens."""
    stop: list[str] = field(default_factory=list)
    """Texts that end an output: it is cut behind the token that completes one."""
    temperature: float | None = None
    """0 is greedy. Default: of the target's generation_config.json where that samples, else 0."""
    top_p: float | None = None
    """Keep the smallest set of tokens with this mass; 1 keeps all. Default: of that file, else 1."""
    top_k: int | None = None
    """Keep the k most probable tokens; 0 keeps all. Default: of that file, else 0."""
    min_p: float | None = None
    """Keep tokens of at least this share of the greatest probability; 0 keeps all. Default: of that file, else 0."""
    seed: int = 0
    """Of every draw; each output has its own from it."""
    batch_size: int = 1
    """Rows that are decoded together."""
    prompt_tokens: int = 32
    """For rows with `text`: how many of its first tokens make the prompt."""
    max_prompts: int | None = None
    """Use only the first rows of the prompts."""
    ignore_eos: bool = False
    """Go on to max_new_tokens even when the target ends."""
    fast: bool = True
    """false: the models' own forward, without packed weights and the lean Llama code; outputs differ by rounding."""
    compile: bool = False
    """Record every step as a CUDA graph when it first occurs, and replay it from then on (CUDA only). Outputs differ by
    rounding; the first ones take longer, which is told apart."""
    quantize: Quantize = "none"
    """nf4: the target's weights in four bits (bitsandbytes); the output then follows the rounded model."""
    quantize_draft: Quantize | None = None
    """The same for draft models. Default: as --quantize."""
    heterogeneous_vocab: bool = False
    """true: drafts that are language models of another tokenizer draft the tokens that both have (lossless)."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    dtype: str = "auto"
    """Of the models: auto (float32 on a CPU, else the checkpoint's own), float32, bfloat16 or float16."""
    chat_template: str | None = None
    """A Jinja file with the chat template, where the target's tokenizer has none or another is wanted."""
    trust_remote_code: bool = False
    """Run model code that comes with a checkpoint."""

    def __post_init__(self) -> None:
        check_types(self)
        check_least(self, 1, "num_samples", "max_new_tokens", "batch_size", "prompt_tokens", "max_prompts")
        if (self.prompt is None) == (self.prompts is None):
            raise InputError("prompt: give either --prompt TEXT or --prompts FILE")
        _check_name("proposer", self.proposer, [*PROPOSERS, "none"])
        _check_name("verifier", self.verifier, VERIFIERS)
        if any(not text for text in self.stop):
            raise InputError("stop: an empty text would end every output at once; give at least one character")
        if self.out is not None and Path(self.out).is_dir():
            raise InputError(f"out: {self.out} is a directory; name a .jsonl file")
        if self.out is not None:
            check_replaceable(Path(self.out), "out:")
            check_apart(self.out, [self.prompts, self.datastore])
        check_sampling(self.temperature, self.top_k, self.top_p, self.min_p)


def _check_name(key: str, name: str | None, known: Collection[str]) -> None:
    if name is not None and name not in known:
        raise InputError(f"{key}: {name!r} is unknown; {nearest(name, known)}")
