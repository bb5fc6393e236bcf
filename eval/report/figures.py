"""The figures of a report. Each is a function of the results and a look; None when there is nothing to show.

Rows run down a page whose vertical unit is the point, so that a figure grows with what it shows.
"""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from eval.report.row_figure import (
    AXIS,
    GAP,
    Rows,
    dot,
    limits,
    margin,
    names,
    names_width,
    number,
    row_axes,
    share,
    signed,
    tree_name,
)
from eval.report.theme import NARROW, Look, drawing, place, sheet
from eval.schema import AlphaRow, DecodingRow, Estimate, ResultsDocument, SpeedRow

# Characters of a tree and its verifier that fit on one line beside marks, on a phone.
ONE_LINE = 24
KIND_TITLES = {"id": "In distribution", "ood": "Out of distribution"}


def headline_temperature(results: ResultsDocument) -> float:
    """The temperature a report leads with."""
    return max(results["temperatures"])


def alpha_figure(results: ResultsDocument, look: Look) -> Figure | None:
    """alpha of every draft on every suite, ID first; a vertical line carries the base draft through
    each suite."""
    temperature = headline_temperature(results)
    cells = {(row["domain"], row["draft"]): row for row in results["alpha"] if row["temperature"] == temperature}
    layout = Rows()
    spans: list[tuple[float, float, AlphaRow]] = []
    for kind in ("id", "ood"):
        suites = [suite["name"] for suite in results["suites"] if suite["kind"] == kind]
        if suites:
            layout.section(KIND_TITLES[kind])
        for suite in suites:
            layout.title(suite)
            top = layout.y
            for draft in results["drafts"]:
                layout.row(draft, draft)
                layout.payload.append(cells[suite, draft])
            spans.append((top, layout.y, cells[suite, results["base"]]))
            layout.y += GAP
    rows: list[AlphaRow] = layout.payload
    with drawing(look):
        right = 96.0 if look.size is not NARROW else 42.0
        figure, ax = row_axes(look, layout, right)
        low, high = limits([row["alpha"] for row in rows], (-0.008, 1.008))
        ax.set_xlim(min(low, high - 0.1), high)
        ax.set_xlabel(f"expected acceptance α, T = {temperature:g}")
        for top, bottom, base in spans:
            if base["alpha"]["value"] is not None:
                ax.plot(
                    [base["alpha"]["value"]] * 2,
                    [top, bottom],
                    color=look.colours["base"],
                    lw=1,
                    ls=(0, (2, 2)),
                )
        for entry, row in zip(layout.rows, rows, strict=True):
            dot(ax, look, row["alpha"], entry.y, row["draft"])
            text = number(row["alpha"]["value"])
            margin(ax, look, entry.y, text, 10, "ink")
            if look.size is not NARROW and row["gain"] is not None:
                margin(ax, look, entry.y, signed(row["gain"]["value"]), 50, "soft")
    return figure


def gain_figure(results: ResultsDocument, look: Look) -> Figure | None:
    """What alignment changed, per aligned draft and suite, and on the right the share that transferred."""
    temperature = headline_temperature(results)
    aligned = [draft for draft in results["drafts"] if draft != results["base"]]
    if not aligned:
        return None
    shares = {(t["draft"], t["domain"]): t for t in results["transfer"] if t["temperature"] == temperature}
    layout = Rows()
    for draft in aligned:
        layout.title(draft)
        for row in results["alpha"]:
            if row["draft"] == draft and row["temperature"] == temperature:
                layout.row(str(row["domain"]), None)
                layout.payload.append(row)
        layout.y += GAP
    rows: list[AlphaRow] = layout.payload
    with drawing(look):
        wide = look.size is not NARROW
        figure, ax = row_axes(look, layout, 150.0 if wide else 62.0)
        gains = [row["gain"] for row in rows if row["gain"] is not None]
        low, high = limits(gains, (-1.0, 1.0), include=0.0)
        ax.set_xlim(low, high)
        ax.axvline(0, color=look.colours["soft"], lw=1)
        ax.set_xlabel(f"gain in α over {look.short(results['base'], 14)}, T = {temperature:g}")
        margin(ax, look, -6, "transfer", 10, "soft")
        for entry, row in zip(layout.rows, rows, strict=True):
            assert row["gain"] is not None
            dot(ax, look, row["gain"], entry.y, row["draft"], hollow=row["kind"] == "ood")
            carried = shares.get((row["draft"], row["domain"]))
            text = "home" if row["kind"] == "id" else share(carried, wide)
            margin(ax, look, entry.y, text, 10, "soft" if row["kind"] == "id" else "ink")
    return figure


def accept_figure(results: ResultsDocument, look: Look) -> Figure | None:
    """accept@d against depth, one panel a suite, for the first tree and verifier."""
    temperature, method = headline_temperature(results), results["methods"][0]
    panels: dict[str, list[DecodingRow]] = {suite["name"]: [] for suite in results["suites"]}
    for row in results["decoding"]:
        ours = row["temperature"] == temperature and row["tree"] == method["tree"]
        if ours and row["verifier"] == method["verifier"] and any(e["value"] is not None for e in row["accept_at"]):
            panels[str(row["domain"])].append(row)
    panels = {name: rows for name, rows in panels.items() if rows}
    if not panels:
        return None
    kinds = {suite["name"]: suite["kind"] for suite in results["suites"]}
    columns = 1 if look.size is NARROW else 2 if len(panels) == 4 else min(3, len(panels))
    lines = -(-len(panels) // columns)
    height, gap, left, label = 128.0, 58.0, 34.0, 82.0
    with drawing(look):
        figure = sheet(look, lines * (height + gap) + 4)
        pitch = (look.size.width if columns > 1 else min(look.size.width, 420.0)) / columns
        for index, (name, rows) in enumerate(panels.items()):
            ax = place(
                figure,
                left + index % columns * pitch,
                24 + index // columns * (height + gap),
                pitch - left - label,
                height,
            )
            _accept_panel(ax, look, rows)
            tag = "" if kinds[name] == "id" else "  (OOD)"
            ax.set_title(
                look.short(name, 22) + tag,
                loc="left",
                fontsize=look.size.text,
                fontweight="bold",
                pad=8,
            )
            if index // columns == lines - 1 or index + columns >= len(panels):
                ax.set_xlabel("depth d")
    return figure


def _accept_panel(ax: Axes, look: Look, rows: Sequence[DecodingRow]) -> None:
    deepest = max(len(row["accept_at"]) for row in rows)
    ax.set_ylim(0, 1.03)
    ax.set_xlim(0.8, deepest + 0.2)
    ax.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "", "0.5", "", "1"])
    ax.xaxis.set_major_locator(MaxNLocator(min(deepest, 6) + 1, integer=True, min_n_ticks=1))
    ax.grid(visible=False, axis="x")
    ends: list[tuple[float, float, str]] = []
    for row in rows:
        points = [(d, e) for d, e in enumerate(row["accept_at"], 1) if e["value"] is not None]
        if not points:
            continue
        colour = look.colour(row["draft"])
        xs = [float(d) for d, _ in points]
        ys = [float(e["value"] or 0.0) for _, e in points]
        for x, (_, e) in zip(xs, points, strict=True):
            if e["low"] is not None and e["high"] is not None:
                ax.plot([x, x], [e["low"], e["high"]], color=colour, lw=1.2, alpha=0.5)
        ax.plot(xs, ys, color=colour, lw=1.6, marker=look.marker(row["draft"]), ms=4)
        ends.append((ys[-1], xs[-1], row["draft"]))
    # Names stand at the ends of their lines, pushed apart where two would overlap.
    step = 0.115
    at = [y for y in sorted(y for y, _, _ in ends)]
    for i in range(1, len(at)):
        at[i] = max(at[i], at[i - 1] + step)
    over = at[-1] - 1.0
    if over > 0:
        at[-1] -= over
        for i in range(len(at) - 2, -1, -1):
            at[i] = min(at[i], at[i + 1] - step)
    for y, (_, _, draft) in zip(at, sorted(ends), strict=True):
        ax.annotate(
            look.short(draft, 12),
            (deepest + 0.2, y),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            color=look.colour(draft),
            fontsize=look.size.text - 1,
            annotation_clip=False,
        )


def tau_figure(results: ResultsDocument, look: Look) -> Figure | None:
    """Tokens per target call and, when timed, speedup, by tree: ID and OOD each pooled over their suites."""
    temperature = headline_temperature(results)
    taus = [row for row in results["overall_decoding"] if row["temperature"] == temperature]
    speeds = [
        row for row in results["speed"]["overall"] if row["temperature"] == temperature and row["speedup"] is not None
    ]
    panels: list[tuple[str, list[tuple[DecodingRow | SpeedRow, Estimate]]]] = [
        ("tokens per target call, τ", [(row, row["tau"]) for row in taus])
    ]
    if speeds:
        timed = [(row, row["speedup"]) for row in speeds if row["speedup"] is not None]
        panels.append(("speed, the target alone = 1", list(timed)))
    layout = Rows(clear=True)
    for method in results["methods"]:
        tree, rule = tree_name(method["tree"]), method["verifier"]
        if method["lossless"] and len(tree) + len(rule) < ONE_LINE:
            layout.title(f"{tree} · {rule}")
        else:
            # On two lines, so that only the short one stands beside marks.
            layout.title(tree)
            layout.title(rule if method["lossless"] else f"{rule} · lossless: false")
        for draft in results["drafts"]:
            layout.row(draft, draft)
            layout.payload.append((method["tree"], method["verifier"], draft))
        layout.y += GAP
    narrow = look.size is NARROW
    height = layout.y
    left, right = names_width(look, layout), 12.0
    with drawing(look):
        stacked = len(panels) if narrow else 1
        figure = sheet(look, stacked * (height + AXIS + 30))
        free = look.size.width - left - right
        width = free if narrow or len(panels) == 1 else (free - 24) / 2
        width = min(width, 430.0)
        for index, (title, values) in enumerate(panels):
            top = 26 + (index * (height + AXIS + 30) if narrow else 0)
            ax = place(figure, left + (0 if narrow else index * (width + 24)), top, width, height)
            _tau_panel(ax, look, layout, values, labelled=narrow or index == 0)
            ax.set_xlabel(title if narrow else f"{title} (T = {temperature:g})")
    return figure


def _tau_panel(
    ax: Axes,
    look: Look,
    layout: Rows,
    values: Sequence[tuple[DecodingRow | SpeedRow, Estimate]],
    *,
    labelled: bool,
) -> None:
    ax.set_ylim(layout.y, 0)
    ax.set_yticks([])
    ax.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    ax.set_xlim(*limits([e for _, e in values], (0.0, 1e9), include=1.0))
    ax.axvline(1, color=look.colours["soft"], lw=1)
    if labelled:
        names(ax, look, layout)
    found = {(row["tree"], row["verifier"], row["draft"], row["kind"]): e for row, e in values}
    for index, (entry, key) in enumerate(zip(layout.rows, layout.payload, strict=True)):
        pair = {kind: found.get((*key, kind)) for kind in ("id", "ood")}
        for kind, nudge in (("id", -3.2), ("ood", 3.2)):
            e = pair[kind]
            if e is not None:
                y = entry.y + (nudge if pair["id"] and pair["ood"] else 0)
                dot(ax, look, e, y, key[2], hollow=kind == "ood", size=4.6)
        if index == 0:
            _key(ax, look, entry.y, pair)


def _key(ax: Axes, look: Look, y: float, pair: dict[str, Estimate | None]) -> None:
    """Say at the first pair which mark is ID and which OOD: the larger reads rightwards, the smaller
    leftwards."""
    given = [(e["value"], kind) for kind, e in pair.items() if e is not None and e["value"] is not None]
    for rank, (value, kind) in enumerate(sorted(given)):
        rightmost = rank == len(given) - 1
        ax.annotate(
            kind.upper(),
            (value, y - 3),
            xytext=(-2 if not rightmost else 2, 6),
            textcoords="offset points",
            ha="left" if rightmost else "right",
            va="bottom",
            fontsize=look.size.text - 2,
            color=look.colours["soft"],
        )
