"""The figures that explain: calibration, candidates, and speed against the cost of drafting."""

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval.report.formats import shortened
from eval.report.theme import WIDTH, Look, drawing
from eval.results import KINDS, Results
from eval.schema import CalibrationRow, CandidatesRow

# Typical drafts as a share of their target's parameters, which is their cost where memory bandwidth decides.
TYPICAL_COSTS = {"68M for 7B": 0.068 / 6.7, "EAGLE head for 7B": 0.24 / 6.7, "160M for 7B": 0.162 / 6.7}


def _by_kind(results: Results, look: Look, draw: Callable[[Axes, str], None], label: str) -> Figure:
    """One panel for each kind of sets that was measured, with one legend of drafts."""
    kinds = [kind for kind in KINDS if results.has(kind)]
    figure = Figure(figsize=(WIDTH, 3.0))
    axes = list(figure.subplots(1, len(kinds), squeeze=False, sharey=True)[0])
    for ax, kind in zip(axes, kinds, strict=True):
        draw(ax, kind)
        ax.set_title("in distribution" if kind == "id" else "out of distribution")
    axes[0].set_ylim(0, 1.03)
    figure.supxlabel(label, color=look.colours["soft"], fontsize=11)
    entries = {text: line for ax in axes for line, text in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(entries.values(), entries.keys(), loc="outside upper left", ncols=3)
    return figure


def calibration_figure(results: Results, look: Look) -> Figure | None:
    """Confidence of the draft against acceptance, at the highest temperature; the diagonal is a calibrated draft."""
    diagnosis = results.document["diagnosis"]
    if diagnosis is None:
        return None
    rows: Sequence[CalibrationRow] = diagnosis["calibration"]

    def draw(ax: Axes, kind: str) -> None:
        ax.plot([0, 1], [0, 1], color=look.colours["line"], lw=1)
        for row in rows:
            if (row["kind"], row["temperature"]) != (kind, results.top_temperature):
                continue
            points = [(b["confidence"] or 0.0, b["acceptance"] or 0.0) for b in row["bins"] if b["mass"]]
            ax.plot(
                [x for x, _ in points], [y for _, y in points], color=look.colour(row["draft"]),
                marker=look.marker(row["draft"]), ms=4.5, label=shortened(row["draft"], 16),
            )  # fmt: skip

    with drawing(look.colours):
        return _by_kind(results, look, draw, f"confidence of the draft, T = {results.top_temperature:g}")


def candidates_figure(results: Results, look: Look) -> Figure | None:
    """Acceptance against the number of candidates: drawn (solid) and most probable (dashed)."""
    diagnosis = results.document["diagnosis"]
    if diagnosis is None:
        return None
    rows: Sequence[CandidatesRow] = diagnosis["candidates"]

    def draw(ax: Axes, kind: str) -> None:
        for row in rows:
            if (row["kind"], row["temperature"]) != (kind, results.top_temperature):
                continue
            drawn = row["way"] == "drawn"
            ax.plot(
                row["k"], [each["value"] or 0.0 for each in row["acceptance"]], color=look.colour(row["draft"]),
                marker=look.marker(row["draft"]), ms=4, ls="-" if drawn else (0, (3, 2)),
label=shortened(row["draft"], 16) if drawn or not row["temperature"] else None,
            )  # fmt: skip
        ax.set_xscale("log", base=2)
        ax.set_xticks([1, 4, 16, 64], ["1", "4", "16", "64"])

    with drawing(look.colours):
        return _by_kind(results, look, draw, f"candidates k, T = {results.top_temperature:g}")


def cost_figure(results: Results, look: Look) -> Figure | None:
    """Expected speedup of every draft, by its measured tau, over the cost of one draft call; this machine's points."""
    method = next((m for m in results.document["methods"] if m["lossless"]), None)
    if method is None:
        return None
    kinds = [kind for kind in KINDS if results.has(kind)]
    ratios = [10 ** (power / 20) for power in range(-50, 1)]
    with drawing(look.colours):
        figure = Figure(figsize=(WIDTH, 3.4))
        ax = figure.subplots()
        for draft in results.drafts:
            for kind in kinds:
                row = results.decoding(draft, kind, None, method["tree"], method["verifier"])
                tau = row["tau"]["value"]
                calls = draft_calls(row["counts"]["depth_sum"], row["counts"]["target_calls"])
                if tau is None or not calls:
                    continue
                style = "-" if kind == "id" else (0, (3, 2))
                name = f"{shortened(draft, 14)}, {kind.upper()}"
                ax.plot(ratios, [tau / (1 + calls * c) for c in ratios], color=look.colour(draft), ls=style, label=name)
                timed = results.speed(draft, kind, None, method["tree"], method["verifier"])
                measured = timed["speedup"]["value"] if timed is not None and timed["speedup"] is not None else None
                if measured:
                    cost = (tau / measured - 1) / calls
                    if cost > 0:
                        ax.plot([cost], [measured], look.marker(draft), ms=6, color=look.colour(draft))
        for name, cost in TYPICAL_COSTS.items():
            ax.axvline(cost, color=look.colours["line"], lw=1, zorder=0)
            ax.annotate(
                name, (cost, 0.03), xycoords=ax.get_xaxis_transform(), rotation=90, va="bottom", ha="right", fontsize=8,
                color=look.colours["soft"],
            )  # fmt: skip
        ax.axhline(1, color=look.colours["soft"], lw=1)
        ax.set_xscale("log")
        ax.set_xlabel("cost of one draft call / one target call")
        ax.set_ylabel("expected speedup")
        figure.legend(loc="outside upper left", ncols=2)
    return figure


def draft_calls(depth_sum: int, target_calls: int) -> float:
    """Draft calls per target call: a tree is drafted level by level."""
    return depth_sum / target_calls if target_calls else 0.0
