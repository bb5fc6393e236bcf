"""Choose and fill the sentences of a report, which are in templates/words.yaml.

Only an interval that leaves out zero is called a change.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from eval.decision import Cell, Decision, Setting, decide
from eval.report.formats import WORDS, number, percent, points, sign, tree_name, with_interval
from eval.results_table import ResultsTable
from eval.schema import BUSY, Row


@dataclass(frozen=True)
class Lead:
    """The head of a report: the decision, its cells (label, sentence), the changes, and whether
    outputs differ.

    `draft` is the decided draft, or the best aligned one; `setting` the decided setting; `command`
    repeats timings of a busy machine.
    """

    draft: str
    setting: str
    command: str
    headline: str
    detail: str
    cells: list[tuple[str, str]]
    changes: list[str]
    lossless: str


# The largest logit gap that rounding can flip, by dtype: a few units in the last place of a logit
# of 32.
TIES = {"float32": 2e-3, "float16": 0.15, "bfloat16": 1.0}


def lead(results: ResultsTable) -> Lead:
    """The decision, each of its cells, and the changes at each temperature."""
    decision = decide(results)
    again = shlex.join(
        ["draftsmith", "eval", "--time_again", results.document["config"].get("out", "DIR")]
    )
    return Lead(
        command=again if any(cell.busy for cell in decision.cells) else "",
        draft=decision.setting.draft if decision.setting else best_aligned(results),
        setting=_setting(decision.setting) if decision.setting else "",
        headline=_fill(WORDS["headlines"][decision.verdict], decision, results),
        detail=_detail(decision, results),
        changes=[f"At T = {t:g}, {_change(results, t)}" for t in sorted(results.temperatures)],
        cells=[_cell(cell, decision, results) for cell in decision.cells],
        lossless=_lossless(results),
    )


def _fill(template: str, decision: Decision, results: ResultsTable) -> str:
    setting, cells = decision.setting, decision.paying or decision.cells
    if setting is None:
        return template
    whole = [row for cell in cells if (row := results.beside(cell.speedup, "speedup_with_prompt"))]
    return template.format(
        draft=setting.draft,
        setting=_setting(setting),
        method=f"{tree_name(setting.tree)} and {setting.verifier}",
        speed=_range([cell.speedup for cell in cells]),
        whole=WORDS["whole"].format(speed=_range(whole)) if whole else "",
        where=_where(decision, 1),
        elsewhere="" if results.domains("ood") else WORDS["elsewhere"],
        rest=" ".join(
            text.format(where)
            for sign, text in WORDS["rest"].items()
            if (where := _where(decision, sign))
        ),
    ).strip()


def _range(rows: Sequence[Row]) -> str:
    values = sorted(row["value"] or 0.0 for row in rows)
    return " to ".join(dict.fromkeys(number(value, 2) for value in (values[0], values[-1])))


def _setting(setting: Setting) -> str:
    return f"{setting.draft} with {tree_name(setting.tree)} and {setting.verifier}"


def _where(decision: Decision, sign: int | None) -> str:
    """The sets on which the setting has this sign, with the temperatures unless it is all of
    them.
    """
    parts = []
    for name in dict.fromkeys(cell.domain for cell in decision.cells):
        cells = [cell for cell in decision.cells if cell.domain == name]
        if fit := [f"{cell.temperature:g}" for cell in cells if cell.sign == sign]:
            parts.append(name if len(fit) == len(cells) else f"{name} at T = {' and '.join(fit)}")
    return ", ".join(parts[:-1]) + " and " + parts[-1] if len(parts) > 1 else "".join(parts)


def _detail(decision: Decision, results: ResultsTable) -> str:
    text, over = _fill(WORDS["details"][decision.verdict], decision, results), decision.over_base
    if decision.verdict in ("ship", "ship_for"):
        if over is not None:
            words = WORDS["beats_base" if sign(over, 1.0) == 1 else "as_base"]
            text += " " + words.format(base=results.base, figure=with_interval(over, 2))
        text += "" if results.domains("ood") else f" {WORDS['no_ood']}"
    if any(cell.busy for cell in decision.cells):
        causes = [
            remark["text"] for remark in results.document["remarks"] if remark["about"] == BUSY
        ]
        cause = causes[0] if causes else "the machine was busy during timing"
        text += f" {cause[0].upper()}{cause[1:]}. {WORDS['busy']}"
    return text


def _cell(cell: Cell, decision: Decision, results: ResultsTable) -> tuple[str, str]:
    text = WORDS["cells"][cell.sign].format(speed=with_interval(cell.speedup, 2))
    if cell.fastest != decision.setting and (cell.fastest_speedup["value"] or 0) > 1:
        text += (
            f" Fastest there: {_setting(cell.fastest)}, {with_interval(cell.fastest_speedup, 2)}."
        )
    return f"{cell.domain} ({results.kind(cell.domain).upper()}), T = {cell.temperature:g}", text


def best_aligned(results: ResultsTable) -> str:
    """The aligned draft that gains most, ID and OOD together: a gain that is lost elsewhere is no
    gain.
    """

    def gains(draft: str) -> float:
        rows = [results.gain(draft, kind) for kind in results.kinds]
        return sum(row["value"] if row and row["value"] is not None else -1.0 for row in rows)

    return max(results.aligned, key=gains, default=results.base)


def _change(results: ResultsTable, temperature: float) -> str:
    draft, base = best_aligned(results), results.base
    before, after = (
        percent(results.alpha(name, "id", temperature)["value"]) for name in (base, draft)
    )
    if draft == base:
        text = f"the target accepts {before} of what {base} drafts in distribution"
        if "ood" in results.kinds:
            text += (
                f" and {percent(results.alpha(base, 'ood', temperature)['value'])} out of "
                "distribution"
            )
        return f"{text}."
    count, both = (
        len(results.aligned),
        " in and out of distribution together" * (len(results.kinds) > 1),
    )
    who = "alignment" if count == 1 else f"{draft}, the best of {count} alignments{both},"
    change = sign(results.gain(draft, "id", temperature))
    text = str(WORDS["id_change"][change]).format(who=who, before=before, after=after)
    if (worst := worst_set(results, draft, temperature)) is None:
        return f"{text}."
    gain = results.gain(draft, "ood", temperature)
    there = f"{worst['domain']}, {number(100 * (worst['value'] or 0.0), 1, sign=True)} points"
    aside = f" (worst: {there})" if len(results.domains("ood")) > 1 else ""
    return text + str(WORDS["ood_change"][sign(gain)]).format(points=points(gain), worst=aside)


def worst_set(results: ResultsTable, draft: str, temperature: float) -> Row | None:
    """The gain on the OOD set where a draft gains least; None for the base."""
    gains = (results.gain(draft, domain, temperature) for domain in results.domains("ood"))
    return min(filter(None, gains), key=lambda gain: gain["value"] or 0.0, default=None)


def _lossless(results: ResultsTable) -> str:
    """Whether outputs equal the target's own, over all lossless methods on every set."""
    lossy = sorted({rule for _, rule in results.methods if not results.lossless(rule)})
    parts = [WORDS["lossy"].format(names=", ".join(lossy))] if lossy else []
    sets = results.domains()
    checks, gaps = (
        [
            row
            for row in results.rows(figure)
            if row["domain"] in sets and results.lossless(row["verifier"])
        ]
        for figure in ("identical", "largest_gap")
    )
    same, total = round(sum(row["value"] or 0.0 for row in checks)), sum(row["n"] for row in checks)
    if checks and same == total:
        who = "The others are lossless" if lossy else "Lossless"
        parts.append(WORDS["all_same"].format(who=who, same=same, total=total))
    elif checks:
        gap, dtype = (
            max(row["value"] or 0.0 for row in gaps),
            results.document["models"]["target"]["dtype"],
        )
        cause = WORDS["tie" if gap <= TIES.get(dtype, TIES["float32"]) else "no_tie"]
        parts.append(
            WORDS["some_same"].format(same=same, total=total, gap=gap, dtype=dtype, cause=cause)
        )
    elif len(lossy) < len({rule for _, rule in results.methods}):
        parts.append(WORDS["not_compared"])
    return " ".join(parts)
