"""The options of `draftsmith align`, without torch. `alignment.choices` chooses what is left
open.
"""

import re
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field

from draftsmith.core.errors import InputError
from draftsmith.core.options import (
    AtLeast0,
    AtLeast1,
    ByContent,
    Directory,
    LargeTargetOptions,
    Model,
    NamedPrompts,
    NotIdentity,
    OpenShare,
    Positive,
    Prompts,
    Rare,
    RunOptions,
    Share,
    ShareBelow1,
    Shown,
    Spec,
    Temperature,
    TopP,
    options,
    refuse_unused,
)
from draftsmith.core.prompt_rows import parse_named
from draftsmith.eval.config import TokensPerCall, Trees
from draftsmith.train.config import DraftKind
from draftsmith.train.objective import parse_objective

T = TypeVar("T")
# An option that `alignment.choices` fills if it is None. What reads it comes after the choices, so
# a type checker sees a value.
if TYPE_CHECKING:
    Open = Annotated[T, "open"]
else:
    Open = Annotated[T | None, "open"]
OPEN: Any = None
RareCount = Rare[Open[AtLeast1]]
# In align.yaml, before the command that began the run.
BEGUN_BY = "# Begun by: "
Policy = Literal["id", "balanced"]
_SECONDS = {"s": 1, "m": 60, "h": 3600}


def seconds_of(time: str) -> float:
    """Seconds of a time such as 30m."""
    return float(time[:-1]) * _SECONDS[time[-1]]


def _is_time(value: str) -> str:
    if not re.fullmatch(r"\d+(\.\d+)?[smh]", value) or not seconds_of(value):
        raise ValueError("must be a time such as 30m, 2h or 90s")
    return value


@options
class DistillChoices:
    """What the target writes."""

    general_texts: Rare[Open[AtLeast0]] = OPEN
    """Number of texts to replay, which the target writes by itself."""
    general_from: Rare[Open[Literal["magpie", "token"]]] = OPEN
    """What those texts are. magpie: chats in the target's template, user turns included. token:
    texts that begin with a random token of the vocabulary.
    """
    num_samples: RareCount = OPEN
    """Answers per prompt."""
    max_new_tokens: Open[AtLeast1] = OPEN
    """Longest answer, in tokens."""
    temperature: Open[Temperature] = OPEN
    """The temperature that you will serve with; 0 is greedy. Default: the target's
    generation_config.json, else 1.
    """
    batch_size: RareCount = OPEN
    """Rows generated together. A finished row is replaced by the next prompt."""
    part_rows: RareCount = OPEN
    """About this many rows per Parquet file."""
    top_k: Rare[Open[AtLeast0]] = OPEN
    """Keep the k most probable tokens; 0 keeps all. Default: generation_config.json, else 0."""
    top_p: Rare[Open[TopP]] = OPEN
    """Keep the smallest set of tokens with this mass; 1 keeps all. Default: generation_config.json,
    else 1.
    """
    min_p: Rare[Open[Share]] = OPEN
    """Keep tokens of at least this share of the greatest probability. Default:
    generation_config.json, else 0.
    """
    max_prompts: Open[AtLeast1] = OPEN
    """Use only the first prompts."""


@options
class OptimChoices:
    """Optimizer and schedule."""

    lr: Open[Positive] = OPEN
    """Peak learning rate. null: by a rule (printed) from the number of trained parameters."""
    warmup_steps: Rare[Open[AtLeast0]] = OPEN
    """Steps in which the rate rises from 0."""


@options
class TrainChoices:
    """Training on what the target wrote."""

    steps: Open[AtLeast1] = OPEN
    """Optimizer steps without replay; policy balanced takes twice as many, so that the draft still
    sees every answer.
    """
    rows_per_step: RareCount = OPEN
    """Sequences per optimizer step, over all processes."""
    draft_vocab_size: Rare[AtLeast1 | None] = None
    """Draft only this many tokens, the most frequent in the responses, then those that the target
    finds likely; null is all. Not for eagle, medusa, hydra.
    """
    heldout_fraction: Rare[Open[OpenShare]] = OPEN
    """Share of the prompts in `data` that are held out if `heldout` is empty."""
    max_length: RareCount = OPEN
    """Tokens of prompt and response; longer rows are truncated, text is cut into blocks of this
    length.
    """
    replay_fraction: Rare[Open[ShareBelow1]] = OPEN
    """Share of the sequences that come from `replay`."""
    batch_size: RareCount = OPEN
    """Sequences per process and forward."""
    gradient_checkpointing: Rare[Open[bool]] = OPEN
    """Recompute the draft's activations in the backward: less memory, more time."""
    eval_every: RareCount = OPEN
    """Steps between held-out evaluations, which select the best weights by alpha, or without a
    teacher by the loss.
    """
    save_every: RareCount = OPEN
    """Steps between checkpoints that a killed run continues from."""
    optim: OptimChoices = field(default_factory=OptimChoices)
    precision: Rare[Literal["auto", "fp32", "bf16"] | None] = None
    """Autocast of the forward. Weights and optimizer stay fp32. auto: bf16 if an accelerator has
    it.
    """


@options
class EvalChoices:
    """Compare drafts of one target, in distribution (ID) and out of it (OOD)."""

    temperature: Open[Annotated[list[Temperature], Field(min_length=1)]] = OPEN
    """Temperatures to measure at; the report leads with the highest."""
    tree: Rare[Open[Trees]] = OPEN
    """Draft trees to decode with: chain:N, kary:K1,K2,..., static:FILE, eagle2, opt,
    auto:FILE (a plan), auto (the plan.json of the first draft that is not the base), or none:
    alpha and predictions only.
    """
    max_prompts: Open[AtLeast1] = OPEN
    """Prompts to read from each set."""
    max_new_tokens: RareCount = OPEN
    """Maximum length of a continuation."""
    other_template: Rare[Open[bool]] = OPEN
    """Also ask the prompts in distribution under a system sentence, in another template, on another
    date, as a set out of distribution.
    """
    speed_prompts: Rare[Open[AtLeast0]] = OPEN
    """Prompts per set to time at batch 1; 0 skips timing."""
    compile: Rare[bool | None] = None
    """Time steps that are recorded as CUDA graphs, as `decode --compile` runs them. Default: on a
    GPU, if the models can be recorded.
    """
    pays_from: Rare[TokensPerCall | None] = None
    """Tokens per target call from which a draft pays, if that is known without timing here. A model
    that stays below by its alpha is not decoded.
    """
    batch_size: RareCount = OPEN
    """Prompts to decode together, except when timing."""
    bootstrap: Rare[Annotated[int, Field(ge=100)] | None] = None
    """Bootstrap resamples for every 95 % interval."""


@options
class AlignConfig(LargeTargetOptions, RunOptions):
    """Align a draft with a target: distil, train, evaluate, report. Open options are chosen."""

    target: ByContent[Model]
    """The target: a local directory or hub name."""
    prompts: ByContent[Prompts]
    """Prompts that you will serve: a .jsonl or .parquet file, or hub dataset as
    owner/name[:split].
    """
    draft: ByContent[Model | None] = None
    """The draft to start from: a language model, or a head. Without one, train a fresh head."""
    kind: Open[DraftKind] = OPEN
    """What to train without --draft. Default: what engines take."""
    init: Literal["prune"] | None = None
    """Make the draft to start from in OUT/start, as `draftsmith init --method prune` does."""
    objective: Annotated[list[Spec], Field(min_length=1)] = field(
        default_factory=lambda: ["jsd:beta=0.5"]
    )
    """Training objective, as `train --objective` takes it; several are compared at equal steps."""
    policy: Policy | None = None
    """balanced (the default): twice as many steps, half of each filled with text or chats that the
    target writes by itself, so that the draft keeps what it knew (docs/robust.md). id: only the
    answers.
    """
    plain: Rare[bool] = False
    """Also train every objective as policy id does, as NAME-plain, to compare with the policy."""
    time_budget: Annotated[str, AfterValidator(_is_time), Shown("TIME")] | None = None
    """Time of the whole run, such as 30m: open options are chosen to fit."""
    id: ByContent[list[NamedPrompts]] = field(default_factory=list)
    """Prompt sets in distribution, written as for `eval`. Default: part of --prompts, held out of
    training.
    """
    ood: ByContent[list[NamedPrompts]] = field(default_factory=list)
    """Prompt sets out of distribution: domains that the draft is not aligned on, each PROMPTS,
    NAME=PROMPTS, @SUITE or @SUITE:FILE.
    """
    distilled: Rare[Directory | None] = None
    """Take the answers of an earlier run, its --out, and hold out the same prompts: to compare
    another draft.
    """
    heldout_prompts: Rare[AtLeast1 | None] = None
    """Number of --prompts to hold out if --id is empty."""
    prompt_tokens: Rare[AtLeast1] = 32
    """For rows with `text`: number of leading tokens that make the prompt."""
    distill: DistillChoices = field(default_factory=DistillChoices)
    """Some options of `draftsmith distill`; for the others run it by itself."""
    train: TrainChoices = field(default_factory=TrainChoices)
    """Some options of `draftsmith train`; for the others run it by itself."""
    eval: EvalChoices = field(default_factory=EvalChoices)
    """Some options of `draftsmith eval`; for the others run it by itself."""
    tracker: Rare[NotIdentity[Literal["none", "wandb"]]] = "none"
    """wandb: log training and evaluation to Weights & Biases, in the project WANDB_PROJECT, else
    draftsmith (offline with WANDB_MODE=offline).
    """
    push_to_hub: NotIdentity[Rare[str | None]] = None
    """Upload the best aligned draft to this model on the hub, owner/name, with the token in
    HF_TOKEN. A new model is private.
    """

    def __post_init__(self) -> None:
        if self.init is not None and self.draft is not None:
            raise InputError("init: makes the draft that --draft would name; give one of the two")
        if self.init is not None and self.kind not in (None, "lm"):
            raise InputError(f"kind: --init {self.init} makes a language model, lm")
        if self.init is not None and (self.target_parallel > 1 or self.target_device_map):
            raise InputError(
                "init: reads a whole target; make the draft by draftsmith init, and give --draft"
            )
        if self.kind == "lm" and self.init is None and self.draft is None:
            raise InputError("kind: lm needs a model to start from; add --init prune, or --draft")
        if self.policy == "id":
            refuse_unused(self, {"plain": "every draft is trained so with --policy id"})
            if self.distill.general_texts or self.train.replay_fraction:
                raise InputError("policy: id replays nothing; leave out the options of replay")
        if self.id and self.heldout_prompts is not None:
            raise InputError("heldout_prompts: --id names the prompts to measure; give one of them")
        for spec in self.objective:
            parse_objective(spec)
        sets = parse_named("id", self.id)
        for name, source in parse_named("ood", self.ood).items():
            if name in (*sets, "id") or source in sets.values():
                raise InputError(
                    f"ood: {name}={source} is in another set too; sets must not overlap"
                )

    @property
    def directory(self) -> Path:
        """Where everything is written."""
        return Path(self.out)

    @property
    def file(self) -> Path:
        """All options of the run, once it has begun."""
        return self.directory / "align.yaml"

    def drafts(self) -> dict[str, str]:
        """Return the objective of each aligned draft by name: `jsd` for `jsd:beta=0.5` if that is
        clear, `jsd-balanced` with policy balanced.
        """
        return self._named("-balanced" if self.policy == "balanced" else "")

    def _named(self, ending: str) -> dict[str, str]:
        short = [re.split(r"[^a-z_]", spec)[0] for spec in self.objective]
        named = {}
        for name, spec in zip(short, self.objective, strict=True):
            if not name or short.count(name) > 1:
                name = re.sub(r"[^A-Za-z0-9.]+", "-", spec).strip("-.")[:64]
            named[name + ending] = spec
        return named

    def plain_drafts(self) -> dict[str, str]:
        """Return the objective of every draft that `plain` adds."""
        return self._named("-plain") if self.plain else {}

    def trained(self) -> dict[str, str]:
        """Return the objective of every draft that is trained and compared with the base."""
        return self.plain_drafts() | self.drafts()
