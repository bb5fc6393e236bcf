"""The options of `draftsmith align`. What is left open is chosen from what the command is given; needs no torch."""

import math
import re
from dataclasses import dataclass, field
from typing import Literal

from draftsmith_core.errors import InputError
from draftsmith_core.option_types import check_least, check_range, check_types
from draftsmith_core.sampling_options import check_sampling
from eval.request import parse_named
from train.config import Lora
from train.objective import parse_objective

Policy = Literal["id", "balanced", "no_loss"]


@dataclass(frozen=True, kw_only=True)
class DistillChoices:
    """How the target answers. What is null, `align` chooses."""

    num_samples: int | None = None
    """Answers per prompt."""
    max_new_tokens: int | None = None
    """The longest answer."""
    temperature: float | None = None
    """Sample as you will serve; 0 is greedy."""
    top_p: float | None = None
    """1 keeps all tokens."""
    top_k: int | None = None
    """0 keeps all tokens."""
    min_p: float | None = None
    """0 keeps all tokens."""
    max_prompts: int | None = None
    """Prompts to answer, from the first on."""
    batch_size: int | None = None
    """Answers that are generated together."""
    part_rows: int = 512
    """Answers per file; a killed run loses at most the files in the making."""
    general_texts: int | None = None
    """Texts that the target writes by itself, from any token of the vocabulary on, to be replayed while training."""


@dataclass(frozen=True, kw_only=True)
class TrainChoices:
    """How the draft is trained. What is null or empty, `align` chooses. Every objective gets the same number of
    optimizer steps.
    """

    steps: int | None = None
    """Optimizer steps."""
    lr: list[float] = field(default_factory=list)
    """Peak learning rate: one for all objectives, or one for each in their order."""
    warmup_steps: int | None = None
    """Steps in which the rate rises from 0."""
    rows_per_step: int = 32
    """Sequences per optimizer step, over all processes."""
    batch_size: int | None = None
    """Sequences per process and forward; divides `rows_per_step`."""
    max_length: int | None = None
    """Tokens of prompt and answer; what is longer is cut."""
    heldout_fraction: float = 0.06
    """Share of the prompts by which the best weights are chosen."""
    eval_every: int | None = None
    """Steps between held-out evaluations."""
    save_every: int = 50
    """Steps between checkpoints that a killed run continues from."""
    gradient_checkpointing: bool | None = None
    """Less memory, more time."""
    replay_fraction: float | None = None
    """Share of the sequences that are general text, so that the draft keeps what it knew; 0 with policy id."""
    anchor_kl: float = 0.0
    """As `train --anchor_kl`: weight of the divergence from the draft that was started from."""
    draft_vocab_size: int = 0
    """As `train --head.draft_vocab_size`: how many tokens a draft language model drafts, the commonest in what it is
    trained on; 0 is all."""
    lora: Lora = field(default_factory=Lora)


@dataclass(frozen=True, kw_only=True)
class EvalChoices:
    """How drafts are measured. What is null or empty, `align` chooses."""

    temperature: list[float] = field(default_factory=list)
    """Temperatures to measure at; the report leads with the highest."""
    tree: list[str] = field(default_factory=list)
    """Draft trees to decode with."""
    max_prompts: int | None = None
    """Prompts per set."""
    max_new_tokens: int | None = None
    """The longest continuation."""
    speed_prompts: int | None = None
    """Prompts per set that are also timed, one at a time; 0 times nothing."""
    batch_size: int | None = None
    """Prompts decoded together."""
    bootstrap: int = 2000
    """Resamples behind every 95 % interval."""


@dataclass(frozen=True, kw_only=True)
class AlignConfig:
    """Align a draft with a target: distil, train, evaluate, report. What is left open is chosen and printed."""

    target: str
    """The target: a local directory or hub name."""
    prompts: str
    """What you will serve: a .jsonl or .parquet file, or hub dataset as owner/name[:split]."""
    out: str
    """Directory for everything: align.yaml, prompts/, distilled/, one checkpoint per objective, eval/report.html."""
    draft: str | None = None
    """The draft to start from: a language model, or a head. Without one a fresh EAGLE head is trained."""
    init: Literal["prune", "transplant", "fresh"] | None = None
    """Make the draft to start from, as `draftsmith init --method` does; it lies in OUT/start."""
    donor: str | None = None
    """With --init transplant: the model to move."""
    objective: list[str] = field(default_factory=lambda: ["jsd:beta=0.5"])
    """What the draft is trained to do, as `train --objective` takes it; several are compared at equal steps."""
    policy: Policy | None = None
    """How much of what the base knows is kept. id: nothing is done for it. balanced, no_loss: general text is replayed
    while training, and the draft is then moved back towards the base as far as held-out answers and what the target
    writes by itself say (docs/robust.md). null: balanced for a draft language model, id for a head."""
    plain: bool = False
    """Also train every objective as policy id does, as NAME-plain, to see what the policy costs and keeps."""
    id: list[str] = field(default_factory=list)
    """Prompt sets in distribution, NAME=PROMPTS. Without one, part of --prompts is held out of training for it."""
    ood: list[str] = field(default_factory=list)
    """Prompt sets out of distribution, NAME=PROMPTS: where the draft was not aligned."""
    heldout_prompts: int | None = None
    """How many of --prompts to hold out where --id is empty."""
    prompt_tokens: int = 32
    """For rows with `text`: how many of its first tokens make the prompt."""
    distill: DistillChoices = field(default_factory=DistillChoices)
    train: TrainChoices = field(default_factory=TrainChoices)
    eval: EvalChoices = field(default_factory=EvalChoices)
    push_to_hub: str | None = None
    """Upload the best of the aligned drafts to this model on the hub, owner/name, with the token in HF_TOKEN; made
    private where it does not exist."""
    seed: int = 0
    """Of every draw; each stage has its own from it."""
    device: str = "auto"
    """auto, cpu or cuda."""
    dtype: str = "auto"
    """Of the target: auto, float32, bfloat16 or float16."""
    chat_template: str | None = None
    """A Jinja file with the chat template, where the target's tokenizer has none or another is wanted."""
    trust_remote_code: bool = False
    """Run model code that comes with a checkpoint."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.draft is not None and not self.draft.strip():
            raise InputError(f"draft: {self.draft!r} is empty; name a draft, or leave it out for a fresh EAGLE head")
        if self.init is not None and self.draft is not None:
            raise InputError("init: makes the draft to start from, and --draft names one; give one of the two")
        if (self.donor is not None) != (self.init == "transplant"):
            raise InputError("donor: --init transplant needs one, and nothing else reads it")
        if not self.objective:
            raise InputError("objective: is empty; name at least one, such as jsd:beta=0.5")
        for spec in self.objective:
            if parse_objective(spec).needs_reference:
                raise InputError(f"objective: {spec}: @adaspec needs a reference draft; use `draftsmith train` for it")
        if len(set(self.objective)) < len(self.objective):
            raise InputError(f"objective: {' '.join(self.objective)} names one twice")
        check_least(self, 1, "heldout_prompts", "prompt_tokens")
        for part, keys in (
            ("distill", ("num_samples", "max_new_tokens", "max_prompts", "batch_size", "part_rows")),
            ("train", ("steps", "rows_per_step", "batch_size", "max_length", "eval_every", "save_every")),
            ("eval", ("max_prompts", "max_new_tokens", "batch_size")),
        ):
            check_least(self, 1, *(f"{part}.{key}" for key in keys))
        check_least(self, 0, "distill.general_texts", "train.warmup_steps", "eval.speed_prompts")
        check_least(self, 0, "train.anchor_kl", "train.draft_vocab_size")
        check_least(self, 100, "eval.bootstrap")
        check_sampling(self.distill.temperature, self.distill.top_k, self.distill.top_p, self.distill.min_p)
        for temperature in self.eval.temperature:
            check_sampling(temperature, None, None)
        if len(self.train.lr) not in (0, 1, len(self.objective)):
            raise InputError(
                f"train.lr: {len(self.train.lr)} rates for {len(self.objective)} objectives; give one, or one for each"
            )
        if any(not 0 < rate < math.inf for rate in self.train.lr):
            raise InputError(f"train.lr: {' '.join(map(str, self.train.lr))}: every rate must be above 0")
        batch = self.train.batch_size
        if batch is not None and self.train.rows_per_step % batch:
            raise InputError(
                f"train.batch_size: {batch} does not divide train.rows_per_step, {self.train.rows_per_step}"
            )
        taken = parse_named("id", self.id)
        for name in parse_named("ood", self.ood):
            if name in taken:
                raise InputError(f"ood: the name {name!r} is taken by --id; a set is either ID or OOD")
        if self.id and self.heldout_prompts is not None:
            raise InputError("heldout_prompts: --id names the evaluation prompts, so none are held out; leave it out")
        check_range(self, "[0, 1)", "train.replay_fraction")
        if self.train.replay_fraction and self.distill.general_texts == 0:
            raise InputError("distill.general_texts: is 0, and train.replay_fraction replays them; leave one out")
        if self.policy in ("balanced", "no_loss") and self.draft is None and self.init is None:
            raise InputError(f"policy: {self.policy} goes back towards the draft that was started from; name --draft")
        if self.train.draft_vocab_size and self.draft is None and self.init is None:
            raise InputError("train.draft_vocab_size: a fresh EAGLE head drafts all tokens; name --draft or --init")
        if self.policy == "id" and self.plain:
            raise InputError("plain: with policy id every draft is plain; leave one of the two out")

    def drafts(self) -> dict[str, str]:
        """The name of each aligned draft and its objective: `jsd` for `jsd:beta=0.5` where one name is enough."""
        short = [re.split(r"[^a-z_]", spec)[0] for spec in self.objective]
        named = {}
        for name, spec in zip(short, self.objective, strict=True):
            clear = name and short.count(name) == 1 and name not in ("base", "target", "eval", "distilled", "prompts")
            named[name if clear else re.sub(r"[^A-Za-z0-9.]+", "-", spec).strip("-.")[:64]] = spec
        return named

    def plain_drafts(self) -> dict[str, str]:
        """Those that are trained as policy id does, for comparison, with their objectives."""
        return {f"{name}-plain": spec for name, spec in self.drafts().items()} if self.plain else {}

    def trained(self) -> dict[str, str]:
        """Every training run and its objective."""
        return self.plain_drafts() | self.drafts()

    def offered(self) -> dict[str, str]:
        """The drafts to choose the one to serve from, with their objectives: those of the policy, if it makes any."""
        if self.policy is None or self.policy == "id":
            return self.drafts()
        return {f"{name}-{self.policy.replace('_', '-')}": spec for name, spec in self.drafts().items()}

    def compared(self) -> dict[str, str]:
        """The drafts that the evaluation compares with the one they started from."""
        return self.plain_drafts() | self.offered()
