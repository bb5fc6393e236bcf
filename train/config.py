"""The options of `draftsmith train`. Every key may stand in the YAML file or on the command line."""

import math
from dataclasses import dataclass, field
from typing import Literal

from draftsmith.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Optim:
    """The optimizer and its schedule: linear warm-up, then a cosine down to a fraction of the peak."""

    name: Literal["adamw", "sgd"] = "adamw"
    """`sgd` (no momentum) is for checking gradients; AdamW hides a wrong scale."""
    lr: float = 1e-4
    """Peak learning rate."""
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    """Decoupled; not applied to norms and biases."""
    warmup_steps: int = 0
    final_lr_fraction: float = 0.1
    """The cosine ends at this fraction of `lr`."""
    clip_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 leaves them alone."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Fit a draft model to a distilled set (or to text)."""

    out: str
    """The draft checkpoint: an ordinary Hugging Face directory when training is done; `run/` in it holds the rest."""
    data: list[str]
    """Distilled sets (directories), or .jsonl/.parquet files with `text`, or `messages` that end with an answer."""
    draft: str | None = None
    """Weights to start from: a directory or hub name."""
    draft_config: str | None = None
    """A Hugging Face config.json. Alone: a fresh model of that shape. With `draft`: the shape it must have."""
    target: str | None = None
    """The teacher. Needed by `fkl`; with `ce` it adds the held-out alpha."""
    tokenizer: str | None = None
    """Default: the target's, else the draft's."""
    objective: Literal["ce", "fkl"] = "ce"
    """ce: cross-entropy on the response tokens (sequence-level KD). fkl: KL(target || draft) per token."""
    heldout: list[str] = field(default_factory=list)
    """Held-out data, same kinds as `data`. Empty: `heldout_fraction` of the prompts in `data`."""
    heldout_fraction: float = 0.05
    max_length: int = 512
    """Tokens of prompt and response; what is longer is cut, text is packed into blocks of this length."""
    batch_size: int = 8
    """Sequences per process and forward."""
    accumulation: int = 1
    """Forwards per optimizer step; a step sees batch_size x accumulation x processes sequences."""
    epochs: float = 1.0
    steps: int | None = None
    """Optimizer steps; overrides `epochs`."""
    eval_every: int = 100
    """Steps between held-out evaluations; one is also made at the start and at the end."""
    patience: int = 0
    """Stop after this many evaluations without a better held-out loss; 0 never stops early."""
    save_every: int = 100
    """Steps between checkpoints that a killed run continues from."""
    optim: Optim = field(default_factory=Optim)
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Autocast of the forward. Weights and optimizer stay fp32. auto: bf16 where an accelerator has it."""
    tracker: Literal["none", "wandb"] = "none"
    """metrics.jsonl is always written; wandb adds Weights & Biases (WANDB_MODE=offline needs no account)."""
    project: str = "draftsmith"
    """Name of the W&B project."""
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    """Of the target."""
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        positive = ("max_length", "batch_size", "accumulation", "eval_every", "save_every")
        for key in positive:
            if getattr(self, key) < 1:
                raise InputError(f"{key}: {getattr(self, key)} must be at least 1")
        if not self.data:
            raise InputError("data: is empty; name a distilled set or a .jsonl/.parquet file")
        if self.draft is None and self.draft_config is None:
            raise InputError("draft: give `draft` (weights to start from) or `draft_config` (a config.json)")
        if self.objective == "fkl" and self.target is None:
            raise InputError("target: objective fkl needs the target as its teacher")
        if self.steps is not None and self.steps < 1:
            raise InputError(f"steps: {self.steps} must be at least 1")
        if not 0 < self.epochs < math.inf:
            raise InputError(f"epochs: {self.epochs} must be above 0")
        if not 0 < self.heldout_fraction < 1:
            raise InputError(f"heldout_fraction: {self.heldout_fraction} must be between 0 and 1")
        optim = self.optim
        if not 0 < optim.lr < math.inf:
            raise InputError(f"optim.lr: {optim.lr} must be above 0")
        for key, value in (("beta1", optim.beta1), ("beta2", optim.beta2)):
            if not 0 <= value < 1:
                raise InputError(f"optim.{key}: {value} must be at least 0 and below 1")
        for key, value in (
            ("optim.weight_decay", optim.weight_decay),
            ("optim.warmup_steps", optim.warmup_steps),
            ("optim.final_lr_fraction", optim.final_lr_fraction),
            ("optim.clip_norm", optim.clip_norm),
            ("patience", self.patience),
        ):
            if not 0 <= value < math.inf:
                raise InputError(f"{key}: {value} must not be negative")
