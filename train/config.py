"""The options of `draftsmith train`. Every key may be given in the YAML file or on the command line."""

from dataclasses import dataclass, field
from typing import Literal

from draftsmith_core.errors import InputError
from draftsmith_core.option_types import check_least, check_range, check_types
from train.objective import parse_objective


@dataclass(frozen=True, kw_only=True)
class Optim:
    """The optimizer and its schedule: linear warm-up, then a cosine down to a fraction of the peak."""

    name: Literal["adamw", "sgd"] = "adamw"
    """`sgd` (no momentum) is for checking gradients; AdamW hides a wrong scale."""
    lr: float = 1e-4
    """Peak learning rate."""
    beta1: float = 0.9
    """AdamW's decay of the mean gradient."""
    beta2: float = 0.95
    """AdamW's decay of the mean squared gradient."""
    weight_decay: float = 0.0
    """Decoupled; not applied to norms and biases."""
    warmup_steps: int = 0
    """Steps in which the rate rises from 0."""
    final_lr_fraction: float = 0.1
    """The cosine ends at this fraction of `lr`."""
    clip_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 leaves them alone."""


DraftKind = Literal["lm", "eagle", "eagle3", "medusa", "hydra"]

# The options under `head` that each kind has.
_HEAD_OPTIONS: dict[str, frozenset[str]] = {
    "lm": frozenset({"draft_vocab_size", "features", "features_gib"}),
    "eagle": frozenset({"noise", "features", "features_gib"}),
    "eagle3": frozenset({"draft_vocab_size", "test_steps", "step_decay", "features", "features_gib"}),
    "medusa": frozenset({"num_heads", "num_layers", "step_decay", "features", "features_gib"}),
    "hydra": frozenset({"num_heads", "num_layers", "step_decay", "features", "features_gib"}),
}


@dataclass(frozen=True, kw_only=True)
class HeadOptions:
    """Options of heads; null is the paper's value. An option that `kind` does not have is refused."""

    num_heads: int | None = None
    """Medusa, Hydra: how many tokens ahead; 4."""
    num_layers: int | None = None
    """Medusa, Hydra: residual layers of each head; 1."""
    draft_vocab_size: int | None = None
    """lm, EAGLE-3: how many of the target's tokens it drafts, the commonest in the responses of `data` and `replay`;
    null is all."""
    test_steps: int | None = None
    """EAGLE-3: how many steps it is trained on its own features; 7."""
    step_decay: float | None = None
    """EAGLE-3, Medusa, Hydra: weight of the loss of each further step, as a share of the one before; 0.8."""
    noise: float | None = None
    """EAGLE-1: while training, input features are shifted at random by up to this much; 0.1."""
    features: str | None = None
    """A directory to keep the target's hidden states in, for other epochs and runs. null: computed every time; of an lm
    on a CPU up to 2 GiB are held in memory for later epochs."""
    features_gib: float | None = None
    """The most that directory may hold, GiB; 16."""

    def check(self, kind: str) -> None:
        """InputError for an option that the kind does not have."""
        given = {key: value for key, value in vars(self).items() if value is not None}
        for key in given:
            if key not in _HEAD_OPTIONS[kind]:
                known = ", ".join(sorted(_HEAD_OPTIONS[kind])) or "none"
                raise InputError(f"head.{key}: kind {kind} has no such option; it has {known}")
        if "features_gib" in given and "features" not in given:
            raise InputError("head.features_gib: goes with head.features, the directory that it bounds")


@dataclass(frozen=True, kw_only=True)
class OnPolicy:
    """Sequences that the draft generates itself, for the target to score (GKD, DistillSpec)."""

    fraction: float = 0.0
    """Share of the sequences whose response the draft generates, anew at every step; 0 for none."""
    max_new_tokens: int = 128
    """The longest such response."""
    temperature: float = 1.0
    """Of the draft while it answers."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank updates in place of all weights, through peft; merged in the checkpoint, and kept beside it."""

    rank: int = 0
    """Rank of the update of each layer; 0 trains all weights."""
    alpha: float | None = None
    """Updates are multiplied by alpha / rank; null is twice the rank."""
    dropout: float = 0.0
    """Of what goes into the updates, while training."""
    targets: list[str] = field(default_factory=list)
    """Names of the linear layers, such as q_proj v_proj; empty is all but the output projection."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Fit a draft model to a distilled set (or to text)."""

    out: str
    """The draft checkpoint: an ordinary Hugging Face directory when training is done; `run/` in it holds the rest."""
    data: list[str]
    """Distilled sets (directories), or .jsonl/.parquet files with `text`, or `messages` that end with an answer."""
    kind: DraftKind = "lm"
    """What is trained: a language model, or a head on the target's hidden states."""
    draft: str | None = None
    """Weights to start from: a directory or hub name. A head without it starts fresh."""
    draft_config: str | None = None
    """A Hugging Face config.json. Alone: a fresh model of that shape. With `draft`: the shape it must have."""
    target: str | None = None
    """The teacher. Needed by heads, and by every objective but `ce` unless `data` has teacher columns; with `ce` it
    adds held-out alpha."""
    tokenizer: str | None = None
    """The tokenizer to save with the draft, and for rows of text. Default: the target's, else the draft's."""
    objective: str = "ce"
    """ce (cross-entropy: sequence-level KD on the target's answers), fkl, rkl, jsd:beta=0.5, tvd, tvd_pp, lk_alpha,
    lk_hybrid:eta=3, sums such as `0.9*fkl+0.1*ce`; `@adaspec:keep=0.4` behind it selects tokens; tvd@e2e:depth=4."""
    temperature: float = 1.0
    """Divides the logits of draft and target in the objective (not in `ce`, and not for the reported alpha)."""
    reference: str | None = None
    """The draft that `@adaspec` compares with: one that was distilled already."""
    heldout: list[str] = field(default_factory=list)
    """Held-out data, same kinds as `data`. Empty: `heldout_fraction` of the prompts in `data`."""
    heldout_fraction: float = 0.05
    """Share of the prompts in `data` that are held out where `heldout` is empty."""
    max_length: int = 512
    """Tokens of prompt and response; what is longer is cut, text is cut into blocks of this length."""
    heterogeneous_vocab: bool = False
    """Train a draft language model of another tokenizer than the target's: the data is written in its tokens, objective
    ce alone."""
    packing: bool = False
    """Several prompts and responses per row of `max_length` tokens, kept apart; `batch_size` counts rows."""
    replay: list[str] = field(default_factory=list)
    """General data to mix in, same kinds as `data`, so that the draft keeps its acceptance in other domains."""
    replay_fraction: float = 0.0
    """Share of the sequences that come from `replay`."""
    mixing_temperature: float = 1.0
    """With several `data`, which are domains then: each is drawn in proportion to its size^(1 / temperature). 1: as
    large as it is; far above 1: all alike."""
    anchor_kl: float = 0.0
    """Weight of KL(draft before training || draft) per token, beside the objective, so that the draft keeps what it
    knew; it holds on the tokens of `data` and `replay`. 0: none. For language models."""
    lora: Lora = field(default_factory=Lora)
    on_policy: OnPolicy = field(default_factory=OnPolicy)
    head: HeadOptions = field(default_factory=HeadOptions)
    batch_size: int = 8
    """Sequences per process and forward."""
    accumulation: int = 1
    """Forwards per optimizer step; a step sees batch_size x accumulation x processes sequences."""
    epochs: float = 1.0
    """Times through `data` and `replay`: steps for so many times the sequences of both."""
    steps: int | None = None
    """Optimizer steps; overrides `epochs`."""
    gradient_checkpointing: bool = False
    """Recompute the draft's activations for the gradient instead of keeping them: less memory, more time."""
    compile: bool = False
    """torch.compile every layer of the draft; worth it on GPUs, needs a C compiler on CPUs."""
    eval_every: int = 100
    """Steps between held-out evaluations; one is also made at the start and at the end."""
    patience: int = 0
    """Stop after this many evaluations in a row without a new best; 0 never stops early."""
    best_by: Literal["auto", "alpha", "loss"] = "auto"
    """Which held-out figure decides what weights are the best. auto: alpha where it is measured, else the loss."""
    save_every: int = 100
    """Steps between checkpoints that a killed run continues from."""
    keep: int = 2
    """How many of those stay."""
    optim: Optim = field(default_factory=Optim)
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Autocast of the forward. Weights and optimizer stay fp32. auto: bf16 where an accelerator has it."""
    tracker: Literal["none", "wandb", "tensorboard"] = "none"
    """metrics.jsonl is always written; wandb adds Weights & Biases (WANDB_MODE=offline needs no account)."""
    project: str = "draftsmith"
    """Name of the W&B project."""
    push_to_hub: str | None = None
    """Upload the finished checkpoint to this model on the hub, owner/name, with the token in HF_TOKEN; made private
    where it does not exist."""
    seed: int = 0
    """Of fresh weights, the order of the data, dropout and noise."""
    device: str = "auto"
    """auto, cpu or cuda."""
    dtype: str = "auto"
    """Of the target: auto, float32, bfloat16 or float16."""
    chat_template: str | None = None
    """A Jinja file with the chat template, where the target's tokenizer has none or another is wanted."""
    trust_remote_code: bool = False
    """Run model code that comes with a checkpoint."""
    smoke: bool = False
    """Try the recipe out: tiny random models of the same families, made-up data, a few steps, nothing downloaded."""

    def __post_init__(self) -> None:
        check_types(self)
        self._check_ranges()
        if not self.data:
            raise InputError("data: is empty; name a distilled set or a .jsonl/.parquet file")
        self._check_kind()
        self._check_unused()
        if self.heterogeneous_vocab:
            self._check_other_tokenizer()
        if self.smoke and self.push_to_hub is not None:
            raise InputError("push_to_hub: what --smoke makes is a random model; leave one of them out")
        if self.kind == "lm" and self.draft is None and self.draft_config is None:
            raise InputError("draft: give `draft` (weights to start from) or `draft_config` (a config.json)")
        objective = parse_objective(self.objective, self.temperature)
        if objective.needs_reference and self.reference is None:
            raise InputError("reference: @adaspec compares with a draft that was distilled already; name it")
        if self.reference is not None and not objective.needs_reference:
            raise InputError("reference: only an objective that ends in @adaspec has one; leave it out")
        if self.replay and self.replay_fraction == 0:
            raise InputError("replay_fraction: is 0, so `replay` would not be used; set it, such as to 0.3")
        if self.replay_fraction > 0 and not self.replay:
            raise InputError("replay: is empty and replay_fraction is not; name the data to mix in")
        if self.anchor_kl and self.draft is None:
            raise InputError("anchor_kl: fresh weights have nothing to keep; name the `draft` to start from")
        self._check_domains()
        self._check_lora()

    def _check_ranges(self) -> None:
        check_least(self, 1, "max_length", "batch_size", "accumulation", "eval_every", "save_every", "keep", "steps")
        check_least(self, 1, "head.num_heads", "head.num_layers", "head.draft_vocab_size", "head.test_steps")
        check_least(self, 1, "on_policy.max_new_tokens")
        check_least(self, 0, "optim.weight_decay", "optim.warmup_steps", "optim.final_lr_fraction", "optim.clip_norm")
        check_least(self, 0, "patience", "anchor_kl", "lora.rank", "head.noise")
        check_range(self, "(0, inf)", "epochs", "optim.lr", "mixing_temperature", "lora.alpha")
        check_range(self, "(0, inf)", "on_policy.temperature", "head.features_gib")
        check_range(self, "[0, 1)", "replay_fraction", "optim.beta1", "optim.beta2", "lora.dropout")
        check_range(self, "(0, 1)", "heldout_fraction")
        check_range(self, "(0, 1]", "head.step_decay")
        check_range(self, "[0, 1]", "on_policy.fraction")

    def _check_domains(self) -> None:
        if self.mixing_temperature != 1 and len(self.data) < 2:
            raise InputError("mixing_temperature: needs several domains; name a set each in `data`, or leave it out")
        if self.mixing_temperature != 1 and self.packing:
            raise InputError(
                "mixing_temperature: rows of several documents belong to no one domain; set packing to false"
            )

    def _check_other_tokenizer(self) -> None:
        """InputError for what cannot be done across tokenizers."""
        if self.kind != "lm" or self.draft is None:
            raise InputError("heterogeneous_vocab: is for a language model that has a tokenizer; name it as `draft`")
        if self.target is None:
            raise InputError("target: heterogeneous_vocab needs its tokenizer, which the data has; name the target")
        for key, given in (
            ("objective", self.objective.strip() != "ce"),
            ("on_policy", self.on_policy.fraction > 0),
            ("best_by", self.best_by == "alpha"),
            ("head.features", self.head.features is not None),
        ):
            if given:
                raise InputError(
                    f"{key}: heterogeneous_vocab trains with ce on the target's answers, because the target's "
                    f"distributions are over other tokens; leave it out"
                )
        if self.tokenizer is not None:
            raise InputError("tokenizer: with heterogeneous_vocab data has the target's and the draft keeps its own")

    def _check_lora(self) -> None:
        lora = self.lora
        if not lora.rank:
            if lora != Lora():
                raise InputError("lora: is not used while lora.rank is 0; leave it out, or set the rank")
            return
        if self.kind != "lm" or self.draft is None:
            raise InputError("lora.rank: updates a language model that is there; name it as `draft`, with kind lm")

    def _check_unused(self) -> None:
        """InputError for an option that was set and that this run would not use."""
        sgd, policy, default = self.optim.name == "sgd", self.on_policy, OnPolicy()
        for key, ignored, why in (
            ("optim.beta1", sgd and self.optim.beta1 != Optim.beta1, "sgd has none"),
            ("optim.beta2", sgd and self.optim.beta2 != Optim.beta2, "sgd has none"),
            ("on_policy", not policy.fraction and policy != default, "is not used while on_policy.fraction is 0"),
            (
                "dtype",
                self.dtype != "auto" and not (self.target or self.reference),
                "is the target's, and none is given",
            ),
        ):
            if ignored:
                raise InputError(f"{key}: {why}; leave it out")

    def _check_kind(self) -> None:
        self.head.check(self.kind)
        policy = self.on_policy
        if policy.fraction > 0:
            if self.target is None:
                raise InputError("target: on_policy needs the target, which must score what the draft generates")
            if self.packing:
                raise InputError("packing: answers that are generated later cannot be packed now; set it to false")
        if self.kind == "lm":
            if self.head.features is not None and (self.target is None or policy.fraction > 0):
                why = "no target is given" if self.target is None else "answers of on_policy do not come back"
                raise InputError(f"head.features: {why}; leave it out")
            return
        for key, why in (
            ("draft_config", "a head has the shape that its target gives it"),
            ("reference", "heads are not trained with @adaspec"),
            ("anchor_kl", "is for draft language models"),
            ("gradient_checkpointing", "is for draft language models; a head has one layer"),
            ("compile", "is for draft language models; a head costs little beside its target"),
        ):
            if getattr(self, key):
                raise InputError(f"{key}: {why}; leave it out for kind {self.kind}")
        if self.target is None:
            raise InputError(f"target: kind {self.kind} is trained on the target's hidden states; name the target")
        if policy.fraction > 0:
            raise InputError(
                f"on_policy: kind {self.kind} drafts from the target's states; set on_policy.fraction to 0"
            )
