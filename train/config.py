"""The options of `draftsmith train`, in YAML or on the command line."""

from dataclasses import field
from typing import Annotated, Literal, TypeVar

from pydantic import Field

from draftsmith.core.errors import InputError
from draftsmith.core.options import (
    AtLeast0,
    AtLeast1,
    ByContent,
    Directory,
    File,
    LargeTargetOptions,
    Model,
    NonNegative,
    NotIdentity,
    Of,
    OpenShare,
    Positive,
    Prompts,
    Rare,
    RunOptions,
    ShareBelow1,
    Spec,
    Url,
    options,
)
from draftsmith.drafts.config import BLOCK_KINDS
from draftsmith.train.objective import Objective, parse_objective

T = TypeVar("T")


@options
class Optim:
    """Optimizer and schedule."""

    name: Rare[Literal["adamw", "muon", "sgd"] | None] = None
    """null: `muon` for a draft that was never trained, else `adamw`. `muon` takes the matrices of
    layers at `muon_lr`, and AdamW the rest. `sgd` (no momentum) is for checking gradients; AdamW
    hides a wrong scale.
    """
    lr: Positive | None = None
    """Peak learning rate. null: by a rule (printed) from the number of trained parameters."""
    muon_lr: Rare[Annotated[Positive, Of("optim.name", ["muon"])]] = 0.02
    """Peak rate of the matrices that Muon trains, whatever their size."""
    schedule: Rare[Literal["cosine", "wsd"]] = "cosine"
    """How the rate falls after the warm-up: as a cosine at once, or over the last fifth."""
    beta2: Rare[ShareBelow1] = 0.95
    """AdamW's decay of the mean squared gradient."""
    weight_decay: Rare[NonNegative] = 0.0
    """Decoupled; not applied to norms and biases."""
    warmup_steps: Rare[AtLeast0] = 0
    """Steps in which the rate rises from 0."""
    final_lr_fraction: Rare[NonNegative] = 0.1
    """The rate ends at this fraction of `lr`."""
    clip_norm: Rare[NonNegative] = 1.0
    """Scale gradients down to this global norm; 0 turns clipping off."""


DraftKind = Literal[
    "lm", "eagle", "eagle3", "mtp", "medusa", "hydra", "dflash", "dspark", "jetspec"
]
VOCABULARY_KINDS = ("eagle3", *BLOCK_KINDS)
_UNROLLED_KINDS = ("eagle", "eagle3", "mtp")
_STACKED_KINDS = ("medusa", "hydra")
OfBlocks = Annotated[T, Of("kind", BLOCK_KINDS)]
OfHeads = Annotated[T, Of("kind", [*_UNROLLED_KINDS, *_STACKED_KINDS, *BLOCK_KINDS])]


@options
class HeadOptions:
    """Heads; null is the paper's value."""

    num_heads: Rare[Annotated[AtLeast1 | None, Of("kind", _STACKED_KINDS)]] = None
    """Medusa, Hydra: number of heads, one per token ahead; 4."""
    num_layers: Rare[
        Annotated[AtLeast1 | None, Of("kind", ["eagle3", *_STACKED_KINDS, *BLOCK_KINDS])]
    ] = None
    """Medusa, Hydra: residual layers per head; 1. Decoder layers: EAGLE-3 1, block drafters 5."""
    norms: Rare[Annotated[Literal["eagle3", "eagle31"] | None, Of("kind", ["eagle3"])]] = None
    """EAGLE-3: `eagle31` norms each of the target's states, and the features of the next depth;
    `eagle3` does not, for llama.cpp and the authors' code. eagle31.
    """
    test_steps: Rare[Annotated[AtLeast1 | None, Of("kind", _UNROLLED_KINDS)]] = None
    """Depths that are trained, each on the head's own features: EAGLE-3 7, MTP 3, EAGLE-1 1."""
    step_decay: Rare[OfHeads[Annotated[float, Field(gt=0, le=1)] | None]] = None
    """Weight of the loss of each further step, relative to the one before; 0.8, of a block drafter
    exp(-1/7) to exp(-1/4) by the size of its block.
    """
    noise: Rare[Annotated[NonNegative | None, Of("kind", ["eagle"])]] = None
    """EAGLE-1: input features are shifted at random by up to this much; 0.1."""
    block_size: Rare[OfBlocks[Annotated[int, Field(ge=2)] | None]] = None
    """Block drafters: tokens of a block with its anchor; 16, dspark 7."""
    anchors: Rare[OfBlocks[AtLeast1 | None]] = None
    """Block drafters: blocks per row of the data, packed or not, and pass, at random; 512."""
    target_layers: Rare[OfBlocks[Annotated[list[AtLeast0], Field(min_length=1)] | None]] = None
    """Block drafters: layers of the target, from 0, whose outputs are read; null spreads five."""
    window: Rare[OfBlocks[AtLeast1 | None]] = None
    """Block drafters: how far back a token attends; null is without limit."""
    features: Rare[NotIdentity[Directory | None]] = None
    """Directory that caches the target's hidden states. null: compute them in every epoch."""
    features_gib: Rare[Annotated[Positive | None, Of("head.features")]] = None
    """Limit of that directory, GiB; 16."""


@options
class TrainConfig(RunOptions, LargeTargetOptions):
    """Fit a draft to a distilled set (or to text)."""

    data: ByContent[Annotated[list[Prompts], Field(min_length=1)]]
    """Distilled sets (directories), or .jsonl/.parquet files with `text`, or `messages` that end
    with an answer.
    """
    kind: DraftKind = "lm"
    """What to train: a language model, or a head on the target's hidden states."""
    draft: ByContent[Model | None] = None
    """Weights to start from: a directory or hub name. A head without it starts fresh; `mtp` is the
    target's own MTP layer.
    """
    draft_config: Rare[File | None] = None
    """A Hugging Face config.json. Alone: a fresh model of that shape. With `draft`: the shape it
    must have.
    """
    target: ByContent[Model | None] = None
    """The teacher. Needed by heads, and by every objective but `ce` unless `data` has teacher
    columns.
    """
    states: Rare[NotIdentity[str | None]] = None
    """Directory of the target's hidden states, from `distill --states` or `head.features`. Of the
    target only embedding, final norm and output projection are then loaded.
    """
    states_from: Rare[NotIdentity[list[Url]]] = field(default_factory=list)
    """vLLM servers of the target, such as http://localhost:8000/v1, that write what `states` lacks
    while training reads it, and share that directory.
    """
    states_gib: Rare[NotIdentity[Annotated[Positive | None, Of("states_from")]]] = None
    """Limit of what they keep there, GiB; 16. What is gone is asked for again."""
    draft_vocab_size: Rare[AtLeast1 | None] = None
    """Draft only this many tokens, the most frequent in the responses, then those that the target
    finds likely; null is all. Not for eagle, medusa, hydra.
    """
    tokenizer: Rare[Model | None] = None
    """Tokenizer for rows of text, saved with the draft. Default: the target's, else the draft's."""
    thinking: Rare[Literal["keep", "drop"]] = "keep"
    """Of chats in files. `keep`: train the answers' thinking too; an answer whose thinking the chat
    template does not write is skipped. `drop`: train the answers without it, with the template's
    switch off.
    """
    objective: Spec = "ce"
    """ce, fkl, rkl, jsd:beta=0.5, tvd, tvd_pp, lk_alpha, lk_hybrid:eta=3; or a sum such as
    `0.9*fkl+0.1*ce`. For block drafters, `@dpace` may follow.
    """
    loss_temperature: Rare[Positive] = 1.0
    """Divides the logits of draft and target in the objective; `ce` and the reported alpha ignore
    it.
    """
    heldout: Rare[ByContent[list[Prompts]]] = field(default_factory=list)
    """Held-out data, same kinds as `data`. Default: `heldout_fraction` of the prompts in `data`."""
    heldout_fraction: Rare[OpenShare] = 0.05
    """Share of the prompts in `data` that are held out if `heldout` is empty."""
    max_length: Rare[AtLeast1] = 512
    """Tokens of prompt and response; longer rows are truncated, text is cut into blocks of this
    length.
    """
    packing: Rare[bool] = False
    """Pack several documents into each row of `max_length` tokens; `batch_size` counts rows."""
    replay: ByContent[list[Prompts]] = field(default_factory=list)
    """General data to mix in, same kinds as `data`, so that the draft keeps its acceptance in other
    domains.
    """
    replay_fraction: ShareBelow1 = 0.0
    """Share of the sequences that come from `replay`."""
    mixing_temperature: Rare[Positive] = 1.0
    """With several `data` (domains): draw each in proportion to its size^(1 / temperature)."""
    head: HeadOptions = field(default_factory=HeadOptions)
    batch_size: NotIdentity[AtLeast1] = 8
    """Sequences per process and forward."""
    accumulation: Rare[NotIdentity[AtLeast1]] = 1
    """Forwards per optimizer step; a step has batch_size x accumulation x processes sequences."""
    epochs: Positive = 1.0
    """Number of passes over `data` plus `replay`."""
    steps: AtLeast1 | None = None
    """Optimizer steps; overrides `epochs`."""
    gradient_checkpointing: Rare[NotIdentity[bool]] = False
    """Recompute the draft's activations in the backward: less memory, more time."""
    torch_compile: NotIdentity[Rare[bool]] = False
    """torch.compile every layer of the draft; worth it on GPUs, needs a C compiler on CPUs."""
    eval_every: Rare[AtLeast1] = 100
    """Steps between held-out evaluations, which select the best weights by alpha, or without a
    teacher by the loss.
    """
    patience: Rare[AtLeast0] = 0
    """Stop after this many evaluations in a row without a new best; 0 never stops early."""
    save_every: Rare[NotIdentity[AtLeast1]] = 100
    """Steps between checkpoints that a killed run continues from."""
    keep: NotIdentity[Rare[AtLeast1]] = 2
    """Number of checkpoints to keep."""
    optim: Optim = field(default_factory=Optim)
    precision: Rare[Literal["auto", "fp32", "bf16"]] = "auto"
    """Autocast of the forward. Weights and optimizer stay fp32. auto: bf16 if an accelerator has
    it.
    """
    tracker: Rare[NotIdentity[Literal["none", "wandb", "tensorboard"]]] = "none"
    """Tracker in addition to metrics.jsonl (WANDB_MODE=offline needs no account). W&B's project is
    WANDB_PROJECT, else draftsmith.
    """
    push_to_hub: NotIdentity[Rare[str | None]] = None
    """Upload the checkpoint to this hub model, owner/name, with the token in HF_TOKEN; a new one is
    private.
    """

    def __post_init__(self) -> None:
        objective = parse_objective(self.objective, self.loss_temperature)
        self._check_kind()
        for key, wrong, reason in self._rules(objective):
            if wrong:
                raise InputError(f"{key}: {reason}")

    def _check_kind(self) -> None:
        if self.draft_config and self.kind != "lm":
            raise InputError(f"draft_config: is for kind lm, not {self.kind}")
        if self.gradient_checkpointing and self.kind not in ("lm", *_UNROLLED_KINDS):
            raise InputError(
                f"gradient_checkpointing: is for lm, {', '.join(_UNROLLED_KINDS)}, not {self.kind}"
            )

    def _rules(self, objective: Objective) -> list[tuple[str, object, str]]:
        """Options, whether they are wrong together with others, and why."""
        head = self.kind != "lm"
        untaught = not self.target and (head or self.head.features or self.states)
        unmixed = self.mixing_temperature != 1 and (len(self.data) < 2 or self.packing)
        return [
            (
                "draft",
                not (head or self.draft or self.draft_config),
                "give `draft` or `draft_config` (a config.json), or for a head its `kind`",
            ),
            ("target", untaught, "is missing; heads, head.features and states need it"),
            (
                "objective",
                objective.paced and self.kind not in BLOCK_KINDS,
                f"@dpace is for {', '.join(BLOCK_KINDS)}",
            ),
            (
                "draft_vocab_size",
                self.draft_vocab_size and self.kind not in ("lm", *VOCABULARY_KINDS),
                f"is for lm, {', '.join(VOCABULARY_KINDS)}",
            ),
            (
                "replay_fraction",
                bool(self.replay) != (self.replay_fraction > 0),
                "goes with `replay`; set both",
            ),
            (
                "target_parallel",
                self.target_parallel > 1 and (self.states or self.kind == "dspark"),
                "is not for states (which need no layers of the target), nor kind dspark",
            ),
            (
                "target_device_map",
                self.target_device_map and (self.states or not self.target),
                "goes with `target`, and not with states, which need no layers of it",
            ),
            (
                "loss_temperature",
                self.loss_temperature != 1 and not objective.needs_target,
                "`ce` has none",
            ),
            ("head.features", self.head.features and self.states, "is not read: states replace it"),
            ("states_from", self.states_from and not self.states, "needs states, their directory"),
            ("mixing_temperature", unmixed, "needs several `data`, and packing false"),
        ]
