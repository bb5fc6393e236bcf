"""Choose a draft between base and aligned, so that the gain in distribution is not a loss elsewhere.

The line theta = (1 - w) base + w aligned (WiSE-FT, arXiv 2109.01903) costs no training. All its drafts are measured on
one forward of the target, without decoding: in distribution on the answers that training held out, and in general on
texts that the target writes from BOS. Training replays texts that begin with any token instead, and on that kind every
draft looks better than it is elsewhere (docs/robust.md). No prompt of the evaluation is used.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, get_args

import torch
from transformers import PreTrainedModel

from drafts.config import MergeConfig
from drafts.draft_vocabulary import draft_vocabulary, trim
from drafts.load import LoadedPair, load_draft, load_pair
from drafts.merge import merge, merge_states
from draftsmith.alignment.config import AlignConfig, Policy
from draftsmith_core.errors import InputError
from draftsmith_core.models import dtype_name
from draftsmith_core.processes import say
from draftsmith_core.prompts import read_prompts
from draftsmith_core.runs import Run
from draftsmith_core.settings import Sampling, loading
from eval import measure
from eval.acceptance import Continuation
from eval.bootstrap import PromptSums, difference, estimate, resamples
from eval.estimate import measure_alphas
from eval.schema import Estimate
from train.data import divide, load_examples

# Share of the way from base to aligned. 0 is the base itself, 1 the aligned draft.
WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)
# What `no_loss` takes for no loss: the lower bound of the change in general acceptance is above minus this.
TOLERANCE = 0.01
# Texts that each of the two figures is measured on, at most.
TEXTS = 64
RULES: dict[str, str] = {
    "id": "the aligned draft as it was trained",
    "balanced": "the greatest sum of the two changes in alpha",
    "no_loss": f"the greatest change in distribution with a change in general above -{TOLERANCE:g} (lower bound)",
}
assert set(RULES) == set(get_args(Policy))


@dataclass(frozen=True)
class Point:
    """alpha of one draft on the line. `*_change`: against the base, paired by text, with 95 % intervals."""

    weight: float
    id: Estimate
    general: Estimate
    id_change: Estimate
    general_change: Estimate


def free_texts(pair: LoadedPair, count: int, max_new_tokens: int, seed: int) -> list[Continuation]:
    """Return `count` texts of at most `max_new_tokens` that the target writes by itself at temperature 1."""
    prompts = read_prompts(f"self:{count}", pair.tokenizer).prompts
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "batch_size": 16, "seed": seed}
    written = measure.answers(pair.target, prompts, Sampling(temperature=1.0), **options)
    return [row for row in written if row.output_ids]


def heldout_answers(distilled: str, max_length: int, fraction: float) -> list[Continuation]:
    """Return at most `TEXTS` answers of a distilled set that training held out: first one of every prompt."""
    _, heldout = divide(load_examples([distilled], None, max_length), fraction)
    by_prompt: dict[tuple[int, ...], list[Continuation]] = {}
    for row in heldout.rows.select_columns(["prompt_ids", "response_ids"]):
        prompt = tuple(row["prompt_ids"])
        if prompt and row["response_ids"]:
            same = by_prompt.setdefault(prompt, [])
            same.append(Continuation(f"heldout-{len(by_prompt)}-{len(same)}", prompt, row["response_ids"]))
    in_turn = [row for turn in zip_longest(*by_prompt.values()) for row in turn if row is not None]
    return in_turn[:TEXTS]


@torch.no_grad()
def between(base: PreTrainedModel, aligned: PreTrainedModel, weight: float) -> PreTrainedModel:
    """Return the draft at interpolation weight `weight`; the ends are the drafts themselves."""
    if weight in (0.0, 1.0):
        return aligned if weight else base
    draft = copy.deepcopy(base)
    draft.load_state_dict(merge_states([(aligned.state_dict(), weight)], base.state_dict()))
    return draft


def choose(policy: Policy, points: Sequence[Point]) -> Point:
    """Return the point that the policy takes, as `RULES` describes; the base if nothing else qualifies."""
    if policy == "id":
        return points[-1]
    if policy == "balanced":
        return max(points, key=lambda point: (point.id_change["value"] or 0) + (point.general_change["value"] or 0))
    lossless = [point for point in points if point.weight == 0 or _no_loss(point.general_change)]
    return max(lossless, key=lambda point: point.id_change["value"] or 0)


def _no_loss(change: Estimate) -> bool:
    return change["low"] is not None and change["low"] > -TOLERANCE


def keep_general(config: AlignConfig, run: Run) -> None:
    """Write, for every aligned draft, the draft between it and the base that the policy takes, and print the choice.

    OUT/policy/NAME.json has the measured line and the choice.
    """
    assert config.draft is not None
    loaded = cache(lambda: _load(config))
    for name, merged in zip(config.drafts(), config.offered(), strict=True):
        aligned = run.out / name
        record = run.step(f"policy/{name}.json", lambda aligned=aligned: _measure(config, aligned, *loaded()))
        weight = record["weight"]
        if not (run.out / merged / "config.json").exists():
            merge(MergeConfig(out=str(run.out / merged), base=config.draft, draft=[f"{aligned}={weight}"]))
        point = next(point for point in record["points"] if point["weight"] == weight)
        changes = " and ".join(
            f"alpha {point[key]['value']:+.3f} [{point[key]['low']:+.3f}, {point[key]['high']:+.3f}] {where}"
            for key, where in (("id_change", "ID"), ("general_change", "general text"))
            if point[key]["low"] is not None
        )
        say(f"{merged}: interpolation weight {weight:g} towards {name} ({changes or 'no interval'})")


def _load(config: AlignConfig) -> tuple[LoadedPair, dict[str, list[Continuation]]]:
    """Target and base, and the texts of both kinds."""
    assert config.draft is not None
    pair = load_pair(config.target, {"base": config.draft}, **loading(config))
    distilled = str(Path(config.out) / "distilled")
    answers = heldout_answers(distilled, config.train["max_length"], config.train["heldout_fraction"])
    longest = min(config.distill["max_new_tokens"], (pair.context or 1 << 30) - 2)
    texts = {"id": answers, "general": free_texts(pair, TEXTS, longest, config.seed)}
    if empty := next((kind for kind, rows in texts.items() if len(rows) < 2), None):
        raise InputError(f"policy: {len(texts[empty])} texts to measure {empty} on are too few; use --policy id")
    return pair, texts


def _measure(
    config: AlignConfig, aligned: Path, pair: LoadedPair, texts: Mapping[str, list[Continuation]]
) -> dict[str, Any]:
    """The rule, the measured line, and the chosen point."""
    assert config.policy is not None
    base = pair.drafts["base"]
    draft = load_draft(str(aligned), pair.target, device=config.device, dtype=dtype_name(pair.target))
    assert isinstance(base, PreTrainedModel) and isinstance(draft, PreTrainedModel)
    if (ids_D := draft_vocabulary(draft)) is not None and draft_vocabulary(base) is None:
        # The whole line drafts these tokens only, and so does what is merged on it.
        base = copy.deepcopy(base)
        trim(base, ids_D)
    given = {key: config.distill.get(key) for key in ("temperature", "top_k", "top_p", "min_p")}
    drawn = {
        "id": Sampling(**{key: value for key, value in given.items() if value is not None}),
        "general": Sampling(temperature=1.0),
    }
    line = {f"{weight:g}": between(base, draft, weight) for weight in WEIGHTS}
    figures: dict[str, dict[str, Any]] = {name: {"weight": float(name)} for name in line}
    for kind, rows in texts.items():
        picks = resamples(len(rows), config.eval.get("bootstrap", 2000), config.seed)
        options: dict[str, Any] = {"batch_size": config.eval["batch_size"], "seed": config.seed}
        measured = measure_alphas(pair.target, line, rows, drawn[kind], **options)
        sums = {name: PromptSums.of(counts["sum"], counts["count"]) for name, counts in measured.items()}
        for name, part in sums.items():
            figures[name] |= {kind: estimate(part, picks), f"{kind}_change": difference(part, sums["0"], picks)}
    points = [Point(**figures[name]) for name in line]
    return {
        "policy": config.policy,
        "rule": RULES[config.policy],
        "texts": {kind: len(rows) for kind, rows in texts.items()},
        "weight": choose(config.policy, points).weight,
        "points": [asdict(point) for point in points],
    }
