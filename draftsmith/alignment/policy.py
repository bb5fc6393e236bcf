"""How far to go from the base draft to the aligned one, so that what is gained in distribution is not lost elsewhere.

Between the two lies a line of drafts, theta = (1 - w) base + w aligned (WiSE-FT, arXiv 2109.01903), which costs no
training. Their acceptance needs no decoding, so all of them are measured on one forward of the target: in distribution
on the answers that training held out, and in general on what the target writes by itself from BOS on. That is another
kind of text than what is replayed, which begins with any token of the vocabulary: on the replayed kind a draft looks
better than it is elsewhere (docs/robust.md). None of it is in the evaluation's prompts.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
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
from draftsmith_core.io import read_json, write_json_atomic
from draftsmith_core.model_options import loading
from draftsmith_core.models import dtype_name
from draftsmith_core.prompts import read_prompts
from draftsmith_core.sampling_options import Sampling
from eval import measure
from eval.acceptance import Continuation
from eval.bootstrap import PromptSums, Resamples, difference, estimate, resamples
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
    """What the target writes by itself at temperature 1: `count` texts of at most `max_new_tokens`."""
    prompts = read_prompts(f"self:{count}", pair.tokenizer).prompts
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "batch_size": 16, "seed": seed}
    written = measure.answers(pair.target, prompts, Sampling(temperature=1.0), **options)
    return [row for row in written if row.output_ids]


def heldout_answers(distilled: str, max_length: int, fraction: float) -> list[Continuation]:
    """The answers of a distilled set that training held out with this fraction: the target's own, at most `TEXTS`. One
    of every prompt comes before the second of any.
    """
    _, heldout = divide(load_examples([distilled], None, max_length), fraction)
    found: dict[tuple[int, ...], list[Continuation]] = {}
    for row in heldout.rows.select_columns(["prompt_ids", "response_ids"]):
        prompt = tuple(row["prompt_ids"])
        if prompt and row["response_ids"]:
            same = found.setdefault(prompt, [])
            same.append(Continuation(f"heldout-{len(found)}-{len(same)}", prompt, row["response_ids"]))
    in_turn = [row for turn in zip_longest(*found.values()) for row in turn if row is not None]
    return in_turn[:TEXTS]


@torch.no_grad()
def between(base: PreTrainedModel, aligned: PreTrainedModel, weight: float) -> PreTrainedModel:
    """The draft at `weight` of the way; the ends are the drafts themselves."""
    if weight in (0.0, 1.0):
        return aligned if weight else base
    made = copy.deepcopy(base)
    made.load_state_dict(merge_states([(aligned.state_dict(), weight)], base.state_dict()))
    return made


def curve(
    pair: LoadedPair,
    base: PreTrainedModel,
    aligned: PreTrainedModel,
    in_distribution: Sequence[Continuation],
    general: Sequence[Continuation],
    sampling: Sampling,
    *,
    batch_size: int,
    bootstrap: int,
    seed: int,
) -> list[Point]:
    """alpha at every weight. sampling: of the answers in distribution; general texts are at temperature 1."""
    drafts = {f"{weight:g}": between(base, aligned, weight) for weight in WEIGHTS}
    found = []
    for rows, drawn in ((in_distribution, sampling), (general, Sampling(temperature=1.0))):
        picks = resamples(len(rows), bootstrap, seed)
        measured = measure_alphas(pair.target, drafts, rows, drawn, batch_size=batch_size, seed=seed)
        sums = {name: PromptSums.of(each["sum"], each["count"]) for name, each in measured.items()}
        found.append(_figures(sums, picks))
    return [
        Point(weight, found[0][name][0], found[1][name][0], found[0][name][1], found[1][name][1])
        for weight, name in zip(WEIGHTS, drafts, strict=True)
    ]


def _figures(sums: Mapping[str, PromptSums], picks: Resamples) -> dict[str, tuple[Estimate, Estimate]]:
    """Of every draft alpha, and its change against the first."""
    base = next(iter(sums.values()))
    return {name: (estimate(each, picks), difference(each, base, picks)) for name, each in sums.items()}


def choose(policy: Policy, points: Sequence[Point]) -> Point:
    """The point of the line that the policy takes; `RULES` says how. The base where nothing else qualifies."""
    if policy == "id":
        return points[-1]
    if policy == "balanced":
        return max(points, key=lambda point: (point.id_change["value"] or 0) + (point.general_change["value"] or 0))
    kept = [point for point in points if point.weight == 0 or _no_loss(point.general_change)]
    return max(kept, key=lambda point: point.id_change["value"] or 0)


def _no_loss(change: Estimate) -> bool:
    return change["low"] is not None and change["low"] > -TOLERANCE


def keep_general(config: AlignConfig, out: Path) -> list[str]:
    """Write, for every aligned draft in `out`, the one that the policy takes between it and the base.

    OUT/policy/NAME.json says what was measured and why. What is there is kept, so that a killed run continues.
    Returns one line per draft. Raises InputError where there is nothing to measure on.
    """
    assert config.draft is not None
    lines = []
    loaded: tuple[LoadedPair, dict[str, list[Continuation]]] | None = None
    for name, merged in zip(config.drafts(), config.offered(), strict=True):
        file = out / "policy" / f"{name}.json"
        if not file.exists():
            loaded = loaded or _load(config, out)
            write_json_atomic(file, _measure(config, out / name, *loaded))
        found = read_json(file, "the choice of a policy")
        if not (out / merged / "config.json").exists():
            merge(MergeConfig(out=str(out / merged), base=config.draft, draft=[f"{out / name}={found['weight']}"]))
        chosen = next(point for point in found["points"] if point["weight"] == found["weight"])
        changes = " and ".join(
            f"{chosen[key]['value']:+.3f} [{chosen[key]['low']:+.3f}, {chosen[key]['high']:+.3f}] {where}"
            for key, where in (("id_change", "in distribution"), ("general_change", "in general"))
            if chosen[key]["low"] is not None
        )
        lines.append(f"{merged}: {found['weight']:g} of the way to {name} ({changes or 'no interval'})")
    return lines


def _load(config: AlignConfig, out: Path) -> tuple[LoadedPair, dict[str, list[Continuation]]]:
    """Target and base, and the texts of both kinds."""
    assert (
        config.draft is not None and config.train.max_length is not None and config.distill.max_new_tokens is not None
    )
    pair = load_pair(config.target, {"base": config.draft}, **loading(config))
    answers = heldout_answers(str(out / "distilled"), config.train.max_length, config.train.heldout_fraction)
    longest = min(config.distill.max_new_tokens, (pair.context or 1 << 30) - 2)
    texts = {"id": answers, "general": free_texts(pair, TEXTS, longest, config.seed)}
    if empty := next((kind for kind, rows in texts.items() if len(rows) < 2), None):
        raise InputError(f"policy: {len(texts[empty])} texts to measure {empty} on are too few; use --policy id")
    return pair, texts


def _measure(
    config: AlignConfig, aligned: Path, pair: LoadedPair, texts: Mapping[str, list[Continuation]]
) -> dict[str, Any]:
    """The rule, the line as it was measured, and the point that was taken."""
    base = pair.drafts["base"]
    draft = load_draft(str(aligned), pair.target, device=config.device, dtype=dtype_name(pair.target))
    assert isinstance(base, PreTrainedModel) and isinstance(draft, PreTrainedModel)
    if (ids_D := draft_vocabulary(draft)) is not None and draft_vocabulary(base) is None:
        # The whole line drafts these tokens only, and so does what is merged on it.
        base = copy.deepcopy(base)
        trim(base, ids_D)
    drawn, chosen = config.distill, config.eval
    assert drawn.temperature is not None and chosen.batch_size is not None and config.policy is not None
    given = {key: getattr(drawn, key) for key in ("temperature", "top_k", "top_p", "min_p")}
    sampling = Sampling(**{key: value for key, value in given.items() if value is not None})
    points = curve(
        pair,
        base,
        draft,
        texts["id"],
        texts["general"],
        sampling,
        batch_size=chosen.batch_size,
        bootstrap=chosen.bootstrap,
        seed=config.seed,
    )
    return {
        "policy": config.policy,
        "rule": RULES[config.policy],
        "texts": {kind: len(rows) for kind, rows in texts.items()},
        "weight": choose(config.policy, points).weight,
        "points": [asdict(point) for point in points],
    }
