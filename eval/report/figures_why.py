"""The figures that explain, one panel per prompt set or kind of sets and a line per draft: acceptance by depth, speed
against the cost of a step, calibration, and more candidates. None when there is nothing to show.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from eval.report.formats import KIND_TITLES, number, shortened
from eval.report.theme import WIDTH, Look, drawing
from eval.results import KINDS, Results

# Typical drafts as a share of their target's parameters, which is their cost where memory bandwidth decides.
# And on which side of its line the name stands.
TYPICAL_COSTS: dict[str, tuple[float, Literal["left", "right"]]] = {
    "68M for 7B": (0.068 / 6.7, "right"),
    "160M for 13B": (0.162 / 13.0, "left"),
    "EAGLE head for 7B": (0.24 / 6.7, "left"),
}
# What verifying may cost, in steps of the target alone: as much as one token at small batches, more at large ones.
VERIFYING = (1.0, 2.0)
CHEAPEST = -50  # of the costs of a draft call that are drawn, in twentieths of a power of ten
LEGEND_LINE = 0.23  # inches
CORNER = 3  # lines of text in the corner of a panel
SHARES = (-0.03, 1.03)  # of an axis from 0 to 1, with whole marks at its ends


def _panels(
    look: Look, titles: dict[str, str], draw: Callable[[Axes, str], object], label: str, height: float = 2.1
) -> Figure:
    """Panels two abreast, drawn by their key, with one legend and one label of the horizontal axis."""
    columns = min(2, len(titles))
    lines = -(-len(titles) // columns)
    with drawing(look.colours):
        figure = Figure(figsize=(WIDTH, 0.6 + height * lines))
        axes = list(figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).flat)
        for ax, (key, title) in zip(axes, titles.items(), strict=False):
            draw(ax, key)
            ax.set_title(shortened(title, 22))
        for index, ax in enumerate(axes):
            ax.set_visible(index < len(titles))
            # The last panel of its column, where the one below is empty.
            ax.tick_params(labelbottom=index + columns >= len(titles))
        figure.supxlabel(label, color=look.colours["soft"], fontsize=11)
        # A draft may be missing from the first panel and not from others.
        entries = {text: line for ax in axes for line, text in zip(*ax.get_legend_handles_labels(), strict=True)}
        for abreast in (3, 2, 1):
            legend = figure.legend(entries.values(), entries.keys(), loc="outside upper left", ncols=abreast)
            if abreast == 1 or legend.get_window_extent().width <= figure.bbox.width:
                break
            legend.remove()
        # The panels stay as high as they are, however many drafts are named above them.
        figure.set_figheight(figure.get_figheight() + LEGEND_LINE * (-(-len(entries) // abreast) - 1))
    return figure


def _line(ax: Axes, look: Look, draft: str, x: Sequence[float], y: Sequence[float], **style: Any) -> None:
    """The line of one draft, named in the legend unless `label` says otherwise."""
    named: dict[str, Any] = {"label": shortened(draft, 16), "marker": look.marker(draft), "ms": 4.5}
    ax.plot(x, y, color=look.colour(draft), **(named | style))


def _sets(results: Results) -> dict[str, str]:
    return {name: name + " (OOD)" * (results.kind(name) == "ood") for name in results.domains()}


def accept_figure(results: Results, look: Look) -> Figure | None:
    """accept@d against depth, one panel per set, for the first method."""
    method = results.document["methods"][0]
    panels: dict[str, list[Any]] = {}
    for domain in results.domains():
        rows = [results.decoding(draft, domain, None, method["tree"], method["verifier"]) for draft in results.drafts]
        panels[domain] = [row for row in rows if any(at["value"] is not None for at in row["accept_at"])]

    def draw(ax: Axes, domain: str) -> None:
        for row in panels[domain]:
            points = [(depth, at) for depth, at in enumerate(row["accept_at"], 1) if at["value"] is not None]
            for depth, at in points:
                if at["low"] is not None and at["high"] is not None:
                    colour = look.colour(row["draft"])
                    ax.plot([depth] * 2, [at["low"], at["high"]], color=colour, lw=1.2, alpha=0.5)
            _line(ax, look, row["draft"], [depth for depth, _ in points], [at["value"] for _, at in points])
        ax.set_ylim(*SHARES)
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))

    titles = {name: title for name, title in _sets(results).items() if panels[name]}
    return _panels(look, titles, draw, "depth d") if titles else None


def calibration_figure(results: Results, look: Look) -> Figure | None:
    """Confidence of the draft against acceptance, at the highest temperature; the diagonal is a calibrated draft."""

    def draw(ax: Axes, row: Any) -> None:
        points = [(b["confidence"] or 0.0, b["acceptance"] or 0.0) for b in row["bins"] if b["mass"]]
        ax.plot([0, 1], [0, 1], color=look.colours["line"], lw=1)
        _line(ax, look, row["draft"], [x for x, _ in points], [y for _, y in points])

    return _by_kind(results, look, "calibration", draw, "confidence of the draft")


def candidates_figure(results: Results, look: Look) -> Figure | None:
    """Acceptance against the number of candidates: drawn (solid) and most probable (dashed)."""

    def draw(ax: Axes, row: Any) -> None:
        drawn = row["way"] == "drawn"
        style: dict[str, Any] = {"ls": "-" if drawn else (0, (3, 2)), "ms": 4}
        if row["temperature"] and not drawn:
            style["label"] = None
        _line(ax, look, row["draft"], row["k"], [each["value"] or 0.0 for each in row["acceptance"]], **style)
        ax.set_xscale("log", base=2)
        ax.set_xticks([1, 4, 16, 64], ["1", "4", "16", "64"])

    return _by_kind(results, look, "candidates", draw, "candidates k")


def _by_kind(
    results: Results, look: Look, table: str, draw_row: Callable[[Axes, Any], None], label: str
) -> Figure | None:
    """A panel for each kind of sets, with the rows of one table of the diagnosis at the highest temperature."""
    diagnosis: Any = results.document["diagnosis"]
    if diagnosis is None:
        return None

    def draw(ax: Axes, kind: str) -> None:
        for row in diagnosis[table]:
            if (row["kind"], row["temperature"]) == (kind, results.top_temperature):
                draw_row(ax, row)
        ax.set_ylim(*SHARES)

    titles: dict[str, str] = {kind: KIND_TITLES[kind].lower() for kind in KINDS if results.has(kind)}
    return _panels(look, titles, draw, f"{label}, T = {results.top_temperature:g}", 2.4)


def cost_figure(results: Results, look: Look) -> Figure | None:
    """Expected speedup of every draft on every set, by its measured tau, over what a step costs; and this machine's."""
    method = next((m for m in results.document["methods"] if m["lossless"]), None)
    if method is None:
        return None
    wanted = {"temperature": results.top_temperature, "tree": method["tree"], "verifier": method["verifier"]}
    untyped: list[Any] = list(results.document["speed"]["costs"])
    measured = {(row["draft"], row["domain"]): row for row in untyped if wanted.items() <= row.items()}

    # As far as this machine's most costly draft, so that its mark stands beside a line.
    most = max([1.0, *(row["draft_call"] for row in measured.values())])
    costs = [10 ** (power / 20) for power in range(CHEAPEST, 1 + math.ceil(20 * math.log10(most)))]
    highest = [1.0]

    def draw(ax: Axes, domain: str) -> None:
        verifying: list[tuple[str, float]] = []
        for draft in results.drafts:
            row = results.decoding(draft, domain, None, method["tree"], method["verifier"])
            calls = draft_calls(row["counts"]["depth_sum"], row["counts"]["target_calls"])
            if row["tau"]["value"] is None or not calls:
                continue
            upper, lower = ([row["tau"]["value"] / (calls * c + verify) for c in costs] for verify in VERIFYING)
            ax.fill_between(costs, upper, lower, color=look.colour(draft), alpha=0.13, lw=0)
            _line(ax, look, draft, costs, upper, marker="")
            highest.append(upper[0])
            timed = results.speed(draft, domain, None, method["tree"], method["verifier"])
            at = measured.get((draft, domain))
            if at is not None and timed is not None and timed["speedup"] is not None:
                # A draft too cheap to be told from none stands at the left edge.
                speedup = timed["speedup"]["value"] or 0.0
                _line(ax, look, draft, [max(at["draft_call"], costs[0])], [speedup], ms=6.5, label=None)
                verifying.append((draft, at["verify"]))
                highest.append(speedup)
        _say_verifying(ax, look, verifying)
        for name, (typical, side) in TYPICAL_COSTS.items():
            ax.axvline(typical, color=look.colours["line"], lw=1, zorder=0)
            ax.annotate(name, (typical, 0.03), xycoords=ax.get_xaxis_transform(), rotation=90, va="bottom", ha=side,
                        fontsize=7.5, color=look.colours["soft"])  # fmt: skip
        ax.axhline(1, color=look.colours["soft"], lw=1)
        ax.set_xscale("log")
        ax.set_ylim(0, 1.06 * max(highest))

    label = f"cost of one draft call / one target call (T = {results.top_temperature:g})"
    return _panels(look, _sets(results), draw, label, 2.7)


def _say_verifying(ax: Axes, look: Look, costs: Sequence[tuple[str, float]]) -> None:
    """What verifying cost with each draft, in the corner that falling lines leave free: beside the marks, the numbers
    of alike drafts would cover each other. Of more drafts than fit there, from the least to the most.
    """
    said = [(number(cost, 1), look.colour(draft)) for draft, cost in costs]
    if len(said) > CORNER:
        ends = dict.fromkeys(number(end(cost for _, cost in costs), 1) for end in (min, max))
        said = [(" to ".join(ends), look.colours["soft"])]
    for line, (text, colour) in enumerate(said):
        ax.annotate(f"verifying {text}", (0.98, 0.98 - 0.075 * line), xycoords="axes fraction",
                    ha="right", va="top", fontsize=8, color=colour)  # fmt: skip


def draft_calls(depth_sum: int, target_calls: int) -> float:
    """Draft calls per target call: a tree is drafted level by level."""
    return depth_sum / target_calls if target_calls else 0.0
