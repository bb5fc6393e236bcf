"""Choose a draft between base and aligned, so that the gain in distribution is not a loss
elsewhere.

The line theta = (1 - w) base + w aligned (WiSE-FT, arXiv 2109.01903) costs no training. Its drafts
are measured with one forward of the target, without decoding, on two kinds of text: answers that
training held out ("id") and texts that the target writes from BOS ("general"). Replayed texts begin
with a random token; on that kind every draft looks better than it is elsewhere, so "general" does
not use it (docs/robust.md). No prompt of the evaluation is used.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from drafts.config import MergeConfig
from drafts.draft_vocabulary import draft_vocabulary, trim
from drafts.load import LoadedPair, load_draft, load_pair
from drafts.merge import merge, merge_states
from draftsmith.alignment.config import AlignConfig, Policy
from draftsmith_core.errors import InputError
from draftsmith_core.models import dtype_name
from draftsmith_core.prompts import read_prompts, room_for_prompts
from draftsmith_core.ranks import say
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
# `no_loss`: the lower bound of the change on general text must be above minus this.
TOLERANCE = 0.01
# Most texts of a kind.
TEXTS = 64
RULES: dict[str, str] = {
    "balanced": "the greatest sum of the changes in alpha in distribution and on general text",
    "no_loss": "the greatest change in distribution with that on general text above "
    f"-{TOLERANCE:g} (lower bound)",
}


@dataclass(frozen=True)
class Point:
    """A draft between base and aligned: alpha by kind of text ("id", "general"), with 95 %
    intervals, and its change against the base, paired by text.
    """

    weight: float
    alpha: dict[str, Estimate]
    change: dict[str, Estimate]


def heldout_answers(distilled: str, max_length: int, fraction: float) -> list[Continuation]:
    """Return at most `TEXTS` answers of a distilled set that training held out, one of every prompt
    first.
    """
    _, heldout = divide(load_examples([distilled], None, max_length), fraction)
    by_prompt: dict[tuple[int, ...], list[Continuation]] = {}
    for row in heldout.rows.select_columns(["prompt_ids", "response_ids"]):
        prompt = tuple(row["prompt_ids"])
        if prompt and row["response_ids"]:
            same = by_prompt.setdefault(prompt, [])
            same.append(
                Continuation(f"heldout-{len(by_prompt)}-{len(same)}", prompt, row["response_ids"])
            )
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
    """Return the point that the policy takes, as `RULES` describes; the base if nothing else
    qualifies.
    """

    def gain(point: Point, kind: str = "id") -> float:
        return point.change[kind]["value"] or 0

    if policy == "balanced":
        return max(points, key=lambda point: gain(point) + gain(point, "general"))

    def keeps(point: Point) -> bool:
        low = point.change["general"]["low"]
        return point.weight == 0 or (low is not None and low > -TOLERANCE)

    return max(filter(keeps, points), key=gain)


def keep_general(config: AlignConfig, run: Run) -> None:
    """Write, for every objective, the draft that the policy takes, and print the choice.

    OUT/policy/NAME.json has the measured line and the choice.
    """
    assert config.draft is not None
    loaded = cache(lambda: _load(config))
    for name, merged in zip(config.drafts(), config.offered(), strict=True):
        record = run.step(
            f"policy/{name}.json", lambda name=name: _measure(config, name, *loaded())
        )
        weight = record["weight"]
        if not (run.out / merged / "config.json").exists():
            merge(
                MergeConfig(
                    out=str(run.out / merged),
                    base=config.draft,
                    draft=[f"{run.out / name}={weight}"],
                )
            )
        change = next(point for point in record["points"] if point["weight"] == weight)["change"]
        changes = [_in_words(change["id"], "ID"), _in_words(change["general"], "general text")]
        say(
            f"{merged}: interpolation weight {weight:g} towards {name} "
            f"({'; '.join(filter(None, changes))})"
        )


def _in_words(change: Mapping[str, Any], where: str) -> str:
    if change["low"] is None:
        return ""
    return f"alpha {change['value']:+.3f} [{change['low']:+.3f}, {change['high']:+.3f}] {where}"


def _load(config: AlignConfig) -> tuple[LoadedPair, dict[str, tuple[Sampling, list[Continuation]]]]:
    """Load target and base; return also, by kind, the texts and the sampling that drew them."""
    assert config.draft is not None
    pair = load_pair(config.target, {"base": config.draft}, **loading(config))
    distilled = str(Path(config.out) / "distilled")
    longest = min(config.distill["max_new_tokens"], (pair.context or 1 << 30) - 2)
    given = {key: config.distill.get(key) for key in ("temperature", "top_k", "top_p", "min_p")}
    served = Sampling(**{key: value for key, value in given.items() if value is not None})
    heldout = heldout_answers(
        distilled, config.train["max_length"], config.train["heldout_fraction"]
    )
    room = room_for_prompts(pair.context, longest)
    prompts = read_prompts(f"self:{TEXTS}", pair.tokenizer, max_tokens=room).prompts
    drawn = Sampling(temperature=1.0)
    options: dict[str, Any] = {"max_new_tokens": longest, "batch_size": 16, "seed": config.seed}
    answers = measure.answers(pair.target, prompts, drawn, **options)
    texts = {
        "id": (served, heldout),
        "general": (drawn, [row for row in answers if row.output_ids]),
    }
    if empty := next((kind for kind, (_, rows) in texts.items() if len(rows) < 2), None):
        raise InputError(
            f"policy: {len(texts[empty][1])} texts are too few to measure {empty} on; use "
            "--policy id"
        )
    return pair, texts


def _measure(
    config: AlignConfig,
    name: str,
    pair: LoadedPair,
    texts: Mapping[str, tuple[Sampling, list[Continuation]]],
) -> dict[str, Any]:
    assert config.policy is not None
    base = pair.drafts["base"]
    draft = load_draft(
        str(Path(config.out) / name),
        pair.target,
        device=config.device,
        dtype=dtype_name(pair.target),
    )
    assert isinstance(base, PreTrainedModel) and isinstance(draft, PreTrainedModel)
    if (ids_D := draft_vocabulary(draft)) is not None and draft_vocabulary(base) is None:
        # All drafts of the line draft these tokens only, and so does the merged one.
        base = copy.deepcopy(base)
        trim(base, ids_D)
    drafts = {f"{weight:g}": between(base, draft, weight) for weight in WEIGHTS}
    points = [Point(weight, {}, {}) for weight in WEIGHTS]
    for kind, (drawn, rows) in texts.items():
        picks = resamples(len(rows), config.eval.get("bootstrap", 2000), config.seed)
        options: dict[str, Any] = {"batch_size": config.eval["batch_size"], "seed": config.seed}
        measured = measure_alphas(pair.target, drafts, rows, drawn, **options)
        sums = [PromptSums.of(counts["sum"], counts["count"]) for counts in measured.values()]
        for point, part in zip(points, sums, strict=True):
            point.alpha[kind], point.change[kind] = (
                estimate(part, picks),
                difference(part, sums[0], picks),
            )
    return {
        "policy": config.policy,
        "rule": RULES[config.policy],
        "texts": {kind: len(rows) for kind, (_, rows) in texts.items()},
        "weight": choose(config.policy, points).weight,
        "points": [asdict(point) for point in points],
    }
