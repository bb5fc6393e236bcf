"""The options of `draftsmith align`, without torch. `alignment.choices` chooses what is left
open.
"""

import re
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import Field

from draftsmith.core.errors import InputError
from draftsmith.core.options import (
    AtLeast0,
    AtLeast1,
    ByContent,
    Given,
    NotIdentity,
    Rare,
    RunOptions,
    TargetOptions,
    Text,
    options,
    refuse_unused,
)
from draftsmith.core.prompt_rows import parse_named
from draftsmith.distill.config import DistillConfig
from draftsmith.eval.config import EvalConfig
from draftsmith.train.config import TrainConfig
from draftsmith.train.objective import parse_objective

Policy = Literal["id", "balanced"]


@options
class AlignedDistilling(DistillConfig):
    """What the target writes."""

    general_texts: AtLeast0 | None = None
    """Number of texts to replay, which the target writes by itself."""
    general_from: Literal["magpie", "token"] | None = None
    """What those texts are. magpie: chats in the target's template, user turns included. token:
    texts that begin with a random token of the vocabulary.
    """


@options
class AlignedTraining(TrainConfig):
    """Training on what the target wrote."""

    steps: AtLeast1 | None = None
    """Optimizer steps without replay; policy balanced takes twice as many, so that the draft still
    sees every answer.
    """
    rows_per_step: AtLeast1 | None = None
    """Sequences per optimizer step, over all processes."""


@options
class AlignConfig(TargetOptions, RunOptions):
    """Align a draft with a target: distil, train, evaluate, report. Open options are chosen.
    Shorter: a smaller distill.max_prompts, train.steps or eval.max_prompts, or policy id.
    """

    target: ByContent[str]
    """The target: a local directory or hub name."""
    prompts: ByContent[str]
    """Prompts that you will serve: a .jsonl or .parquet file, or hub dataset as
    owner/name[:split].
    """
    draft: ByContent[Text | None] = None
    """The draft to start from: a language model, or a head. Without one, train a fresh head:
    EAGLE-3 if train.draft_vocab_size is given or the vocabulary is a large part of the target, else
    EAGLE.
    """
    init: Literal["prune"] | None = None
    """Make the draft to start from in OUT/start, as `draftsmith init --method prune` does."""
    objective: Annotated[list[str], Field(min_length=1)] = field(
        default_factory=lambda: ["jsd:beta=0.5"]
    )
    """Training objective, as `train --objective` takes it; several are compared at equal steps."""
    policy: Policy | None = None
    """balanced (the default): half of every step is text or chats that the target writes by itself,
    over twice the steps, so that the draft keeps what it knew (docs/robust.md). id: the answers
    alone.
    """
    plain: Rare[bool] = False
    """Also train every objective as policy id does, as NAME-plain, to compare with the policy."""
    id: ByContent[list[str]] = field(default_factory=list)
    """Prompt sets in distribution, PROMPTS or NAME=PROMPTS. Default: part of --prompts, held out of
    training.
    """
    ood: ByContent[list[str]] = field(default_factory=list)
    """Prompt sets out of distribution, PROMPTS or NAME=PROMPTS: domains that the draft is not
    aligned on.
    """
    heldout_prompts: Rare[AtLeast1 | None] = None
    """Number of --prompts to hold out if --id is empty."""
    prompt_tokens: Rare[AtLeast1] = 32
    """For rows with `text`: number of leading tokens that make the prompt."""
    distill: Annotated[
        dict[str, Any],
        Given(
            AlignedDistilling,
            shown=("max_new_tokens", "temperature", "max_prompts"),
            rare=(
                "general_texts",
                "general_from",
                "num_samples",
                "batch_size",
                "part_rows",
                "top_k",
                "top_p",
                "min_p",
            ),
        ),
    ] = field(default_factory=dict)
    """Some options of `draftsmith distill`; for the others run it by itself."""
    train: Annotated[
        dict[str, Any],
        Given(
            AlignedTraining,
            shown=("steps", "optim.lr"),
            rare=(
                "rows_per_step",
                "draft_vocab_size",
                "heldout_fraction",
                "max_length",
                "replay_fraction",
                "batch_size",
                "gradient_checkpointing",
                "precision",
                "eval_every",
                "save_every",
                "optim.warmup_steps",
            ),
        ),
    ] = field(default_factory=dict)
    """Some options of `draftsmith train`; for the others run it by itself."""
    eval: Annotated[
        dict[str, Any],
        Given(
            EvalConfig,
            shown=("temperature", "max_prompts"),
            rare=(
                "tree",
                "max_new_tokens",
                "speed_prompts",
                "batch_size",
                "bootstrap",
            ),
        ),
    ] = field(default_factory=dict)
    """Some options of `draftsmith eval`; for the others run it by itself."""
    push_to_hub: NotIdentity[Rare[str | None]] = None
    """Upload the best aligned draft to this model on the hub, owner/name, with the token in
    HF_TOKEN. A new model is private.
    """

    def __post_init__(self) -> None:
        if self.init is not None and self.draft is not None:
            raise InputError("init: makes the draft that --draft would name; give one of the two")
        if self.policy == "id":
            refuse_unused(self, {"plain": "every draft is trained so with --policy id"})
            if self.distill.get("general_texts") or self.train.get("replay_fraction"):
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
