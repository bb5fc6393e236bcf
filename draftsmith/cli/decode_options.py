"""The options of `draftsmith decode`, without torch."""

from dataclasses import field
from pathlib import Path

from decode import PROPOSERS, VERIFIERS
from draftsmith_core.errors import InputError, nearest
from draftsmith_core.io import check_apart, check_replaceable
from draftsmith_core.model_options import Quantize
from draftsmith_core.options import (
    AtLeast1,
    ChatModelOptions,
    NotIdentity,
    Out,
    PromptOptions,
    Rare,
    SamplingOptions,
    Seed,
    Text,
    options,
)

# What decodes is part of a run's identity by its content (`Decoding.identity`), not by its name.
Named = NotIdentity[str | None]


@options
class DecodeConfig(ChatModelOptions, SamplingOptions, PromptOptions):
    """Generate with a target and a method of drafting; with a lossless verifier the output follows the target alone."""

    target: NotIdentity[str]
    """The target: a local directory or hub name."""
    draft: NotIdentity[list[str]] = field(default_factory=list)
    """A draft model (local directory or hub name), several of them, or a head (local directory)."""
    proposer: Named = None
    """What drafts; the table below lists them. Default: what --draft is, else none (the target alone)."""
    tree: Named = None
    """Tree to draft per step; see below. auto plans first, auto:FILE reads a plan of `draftsmith plan`. Default:
    chain:4 (fewer for fewer heads); lookahead has its own."""
    verifier: Named = None
    """Rule that says which drafted tokens stay; see below. Default: speculative on a chain, mcsd on a tree, specinfer
    for several drafts together, exact where nothing is drawn."""
    datastore: Named = None
    """For --proposer retrieval: a .jsonl, .parquet or .txt file, or hub dataset, of text to draft from."""
    index: Rare[Named] = None
    """A .safetensors file that keeps the index of --datastore: read when it exists, else written."""
    prompt: str | None = None
    """A text to continue; to a target with a chat template it is what the user says."""
    raw: bool = False
    """Continue --prompt as it is, without the chat template."""
    prompts: Named = None
    """Or a .jsonl/.parquet file or hub dataset of prompts."""
    out: NotIdentity[Out | None] = None
    """Write one JSON object per output to this .jsonl file; a killed run then continues."""
    num_samples: AtLeast1 = 1
    """Outputs per prompt."""
    max_new_tokens: AtLeast1 = 128
    """The longest output, in tokens."""
    stop: list[Text] = field(default_factory=list)
    """Texts that end an output after the token that completes one."""
    seed: Seed = 0
    """Base seed. Each output derives its own seed from it."""
    batch_size: AtLeast1 = 1
    """Rows that are decoded together."""
    ignore_eos: bool = False
    """Go on to max_new_tokens even when the target ends."""
    fast: NotIdentity[Rare[bool]] = True
    """false: use the models' own forward, no packed weights and no lean Llama code. Outputs differ by rounding."""
    compile: NotIdentity[Rare[bool]] = False
    """Record every step as a CUDA graph when it first occurs, and replay it from then on (CUDA only). Outputs differ by
    rounding. The summary reports the time of recording apart."""
    quantize: Quantize = "none"
    """nf4: the target's weights in four bits (bitsandbytes); the output then follows the rounded model."""
    quantize_draft: Rare[Quantize | None] = None
    """The same for draft models. Default: as --quantize."""
    heterogeneous_vocab: Rare[bool] = False
    """true: drafts that are language models of another tokenizer draft the tokens that both have (lossless)."""

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.prompts is None):
            raise InputError("prompt: give either --prompt TEXT or --prompts FILE")
        for key, name, known in (
            ("proposer", self.proposer, [*PROPOSERS, "none"]),
            ("verifier", self.verifier, VERIFIERS),
        ):
            if name is not None and name not in known:
                raise InputError(f"{key}: {name!r} is unknown; {nearest(name, known)}")
        if self.out is not None:
            check_replaceable(Path(self.out), "out:")
            check_apart(self.out, [self.prompts, self.datastore])
