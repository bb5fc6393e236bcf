"""What `align` chooses where its options leave something open, and why: one line per choice."""

import dataclasses
import math
from dataclasses import dataclass, replace
from typing import Any

from draftsmith.alignment.config import AlignConfig
from draftsmith_core.errors import InputError
from draftsmith_core.generation_defaults import ResolvedSampling

_LARGE = 1_000_000_000  # parameters from which memory, not speed, decides batch sizes
# The share of every step that is general text, as docs/robust.md supports it.
REPLAYED = 0.7
# Beyond this more general text is not worth its generation: replay begins anew.
_MOST_TEXTS = 4096


@dataclass(frozen=True)
class Facts:
    """What the choices depend on. Lengths in tokens; `context` is the shortest of target and draft, None if unknown.

    rows: what the prompts are, "chat", "prompt" or "text". prompts: how many can be used, of those that were read.
    id_only: why no policy but id can be followed, empty where any can.
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
    id_only: str = ""

    @property
    def place(self) -> str:
        """The kind of device, "GPU" or "CPU", for the reasons that are printed."""
        return "GPU" if self.on_gpu else "CPU"


def most_prompts(config: AlignConfig, on_gpu: bool) -> int:
    """How many prompts to read at most."""
    return config.distill.max_prompts or (20_000 if on_gpu else 1024)


def complete(config: AlignConfig, facts: Facts) -> tuple[AlignConfig, list[str]]:
    """The options with nothing left open, and one line per choice: the key, its value and the reason."""
    said: list[str] = []

    def choose(section: str, key: str, value: Any, why: str) -> Any:
        there = getattr(getattr(config, section) if section else config, key)
        if there is not None and there != []:
            return there
        name = f"{section}.{key}" if section else key
        shown = " ".join(map(str, value)) if isinstance(value, list) else value
        said.append(f"{name} {shown}   ({why})")
        return value

    gpu, place = facts.on_gpu, facts.place
    count = f"{facts.prompts} prompts"
    heldout = config.heldout_prompts
    limit = choose("eval", "max_prompts", 64 if gpu else 40, place)
    if not config.id:
        # Never more than a fifth: the draft is to be trained on what is left.
        heldout = choose("", "heldout_prompts", max(1, min(limit, facts.prompts // 5)), f"{count}, no --id")
    prompts = choose("distill", "max_prompts", max(1, facts.prompts - (heldout or 0)), f"{count}, {place}")
    if min(prompts, facts.prompts - (heldout or 0)) < 2:
        raise InputError(
            f"prompts: {facts.prompts} can be used, and too few are left to train on and to choose weights by; add some"
        )
    samples = choose("distill", "num_samples", 4 if prompts < 500 else 2 if prompts < 5000 else 1, f"{prompts} prompts")
    few = max(1, round(config.train.heldout_fraction * prompts)) * samples < 2
    if few and config.policy not in (None, "id"):
        raise InputError(
            f"policy: {config.policy} chooses by held-out answers, and of {prompts} prompts too few are held out; "
            f"add some, or use --policy id"
        )
    id_only = facts.id_only or ("too few prompts to hold any out for the choice" if few else "")
    policy = choose("", "policy", "id" if id_only else "balanced", id_only or "docs/robust.md")
    if policy == "id" and config.plain:
        raise InputError(f"plain: with policy id ({id_only}) every draft is plain; leave it out")
    usual = (512 if gpu else 128) if facts.rows == "chat" else (256 if gpu else 96)
    room = usual if facts.context is None else max(1, min(usual, facts.context // 2))
    why = f"{facts.rows} rows, {place}" + (f", context {facts.context}" if room < usual else "")
    answer = choose("distill", "max_new_tokens", room, why)
    size = f"{_count(facts.target_parameters)} parameters"
    together = choose("distill", "batch_size", 16 if facts.target_parameters >= _LARGE else 64, f"target of {size}")
    drawn = {
        key: choose("distill", key, value, _source(facts.sampling, key))
        for key, value in dataclasses.asdict(facts.sampling.sampling).items()
    }
    replayed = choose("train", "replay_fraction", 0.0 if policy == "id" else REPLAYED, f"policy {policy}")
    needed = min(_MOST_TEXTS, prompts * samples) if replayed else 0
    texts = choose("distill", "general_texts", needed, f"as many as answers, at most {_MOST_TEXTS}; 0 with policy id")
    drawn |= {"general_texts": texts, "max_prompts": prompts, "num_samples": samples}
    distill = replace(config.distill, max_new_tokens=answer, batch_size=together, **drawn)
    train = replace(_train(config, facts, prompts * samples, answer, choose), replay_fraction=replayed)
    if facts.context is not None:
        for key, value, least in (
            ("distill.max_new_tokens", answer, facts.context - 1),
            ("train.max_length", train.max_length, facts.context),
        ):
            if value > least:
                raise InputError(f"{key}: {value} leaves no room in a context of {facts.context}")
    trees = ["chain:4", "kary:4,2,2"] if gpu else ["chain:2", "kary:3,2"]
    longest = choose("eval", "max_new_tokens", min(answer, 128 if gpu else 48), f"answers of {answer} tokens, {place}")
    measure = replace(
        config.eval,
        max_prompts=limit,
        temperature=choose("eval", "temperature", sorted({0.0, drawn["temperature"]}), "greedy, and as distilled"),
        tree=choose("eval", "tree", trees, place),
        max_new_tokens=longest,
        speed_prompts=choose("eval", "speed_prompts", 8 if gpu else 6, place),
        batch_size=choose("eval", "batch_size", 16 if gpu else 20, place),
    )
    return replace(config, policy=policy, heldout_prompts=heldout, distill=distill, train=train, eval=measure), said


def _train(config: AlignConfig, facts: Facts, rows: int, answer: int, choose: Any) -> Any:
    train = config.train
    size = f"draft of {_count(facts.draft_parameters)} parameters"
    passes = 5 if rows < 10_000 else 3 if rows < 50_000 else 1
    enough = max(50, math.ceil(passes * rows * (1 - train.heldout_fraction) / train.rows_per_step))
    steps = choose("train", "steps", enough, f"{rows} answers, {train.rows_per_step} per step")
    # Through the recipes of this repository: 2e-4 at 68 M parameters, 1e-4 at 160 M, 3e-3 at 0.4 M.
    peak = float(f"{min(3e-3, max(1e-5, 2e-4 * math.sqrt(68e6 / facts.draft_parameters))):.0e}")
    # Cross-entropy on sampled answers is a noisier gradient than a divergence between distributions.
    rates = [float(f"{peak / 3:.0e}") if spec == "ce" else peak for spec in config.objective]
    tokens = math.ceil((facts.longest_prompt + answer) / 32) * 32
    length = choose(
        "train",
        "max_length",
        min(tokens, 2048, facts.context or tokens),
        f"longest prompt {facts.longest_prompt}, answers {answer}, context {facts.context or 'unknown'}",
    )
    fits = 2 if facts.draft_parameters >= _LARGE else 8 if facts.draft_parameters * length >= 10**10 else 32
    share = max(1, train.rows_per_step // facts.processes)
    batch = max(each for each in range(1, min(fits, share) + 1) if share % each == 0)
    return dataclasses.replace(
        train,
        steps=steps,
        lr=choose("train", "lr", rates if len(set(rates)) > 1 else rates[:1], size),
        warmup_steps=choose("train", "warmup_steps", min(100, max(1, steps // 20)), f"{steps} steps"),
        max_length=length,
        batch_size=choose("train", "batch_size", batch, f"{size}, {facts.processes} process(es)"),
        eval_every=choose("train", "eval_every", max(5, steps // 15), f"{steps} steps"),
        gradient_checkpointing=choose(
            "train",
            "gradient_checkpointing",
            facts.on_gpu and facts.draft_parameters >= _LARGE,
            f"{facts.place}, {size}",
        ),
    )


def _source(sampling: ResolvedSampling, key: str) -> str:
    return "the target's generation_config.json" if key in sampling.from_target else "the target's own distribution"


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.1f} B" if parameters >= _LARGE else f"{parameters / 1e6:.1f} M"
