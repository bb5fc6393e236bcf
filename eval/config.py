"""The options of `draftsmith eval`. `eval.request` checks them; neither imports torch."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from draftsmith_core.io import check_apart, check_replaceable, check_writable
from draftsmith_core.model_options import Quantize
from draftsmith_core.option_types import check_least, check_types
from draftsmith_core.sampling_options import check_sampling


@dataclass(frozen=True, kw_only=True)
class RenderConfig:
    """Draw the report of an evaluation again."""

    render: str
    """Directory of the evaluation; results.json there is read, report.html and plots/ are written."""
    require: list[str] = field(default_factory=list)
    """Requirements on it, as those of an evaluation."""


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Set two evaluations side by side, paired where their prompts agree."""

    compare: list[str]
    """The first and the second: each a results.json or the directory of an evaluation."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Compare drafts of one target, ID and OOD; `eval --render DIR` only draws the report of DIR again, and
    `eval --compare A B` sets two evaluations side by side."""

    target: str
    """Target model: a local directory or a hub name."""
    draft: list[str]
    """Drafts to compare, each NAME=MODEL; a model is a language model or the directory of a head."""
    id: list[str]
    """Prompt sets in distribution, each NAME=PROMPTS, or a suite: @NAME, or @NAME:FILE for local rows of it."""
    ood: list[str] = field(default_factory=list)
    """Prompt sets out of distribution, the same way."""
    out: str
    """Directory for results.json, report.html, plots/ and the measurements that a killed run resumes from."""
    base: str | None = None
    """The draft that the others are compared with; the first one when not given."""
    temperature: list[float] = field(default_factory=lambda: [0.0, 1.0])
    """Temperatures to measure at; the report leads with the highest."""
    tree: list[str] = field(default_factory=lambda: ["chain:4"])
    """Draft trees to decode with: chain:N, kary:K1,K2,..., static:FILE, sequoia:FILE, eagle2, opt, auto:FILE as
    `plan` chose, or auto, planned first: for the first draft that is not the base, at the highest temperature."""
    verifier: list[str] = field(default_factory=list)
    """Verifiers to decode with; when empty, speculative on chains, mcsd on trees, exact on trees that grow."""
    top_k: int | None = None
    """Keep the k most probable tokens; 0 keeps all. Default: of the target's generation_config.json, else 0."""
    top_p: float | None = None
    """Keep the smallest set of tokens with this mass; 1 keeps all. Default: of that file, else 1."""
    min_p: float | None = None
    """Keep tokens of at least this share of the greatest probability; 0 keeps all. Default: of that file, else 0."""
    max_prompts: int = 64
    """Prompts read from each set."""
    prompt_tokens: int = 32
    """Tokens of a `text` row that become its prompt."""
    max_new_tokens: int = 64
    """Longest continuation."""
    speed_prompts: int = 8
    """Prompts per set that are also timed at batch 1; 0 times nothing."""
    batch_size: int = 16
    """Prompts decoded together (not when timing)."""
    bootstrap: int = 2000
    """Resamples behind every 95 % interval."""
    seed: int = 0
    """Seed of every draw."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    dtype: str = "auto"
    """auto, float32, bfloat16 or float16."""
    quantize: Quantize = "none"
    """none, or nf4: the target in 4 bits through bitsandbytes. Every figure is then about the 4-bit target."""
    quantize_draft: Quantize | None = None
    """The same for drafts that are language models; as `quantize` when not given."""
    heterogeneous_vocab: bool = False
    """true: drafts that are language models of another tokenizer draft the tokens that both have (lossless)."""
    chat_template: str | None = None
    """A Jinja file with the chat template, where the target's tokenizer has none or another is wanted."""
    trust_remote_code: bool = False
    """Run model code that comes with a checkpoint."""
    strict: bool = False
    """Make every remark an error: prompts that were trained on or shared between sets, drafts that are not smaller than
    the target, options that change nothing (exit code 2), and clock times of a busy machine (exit code 1)."""
    require: list[str] = field(default_factory=list)
    """What the results must meet, such as "alpha[code] >= 0.4", "gain[id] > 0" or "speedup[code T=0 draft=jsd] > 1",
    judged on bounds of 95 % intervals: the low one for > and >=, the high one for < and <=. What brackets leave open is
    required of every draft but the base, prompt set, temperature and tree. Exit code 3 and a line each when not met."""
    tracker: Literal["none", "wandb"] = "none"
    """wandb: the figures, results.json and report.html in Weights & Biases too, joined to the drafts' training runs
    (WANDB_MODE=offline needs no account)."""
    project: str = "draftsmith"
    """Name of the W&B project; artifacts join within one."""

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Find the tree with which a draft is fastest on this machine, and confirm it by the clock."""

    target: str
    """Target model: a local directory or a hub name."""
    draft: str
    """The draft: a language model or the directory of a head."""
    prompts: str
    """Prompts like those that will be served; rows may have domains."""
    out: str
    """The .json file to write; `--tree auto:FILE` of decode and eval reads it."""
    temperature: float | None = None
    """What is planned for; 0 is greedy. Default: of the target's generation_config.json where that samples, else 0."""
    top_k: int | None = None
    """Keep the k most probable tokens; 0 keeps all. Default: of that file, else 0."""
    top_p: float | None = None
    """Keep the smallest set of tokens with this mass; 1 keeps all. Default: of that file, else 1."""
    min_p: float | None = None
    """Keep tokens of at least this share of the greatest probability; 0 keeps all. Default: of that file, else 0."""
    batch_size: int = 1
    """Rows that are decoded together where the plan is used."""
    max_prompts: int = 32
    """Prompts that acceptance is measured on."""
    confirm_prompts: int = 8
    """Prompts on which the best are timed."""
    prompt_tokens: int = 32
    """Tokens of a `text` row that become its prompt."""
    max_new_tokens: int = 64
    """Tokens per prompt."""
    seed: int = 0
    """Seed of every draw."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    dtype: str = "auto"
    """auto, float32, bfloat16 or float16."""
    quantize: Quantize = "none"
    """none, or nf4: the target in 4 bits through bitsandbytes."""
    trust_remote_code: bool = False
    """Run model code that comes with a checkpoint."""

    def __post_init__(self) -> None:
        check_types(self)
        check_replaceable(Path(self.out), "--out")
        check_writable(Path(self.out), "--out")
        check_apart(self.out, [self.prompts])
        check_least(self, 1, "batch_size", "max_prompts", "confirm_prompts", "prompt_tokens")
        check_least(self, 4, "max_new_tokens")
        check_sampling(self.temperature, self.top_k, self.top_p, self.min_p)
