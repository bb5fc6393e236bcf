"""Choose and fill the sentences of a report, which are in templates/words.yaml.

Only an interval that leaves out zero is called a change.
"""

from dataclasses import dataclass

from eval.decision import Cell, Decision, Setting, decide
from eval.report.formats import KIND_TITLES, WORDS, Figure, interval, number, percent, points, tree_name
from eval.results import Results
from eval.schema import Row, SuiteKind


@dataclass(frozen=True)
class Lead:
    """The head of a report: the decision and its cells, the changes, and by draft the findings (label and sentence)."""

    headline: str
    detail: str
    cells: list[tuple[str, str]]
    changes: list[str]
    findings: dict[str, list[tuple[str, str]]]
    lossless: str


# The largest logit gap that rounding can flip, by dtype: a few units in the last place of a logit of 32.
TIES = {"float32": 2e-3, "float16": 0.15, "bfloat16": 1.0}


def sign(figure: Figure | None, null: float = 0.0) -> int | None:
    """1 or -1 if the interval leaves out `null`, 0 if it does not, None if there is no interval."""
    if figure is None or figure["low"] is None or figure["high"] is None:
        return None
    return int(figure["low"] > null) - int(figure["high"] < null)


def lead(results: Results) -> Lead:
    """The decision, each of its cells, the changes at each temperature, and findings by draft."""
    decision = decide(results)

    def gains(draft: str) -> float:
        """ID and OOD together: a gain in distribution that is lost elsewhere is no gain."""
        rows = [results.gain(draft, kind) for kind in results.kinds]
        return sum(row["value"] if row and row["value"] is not None else -1.0 for row in rows)

    order = sorted(results.aligned, key=gains, reverse=True) or [results.base]
    both = " in and out of distribution together" * (len(results.kinds) > 1)
    who = "alignment" if len(order) == 1 else f"{order[0]}, the best of {len(order)} alignments{both},"
    changes = [
        f"At T = {t:g}, " + (_headline(results, order[0], t, who) if results.aligned else _plain_headline(results, t))
        for t in sorted(results.temperatures)
    ]
    return Lead(
        headline=_fill(WORDS["headlines"][decision.verdict], decision),
        detail=_detail(decision, results),
        changes=changes,
        cells=[_cell(cell, decision, results) for cell in decision.cells],
        findings={draft: _finding(results, draft) for draft in order},
        lossless=_lossless(results),
    )


def _fill(template: str, decision: Decision) -> str:
    setting, cells = decision.setting, decision.paying or decision.cells
    if setting is None:
        return template
    values = sorted(cell.speedup["value"] or 0.0 for cell in cells)
    ends = dict.fromkeys(number(value, 2) for value in (values[0], values[-1]))
    return template.format(
        draft=setting.draft,
        setting=_setting(setting),
        method=f"{tree_name(setting.tree)} and {setting.verifier}",
        speed=" to ".join(ends),
        where=_where(decision, 1),
        rest=" ".join(text.format(where) for sign, text in WORDS["rest"].items() if (where := _where(decision, sign))),
    )


def _setting(setting: Setting) -> str:
    return f"{setting.draft} with {tree_name(setting.tree)} and {setting.verifier}"


def _where(decision: Decision, sign: int | None) -> str:
    """The sets on which the setting has this sign, with the temperatures unless it is all of them."""
    by_set: dict[str, list[Cell]] = {}
    for cell in decision.cells:
        by_set.setdefault(cell.domain, []).append(cell)
    parts = []
    for name, cells in by_set.items():
        fit = [f"{cell.temperature:g}" for cell in cells if cell.sign == sign]
        if fit:
            parts.append(name if len(fit) == len(cells) else f"{name} at T = {' and '.join(fit)}")
    return ", ".join(parts[:-1]) + " and " + parts[-1] if len(parts) > 1 else "".join(parts)


def _detail(decision: Decision, results: Results) -> str:
    text, over = _fill(WORDS["details"][decision.verdict], decision), decision.over_base
    if over is not None and decision.verdict in ("ship", "ship_for"):
        words = WORDS["beats_base" if sign(over, 1.0) == 1 else "as_base"]
        text += " " + words.format(base=results.base, figure=_figure(over))
    return f"{text} {WORDS['busy']}" if any(cell.busy for cell in decision.cells) else text


def _cell(cell: Cell, decision: Decision, results: Results) -> tuple[str, str]:
    text = WORDS["cells"][cell.sign].format(speed=_figure(cell.speedup))
    if cell.fastest != decision.setting and (cell.fastest_speedup["value"] or 0) > 1:
        text += f" Fastest there: {_setting(cell.fastest)}, {_figure(cell.fastest_speedup)}."
    text += " The machine was busy." * cell.busy
    return f"{cell.domain} ({results.kind(cell.domain).upper()}), T = {cell.temperature:g}", text


def _headline(results: Results, draft: str, temperature: float, who: str) -> str:
    before, after = (percent(results.alpha(each, "id", temperature)["value"]) for each in (results.base, draft))
    text: str = WORDS["id_change"][sign(results.gain(draft, "id", temperature))].format(
        who=who, before=before, after=after
    )
    if not results.domains("ood"):
        return f"{text}."
    signs = {name: sign(results.gain(draft, name, temperature)) for name in results.domains("ood")}
    gained, lost = ([name for name, each in signs.items() if each == wanted] for wanted in (1, -1))
    if gained and lost:
        return text + str(WORDS["ood_mixed"]).format(gained=_listed(gained), lost=_listed(lost))
    change, kept = results.gain(draft, "ood", temperature), results.transfer(draft, "ood", temperature)
    if sign(change) == 1 and kept is not None and kept["value"] is not None:
        return text + str(WORDS["ood_kept"]).format(kept=percent(kept["value"]))
    return text + str(WORDS["ood_change"][sign(change)]).format(points=points(change), lost=points(change, bare=True))


def _listed(names: list[str]) -> str:
    return " and ".join(names) if len(names) <= 2 else f"{len(names)} domains"


def _plain_headline(results: Results, temperature: float) -> str:
    shares = {kind: percent(results.alpha(results.base, kind, temperature)["value"]) for kind in results.kinds}
    text = f"the target accepts {shares['id']} of what {results.base} drafts in distribution"
    return f"{text} and {shares['ood']} out of distribution." if "ood" in shares else f"{text}."


def _percent_interval(figure: Figure, digits: int = 1, *, sign: bool = False) -> str:
    text = interval(figure, digits, scale=100, sign=sign)
    return f"95 % interval {text}" if text else "no interval: too few prompts"


def _finding(results: Results, draft: str) -> list[tuple[str, str]]:
    """Label and sentence of every finding on one draft, its lowest temperature first."""
    points = []
    for temperature in sorted(results.temperatures):
        at = f", T\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}{temperature:g}"
        points += [(KIND_TITLES[kind] + at, _acceptance(results, draft, kind, temperature)) for kind in results.kinds]
        points += [(label + at, text) for label, text in _work(results, draft, temperature)]
    if draft == results.base:
        points.append(("Alignment", "Only one draft was measured, so there is no gain to report; add an aligned one."))
    training = results.document["models"][draft]["training"]
    if training is not None:
        text = WORDS["trained"].format(**{**training, "objective": _objective(training["objective"])})
        points.append(("Training", f"{text} {WORDS['trained_on_samples']}" if training["objective"] == "ce" else text))
    return points


def _acceptance(results: Results, draft: str, kind: SuiteKind, temperature: float) -> str:
    """The change in acceptance on all sets of a kind, by set, and as a share of the gain in distribution."""
    gain = results.gain(draft, kind, temperature)
    if gain is None:
        alpha = results.alpha(draft, kind, temperature)
        return f"{percent(alpha['value'])} of draft tokens are accepted ({_percent_interval(alpha)})."
    before, after = (percent(results.alpha(each, kind, temperature)["value"]) for each in (results.base, draft))
    detail = f"{points(gain)}, {_percent_interval(gain, sign=True)}"
    text: str = WORDS["change"][sign(gain)].format(before=before, after=after, detail=detail)
    # The parts of the pooled change, if there are few enough sets to name.
    if 2 <= len(names := results.domains(kind)) <= 4:
        gains = {name: results.gain(draft, name, temperature) for name in names}
        parts = [f"{name} {points(gain)}" + " (includes zero)" * (sign(gain) == 0) for name, gain in gains.items()]
        text += f" By set: {', '.join(parts)}."
    share = results.transfer(draft, kind, temperature)
    if share is None:
        return text
    if share["value"] is None:
        return f"{text} Transfer is undefined: {results.why_undefined(share)}."
    words = WORDS["transfer"][sign(share)]
    return f"{text} {words.format(share=percent(share['value']), spread=_percent_interval(share, 0))}"


def _objective(spec: str) -> str:
    """An objective in words; a sum, or a loss that is not one of draftsmith's, stays as it is."""
    name: str | None = WORDS["objectives"].get(spec.partition(":")[0])
    return spec if name is None or "+" in spec or "@" in spec else name


def _work(results: Results, draft: str, temperature: float) -> list[tuple[str, str]]:
    """Tokens per target call and speed in distribution, with the method that does best there."""
    taus = [results.tau(draft, "id", temperature, *method) for method in results.methods]

    def merit(tau: Row) -> tuple[bool, float, float]:
        timed = results.beside(tau, "speedup")
        # A lossy rule speaks for a draft only if nothing else was measured.
        return results.lossless(tau["verifier"]), (timed and timed["value"]) or 0.0, tau["value"] or 0.0

    best = max((tau for tau in taus if tau["value"]), key=merit, default=None)
    if best is None:
        return []
    method = (best["tree"], best["verifier"])
    text = f"One target call yields {_figure(best)} tokens in distribution with {tree_name(best['tree'] or '')}"
    if not results.lossless(best["verifier"]):
        text += f" and {best['verifier']} (lossless: false)"
    if draft != results.base:
        base = results.tau(results.base, "id", temperature, *method)
        text += f"; with {results.base}, {number(base['value'], 2)}"
        text += ", no measurable difference" * (sign(results.beside(best, "tau_gain")) == 0)
    findings = [("Tokens per call", f"{text}.")]
    timed, before = (results.speedup(each, "id", temperature, *method) for each in (draft, results.base))
    if timed is not None and timed["value"] is not None:
        text = f"{_figure(timed)} times the target alone in distribution{WORDS['faster'][sign(timed, 1.0)]}"
        if draft != results.base and before is not None and before["value"] is not None:
            text += f"; {results.base} reached {number(before['value'], 2)}"
        findings.append(("Speed", f"{text}."))
    return findings


def _figure(value: Figure) -> str:
    ends = "" if sign(value) is None else f" ({number(value['low'], 2)} to {number(value['high'], 2)})"
    return number(value["value"], 2) + ends


def _lossless(results: Results) -> str:
    """Whether outputs equal the target's own, over all lossless methods on every set."""
    lossy = sorted({rule for _, rule in results.methods if not results.lossless(rule)})
    parts = [WORDS["lossy"].format(names=", ".join(lossy))] if lossy else []
    sets = results.domains()
    checks, gaps = (
        [row for row in results.rows(each) if row["domain"] in sets and results.lossless(row["verifier"])]
        for each in ("identical", "largest_gap")
    )
    same, total = round(sum(row["value"] or 0.0 for row in checks)), sum(row["n"] for row in checks)
    if checks and same == total:
        who = "The others are lossless" if lossy else "Lossless"
        parts.append(WORDS["all_same"].format(who=who, same=same, total=total))
    elif checks:
        gap, dtype = max(row["value"] or 0.0 for row in gaps), results.document["models"]["target"]["dtype"]
        cause = WORDS["tie" if gap <= TIES.get(dtype, TIES["float32"]) else "no_tie"]
        parts.append(WORDS["some_same"].format(same=same, total=total, gap=gap, dtype=dtype, cause=cause))
    elif len(lossy) < len({rule for _, rule in results.methods}):
        parts.append(WORDS["not_compared"])
    return " ".join(parts)
