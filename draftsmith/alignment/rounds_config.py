"""The options of `draftsmith align --from_log` and `--rollback`; reading them needs no torch."""

import re
from dataclasses import dataclass, field

from draftsmith.alignment.config import DistillChoices, EvalChoices, Policy, TrainChoices
from draftsmith_core.errors import InputError
from draftsmith_core.option_types import check_range, check_types
from eval.require import Requirement


@dataclass(frozen=True, kw_only=True)
class AdaptConfig:
    """One round of adaptation of the draft that is served to what its server has logged; it is switched only for one
    that is better and loses nowhere."""

    draft: str
    """The directory of the draft that is served. A promotion switches it; DRAFT.previous is what it was before."""
    from_log: str | None = None
    """A .jsonl log of requests with the target's answers, as `eval --watch` reads it, with `created`, `timestamp` or
    `time`."""
    baseline: str | None = None
    """results.json of an evaluation: its target, and the prompt sets in and out of distribution to compare on."""
    target: str | None = None
    """The target; that of --baseline without it."""
    rollback: bool = False
    """Instead: switch back to DRAFT.previous."""
    out: str | None = None
    """Directory of the rounds, one directory each; DRAFT.rounds without it."""
    redact: list[str] = field(default_factory=list)
    """Regular expressions: a logged row in which one of them matches is left out and counted."""
    require: list[str] = field(default_factory=lambda: ["gain[recent] > 0", "gain >= -0.02"])
    """What a draft must meet to be promoted, as `eval --require` has it; `recent` are the latest prompts of the log."""
    recent_fraction: float = 0.2
    """Share of the log, the latest, that is measured on and not trained on."""
    objective: str = "jsd:beta=0.5"
    """What the draft is trained to do."""
    policy: Policy = "balanced"
    """How much of what the draft knows is kept, as `align --policy` has it."""
    distill: DistillChoices = field(default_factory=DistillChoices)
    train: TrainChoices = field(default_factory=lambda: TrainChoices(heldout_fraction=0.15))
    eval: EvalChoices = field(default_factory=EvalChoices)
    seed: int = 0
    """Of every draw."""
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
        if self.rollback and (self.from_log or self.baseline):
            raise InputError("rollback: only switches the draft back; leave out --from_log and --baseline")
        if not self.rollback and not (self.from_log and self.baseline):
            raise InputError("from_log: a round needs --from_log LOG.jsonl and --baseline results.json")
        check_range(self, "(0, 1)", "recent_fraction")
        for pattern in self.redact:
            try:
                re.compile(pattern)
            except re.error as error:
                raise InputError(f"redact: {pattern!r} is no regular expression ({error})") from None
        if not self.require:
            raise InputError("require: is empty, so any draft would be promoted; leave it out for the usual rules")
        for text in self.require:
            Requirement.parse(text)
