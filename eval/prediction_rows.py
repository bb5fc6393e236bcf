"""The table of predictions: tau of every chain and of every tree that is known beforehand, beside what was measured."""

from decode import Tree
from decode.stats import independent_tau
from draftsmith_core.sampling import row_seed
from eval.bootstrap import PromptSums, estimate
from eval.groups import Group, Measured, Setting, at_depth, joined, ratio
from eval.predict import predicted_methods, run_interval
from eval.request import Method
from eval.schema import PredictionRow


def prediction_rows(setting: Setting, measured: Measured) -> list[PredictionRow]:
    """What decoding is predicted to reach, on every suite and on each kind pooled (law 10)."""
    asked = (
        _row(setting, measured, group, draft, method)
        for group in setting.groups()
        for draft in setting.drafts
        for method in predicted_methods(setting.methods, group.temperature == 0)
    )
    return [row for row in asked if row is not None]


def _row(setting: Setting, measured: Measured, group: Group, draft: str, method: Method) -> PredictionRow | None:
    alphas = group.alphas(measured, draft)
    parts = [each["predicted"][method.name] for each in alphas if method.name in each["predicted"]]
    if len(parts) < len(alphas):
        return None
    calls, variance = joined(parts, "target_calls"), joined(parts, "variance")
    sums = PromptSums.of(joined(alphas, "count"), calls)
    alpha = ratio(alphas, "sum", "count").pooled
    chain = isinstance(method.shape, Tree) and method.shape.is_chain and not method.shape.stop
    seed = row_seed(setting.seed, f"run/{draft}/{method.name}/{group.domain or group.kind}/{group.temperature}")
    low, high = run_interval(sums, variance, group.picks, seed)
    decoded = group.decodings(measured, draft, method)
    found = ratio(decoded, "emitted", "target_calls").pooled if decoded else None
    inside = None
    if found is not None and low is not None and high is not None:
        # At temperature 0 nothing is random, and what differs is rounding.
        inside = low - 1e-9 <= found <= high + 1e-9
    return PredictionRow(
        {
            **group.of_method(draft, method),
            "tau": estimate(sums, group.picks),
            "run_low": low,
            "run_high": high,
            "accept_at": [estimate(at_depth(parts, depth + 1), group.picks) for depth in range(method.shape.depth)],
            "independent": independent_tau([alpha] * method.shape.depth) if chain and alpha is not None else None,
            "measured": found,
            "inside": inside,
        }
    )
