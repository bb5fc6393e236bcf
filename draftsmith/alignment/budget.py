"""What a training is likely to buy, from kept runs, and what a draft must reach to pay."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from draftsmith.alignment.config import AlignConfig
from draftsmith.alignment.facts import Facts
from draftsmith.alignment.kept_runs import KEPT, KeptSeries
from draftsmith.core.models import parameter_count
from draftsmith.core.sampling import Sampling
from draftsmith.decode import PROPOSERS, SpeculativeDecoder
from draftsmith.decode.tree import chain
from draftsmith.drafts.heads import HEADS
from draftsmith.drafts.heads.eagle3 import Eagle3Head
from draftsmith.drafts.load import Draft, LoadedModels, depth_limit, kind_of
from draftsmith.train.config import TrainConfig

# A kept run is near if sizes differ by at most this factor, and steps too.
_NEAR = 1.5
# The chain whose step is timed, tokens of a timed run, and interleaved rounds.
_CHAIN = 2
_TOKENS = 8
_ROUNDS = 5


@dataclass(frozen=True)
class Budget:
    """A training to come. parameters: of the draft that is trained. passes: over the answers."""

    kind: str
    optimizer: str
    fresh: bool
    parameters: int
    target_parameters: int
    rows: str
    temperature: float
    steps: int
    answers_per_step: int
    passes: float

    @classmethod
    def of(cls, config: AlignConfig, run: TrainConfig, facts: Facts, draft: Draft) -> "Budget":
        """Return the budget of a training of `align`."""
        assert run.steps is not None
        answers = config.distill["max_prompts"] * config.distill["num_samples"]
        per_step = config.train["rows_per_step"]
        return cls(
            kind=run.kind,
            optimizer=run.optim.name or "muon",
            fresh=facts.fresh_head,
            parameters=parameter_count(draft),
            target_parameters=facts.target_parameters,
            rows=facts.rows,
            temperature=config.distill["temperature"],
            steps=run.steps,
            answers_per_step=per_step,
            passes=run.steps * per_step * (1 - run.replay_fraction) / answers,
        )

    def near(self, series: KeptSeries) -> bool:
        """Whether kept runs are of this kind and size, and some as long."""
        return (
            self.fresh
            and self.optimizer == series.optimizer
            and (self.kind, self.rows, self.temperature) == (series.kind, series.rows, 1.0)
            and _alike(self.parameters, series.parameters)
            and _alike(self.target_parameters, series.target_parameters)
            and _alike(self.answers_per_step, series.answers)
            and self.passes <= series.most_passes
            and self.steps <= series.runs[-1].steps * _NEAR
        )

    def shorter_than(self, series: KeptSeries) -> bool:
        """Whether all kept runs are much longer."""
        return self.steps * _NEAR < series.runs[0].steps


def _alike(one: int, other: int) -> bool:
    return max(one, other) <= _NEAR * min(one, other)


def untrained(models: LoadedModels, config: AlignConfig, run: TrainConfig) -> Draft:
    """Return the draft before its training: the one that was given, or a fresh head."""
    if models.drafts:
        return next(iter(models.drafts.values()))
    size = config.train.get("draft_vocab_size")
    if run.kind == "eagle3" and size is not None:
        return Eagle3Head.fresh(models.target, draft_vocab=range(size)).eval()
    return HEADS[run.kind].fresh(models.target).eval()


@dataclass(frozen=True)
class StepCost:
    """A step on chain:2 at one temperature, one row, beside the target's own.

    ratio: seconds of the one over those of the other, the tokens per call from which a draft pays.
    """

    temperature: float
    target_s: float
    ratio: float


def step_costs(
    models: LoadedModels,
    draft: Draft,
    prompt: Sequence[int],
    temperatures: Sequence[float],
) -> list[StepCost]:
    """Time steps with a draft and without, at each temperature. None if the draft is not that deep.

    What a draft accepts does not change what a step costs, so an untrained one is timed.
    """
    if (depth_limit(draft) or _CHAIN) < _CHAIN:
        return []
    proposer = PROPOSERS[kind_of(draft)].make(draft)
    decoders = [
        SpeculativeDecoder(models.target),
        SpeculativeDecoder(models.target, proposer, chain(_CHAIN)),
    ]
    costs = []
    for temperature in temperatures:
        sampling = Sampling(temperature=temperature)
        alone: list[float] = []
        drafted: list[float] = []
        for _ in range(1 + _ROUNDS):
            for decoder, seconds in zip(decoders, (alone, drafted), strict=True):
                batch = decoder.generate([prompt], sampling, _TOKENS, eos_ids=())
                seconds.append(batch.decode_s / batch.generations[0].stats.target_calls)
        # The first round packs weights.
        pairs = zip(alone[1:], drafted[1:], strict=True)
        ratio = median(with_draft / without for without, with_draft in pairs)
        costs.append(StepCost(temperature, median(alone[1:]), ratio))
    return costs


def budget_lines(budget: Budget, costs: Sequence[StepCost]) -> list[str]:
    """Return what kept runs of this kind and size reached, and from when a draft pays here."""
    series = next((each for each in KEPT if budget.near(each)), None)
    lines = []
    if series is not None:
        lines.append(_bought(budget, series))
    if costs:
        lines.append(_pays(budget, series, costs))
    return lines


def _bought(budget: Budget, series: KeptSeries) -> str:
    first = series.runs[0]
    low = _at(budget.steps, series, [run.alpha_low for run in series.runs])
    high = _at(budget.steps, series, [run.alpha_high for run in series.runs])
    steps = f"{budget.steps} steps"
    if budget.shorter_than(series):
        steps = f"{first.steps} steps, {first.steps / budget.steps:.1f} times these,"
    sizes = f"{series.parameters / 1e6:.1f} M of {series.target_parameters / 1e6:.0f} M parameters"
    return (
        f"budget: at {steps} of {series.answers} answers, our runs had a held-out alpha of "
        f"{low:.2f} to {high:.2f} ({series.kind}, {sizes}, {series.optimizer}; {series.page})"
    )


def _at(steps: int, series: KeptSeries, values: Sequence[float]) -> float:
    """Interpolate linearly in the logarithm of the steps; beyond the ends, the last value."""
    known = [math.log(run.steps) for run in series.runs]
    return float(np.interp(math.log(steps), known, values))


def _pays(budget: Budget, series: KeptSeries | None, costs: Sequence[StepCost]) -> str:
    first, *others = costs
    text = f"pays: from {first.ratio:.2f} tokens per call at T = {first.temperature:g}"
    text += "".join(f", {cost.ratio:.2f} at T = {cost.temperature:g}" for cost in others)
    text += f", on chain:{_CHAIN} here (its step was timed)"
    if min(cost.ratio for cost in costs) > 1 + _CHAIN:
        return f"{text}: more than it can bring, so no draft pays on it"
    if series is None:
        return text
    # The kept runs were measured at the temperature of their answers.
    cost = max(costs, key=lambda cost: cost.temperature).ratio
    taus = [run.tau for run in series.runs]
    now = _at(budget.steps, series, taus)
    if not budget.shorter_than(series):
        text += f"; our runs had {now:.2f} at these steps"
        if now >= cost:
            return text
    last = series.runs[-1]
    if last.tau < cost:
        return f"{text}; no run of ours had more than {last.tau:.2f}, at {last.steps} steps"
    needed = math.exp(np.interp(cost, taus, [math.log(run.steps) for run in series.runs]))
    times = needed / budget.steps
    return f"{text}; our runs had {cost:.2f} at about {needed:.0f} steps, {times:.1f} times these"
