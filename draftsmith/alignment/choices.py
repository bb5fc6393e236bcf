"""What `align` chooses where options are open: for each stage, every rule with its reason.

docs/own-model.md has the rules as a table.
"""

import math
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TypeVar, cast

from draftsmith.alignment.config import AlignConfig, Trained
from draftsmith.alignment.facts import Facts
from draftsmith.core.errors import InputError
from draftsmith.core.io import JsonObject
from draftsmith.core.options import options_of, put, value_at
from draftsmith.core.ranks import groups
from draftsmith.core.settings import loading
from draftsmith.distill.config import DistillConfig, EngineOptions
from draftsmith.drafts.draft_sources import JOINED
from draftsmith.drafts.load import draft_kind

T = TypeVar("T")
# The name of prompt lookup in the evaluation.
LOOKUP = "lookup"
# The share of general text in every step that docs/robust.md supports.
_REPLAYED = 0.5


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


def shared(config: AlignConfig) -> JsonObject:
    """Return what every stage takes from the options of `align`."""
    names = ("target", "chat_template", "seed", "prompt_tokens")
    return {name: getattr(config, name) for name in names} | loading(config)


def _begun(config: AlignConfig, facts: Facts, given: JsonObject, out: str) -> Choices:
    """Begin with the options of a stage that are given."""
    values = shared(config) | deepcopy(given) | {"date": facts.date}
    return Choices(values | {"out": str(config.directory / out)})


def choose(name: str, config: AlignConfig, facts: Facts, distill: DistillConfig | None) -> Choices:
    """Choose the options of a stage by its name. distill: those of the first stage, for the
    others.
    """
    if distill is None:
        return _distill(config, facts)
    for draft in config.trained():
        if draft.stage == name:
            return _train(config, facts, distill, draft)
    stage = _general if name == "general" else _eval
    return stage(config, facts, distill)


def _distill(config: AlignConfig, facts: Facts) -> Choices:
    """Choose how the target answers the prompts that are not held out."""
    if facts.prompts < 2:
        raise InputError("prompts: are too few to train on and to hold out; add some")
    choices = _begun(config, facts, config.distill, "distilled")
    rows = config.directory / "prompts" / "train.jsonl"
    choices.values["prompts"] = config.prompts if config.id else str(rows)
    prompts = choices.choose("max_prompts", facts.prompts, "those that are not held out")
    samples = 4 if prompts < 500 else 2 if prompts < 5000 else 1
    choices.choose("num_samples", samples, f"{prompts} prompts")
    tokens = facts.by_device(512, 128)
    tokens = max(1, min(tokens, (facts.context or 2 * tokens) // 2))
    tokens = choices.choose("max_new_tokens", tokens, "by device, at most half of the context")
    # On a GPU hundreds of rows cost little more than one.
    fits = facts.gpu_bytes // 8 // (facts.cache_bytes * _longest(facts, tokens))
    together = facts.by_device(min(512, max(16, fits)), 64)
    choices.choose("batch_size", together, "by device, an eighth of a GPU's memory caches them")
    if not choices.values.get("temperatures"):
        reason = "the target's generation_config.json, else 1"
        choices.choose("temperature", facts.temperature, reason)
    return choices


def _longest(facts: Facts, answer: int) -> int:
    """Return the length of the longest row, rounded up."""
    tokens = math.ceil((facts.longest_prompt + answer) / 32) * 32
    return min(tokens, 2048, facts.context or tokens)


def _general(config: AlignConfig, facts: Facts, distill: DistillConfig) -> Choices:
    """Choose the texts to replay, which the target writes by itself."""
    keys = [option.key for option in options_of(EngineOptions) if "states" not in option.key]
    keys += ["max_new_tokens", "batch_size", "part_rows"]
    given = {key: getattr(distill, key) for key in keys}
    given |= {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    choices = _begun(config, facts, given, "general")
    source = "magpie" if facts.own_chats else "token"
    # To write more does not pay; replay repeats them.
    texts = f"{source}:{min(4096, _answers(distill))}"
    choices.choose("prompts", texts, "as many as answers, at most 4,096")
    return choices


def _answers(distill: DistillConfig) -> int:
    """Return how many answers the target writes at most."""
    return (distill.max_prompts or 1) * distill.num_samples


def _train(config: AlignConfig, facts: Facts, distill: DistillConfig, draft: Trained) -> Choices:
    """Choose how a draft is trained on the answers."""
    out = config.directory
    choices = _begun(config, facts, config.train, draft.name)
    values = choices.values
    del values["prompt_tokens"]
    kind = draft_kind(config.draft).replace("draft", "lm") if config.draft else config.kind
    values |= {"draft": config.draft, "objective": draft.objective, "kind": kind}
    values |= {"data": [str(out / "distilled")]}
    choices.choose("kind", "eagle3", "docs/evidence/which-draft.md")
    values["seed"] += 1 + config.objective.index(draft.objective)
    if draft.replays:
        values["replay"] = [str(out / "general"), *(values.get("replay") or [])]
        choices.choose("replay_fraction", _REPLAYED, "policy balanced, docs/robust.md")
    elif config.plain:
        values |= {"replay": [], "replay_fraction": 0.0}
    if facts.drafted is not None:
        choices.choose("head.test_steps", 4, "as deep as trees usually go")
        outside = f"{facts.drafted.missing:.1%} of the target's mass is outside"
        choices.choose("draft_vocab_size", facts.drafted.tokens, outside)
    if not facts.gpu_bytes and (values["kind"] != "lm" or len(config.trained()) > 1):
        choices.choose("head.features", str(out / "features"), "the answers are read once")
    length = _longest(facts, distill.max_new_tokens)
    choices.choose("max_length", length, "longest prompt and answer")
    # Small steps raise alpha on the same answers (docs/evidence/how-much.md; measured on a CPU).
    rows = facts.by_device(32, max(4, groups()))
    fits = 2 if facts.draft_parameters >= 10**9 else 8
    batch = max(1, min(fits, rows // groups()))
    batch = choices.choose("batch_size", batch, f"{rows} rows a step")
    choices.choose("accumulation", max(1, rows // (batch * groups())), f"{rows} rows a step")
    _schedule(facts, _answers(distill), choices)
    return choices


def _schedule(facts: Facts, answers: int, choices: Choices) -> None:
    """Choose the steps of a training, and what depends on them."""
    values = choices.values
    rows = values["batch_size"] * values["accumulation"] * groups()
    passes = values.get("epochs")
    fewest = 1
    if passes is None:
        # On a CPU the loss of a fresh head, over the vocabulary at every depth, takes longer than
        # writing the answers.
        passes = facts.by_device(5, 3 if values["draft"] is None else 5)
        if answers >= 10_000:
            passes = 3 if answers < 50_000 else 1
        fewest = 50
    heldout = values.get("heldout_fraction", 0.05) * answers
    # Replay takes its share of the steps.
    answered = 1 - values.get("replay_fraction", 0.0)
    steps = max(fewest, math.ceil(passes * (answers - heldout) / rows))
    reason = f"{passes} passes over {answers} answers, {rows} rows a step"
    steps = round(answered * choices.choose("steps", round(steps / answered), reason))
    choices.choose("optim.warmup_steps", min(100, max(1, steps // 20)), f"{steps} steps on answers")
    # A held-out row costs about a third of a trained one: measuring then takes a sixth as long as
    # training, also where a few steps are trained on many answers.
    every = max(5, steps // 15, min(round(2 * heldout / rows), steps // 3))
    choices.choose("eval_every", every, "measuring takes a sixth of the time")


def contenders(config: AlignConfig) -> list[str]:
    """Return what is compared, NAME=SOURCE: the base, the trained drafts, and prompt lookup, the
    rival that needs no training; of a single trained draft also the two joined.
    """
    drafts = [f"base={config.draft}"] if config.draft else []
    trained = config.trained()
    drafts += [f"{draft.name}={config.directory / draft.name}" for draft in trained]
    drafts.append(f"{LOOKUP}=prompt_lookup")
    if len(trained) == 1:
        drafts.append(f"both={JOINED}{config.directory / trained[0].name}")
    return drafts


def _eval(config: AlignConfig, facts: Facts, distill: DistillConfig) -> Choices:
    """Choose how all contenders are measured."""
    heldout = config.directory / "prompts" / "heldout.jsonl"
    choices = _begun(config, facts, config.eval, "eval")
    values = choices.values
    values |= {"draft": contenders(config), "id": config.id, "ood": [*config.ood]}
    if not config.id:
        values["id"] = [f"heldout={heldout}"]
        if facts.chats:
            values["ood"].append(f"heldout-template=template:{heldout}")
    values["seed"] += 1 + len(config.objective)
    for key in ("top_p", "top_k", "min_p"):
        values.setdefault(key, getattr(distill, key))
    choices.choose("temperature", sorted({0.0, facts.temperature}), "greedy, and as distilled")
    trees = facts.by_device(["chain:4", "kary:4,2,2"], ["chain:2", "kary:3,2"])
    choices.choose("tree", trees, "by device")
    choices.choose("max_prompts", facts.by_device(64, 40), "by device")
    tokens = min(distill.max_new_tokens, facts.by_device(128, 48))
    choices.choose("max_new_tokens", tokens, f"answers of {distill.max_new_tokens}")
    return choices
