"""Options of `draftsmith eval` and `draftsmith plan`, without torch. `eval.request` reads the names
in them.
"""

from dataclasses import field
from pathlib import Path
from typing import Annotated

from pydantic import Field

from draftsmith.core.errors import InputError
from draftsmith.core.io import check_out
from draftsmith.core.options import (
    AtLeast0,
    AtLeast1,
    Directory,
    LargeTargetOptions,
    Model,
    NamedModel,
    NamedPrompts,
    NotIdentity,
    OutFile,
    PenaltyOptions,
    PromptOptions,
    Prompts,
    Rare,
    RunOptions,
    Spec,
    SpreadTargetOptions,
    Temperature,
    options,
)
from draftsmith.core.settings import Quantize

Drafts = Annotated[list[NamedModel], Field(min_length=1)]
Named = Annotated[list[NamedPrompts], Field(min_length=1)]
Trees = Annotated[list[Spec], Field(min_length=1)]


@options
class RenderConfig:
    """Draw the report of an evaluation again."""

    render: Directory
    """Directory of the evaluation. Reads results.json, writes report.html and plots/."""
    require: list[Spec] = field(default_factory=list)
    """Requirements to check, as in an evaluation."""


@options
class TimeAgainConfig:
    """Time an evaluation again, on a machine that is quiet now."""

    time_again: Directory
    """Directory of the evaluation. All its measurements but the timings are kept."""


@options
class EvalConfig(LargeTargetOptions, PenaltyOptions, PromptOptions, RunOptions):
    """Compare drafts of one target, in distribution (ID) and out of it (OOD)."""

    target: Model
    """Target model: a local directory or hub name."""
    draft: Drafts
    """Drafts to compare, each MODEL or NAME=MODEL: a language model, a head,
    `mtp` (the target's own MTP layer), or a method without weights: prompt_lookup, lookahead,
    retrieval:FILE (FILE as --datastore of decode), and prompt_lookup+MODEL: lookup beside the
    model. Lookahead has its own tree and no alpha. One NAME= several times, or
    with a pattern (*): training seeds of one draft.
    """
    id: Named
    """Prompt sets in distribution, each PROMPTS, NAME=PROMPTS, @SUITE, or @SUITE:FILE for local
    rows of the suite.
    """
    ood: list[NamedPrompts] = field(default_factory=list)
    """Prompt sets out of distribution, as for `id`; also template:PROMPTS."""
    base: str | None = None
    """Draft to compare the others with. Default: the first with weights."""
    temperature: Annotated[list[Temperature], Field(min_length=1)] = field(
        default_factory=lambda: [0.0, 1.0]
    )  # type: ignore[assignment]
    """Temperatures; the report leads with the highest."""
    tree: Trees = field(default_factory=lambda: ["chain:4"])
    """Draft trees to decode with: chain:N, kary:K1,K2,..., static:FILE, eagle2, opt,
    auto:FILE (a plan), or none: alpha and predictions only. Not auto, whose counts would be those
    of one machine.
    """
    verifier: list[str] = field(default_factory=list)
    """Verifiers to decode with. Default: speculative on chains, mcsd on trees, exact on trees that
    grow.
    """
    max_prompts: AtLeast1 = 64
    """Prompts to read from each set."""
    max_new_tokens: AtLeast1 = 64
    """Maximum length of a continuation."""
    speed_prompts: Rare[AtLeast0] = 8
    """Prompts per set to time at batch 1; 0 skips timing."""
    compile: Rare[bool | None] = None
    """Time steps that are recorded as CUDA graphs, as `decode --compile` runs them. Default: on a
    GPU, if the models can be recorded.
    """
    batch_size: Rare[AtLeast1] = 16
    """Prompts to decode together, except when timing."""
    bootstrap: Rare[Annotated[int, Field(ge=100)]] = 2000
    """Bootstrap resamples for every 95 % interval."""
    quantize: Rare[Quantize] = "none"
    """nf4: load the target in 4 bits with bitsandbytes. Every figure is then about the 4-bit
    target.
    """
    quantize_draft: Rare[Quantize | None] = None
    """Quantization of draft language models. Default: as `quantize`."""
    heterogeneous_vocab: Rare[bool] = False
    """Accept draft language models of another tokenizer; they draft the tokens that both have
    (lossless).
    """
    strict: Rare[bool] = False
    """Turn warnings into errors: shared or trained-on prompts, oversized drafts (exit code 2),
    timings of a busy machine (exit code 1).
    """
    require: list[Spec] = field(default_factory=list)
    """Requirements, such as "alpha[code] >= 0.4", "gain[id] > 0" or "speedup[code T=0 draft=jsd] >
    1". They are judged on 95 % bounds: the low one for > and >=, the high one for < and <=. If the
    brackets omit the prompt set, temperature, tree or draft, all must meet it (drafts but the
    base). If one is not met, the exit code is 3.
    """

    def __post_init__(self) -> None:
        if self.tree == ["none"] and self.verifier:
            raise InputError("verifier: --tree none decodes nothing; leave it out")


@options
class PlanConfig(SpreadTargetOptions, PenaltyOptions, PromptOptions, RunOptions):
    """Find the tree with which a draft is fastest on this machine, and confirm it by the clock."""

    target: Model
    """Target model: a local directory or hub name."""
    draft: Model
    """Draft: a language model or a head; or, with --out, prompt_lookup, lookahead,
    retrieval:FILE (FILE as --datastore of decode), or prompt_lookup+DRAFT: lookup beside the
    draft.
    """
    prompts: Prompts
    """Prompts like those that you will serve."""
    out: NotIdentity[OutFile | None] = None  # type: ignore[assignment]
    """The .json file to write; `--tree auto:FILE` of decode and eval reads it. Default: plan.json
    in the draft's directory.
    """
    batch_size: AtLeast1 = 1
    """Rows that are decoded together when the plan is used."""
    max_prompts: AtLeast1 = 32
    """Prompts to read."""
    confirm_prompts: AtLeast1 = 8
    """Prompts to time the best trees on."""
    max_new_tokens: Annotated[int, Field(ge=4)] = 64
    """Maximum tokens per prompt."""
    compile: Rare[bool | None] = None
    """Time steps that are recorded as CUDA graphs, as `decode --compile` runs them. Default: on a
    GPU, if the models can be recorded.
    """
    quantize: Quantize = "none"
    """nf4: load the target in 4 bits with bitsandbytes."""

    def __post_init__(self) -> None:
        if self.out is None and not Path(self.draft).is_dir():
            raise InputError(
                f"--draft {self.draft}: is not a directory to put plan.json in; name a file with "
                "--out"
            )
        # The timing comes before the file is written.
        check_out(self.file, [self.prompts], "schema_version")

    @property
    def file(self) -> Path:
        return Path(self.draft) / "plan.json" if self.out is None else Path(self.out)
