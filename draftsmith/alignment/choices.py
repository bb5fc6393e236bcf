"""What `align` decides before it begins: options left open, the options of each stage, and how long
it will take.
"""

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from decode import SpeculativeDecoder
from distill.config import DistillConfig
from drafts.load import draft_kind
from draftsmith.alignment.config import AlignConfig
from draftsmith_core.devices import resolve_device
from draftsmith_core.errors import InputError
from draftsmith_core.prompt_rows import NAME, parse_named
from draftsmith_core.ranks import launched
from draftsmith_core.sampling import Sampling
from draftsmith_core.settings import ResolvedSampling, loading
from eval.config import EvalConfig
from train.config import HeadOptions, TrainConfig

_LARGE = 1_000_000_000  # parameters from which memory, not speed, decides batch sizes
# The share of general text in every step that docs/robust.md supports.
REPLAYED = 0.5
# A fresh head drafts a part of the vocabulary if the output projection is more than this share of
# the target.
_LARGE_PROJECTION, _DRAFT_VOCABULARY = 0.1, 8192
# Writing more general texts than this does not pay; replay repeats them.
_MOST_TEXTS = 4096
# Rows and tokens that are timed; and by how much the rest of a training step (logits, weights)
# lengthens it, as one run showed (SmolLM2-135M, EAGLE-3, two busy cores).
_ROWS, _TOKENS, _OVERHEAD = 16, 8, 3.0
_BACKWARD = 3  # a forward and its backward, in forwards
FRESH_DEPTHS = 4  # a fresh EAGLE-3 head is trained as deep as trees usually go


@dataclass(frozen=True)
class Clock:
    """Seconds of the target: per prompt token that it reads, per token that it writes in a batch
    and alone.
    """

    read_s: float
    write_s: float
    alone_s: float


@torch.no_grad()
def clock(target: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> Clock:
    """Time the target for some seconds."""
    decoder, found = SpeculativeDecoder(target), {}
    # The first call also packs weights.
    decoder.generate([prompts[0]], Sampling(), 1)
    for rows in (1, min(_ROWS, len(prompts))):
        batch = decoder.generate(prompts[:rows], Sampling(), _TOKENS)
        written = sum(len(generation.output_ids) for generation in batch.generations)
        tokens = sum(len(prompt) for prompt in prompts[:rows])
        found[rows] = batch.prefill_s / tokens, batch.decode_s / max(1, written - rows)
    read_s, write_s = min(found.values(), key=lambda pair: pair[1])
    return Clock(read_s, write_s, found[1][1])


@dataclass(frozen=True)
class Facts:
    """What the choices depend on. Lengths in tokens; `context` is the shortest of target and draft,
    None if unknown.

    rows: "chat", "prompt" or "text". prompts: number of usable prompts. head: whether the draft is
    one. projection_share, layer_share: share of the target's
    parameters in the output projection and in one layer. fresh_head: whether there is no draft to
    start from. clock: of the target.
    """

    rows: str
    prompts: int
    longest_prompt: int
    context: int | None
    on_gpu: bool
    processes: int
    target_parameters: int
    draft_parameters: int
    sampling: ResolvedSampling
    head: bool = False
    mean_prompt: float = 0.0
    vocabulary: int = 0
    projection_share: float = 0.0
    layer_share: float = 0.0
    fresh_head: bool = False
    clock: Clock = Clock(0.0, 0.0, 0.0)


def complete(config: AlignConfig, facts: Facts) -> tuple[AlignConfig, list[str]]:
    """Return the options with nothing left open, and one line per choice: key, value and reason."""
    sections = {name: copy.deepcopy(getattr(config, name)) for name in ("distill", "train", "eval")}
    top: dict[str, Any] = {"policy": config.policy, "heldout_prompts": config.heldout_prompts}
    lines: list[str] = []

    def choose(key: str, value: Any, why: str) -> Any:
        """Return the option `key` (dotted) as it was given, or choose `value`."""
        *groups, name = key.split(".")
        options = sections[groups[0]] if groups else top
        for group in groups[1:]:
            options = options.setdefault(group, {})
        if options.get(name) in (None, []):
            options[name] = value
            shown = " ".join(map(str, value)) if isinstance(value, list) else value
            lines.append(f"{key} {shown}   ({why})")
        return options[name]

    gpu, place, context = facts.on_gpu, "GPU" if facts.on_gpu else "CPU", facts.context
    count = f"{facts.prompts} prompts"
    limit = choose("eval.max_prompts", 64 if gpu else 40, place)
    heldout = 0
    if not config.id:
        # Never more than a fifth: the rest trains the draft.
        heldout = choose(
            "heldout_prompts", max(1, min(limit, facts.prompts // 5)), f"{count}, no --id"
        )
    prompts = choose("distill.max_prompts", max(1, facts.prompts - heldout), f"{count}, {place}")
    if min(prompts, facts.prompts - heldout) < 2:
        raise InputError(
            f"prompts: {facts.prompts} usable prompts are too few to train on and to hold out; "
            "add some"
        )
    samples = choose(
        "distill.num_samples",
        4 if prompts < 500 else 2 if prompts < 5000 else 1,
        f"{prompts} prompts",
    )
    fraction = choose("train.heldout_fraction", 0.06, "enough to choose weights by")
    policy = choose(
        "policy",
        "id" if facts.head else "balanced",
        "the draft is a head" if facts.head else "docs/robust.md",
    )
    usual = (512 if gpu else 128) if facts.rows == "chat" else (256 if gpu else 96)
    room = usual if context is None else max(1, min(usual, context // 2))
    why = f"{facts.rows} rows, {place}" + (f", context {context}" if room < usual else "")
    answer = choose("distill.max_new_tokens", room, why)
    size = f"target of {_count(facts.target_parameters)} parameters"
    choose("distill.batch_size", 16 if facts.target_parameters >= _LARGE else 64, size)
    choose("distill.part_rows", 512, "a killed run loses at most one file")
    for key, value in dataclasses.asdict(facts.sampling.sampling).items():
        named = key in facts.sampling.from_target
        choose(
            f"distill.{key}",
            value,
            f"the target's {'generation_config.json' if named else 'own distribution'}",
        )
    replayed = choose(
        "train.replay_fraction", 0.0 if policy == "id" else REPLAYED, f"policy {policy}"
    )
    rows = prompts * samples
    texts = min(_MOST_TEXTS, rows) if replayed else 0
    choose(
        "distill.general_texts",
        texts,
        f"as many as answers, at most {_MOST_TEXTS}; 0 with policy id",
    )

    draft = facts.draft_parameters
    if facts.fresh_head and facts.projection_share > _LARGE_PROJECTION:
        why = (
            f"the output projection is {facts.projection_share:.0%} of the target; EAGLE-3 "
            "drafts a part of it"
        )
        chosen = choose(
            "train.draft_vocab_size", min(_DRAFT_VOCABULARY, facts.vocabulary // 2), why
        )
        draft += round(chosen / facts.vocabulary * facts.projection_share * facts.target_parameters)
    size = f"draft of {_count(draft)} parameters"
    per_step = choose("train.rows_per_step", 32, "as the recipes have it")
    # On a CPU the loss of a fresh head, over the vocabulary at every depth, takes longer than
    # writing the answers.
    most_passes = 3 if facts.fresh_head and not gpu else 5
    passes = most_passes if rows < 10_000 else 3 if rows < 50_000 else 1
    enough = max(50, math.ceil(passes * rows * (1 - fraction) / per_step))
    steps = choose("train.steps", enough, f"{rows} answers, {per_step} per step")
    # A fit through the recipes of this repository: 2e-4 at 68 M parameters, 1e-4 at 160 M, 3e-3 at
    # 0.4 M.
    peak = float(f"{min(3e-3, max(1e-5, 2e-4 * math.sqrt(68e6 / draft))):.0e}")
    # Cross-entropy on sampled answers is a noisier gradient than a divergence between
    # distributions.
    only_ce = set(config.objective) == {"ce"}
    choose("train.optim.lr", float(f"{peak / 3:.0e}") if only_ce else peak, size)
    choose("train.optim.warmup_steps", min(100, max(1, steps // 20)), f"{steps} steps")
    tokens = math.ceil((facts.longest_prompt + answer) / 32) * 32
    why = f"longest prompt {facts.longest_prompt}, answers {answer}, context {context or 'unknown'}"
    length = choose("train.max_length", min(tokens, 2048, context or tokens), why)
    fits = 2 if draft >= _LARGE else 8 if draft * length >= 10**10 else 32
    share = max(1, per_step // facts.processes)
    batch = max(size for size in range(1, min(fits, share) + 1) if share % size == 0)
    choose("train.batch_size", batch, f"{size}, {facts.processes} process(es)")
    choose("train.eval_every", max(5, steps // 15), f"{steps} steps")
    choose(
        "train.save_every",
        max(1, min(50, steps // 5)),
        "a killed run loses at most this many steps",
    )
    large = gpu and draft >= _LARGE
    choose("train.gradient_checkpointing", large, f"{place}, {size}")
    if context is not None and length > context:
        raise InputError(f"train.max_length: {length} is longer than the context of {context}")

    choose(
        "eval.temperature",
        sorted({0.0, sections["distill"]["temperature"]}),
        "greedy, and as distilled",
    )
    choose("eval.tree", ["chain:4", "kary:4,2,2"] if gpu else ["chain:2", "kary:3,2"], place)
    choose(
        "eval.max_new_tokens",
        min(answer, 128 if gpu else 48),
        f"answers of {answer} tokens, {place}",
    )
    choose("eval.speed_prompts", 8 if gpu else 6, place)
    choose("eval.batch_size", 16 if gpu else 20, place)
    return replace(config, **(top | sections)), lines


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.1f} B" if parameters >= _LARGE else f"{parameters / 1e6:.1f} M"


def _common(config: AlignConfig) -> dict[str, Any]:
    return {"target": config.target, "chat_template": config.chat_template, **loading(config)}


def distill_config(config: AlignConfig, prompts: str) -> DistillConfig:
    """Options of the stage that distils the answers to `prompts` (a file)."""
    values = {key: value for key, value in config.distill.items() if key != "general_texts"}
    values |= {"prompts": prompts, "out": str(Path(config.out) / "distilled")}
    values |= {"prompt_tokens": config.prompt_tokens, "seed": config.seed}
    return DistillConfig(**values | _common(config))


def general_config(config: AlignConfig) -> DistillConfig:
    """Options of the stage that writes text to replay: the target continues single tokens at
    temperature 1.
    """
    chosen = config.distill
    values = {key: chosen[key] for key in ("max_new_tokens", "batch_size", "part_rows")}
    values |= {
        "prompts": f"token:{chosen['general_texts']}",
        "out": str(Path(config.out) / "general"),
    }
    values |= {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": config.seed}
    return DistillConfig(**values | _common(config))


def train_config(config: AlignConfig, name: str) -> TrainConfig:
    """Options of the training run of the draft `name`, one of `config.trained()`."""
    out, objective = Path(config.out), config.trained()[name]
    index = config.objective.index(objective)
    values = dict(config.train)
    rows = values.pop("rows_per_step")
    if name in config.plain_drafts():
        values["replay_fraction"] = 0.0
    else:
        values["replay"] = [str(out / "general")] if values["replay_fraction"] else []
        # As many sequences of answers as without replay.
        values["steps"] = round(values["steps"] / (1 - values["replay_fraction"]))
    batch = values["batch_size"] * launched()
    if rows % batch:
        raise InputError(
            f"train.batch_size: {values['batch_size']} on {launched()} processes does not divide "
            f"train.rows_per_step, {rows}; change one of them"
        )
    head: dict[str, Any] = {}
    if config.draft is not None:
        kind = draft_kind(config.draft)
    elif values.get("draft_vocab_size"):
        kind, head = "eagle3", {"test_steps": FRESH_DEPTHS}
    else:
        kind = "eagle"
    if kind != "draft" and resolve_device(config.device).type == "cpu":
        # Each pass over the answers would read them with the target again.
        head["features"] = str(out / "features")
    values |= {"head": HeadOptions(**head)}
    values |= {
        "kind": "lm" if kind == "draft" else kind,
        "draft": config.draft,
        "objective": objective,
    }
    values |= {
        "out": str(out / name),
        "data": [str(out / "distilled")],
        "accumulation": rows // batch,
    }
    values |= {"seed": config.seed + 1 + index}
    return TrainConfig(**values | _common(config))


def eval_config(config: AlignConfig) -> EvalConfig:
    """Options of the evaluation of the drafts that are compared with the base."""
    out = Path(config.out)
    # Held-out prompts are named as their file, unless that is no name or another set has it.
    name = Path(config.prompts.partition(":")[0]).stem
    if not NAME.fullmatch(name) or name in (*parse_named("ood", config.ood), "id", "ood"):
        name = "heldout"
    drafts = {"base": config.draft} if config.draft else {}
    drafts |= {name: str(out / name) for name in config.trained()}
    values: dict[str, Any] = {
        "draft": [f"{name}={source}" for name, source in drafts.items()],
        "id": config.id or [f"{name}={out / 'prompts' / 'heldout.jsonl'}"],
        "ood": config.ood,
        "out": str(out / "eval"),
        "prompt_tokens": config.prompt_tokens,
        "seed": config.seed + 1 + len(config.objective),
    }
    values |= {key: config.distill[key] for key in ("top_p", "top_k", "min_p")}
    return EvalConfig(**values | config.eval | _common(config))


def expected(config: AlignConfig, runs: Mapping[str, TrainConfig], facts: Facts) -> str:
    """Return a line: how long all will take if the machine stays as busy, as a range, and the share
    of each stage.

    Answers are taken to have full length. runs: the training runs by draft.
    """
    evaluation, sets = eval_config(config), max(1, len(config.id)) + len(config.ood)
    distilled, timed = config.distill, facts.clock
    answers = distilled["max_prompts"] * distilled["num_samples"]
    read = facts.mean_prompt * timed.read_s
    write = distilled["max_new_tokens"] * timed.write_s
    spent = {"distil": answers * (read + write) + distilled["general_texts"] * write, "train": 0.0}
    for run in runs.values():
        sequences = (run.steps or 0) * config.train["rows_per_step"]
        length = facts.mean_prompt + distilled["max_new_tokens"]
        depths = FRESH_DEPTHS if run.kind == "eagle3" else 1
        # The target reads every answer once where its states are kept, else in every pass.
        known = (
            min(sequences, answers)
            if run.head.features or (run.kind == "lm" and not facts.on_gpu)
            else sequences
        )
        drafted = _BACKWARD * depths * facts.draft_parameters / facts.target_parameters
        part = 1.0 if run.draft_vocab_size is None else run.draft_vocab_size / facts.vocabulary
        compared = (
            depths * facts.projection_share * (1 + (_BACKWARD * part if run.kind != "lm" else 0))
        )
        step_s = length * drafted + distilled["max_new_tokens"] * compared
        spent["train"] += timed.read_s * (known * length + _OVERHEAD * sequences * step_s)
    ways = 1 + len(evaluation.draft) * len(evaluation.tree)
    tokens = sets * len(evaluation.temperature) * evaluation.max_new_tokens
    clocked = evaluation.speed_prompts * timed.alone_s
    spent["evaluate"] = tokens * ways * (evaluation.max_prompts * timed.write_s + clocked)
    whole = sum(spent.values())
    stages = ", ".join(f"{name} {seconds / whole:.0%}" for name, seconds in spent.items())
    return (
        f"expected: {_duration(whole / 2)} to {_duration(whole * 2)} if this machine stays as "
        f"busy as it is ({stages})"
    )


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"
