"""The table of predictions: tau of every chain and of every tree that is known beforehand, beside what was measured."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from decode import Tree
from decode.stats import independent_tau
from draftsmith_core.sampling import row_seed
from eval.bootstrap import PromptSums, estimate, pool_sums
from eval.predict import PredictedCounts, run_interval
from eval.request import Method
from eval.schema import Estimate, PredictionRow

if TYPE_CHECKING:
    from eval.assemble import Group, Measured, Setting

LONGEST_CHAIN = 16


def predicted_methods(methods: Sequence[Method], greedy: bool) -> list[Method]:
    """Chains of 1 to 16, above temperature 0 under block verification too, and the methods that are decoded."""
    rules = ("speculative",) if greedy else ("speculative", "block")
    chains = [Method(f"chain:{n}", rule) for rule in rules for n in range(1, LONGEST_CHAIN + 1)]
    return list(dict.fromkeys([*chains, *methods]))


def prediction_rows(setting: "Setting", measured: "Measured") -> list[PredictionRow]:
    """What decoding is predicted to reach, on every suite and on each kind pooled (law 10)."""
    rows = []
    for group in setting.groups():
        for draft in setting.drafts:
            for method in predicted_methods(setting.methods, group.temperature == 0):
                row = _row(setting, measured, group, draft, method)
                if row is not None:
                    rows.append(row)
    return rows


def _row(setting: "Setting", measured: "Measured", group: "Group", draft: str, method: Method) -> PredictionRow | None:
    alphas = [measured.alphas[suite.name, group.temperature, draft] for suite in group.suites]
    parts = [alpha["predicted"].get(method.name) for alpha in alphas]
    if not all(parts):
        return None
    counts = _pooled([part for part in parts if part is not None])
    emitted = [float(count) for alpha in alphas for count in alpha["count"]]
    sums = PromptSums.of(emitted, counts["target_calls"])
    alpha = pool_sums([PromptSums.of(each["sum"], each["count"]) for each in alphas]).pooled
    chain = isinstance(method.shape, Tree) and method.shape.is_chain and not method.shape.stop
    seed = row_seed(setting.seed, f"run/{draft}/{method.name}/{group.domain or group.kind}/{group.temperature}")
    low, high = run_interval(sums.numerator_P, counts, group.picks, seed)
    found = _measured(measured, group, draft, method)
    inside = None
    if found is not None and low is not None and high is not None:
        # At temperature 0 nothing is random, and what differs is rounding.
        inside = low - 1e-9 <= found <= high + 1e-9
    return PredictionRow(
        draft=draft,
        domain=group.domain,
        kind=group.kind,
        temperature=group.temperature,
        tree=method.tree,
        verifier=method.verifier,
        tau=estimate(sums, group.picks),
        run_low=low,
        run_high=high,
        accept_at=_by_depth(counts, group, method.shape.depth),
        independent=independent_tau([alpha] * method.shape.depth) if chain and alpha is not None else None,
        measured=found,
        inside=inside,
    )


def _pooled(parts: Sequence[PredictedCounts]) -> PredictedCounts:
    return PredictedCounts(
        target_calls=[value for part in parts for value in part["target_calls"]],
        variance=[value for part in parts for value in part["variance"]],
        accepted_by_depth=[row for part in parts for row in part["accepted_by_depth"]],
        reached_by_depth=[row for part in parts for row in part["reached_by_depth"]],
    )


def _by_depth(counts: PredictedCounts, group: "Group", depths: int) -> list[Estimate]:
    both = counts["accepted_by_depth"], counts["reached_by_depth"]
    columns = ([[row[depth] for row in part] for part in both] for depth in range(depths))
    return [estimate(PromptSums.of(above, below), group.picks) for above, below in columns]


def _measured(measured: "Measured", group: "Group", draft: str, method: Method) -> float | None:
    keys = [(suite.name, group.temperature, draft, method) for suite in group.suites]
    if not all(key in measured.decodings for key in keys):
        return None
    parts = [measured.decodings[key] for key in keys]
    return pool_sums([PromptSums.of(part["emitted"], part["target_calls"]) for part in parts]).pooled
