"""The options that `align` chooses if they were left open: one table, in the order of choosing."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, TypeVar

from draftsmith.alignment.config import AlignConfig
from draftsmith.alignment.facts import Facts
from draftsmith.core.errors import InputError
from draftsmith.drafts.engine_support import loading
from draftsmith.train.config import DraftKind
from draftsmith.train.optimizer import usual_rate

T = TypeVar("T")
_LARGE = 1_000_000_000  # parameters from which memory, not speed, decides batch sizes
# The share of general text in every step that docs/robust.md supports.
_REPLAYED = 0.5
# Writing more general texts than this does not pay; replay repeats them.
_MOST_TEXTS = 4096
# Answers written together on a GPU.
_MOST_TOGETHER = 512


@dataclass(frozen=True)
class Known:
    """The facts, and the options that are given or chosen so far."""

    facts: Facts
    options: AlignConfig

    def by_device(self, on_gpu: T, on_cpu: T) -> T:
        """Return one value on a GPU and another on a CPU."""
        return on_gpu if self.facts.on_gpu else on_cpu

    @property
    def device(self) -> str:
        return self.by_device("GPU", "CPU")

    @property
    def context(self) -> str:
        return str(self.facts.context or "unknown")

    @property
    def sampled_by(self) -> Mapping[str, str]:
        """What decides each sampling option."""
        named = dict.fromkeys(self.facts.sampling.from_target, "generation_config.json")
        return defaultdict(lambda: "own distribution", named)

    @property
    def usable(self) -> int:
        """Number of prompts that are not held out."""
        return self.facts.prompts - (self.options.heldout_prompts or 0)

    @property
    def answers(self) -> int:
        return self.options.distill.max_prompts * self.options.distill.num_samples

    @property
    def draft_parameters(self) -> int:
        """Parameters of the draft, with the output projection of a fresh EAGLE-3 head."""
        facts = self.facts
        size = self.options.train.draft_vocab_size
        if size is None or not self.fresh_eagle3:
            return facts.draft_parameters
        projection = facts.projection_share * facts.target_read
        return facts.draft_parameters + round(size / facts.vocabulary * projection)

    @property
    def fresh_eagle3(self) -> bool:
        return self.facts.fresh_head and self.options.kind == "eagle3"

    @property
    def draft_size(self) -> str:
        return f"draft of {_count(self.draft_parameters)} parameters"

    @property
    def target_size(self) -> str:
        return _count(self.facts.target_parameters)

    @property
    def general_rows(self) -> str:
        return "chat rows" if self.facts.own_chats else "no chats"


@dataclass(frozen=True)
class Choice:
    """An open field of the options, and the rule that fills it.

    field: dotted. value: returns None to leave the field open. reason: text with `{known}` and its
    parts.
    """

    field: str
    value: Callable[[Known], object]
    reason: str


def complete(config: AlignConfig, facts: Facts) -> tuple[AlignConfig, list[str]]:
    """Return the options with nothing left open, and one line per choice: key, value and reason."""
    known = Known(facts, config)
    lines = []
    for choice in CHOICES:
        if attrgetter(choice.field)(known.options) is not None:
            continue
        value = choice.value(known)
        if value is not None:
            shown = " ".join(map(str, value)) if isinstance(value, list) else value
            lines.append(f"{choice.field} {shown}   ({choice.reason.format(known=known)})")
            known = Known(facts, filled(known.options, choice.field, value))
    one = facts.different == 1 and known.options.heldout_prompts
    if min(known.options.distill.max_prompts, known.usable) < 2 or one:
        same = ", which all ask the same," if one else ""
        raise InputError(
            f"prompts: {facts.prompts} usable prompts{same} are too few to train on and to hold "
            "out; add some"
        )
    length = known.options.train.max_length
    if facts.context is not None and length > facts.context:
        raise InputError(
            f"train.max_length: {length} is longer than the context of {known.facts.context}"
        )
    return known.options, lines


def filled(options: Any, field: str, value: object) -> Any:
    """Return options with a field of theirs, or of a group of them, replaced."""
    name, _, inner = field.partition(".")
    if inner:
        value = filled(getattr(options, name), inner, value)
    return replace(options, **{name: value})


def _kind(known: Known) -> DraftKind | None:
    """EAGLE-3, or EAGLE-1 if an engine takes that alone."""
    if not known.facts.fresh_head:
        return None
    taken = [kind for kind, support in known.facts.support.items() if loading(support)]
    # A draft vocabulary is for the first of the two.
    alone = "eagle3" not in taken and known.options.train.draft_vocab_size is None
    return "eagle" if alone and "eagle" in taken else "eagle3"


def _heldout(known: Known) -> int | None:
    # Never more than a fifth: the rest trains the draft. Rows that ask the same count once. Options
    # of the evaluation do not decide it, so drafts of other runs are compared on the same prompts.
    fifth = (known.facts.different or known.facts.prompts) // 5
    return None if known.options.id else max(1, min(known.by_device(64, 40), fifth))


def _samples(known: Known) -> int:
    prompts = known.options.distill.max_prompts
    return 4 if prompts < 500 else 2 if prompts < 5000 else 1


def _answer(known: Known) -> int:
    chat = known.facts.rows == "chat"
    usual = known.by_device(512, 128) if chat else known.by_device(256, 96)
    context = known.facts.context
    return usual if context is None else max(1, min(usual, context // 2))


def _sampled(field: str) -> Choice:
    """Choose the target's own value of a sampling option."""
    value = attrgetter(f"facts.sampling.sampling.{field}")
    return Choice(f"distill.{field}", value, f"the target's {{known.sampled_by[{field}]}}")


def _general_from(known: Known) -> str | None:
    if not known.options.distill.general_texts:
        return None
    return "magpie" if known.facts.own_chats else "token"


def _draft_vocabulary(known: Known) -> int | None:
    drafted = known.facts.drafted
    return drafted.tokens if drafted and known.fresh_eagle3 else None


def _rows_per_step(known: Known) -> int:
    # Small steps raise alpha on the same answers (docs/evidence/how-much.md; measured on a CPU).
    batch = known.options.train.batch_size or 1
    return known.by_device(32, max(4, batch * known.facts.processes))


def _steps(known: Known) -> int:
    # On a CPU the loss of a fresh head, over the vocabulary at every depth, takes longer than
    # writing the answers.
    most = 3 if known.facts.fresh_head and not known.facts.on_gpu else 5
    passes = most if known.answers < 10_000 else 3 if known.answers < 50_000 else 1
    rows = passes * known.answers * (1 - known.options.train.heldout_fraction)
    return max(50, math.ceil(rows / known.options.train.rows_per_step))


def _eval_every(known: Known) -> int:
    steps = known.options.train.steps
    heldout = known.options.train.heldout_fraction * known.answers
    # A held-out row costs about a third of a trained one: measuring then takes a sixth as long as
    # training, also where a few steps are trained on many answers.
    affordable = round(2 * heldout / known.options.train.rows_per_step)
    return max(5, steps // 15, min(affordable, steps // 3))


def _rate(known: Known) -> float | None:
    if known.facts.fresh_head and known.options.kind not in ("eagle", "eagle3"):
        return None  # training knows the size of such a head
    return usual_rate(known.draft_parameters, taught=set(known.options.objective) != {"ce"})


def _max_length(known: Known) -> int:
    whole = known.facts.longest_prompt + known.options.distill.max_new_tokens
    tokens = math.ceil(whole / 32) * 32
    return min(tokens, 2048, known.facts.context or tokens)


def _batch_size(known: Known) -> int:
    size = known.draft_parameters
    long = size * known.options.train.max_length >= 10**10
    fits = 2 if size >= _LARGE else 8 if long else 32
    share = max(1, known.options.train.rows_per_step // known.facts.processes)
    return max(rows for rows in range(1, min(fits, share) + 1) if share % rows == 0)


def _answered_together(known: Known) -> int:
    """As many rows as a target takes on a CPU; on a GPU as many as an eighth of its memory caches,
    because there hundreds of rows cost little more than one.
    """
    facts = known.facts
    few = 16 if facts.target_parameters >= _LARGE else 64
    fits = facts.gpu_bytes // 8 // (facts.cache_bytes * _max_length(known))
    return min(_MOST_TOGETHER, max(few, fits))


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.1f} B" if parameters >= _LARGE else f"{parameters / 1e6:.1f} M"


CHOICES = (
    Choice("kind", _kind, "the first of EAGLE-3 and EAGLE-1 that an engine takes of this target"),
    Choice("eval.max_prompts", lambda known: known.by_device(64, 40), "{known.device}"),
    Choice("heldout_prompts", _heldout, "{known.facts.prompts} prompts, no --id"),
    Choice(
        "distill.max_prompts",
        lambda known: max(1, known.usable),
        "{known.facts.prompts} prompts, {known.device}",
    ),
    Choice("distill.num_samples", _samples, "{known.options.distill.max_prompts} prompts"),
    Choice("train.heldout_fraction", lambda known: 0.06, "enough to choose weights by"),
    Choice("policy", lambda known: "balanced", "docs/robust.md"),
    Choice(
        "distill.max_new_tokens",
        _answer,
        "{known.facts.rows} rows, {known.device}, context {known.context}",
    ),
    Choice(
        "distill.batch_size",
        _answered_together,
        "target of {known.target_size} parameters, {known.device}",
    ),
    Choice("distill.part_rows", lambda known: 512, "a killed run loses at most one file"),
    *map(_sampled, ("temperature", "top_k", "top_p", "min_p")),
    Choice(
        "train.replay_fraction",
        lambda known: 0.0 if known.options.policy == "id" else _REPLAYED,
        "policy {known.options.policy}",
    ),
    Choice(
        "distill.general_texts",
        lambda known: min(_MOST_TEXTS, known.answers) if known.options.train.replay_fraction else 0,
        f"as many as answers, at most {_MOST_TEXTS}; 0 with policy id",
    ),
    Choice(
        "distill.general_from",
        _general_from,
        "{known.general_rows}",
    ),
    Choice(
        "train.draft_vocab_size",
        _draft_vocabulary,
        "the output projection is {known.facts.projection_share:.0%} of the target; of its mass "
        "{known.facts.drafted.missing:.1%} is outside, and a token reads "
        "{known.facts.drafted.cost:.0%} of the target",
    ),
    Choice("train.rows_per_step", _rows_per_step, "{known.device}"),
    Choice(
        "train.steps",
        _steps,
        "{known.answers} answers, {known.options.train.rows_per_step} per step",
    ),
    Choice(
        "train.optim.lr",
        _rate,
        "{known.draft_size}",
    ),
    Choice(
        "train.optim.warmup_steps",
        lambda known: min(100, max(1, known.options.train.steps // 20)),
        "{known.options.train.steps} steps",
    ),
    Choice(
        "train.max_length",
        _max_length,
        "longest prompt {known.facts.longest_prompt}, answers "
        "{known.options.distill.max_new_tokens}, context {known.context}",
    ),
    Choice(
        "train.batch_size", _batch_size, "{known.draft_size}, {known.facts.processes} process(es)"
    ),
    Choice(
        "train.eval_every",
        _eval_every,
        "{known.options.train.steps} steps",
    ),
    Choice(
        "train.save_every",
        lambda known: max(1, min(50, known.options.train.steps // 5)),
        "a killed run loses at most this many steps",
    ),
    Choice(
        "train.gradient_checkpointing",
        lambda known: known.facts.on_gpu and known.draft_parameters >= _LARGE,
        "{known.device}, {known.draft_size}",
    ),
    Choice(
        "eval.temperature",
        lambda known: sorted({0.0, known.options.distill.temperature}),
        "greedy, and as distilled",
    ),
    Choice(
        "eval.tree",
        lambda known: known.by_device(["chain:4", "kary:4,2,2"], ["chain:2", "kary:3,2"]),
        "{known.device}",
    ),
    Choice(
        "eval.max_new_tokens",
        lambda known: min(known.options.distill.max_new_tokens, known.by_device(128, 48)),
        "answers of {known.options.distill.max_new_tokens} tokens, {known.device}",
    ),
    Choice(
        "eval.speed_prompts",
        lambda known: 0 if known.options.eval.tree == ["none"] else known.by_device(8, 6),
        "{known.device}",
    ),
    Choice(
        "eval.other_template",
        lambda known: known.facts.rows == "chat" and not known.options.id,
        "{known.facts.rows} rows",
    ),
    Choice("eval.batch_size", lambda known: known.by_device(16, 20), "{known.device}"),
)
