"""Choose and fill the sentences of a report, which are in templates/words.yaml.

Only an interval that leaves out zero is called a change.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from draftsmith.eval.decision import Cell, Clocked, Decision, Setting, decide, lossless_taus
from draftsmith.eval.method import decode_options
from draftsmith.eval.report.formats import (
    WORDS,
    number,
    percent,
    points,
    sign,
    tree_name,
    with_interval,
)
from draftsmith.eval.results_table import ResultsTable
from draftsmith.eval.schema import BUSY, Row, SuiteKind


@dataclass(frozen=True)
class Lead:
    """The head of a report: the decision, its cells (label, sentence), the changes, and whether
    outputs differ.

    draft: the decided draft, or the best aligned one. alphas: of at most three drafts, at
    `temperature`. todo: what to do next, with its command if there is one. rising: which drafts
    were still improving.
    """

    draft: str
    setting: str
    headline: str
    temperature: float
    alphas: list[dict[str, str]]
    todo: str
    command: str
    rising: str
    detail: str
    cells: list[tuple[str, str]]
    changes: list[str]
    lossless: str


# A draft that gained this much held-out alpha in the last fifth of its steps was still improving.
RISING = 0.005
# Fewest points of a curve that say so.
LEAST_POINTS = 4
# The largest logit gap that rounding can flip, by dtype: a few units in the last place of a logit
# of 32.
TIES = {"float32": 2e-3, "float16": 0.15, "bfloat16": 1.0}


def lead(results: ResultsTable) -> Lead:
    """The decision, each of its cells, and the changes at each temperature."""
    decision = decide(results)
    setting = decision.setting
    draft = setting.draft if setting else best_aligned(results)
    temperature = results.top_temperature if decision.temperature is None else decision.temperature
    todo = "busy" if decision.verdict == "ship_for" and _busy(decision) else decision.verdict
    return Lead(
        draft=draft,
        setting=_setting(setting) if setting else "",
        headline=_fill(WORDS["headlines"][decision.verdict], decision, results),
        temperature=temperature,
        alphas=_alphas(results, draft, temperature),
        todo=WORDS["todo"][todo],
        command=_command(decision, results, todo),
        rising=" ".join(rising(results)),
        detail=_detail(decision, results),
        changes=[f"At T = {t:g}, {_change(results, t)}" for t in sorted(results.temperatures)],
        cells=[_cell(cell, decision, results) for cell in decision.cells],
        lossless=_lossless(results),
    )


def _busy(decision: Decision) -> bool:
    return any(cell.busy for cell in decision.cells)


def _alphas(results: ResultsTable, draft: str, temperature: float) -> list[dict[str, str]]:
    """The alphas of the base, the decided draft and the best aligned one."""
    rows = []
    for name in dict.fromkeys([results.base, draft, best_aligned(results)]):
        row = {"draft": name}
        for kind in results.kinds:
            row[f"α {kind.upper()}"] = with_interval(results.alpha(name, kind, temperature))
        rows.append(row)
    return rows


def rising(results: ResultsTable) -> list[str]:
    """A sentence on every draft whose held-out alpha still rose when training stopped."""
    sentences = []
    for name, rise in rises(results).items():
        gained = number(rise, 3, sign=True)
        sentences.append(WORDS["rising"].format(draft=name, gained=gained))
    return sentences


def rises(results: ResultsTable) -> dict[str, float]:
    """The rise at the end of training of every draft whose held-out alpha still rose then."""
    found = {}
    for name in results.drafts:
        training = results.document["models"][name]["training"]
        rise = still_rising(training.get("heldout", [])) if training else None
        if rise is not None:
            found[name] = rise
    return found


def still_rising(curve: Sequence[tuple[int, float]]) -> float | None:
    """The rise of held-out alpha over the last fifth of the steps; None if it is below `RISING`."""
    if len(curve) < LEAST_POINTS:
        return None
    last_step, last = curve[-1]
    before = [alpha for step, alpha in curve if step <= 0.8 * last_step]
    rise = last - max(before)
    return rise if rise >= RISING else None


def _command(decision: Decision, results: ResultsTable, todo: str) -> str:
    """The command of `todo`, ready to paste."""
    config = results.document["config"]
    setting = decision.setting
    if todo == "busy":
        return shlex.join(["draftsmith", "eval", "--time_again", config.get("out", "DIR")])
    if setting is None or decision.temperature is None or todo not in ("ship", "ship_for"):
        return ""
    models = results.document["models"]
    words = ["draftsmith", "decode", "--target", models["target"]["name"]]
    words += decode_options(models[setting.draft], setting.tree)
    words += ["--verifier", setting.verifier]
    words += ["--temperature", f"{decision.temperature:g}", "--prompt", "TEXT"]
    return shlex.join(words)


def _fill(template: str, decision: Decision, results: ResultsTable) -> str:
    setting = decision.setting
    if setting is None:
        return template
    cells = decision.paying or decision.cells
    speedups = [cell.speedup for cell in cells]
    with_prompt = [results.beside(row, "speedup_with_prompt") for row in speedups]
    whole = [row for row in with_prompt if row is not None]
    rest = []
    for cell_sign, text in WORDS["rest"].items():
        fits = [cell for cell in decision.cells if cell.sign == cell_sign and not cell.busy]
        if fits and not (decision.verdict == "busy" and cell_sign == 0):
            rest.append(text.format(where=where(decision, fits)))
    if decision.verdict != "busy" and _busy(decision):
        places = where(decision, [cell for cell in decision.cells if cell.busy])
        rest.append(WORDS["busy_there"].format(where=places))
    rest += _faster_elsewhere(decision)
    unclear = decision.unclear if len(decision.unclear) < len(decision.cells) else []
    return template.format(
        draft=setting.draft,
        joined=WORDS["joined"] if results.joins(setting.draft) else "",
        setting=_setting(setting),
        method=f"{tree_name(setting.tree)} and {setting.verifier}",
        speed=_range(speedups),
        whole=WORDS["whole"].format(speed=_range(whole)) if whole else "",
        where=where(decision, decision.paying),
        unclear=WORDS["unclear"].format(where=where(decision, unclear)) if unclear else "",
        tau=_range(lossless_taus(results)) if decision.verdict == "rejected" else "",
        elsewhere="" if results.domains("ood") else WORDS["elsewhere"],
        rest=" ".join(rest),
    ).strip()


def _faster_elsewhere(decision: Decision) -> list[str]:
    """Where the decided setting does not pay, but another does by its own interval."""
    found = []
    for cell in decision.cells:
        if cell.sign != 1 and not cell.busy and sign(cell.fastest.speedup, 1.0) == 1:
            if cell.fastest.setting != decision.setting:
                text = WORDS["faster_elsewhere"].format(
                    where=where(decision, [cell]),
                    setting=_with_tree(cell.fastest.setting),
                    speed=with_interval(cell.fastest.speedup, 2),
                )
                found.append(text)
    return found


def _range(rows: Sequence[Row]) -> str:
    values = [row["value"] or 0.0 for row in rows]
    low = number(min(values), 2)
    high = number(max(values), 2)
    return low if low == high else f"{low} to {high}"


def _setting(setting: Setting) -> str:
    return f"{_with_tree(setting)} and {setting.verifier}"


def where(decision: Decision, fits: Sequence[Cell]) -> str:
    """The sets of some cells, with their temperatures unless these are all."""
    names_at: dict[tuple[float, ...], list[str]] = {}
    for name in dict.fromkeys(cell.domain for cell in decision.cells):
        fit = tuple(cell.temperature for cell in fits if cell.domain == name)
        if fit:
            names_at.setdefault(fit, []).append(name)
    every = tuple(dict.fromkeys(cell.temperature for cell in decision.cells))
    parts = []
    for temperatures, names in names_at.items():
        text = _listed(names)
        if temperatures != every:
            text += f" at T = {_listed([f'{each:g}' for each in temperatures])}"
        elif len(names_at) > 1:
            text += " at every temperature"
        parts.append(text)
    return _listed(parts)


def _listed(words: Sequence[str]) -> str:
    *first, last = words or [""]
    return f"{', '.join(first)} and {last}" if first else last


def _detail(decision: Decision, results: ResultsTable) -> str:
    text = _fill(WORDS["details"][decision.verdict], decision, results)
    if decision.verdict in ("ship", "ship_for"):
        over = decision.over_base
        if over is not None:
            words = WORDS["beats_base" if sign(over, 1.0) == 1 else "as_base"]
            text += " " + words.format(base=results.base, figure=with_interval(over, 2))
        if not results.domains("ood"):
            text += f" {WORDS['no_ood']}"
    if _busy(decision) and decision.verdict not in ("rejected", "none_beats_none"):
        cause = "the machine was busy during timing"
        for remark in results.document["remarks"]:
            if remark["about"] == BUSY:
                cause = remark["text"]
        text += f" {cause[0].upper()}{cause[1:]}."
    return text.strip()


def _cell(cell: Cell, decision: Decision, results: ResultsTable) -> tuple[str, str]:
    words = WORDS["cells"][cell.sign]
    alone = sign(cell.speedup, 1.0)
    if cell.busy:
        words = WORDS["busy_cell"]
    elif cell.sign == 0 and alone:
        words = WORDS["taken_alone"][alone]
    speed = with_interval(cell.speedup, 2)
    text = words.format(speed=speed, count=decision.comparisons)
    fastest = cell.fastest
    if fastest.setting != decision.setting and (fastest.speedup["value"] or 0) > 1:
        judged = WORDS["fastest"][None if cell.busy else sign(fastest.speedup, 1.0)]
        text += " " + judged.format(other=_clocked(fastest))
    if cell.slower and cell.sign != 1 and not cell.busy:
        others = _listed([_clocked(other) for other in cell.slower])
        text += " " + WORDS["slower"].format(others=others)
    kind = results.kind(cell.domain).upper()
    return f"{cell.domain} ({kind}), T = {cell.temperature:g}", text


def _clocked(other: Clocked) -> str:
    return f"{_with_tree(other.setting)}, {with_interval(other.speedup, 2)}"


def _with_tree(setting: Setting) -> str:
    return f"{setting.draft} with {tree_name(setting.tree)}"


def best_aligned(results: ResultsTable) -> str:
    """The aligned draft that gains most, ID and OOD together: a gain that is lost elsewhere is no
    gain.
    """

    def gains(draft: str) -> float:
        rows = [results.gain(draft, kind) for kind in results.kinds]
        values = [row["value"] if row else None for row in rows]
        return sum(-1.0 if value is None else value for value in values)

    return max(results.aligned, key=gains, default=results.base)


def _change(results: ResultsTable, temperature: float) -> str:
    draft = best_aligned(results)
    base = results.base

    def accepted(name: str, kind: SuiteKind) -> str:
        return percent(results.alpha(name, kind, temperature)["value"])

    before = accepted(base, "id")
    if draft == base:
        text = f"the target accepts {before} of what {base} drafts in distribution"
        if "ood" in results.kinds:
            text += f" and {accepted(base, 'ood')} out of distribution"
        return f"{text}."
    who = "alignment"
    if len(results.aligned) > 1:
        both = " in and out of distribution together" if len(results.kinds) > 1 else ""
        who = f"{draft}, the best of {len(results.aligned)} alignments{both},"
    words = WORDS["id_change"][sign(results.gain(draft, "id", temperature))]
    text = str(words.format(who=who, before=before, after=accepted(draft, "id")))
    worst = worst_set(results, draft, temperature)
    if worst is None:
        return f"{text}."
    aside = ""
    if len(results.domains("ood")) > 1:
        change = number(100 * (worst["value"] or 0.0), 1, sign=True)
        aside = f" (worst: {worst['domain']}, {change} points)"
    gain = results.gain(draft, "ood", temperature)
    words = WORDS["ood_change"][sign(gain)]
    return text + str(words.format(points=points(gain), worst=aside))


def worst_set(results: ResultsTable, draft: str, temperature: float) -> Row | None:
    """The gain on the OOD set where a draft gains least; None for the base."""
    gains = (results.gain(draft, domain, temperature) for domain in results.domains("ood"))
    return min(filter(None, gains), key=lambda gain: gain["value"] or 0.0, default=None)


def _lossless(results: ResultsTable) -> str:
    """Whether outputs equal the target's own, over all lossless methods on every set."""
    rules = {rule for _, rule in results.methods}
    lossy = sorted(rule for rule in rules if not results.lossless(rule))
    parts = [WORDS["lossy"].format(names=", ".join(lossy))] if lossy else []
    checks = []
    gaps = [0.0]
    for row in results.rows("identical", "largest_gap"):
        if row["domain"] in results.domains() and results.lossless(row["verifier"]):
            if row["figure"] == "identical":
                checks.append(row)
            else:
                gaps.append(row["value"] or 0.0)
    same = round(sum(row["value"] or 0.0 for row in checks))
    total = sum(row["n"] for row in checks)
    if checks and same == total:
        who = "The others are lossless" if lossy else "Lossless"
        parts.append(WORDS["all_same"].format(who=who, same=same, total=total))
    elif checks:
        gap = max(gaps)
        dtype = results.document["models"]["target"]["dtype"]
        cause = WORDS["tie" if gap <= TIES.get(dtype, TIES["float32"]) else "no_tie"]
        words = WORDS["some_same"]
        parts.append(words.format(same=same, total=total, gap=gap, dtype=dtype, cause=cause))
    elif len(lossy) < len(rules):
        parts.append(WORDS["not_compared"])
    return " ".join(parts)
