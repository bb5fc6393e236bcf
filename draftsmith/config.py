"""The options of `draftsmith init`, `decode`, `doctor --served` and `demo`, without torch."""

from dataclasses import field
from typing import Annotated, Literal

from draftsmith.core.errors import InputError, nearest
from draftsmith.core.io import check_out
from draftsmith.core.options import (
    AtLeast1,
    Device,
    Directory,
    Model,
    NotIdentity,
    Of,
    Out,
    OutFile,
    PenaltyOptions,
    PromptOptions,
    Prompts,
    Rare,
    RunOptions,
    Seed,
    Spec,
    SpreadTargetOptions,
    TargetOptions,
    Temperature,
    Text,
    Url,
    options,
)
from draftsmith.core.settings import Quantize
from draftsmith.decode import PROPOSERS, VERIFIERS

# Identified by content (`Decoding.identity`), not by name.
Named = NotIdentity[str | None]


@options
class DecodeConfig(SpreadTargetOptions, PenaltyOptions, PromptOptions):
    """Generate with a target and a draft. A lossless verifier keeps the target's distribution."""

    target: NotIdentity[Model]
    """The target: a local directory or hub name."""
    draft: NotIdentity[list[Model]] = field(default_factory=list)
    """A draft model (local directory or hub name), several of them, a head, `mtp` (the layer for
    multi-token prediction in the target's own checkpoint), a method without weights
    (prompt_lookup, lookahead, retrieval:FILE), or prompt_lookup+DRAFT: lookup beside the draft.
    """
    proposer: Named = None
    """What drafts; --help=all lists them. Default: what --draft is, else none: the target alone."""
    tree: NotIdentity[Spec | None] = None
    """Tree to draft per step. 4 is chain:4; chain is as deep as the heads or block of a
    draft. auto:FILE reads a plan of `draftsmith plan`. Default: auto, which chooses at every
    step, or no draft, by what steps cost here and what was accepted; with --compile chain:4."""
    verifier: Named = None
    """Rule that says which drafted tokens stay. Default: speculative on a chain, mcsd on
    a tree and for auto, specinfer for several drafts together, exact where nothing is drawn.
    """
    datastore: Rare[NotIdentity[Prompts | None]] = None
    """For --proposer retrieval: a .jsonl, .parquet or .txt file, or hub dataset, of text to draft
    from.
    """
    prompt: Text | None = None
    """A text to continue; to a target with a chat template it is what the user says."""
    raw: Rare[Annotated[bool, Of("prompt")]] = False
    """Continue --prompt as it is, without the chat template."""
    prompts: NotIdentity[Prompts | None] = None
    """Or a .jsonl/.parquet file or hub dataset of prompts."""
    out: NotIdentity[OutFile | None] = None
    """Write one JSON object per output to this .jsonl file; a killed run then continues."""
    num_samples: Rare[AtLeast1] = 1
    """Outputs per prompt."""
    max_new_tokens: AtLeast1 = 128
    """The longest output, in tokens."""
    stop: Rare[list[Text]] = field(default_factory=list)
    """Texts that end an output. Its text ends before the first one."""
    include_stop: Rare[bool] = False
    """Keep the stop text in the output's text."""
    seed: Seed = 0
    """Base seed. Each output derives its own seed from it."""
    batch_size: Rare[AtLeast1] = 1
    """Rows that are decoded together."""
    ignore_eos: Rare[bool] = False
    """Go on to max_new_tokens even when the target ends."""
    fast: NotIdentity[Rare[bool]] = True
    """false: use the models' own forward, no packed weights and no lean Llama code. Outputs differ
    by rounding.
    """
    compile: NotIdentity[Rare[bool]] = False
    """Record every step as a CUDA graph when it first occurs, and replay it from then on (CUDA
    only). Outputs differ by rounding. The summary reports the time of recording apart.
    """
    quantize: Rare[Quantize] = "none"
    """nf4: the target's weights in four bits (bitsandbytes); the output then follows the rounded
    model.
    """
    quantize_draft: Rare[Annotated[Quantize | None, Of("draft")]] = None
    """The same for draft models. Default: as --quantize."""
    heterogeneous_vocab: Rare[Annotated[bool, Of("draft")]] = False
    """true: drafts that are language models of another tokenizer draft the tokens that both have
    (lossless).
    """

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.prompts is None):
            raise InputError("prompt: give either --prompt TEXT or --prompts FILE")
        for key, known in (("verifier", VERIFIERS), ("proposer", [*PROPOSERS, "none"])):
            name = getattr(self, key)
            if name is not None and name not in known:
                raise InputError(f"{key}: {name!r} is unknown; {nearest(name, known)}")
        if self.proposer == "none" or not (self.draft or self.proposer):
            for key in ("draft", "tree"):
                if getattr(self, key):
                    raise InputError(f"{key}: nothing drafts; add --draft, or leave it out")
        if self.out is not None:
            check_out(self.out, [self.prompts, self.datastore], "id")


@options
class InitConfig(TargetOptions, PromptOptions, RunOptions):
    """Make a draft for a target: cut out of it, or moved from another model."""

    target: Model
    """The target: a local directory or hub name."""
    method: Literal["prune", "transplant"]
    """prune: layers of the target. transplant: --donor with the target's vocabulary."""
    donor: Annotated[Model | None, Of("method", ["transplant"])] = None
    """transplant: the model to move, of any tokenizer; a local directory or hub name."""
    num_layers: AtLeast1 | None = None
    """prune, transplant: number of layers to keep. Default: a quarter for prune, all for
    transplant.
    """
    keep: Rare[Literal["first", "last", "even"] | None] = None
    """prune, transplant: which layers to keep. Default: even."""
    intermediate_size: Rare[Annotated[AtLeast1 | None, Of("method", ["prune"])]] = None
    """prune: number of neurons per feed-forward block to keep, those that do most on --prompts."""
    draft_vocab_size: Rare[AtLeast1 | None] = None
    """Draft only this number of tokens, the most frequent ones in --data, then those that the
    target finds likely, and skip the other output rows.
    """
    data: Rare[Annotated[list[Prompts], Of("draft_vocab_size")]] = field(default_factory=list)
    """For --draft_vocab_size: distilled sets, or .jsonl/.parquet files. Default: the answers to
    --prompts.
    """
    prompts: Prompts | None = None
    """Prompts that you will serve, for alpha and for what prune measures: a .jsonl or .parquet
    file, or a hub dataset as owner/name[:split].
    """
    max_prompts: AtLeast1 = 16
    """Number of prompts to read."""
    max_new_tokens: Rare[AtLeast1] = 48
    """Length of the target's answers that alpha is measured on."""

    def __post_init__(self) -> None:
        if self.method == "transplant" and self.donor is None:
            raise InputError(
                "donor: --method transplant needs a model to move; name it with --donor"
            )
        if self.prompts is None and self.draft_vocab_size is not None and not self.data:
            raise InputError(
                "draft_vocab_size: needs texts to count tokens in; add --data, or --prompts"
            )
        if self.prompts is None and self.intermediate_size is not None:
            raise InputError("intermediate_size: is measured on texts; add --prompts")


@options
class ServedConfig(TargetOptions, PromptOptions):
    """Measure a running server: settings, texts, acceptance at load; exit code 3 unless it is as
    predicted.
    """

    target: Model
    """The target: a local directory or hub name."""
    draft: Model
    """The draft, as it was trained: a local directory or hub name."""
    served: Url
    """Address of the vLLM, SGLang or llama.cpp server; nobody else may use it meanwhile."""
    prompts: Prompts
    """Prompts to send: a .jsonl or .parquet file, or a hub dataset."""
    temperature: Temperature | None = None
    """Default: requests leave it to the server, and the prediction follows the target's
    generation_config.json.
    """
    max_new_tokens: AtLeast1 = 128
    """The longest answer, in tokens."""
    concurrency: list[AtLeast1] = field(default_factory=list)
    """Ask also so many prompts at once."""
    draft_sample_method: Rare[Literal["greedy", "probabilistic"] | None] = None
    """How vLLM was told to draft. Default: what its /server_info tells, else the better one."""
    rejection_sample_method: Rare[Literal["standard", "block"] | None] = None
    """How vLLM was told to verify. Default: what its /server_info tells, else standard."""


@options
class StatusConfig:
    """Say what a directory holds, whether it is finished, and how to go on."""

    directory: Directory
    """The directory, or one that holds several."""


@options
class DemoConfig:
    """Align the shipped draft, balanced and plain, and measure both. Then time them beside the same
    target padded to the cost of a large one.
    """

    out: Out = "out/demo"
    """Directory for everything, a copy of the pair and the prompts included."""
    short: bool = False
    """Use a few prompts and steps, to see in seconds that everything runs; the figures mean
    nothing.
    """
    device: Device = "auto"
    """auto, cpu, cuda or cuda:N."""
