"""What `align` chooses where options are open: for each stage, every rule with its reason.

docs/own-model.md has the rules as a table.
"""

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TypeVar, cast

from draftsmith.alignment.config import AlignConfig, Trained
from draftsmith.alignment.facts import Facts
from draftsmith.core.errors import InputError
from draftsmith.core.io import JsonObject
from draftsmith.core.options import put, value_at
from draftsmith.core.ranks import groups
from draftsmith.core.settings import loading
from draftsmith.distill.config import DistillConfig
from draftsmith.drafts.draft_sources import JOINED
from draftsmith.drafts.load import draft_kind
from draftsmith.train.config import DraftKind

T = TypeVar("T")
# Names in the evaluation: prompt lookup, and prompt lookup beside the draft.
LOOKUP = "lookup"
BOTH = "both"
_LARGE = 1_000_000_000  # parameters from which memory, not speed, decides batch sizes
# The share of general text in every step that docs/robust.md supports.
_REPLAYED = 0.5
# Writing more general texts than this does not pay; replay repeats them.
_MOST_TEXTS = 4096
# Answers written together on a GPU.
_MOST_TOGETHER = 512
# A fresh EAGLE-3 head is trained as deep as trees usually go.
_FRESH_DEPTHS = 4


@dataclass
class Choices:
    """The options of a stage in the making: what is given, and by dotted key why others were
    chosen.
    """

    values: JsonObject
    reasons: dict[str, str] = field(default_factory=dict)

    def choose(self, key: str, value: T, reason: str) -> T:
        """Fill an option if it is open; return its value."""
        given = value_at(self.values, key)
        if given is not None:
            return cast(T, given)
        put(self.values, key, value)
        self.reasons[key] = reason
        return value


def _given(options: Mapping[str, object], config: AlignConfig, facts: Facts) -> Choices:
    """Begin with the options of a stage that are given."""
    shared = {"target": config.target, "chat_template": config.chat_template, "seed": config.seed}
    choices = Choices({**shared, **loading(config), **deepcopy(dict(options))})
    if facts.date is not None:
        choices.choose("date", facts.date, "the chat template prints it")
    return choices


def heldout_prompts(config: AlignConfig, facts: Facts) -> int:
    """Return how many prompts are held out to measure on: never more than a fifth, because the rest
    trains the draft. Prompts that ask the same count once.
    """
    if config.id:
        return 0
    return max(1, min(config.eval.get("max_prompts") or _measured(facts), facts.different // 5))


def _measured(facts: Facts) -> int:
    return 64 if facts.gpu_bytes else 40


def choose(name: str, config: AlignConfig, facts: Facts, distill: DistillConfig | None) -> Choices:
    """Choose the options of a stage by its name. distill: those of the first stage, for the
    others.
    """
    if distill is None:
        return _distill(config, facts)
    if name == "general":
        return _general(config, facts, distill)
    if name == "eval":
        return _eval(config, facts, distill)
    (draft,) = (draft for draft in config.trained() if draft.stage == name)
    return _train(config, facts, distill, draft)


def _distill(config: AlignConfig, facts: Facts) -> Choices:
    """Choose how the target answers the prompts that are not held out."""
    heldout = heldout_prompts(config, facts)
    usable = facts.prompts - heldout
    if usable < 2:
        raise InputError(
            f"prompts: {facts.prompts} usable prompts are too few to train on and to hold out; add "
            "some"
        )
    out = config.directory
    choices = _given(config.distill, config, facts)
    choices.values["prompts"] = config.prompts if config.id else str(out / "prompts/train.jsonl")
    choices.values["prompt_tokens"] = config.prompt_tokens
    choices.values["out"] = str(out / "distilled")
    prompts = choices.choose("max_prompts", usable, f"{facts.prompts} prompts, {heldout} held out")
    samples = 4 if prompts < 500 else 2 if prompts < 5000 else 1
    choices.choose("num_samples", samples, f"{prompts} prompts")
    device = "GPU" if facts.gpu_bytes else "CPU"
    tokens = 512 if facts.chats else 256
    if not facts.gpu_bytes:
        tokens = 128 if facts.chats else 96
    if facts.context is not None:
        tokens = max(1, min(tokens, facts.context // 2))
    rows = "chats" if facts.chats else "texts"
    tokens = choices.choose("max_new_tokens", tokens, f"{rows}, {device}")
    # On a GPU hundreds of rows cost little more than one.
    longest = _longest(facts, tokens)
    few = 16 if facts.target_parameters >= _LARGE else 64
    fits = facts.gpu_bytes // 8 // (facts.cache_bytes * longest)
    together = min(_MOST_TOGETHER, max(few, fits))
    choices.choose("batch_size", together, f"{device}; an eighth of a GPU's memory caches them")
    choices.choose("temperature", facts.temperature, "the target's generation_config.json, else 1")
    return choices


def _longest(facts: Facts, answer: int) -> int:
    """Return the length of the longest row, rounded up."""
    tokens = math.ceil((facts.longest_prompt + answer) / 32) * 32
    return min(tokens, 2048, facts.context or tokens)


def _general(config: AlignConfig, facts: Facts, distill: DistillConfig) -> Choices:
    """Choose the texts to replay, which the target writes by itself."""
    choices = _given({}, config, facts)
    count = min(_MOST_TEXTS, _answers(distill))
    source = f"magpie:{count}" if facts.own_chats else f"token:{count}"
    choices.choose("prompts", source, f"as many as answers, at most {_MOST_TEXTS}")
    choices.values |= {"out": str(config.directory / "general")}
    choices.values |= {key: getattr(distill, key) for key in ("max_new_tokens", "batch_size")}
    choices.values |= {"part_rows": distill.part_rows}
    choices.values |= {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    return choices


def _answers(distill: DistillConfig) -> int:
    """Return how many answers the target writes at most."""
    return (distill.max_prompts or 1) * distill.num_samples


def _train(config: AlignConfig, facts: Facts, distill: DistillConfig, draft: Trained) -> Choices:
    """Choose how a draft is trained on the answers."""
    out = config.directory
    fresh = config.draft is None
    on_cpu = not facts.gpu_bytes
    share = config.train.get("replay_fraction", _REPLAYED) if config.policy == "balanced" else 0.0
    choices = _given(config.train, config, facts)
    values = choices.values
    values |= {"out": str(out / draft.name), "draft": config.draft, "objective": draft.objective}
    values |= {"data": [str(out / "distilled")]}
    values["seed"] = config.seed + 1 + config.objective.index(draft.objective)
    values["kind"] = _kind(config)
    if draft.replays:
        values["replay"] = [str(out / "general")]
        choices.choose("replay_fraction", _REPLAYED, "policy balanced, docs/robust.md")
    else:
        values.pop("replay_fraction", None)
    if fresh and values["kind"] == "eagle3":
        choices.choose("head.test_steps", _FRESH_DEPTHS, "as deep as trees usually go")
        if facts.drafted is not None:
            outside = f"{facts.drafted.missing:.1%} of the target's mass is outside"
            choices.choose("draft_vocab_size", facts.drafted.tokens, outside)
    if on_cpu and (values["kind"] != "lm" or len(config.trained()) > 1):
        choices.choose("head.features", str(out / "features"), "read the answers once")
    # Small steps raise alpha on the same answers (docs/evidence/how-much.md; measured on a CPU).
    rows = max(4, groups()) if on_cpu else 32
    longest = choices.choose(
        "max_length", _longest(facts, distill.max_new_tokens), "longest prompt and answer"
    )
    fits = 2 if facts.draft_parameters >= _LARGE else 32
    if facts.draft_parameters * longest >= 10**10:
        fits = min(fits, 8)
    batch = max(1, min(fits, rows // groups()))
    batch = choices.choose("batch_size", batch, f"{rows} rows a step")
    together = choices.choose("accumulation", max(1, rows // (batch * groups())), f"{rows} rows")
    rows = batch * together * groups()
    # On a CPU the loss of a fresh head, over the vocabulary at every depth, takes longer than
    # writing the answers.
    written = _answers(distill)
    passes = 3 if fresh and on_cpu else 5
    if written >= 10_000:
        passes = 3 if written < 50_000 else 1
    heldout = config.train.get("heldout_fraction", 0.05) * written
    steps = max(50, math.ceil(passes * (written - heldout) / rows))
    reason = f"{passes} passes over {written} answers, {rows} rows a step"
    if "steps" in values:
        # Those on answers; a draft without replay beside one with it takes no others.
        steps = round(values["steps"] * (1 - share))
        if not draft.replays:
            values["steps"] = steps
    replayed = share if draft.replays else 0.0
    total = round(steps / (1 - replayed))
    if "epochs" not in values:
        total = choices.choose("steps", total, reason)
    warmup = min(100, max(1, steps // 20))
    choices.choose("optim.warmup_steps", warmup, f"{total} steps")
    # A held-out row costs about a third of a trained one: measuring then takes a sixth as long as
    # training, also where a few steps are trained on many answers.
    every = max(5, steps // 15, min(round(2 * heldout / rows), steps // 3))
    choices.choose("eval_every", every, "measuring takes a sixth of the time")
    return choices


def _kind(config: AlignConfig) -> DraftKind:
    """Return the kind of draft: EAGLE-3 if nothing else is given."""
    if config.draft is None:
        return config.kind or "eagle3"
    kind = draft_kind(config.draft).replace("draft", "lm")
    if config.kind not in (None, kind):
        raise InputError(f"kind: {config.draft} is of kind {kind}; leave --kind out")
    return cast(DraftKind, kind)


def contenders(config: AlignConfig) -> list[str]:
    """Return what is compared, NAME=SOURCE: the base, the trained drafts, and prompt lookup, the
    rival that needs no training; of a single trained draft also the two joined.
    """
    drafts = {"base": config.draft} if config.draft else {}
    trained = {draft.name: str(config.directory / draft.name) for draft in config.trained()}
    drafts |= trained
    drafts[LOOKUP] = "prompt_lookup"
    if len(trained) == 1:
        drafts[BOTH] = JOINED + next(iter(trained.values()))
    return [f"{name}={source}" for name, source in drafts.items()]


def _eval(config: AlignConfig, facts: Facts, distill: DistillConfig) -> Choices:
    """Choose how all contenders are measured."""
    heldout = config.directory / "prompts/heldout.jsonl"
    choices = _given(config.eval, config, facts)
    values = choices.values
    values |= {"draft": contenders(config), "id": config.id, "ood": [*config.ood]}
    if not config.id:
        values["id"] = [f"heldout={heldout}"]
        if facts.chats:
            values["ood"].append(f"heldout-template=template:{heldout}")
    values |= {"out": str(config.directory / "eval"), "prompt_tokens": config.prompt_tokens}
    values["seed"] = config.seed + 1 + len(config.objective)
    for key in ("top_p", "top_k", "min_p"):
        values.setdefault(key, getattr(distill, key))
    on_gpu = facts.gpu_bytes > 0
    device = "GPU" if on_gpu else "CPU"
    choices.choose("temperature", sorted({0.0, facts.temperature}), "greedy, and as distilled")
    trees = ["chain:4", "kary:4,2,2"] if on_gpu else ["chain:2", "kary:3,2"]
    choices.choose("tree", trees, device)
    choices.choose("max_prompts", _measured(facts), device)
    tokens = min(distill.max_new_tokens, 128 if on_gpu else 48)
    choices.choose("max_new_tokens", tokens, f"answers of {distill.max_new_tokens}, {device}")
    return choices
