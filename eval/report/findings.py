"""The answer in words, made from the numbers: what a report says before it shows anything.

A change is called a change only when its interval leaves out zero. Sentences are templates, chosen by the sign of what
they are about: 1 and -1 where the interval lies on one side of zero, 0 where it does not, None where there is none.
"""

from dataclasses import dataclass

from eval.decision import Cell, Decision, Setting, Verdict, decide
from eval.report.formats import KIND_TITLES, interval, number, percent, points, tree_name
from eval.results import KINDS, Results
from eval.schema import DecodingRow, Difference, Estimate, Interval, SuiteKind


@dataclass(frozen=True)
class Finding:
    """What is to be said about one draft: a label and a sentence each."""

    draft: str
    points: list[tuple[str, str]]


@dataclass(frozen=True)
class Lead:
    """The head of the report: the decision and why, cell by cell; what alignment changed; findings by draft."""

    headline: str
    detail: str
    cells: list[tuple[str, str]]
    changes: list[str]
    findings: list[Finding]
    lossless: str


HEADLINES: dict[Verdict, str] = {
    "ship": "Ship {draft}: {speed} times the target alone",
    "ship_for": "Ship {draft} for {where}: {speed} times the target alone",
    "none_beats_none": "Do not ship: no draft beats no draft",
    "not_shown": "Do not ship: no draft is measurably faster than the target alone",
    "too_few": "Not decided: too few prompts were timed",
    "not_timed": "Not decided: nothing was timed",
}
DETAILS: dict[Verdict, str] = {
    "ship": "Decode with {method}: it pays on every set at every temperature measured.",
    "ship_for": "Decode with {method} there. {rest}",
    "none_beats_none": "All are slower than the target alone; the fastest, {setting}, runs at {speed} times its speed.",
    "not_shown": "The fastest on the whole is {setting}, at {speed} times the speed of the target alone. {rest}",
    "too_few": "{setting} was the fastest, at {speed} times the target alone. Time more prompts: --speed_prompts.",
    "not_timed": "Whether a draft pays is a matter of time: measure again with --speed_prompts 8 or more.",
}
# What is said of the cells that do not pay, by their sign.
REST: dict[int | None, str] = {
    -1: "It costs time on {}: decode without a draft.",
    0: "No speedup is shown on {}: time more prompts, or decode without a draft.",
    None: "Too few prompts were timed on {}.",
}
CELLS: dict[int | None, str] = {
    1: "Pays: {speed} times the target alone.",
    0: "Not shown to pay: {speed} times the target alone.",
    -1: "Costs time: {speed} times the target alone.",
    None: "Too few prompts to judge: {speed} times the target alone.",
}
BEATS_BASE = " All sets together, it is {figure} times as fast as {base} with its own fastest method."
AS_BASE = " All sets together, it is not measurably faster than {base} with its own fastest method: {figure} times."
BUSY = " The machine was busy while the clock ran: time again on a quiet one before you rely on this."
ID_HEADLINE = {
    1: "{who} raised acceptance in distribution from {before} to {after}",
    -1: "{who} lowered acceptance in distribution from {before} to {after}",
    0: "{who} made no measurable change in distribution ({before} before, {after} after)",
    None: "{who} took acceptance in distribution from {before} to {after}, on too few prompts to judge",
}
OOD_HEADLINE = {
    1: "; out of distribution it gained {points}.",
    -1: "; out of distribution it cost {lost}.",
    0: "; out of distribution nothing measurable changed.",
    None: "; out of distribution there are too few prompts to judge.",
}
OOD_KEPT = "; out of distribution {kept} of that gain survived."
OOD_MIXED = "; out of distribution it gained on {gained} and lost on {lost}."
CHANGE = {
    1: "Acceptance rose from {before} to {after} ({detail}).",
    -1: "Acceptance fell from {before} to {after} ({detail}).",
    0: "No measurable change: {before} before, {after} after ({detail}, which includes zero).",
    None: "Acceptance went from {before} to {after} ({detail}).",
}
TRANSFER = {
    1: " Transfer: {share} of the ID gain holds ({spread}).",
    -1: " Transfer: none, {share} of the ID gain ({spread}).",
    0: " Transfer cannot be told from none: {share} of the ID gain ({spread}).",
    None: " Transfer: {share} of the ID gain holds ({spread}).",
}
FASTER = {1: "", -1: ": slower than no draft at all", 0: ": no measurable speedup", None: ""}
TRAINED = (
    "{objective} on {response_tokens:,} tokens of the target's answers, {epochs:.1f} passes; best on held-out prompts "
    "at step {best_step} of {steps}."
)
TRAINED_ON_SAMPLES = (
    " A sampled token says less than the distribution it was drawn from: this objective usually needs more fresh "
    "samples than token-level KD for the same gain, and a held-out stop against overfitting."
)
DIVERGENCES = {
    "fkl": "forward KL",
    "rkl": "reverse KL",
    "jsd": "Jensen-Shannon divergence",
    "tvd": "total variation",
    "tvd_pp": "TVD++",
    "lk_alpha": "-log alpha",
    "lk_hybrid": "KL, then total variation",
}


def sign(figure: Interval | None, null: float = 0.0) -> int | None:
    """1 or -1 when the interval leaves out `null`, 0 when it does not, None when there is no interval."""
    if figure is None or figure["low"] is None or figure["high"] is None:
        return None
    return (figure["low"] > null) - (figure["high"] < null)


def lead(results: Results) -> Lead:
    """The decision, what every setting cell does, what alignment changed at each temperature, findings by draft."""
    decision = decide(results)
    temperatures = sorted(results.temperatures)
    # A gain in distribution that is lost elsewhere is no gain, so drafts are ranked by the sum of both.
    kinds = [kind for kind in KINDS if results.has(kind)]
    order = sorted(results.aligned, key=lambda draft: -sum(_value(results.gain(draft, kind)) for kind in kinds)) or [
        results.base
    ]
    if results.aligned:
        which = f"the best of {len(order)} alignments" + " in and out of distribution together" * (len(kinds) > 1)
        who = "alignment" if len(order) == 1 else f"{order[0]}, {which},"
        changes = [f"At T = {t:g}, {_headline(results, order[0], t, who)}" for t in temperatures]
    else:
        changes = [f"At T = {t:g}, {_plain_headline(results, t)}" for t in temperatures]
    return Lead(
        headline=_said(HEADLINES[decision.verdict], decision),
        detail=_detail(decision, results),
        changes=changes,
        cells=[_cell(cell, decision, results) for cell in decision.cells],
        findings=[_finding(results, draft) for draft in order],
        lossless=_lossless(results),
    )


def _said(template: str, decision: Decision) -> str:
    setting, cells = decision.setting, decision.paying or decision.cells
    if setting is None:
        return template
    values = sorted(cell.speedup["value"] or 0.0 for cell in cells)
    ends = [number(value, 2) for value in (values[0], values[-1])]
    return template.format(
        draft=setting.draft,
        setting=_setting(setting),
        method=f"{tree_name(setting.tree)} and {setting.verifier}",
        speed=ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}",
        where=_where(decision, 1),
        rest=" ".join(text.format(where) for sign, text in REST.items() if (where := _where(decision, sign))),
    )


def _setting(setting: Setting) -> str:
    return f"{setting.draft} with {tree_name(setting.tree)} and {setting.verifier}"


def _where(decision: Decision, sign: int | None) -> str:
    """The sets on which the setting has this sign, with the temperatures where it is not all of them."""
    names: dict[str, list[Cell]] = {}
    for cell in decision.cells:
        names.setdefault(cell.domain, []).append(cell)
    said = []
    for name, cells in names.items():
        fit = [f"{cell.temperature:g}" for cell in cells if cell.sign == sign]
        if fit:
            said.append(name if len(fit) == len(cells) else f"{name} at T = {' and '.join(fit)}")
    return ", ".join(said[:-1]) + " and " + said[-1] if len(said) > 1 else "".join(said)


def _detail(decision: Decision, results: Results) -> str:
    text = _said(DETAILS[decision.verdict], decision)
    over = decision.over_base
    if over is not None and decision.verdict in ("ship", "ship_for"):
        text += (BEATS_BASE if sign(over, 1.0) == 1 else AS_BASE).format(base=results.base, figure=_figure(over))
    if any(cell.busy for cell in decision.cells):
        text += BUSY
    return text


def _cell(cell: Cell, decision: Decision, results: Results) -> tuple[str, str]:
    text = CELLS[cell.sign].format(speed=_figure(cell.speedup))
    if cell.fastest != decision.setting and (cell.fastest_speedup["value"] or 0) > 1:
        text += f" Fastest there: {_setting(cell.fastest)}, {_figure(cell.fastest_speedup)}."
    if cell.busy:
        text += " The machine was busy."
    return f"{cell.domain} ({results.kind(cell.domain).upper()}), T = {cell.temperature:g}", text


def _value(gain: Difference | None) -> float:
    return gain["value"] if gain is not None and gain["value"] is not None else -1.0


def _headline(results: Results, draft: str, temperature: float, who: str) -> str:
    before, after = (percent(results.alpha(each, "id", temperature)["value"]) for each in (results.base, draft))
    text = ID_HEADLINE[sign(results.gain(draft, "id", temperature))].format(who=who, before=before, after=after)
    if not results.has("ood"):
        return f"{text}."
    gained, lost = (_domains_with(results, draft, temperature, wanted) for wanted in (1, -1))
    if gained and lost:
        return text + OOD_MIXED.format(gained=_listed(gained), lost=_listed(lost))
    change, kept = results.gain(draft, "ood", temperature), results.transfer(draft, "ood", temperature)
    if sign(change) == 1 and kept is not None and kept["value"] is not None:
        return text + OOD_KEPT.format(kept=percent(kept["value"]))
    return text + OOD_HEADLINE[sign(change)].format(points=points(change), lost=points(change, bare=True))


def _domains_with(results: Results, draft: str, temperature: float, wanted: int) -> list[str]:
    return [name for name in results.domains("ood") if sign(results.gain(draft, name, temperature)) == wanted]


def _listed(names: list[str]) -> str:
    return " and ".join(names) if len(names) <= 2 else f"{len(names)} domains"


def _plain_headline(results: Results, temperature: float) -> str:
    kinds = [kind for kind in KINDS if results.has(kind)]
    shares = {kind: percent(results.alpha(results.base, kind, temperature)["value"]) for kind in kinds}
    text = f"the target accepts {shares['id']} of what {results.base} drafts in distribution"
    return f"{text} and {shares['ood']} out of distribution." if "ood" in shares else f"{text}."


def _percent_interval(value: Interval, digits: int = 1, *, sign: bool = False) -> str:
    text = interval(value, digits, scale=100, sign=sign)
    return f"95 % interval {text}" if text else "no interval: too few prompts"


def _finding(results: Results, draft: str) -> Finding:
    """What was found of one draft, its lowest temperature first: `decode` decodes at 0 unless told otherwise."""
    said = []
    for temperature in sorted(results.temperatures):
        at = f", T\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}{temperature:g}"
        for kind in KINDS:
            if results.has(kind):
                said.append((KIND_TITLES[kind] + at, _acceptance(results, draft, kind, temperature)))
        said += [(label + at, text) for label, text in _work(results, draft, temperature)]
    if draft == results.base:
        said.append(("Alignment", "Only one draft was measured, so there is no gain to report; add an aligned one."))
    return Finding(draft, said + _training(results, draft))


def _acceptance(results: Results, draft: str, kind: SuiteKind, temperature: float) -> str:
    """What alignment changed on all sets of a kind, by set and as a share of the gain in distribution."""
    if draft == results.base:
        alpha = results.alpha(draft, kind, temperature)
        return f"{percent(alpha['value'])} of draft tokens are accepted ({_percent_interval(alpha)})."
    gain = results.gain(draft, kind, temperature)
    assert gain is not None
    before, after = (percent(results.alpha(each, kind, temperature)["value"]) for each in (results.base, draft))
    detail = f"{points(gain)}, {_percent_interval(gain, sign=True)}"
    text = CHANGE[sign(gain)].format(before=before, after=after, detail=detail)
    names = results.domains(kind)
    # What the pooled change is made of, where there are few enough sets to name.
    if 2 <= len(names) <= 4:
        gains = {name: results.gain(draft, name, temperature) for name in names}
        parts = [f"{name} {points(gain)}" + " (includes zero)" * (sign(gain) == 0) for name, gain in gains.items()]
        text += f" By set: {', '.join(parts)}."
    return text + (_transfer(results, draft, temperature) if kind == "ood" else "")


def _transfer(results: Results, draft: str, temperature: float) -> str:
    row = results.transfer(draft, "ood", temperature)
    if row is None:
        return ""
    if row["value"] is None:
        return f" Transfer is undefined: {row['undefined']}."
    return TRANSFER[sign(row)].format(share=percent(row["value"]), spread=_percent_interval(row, 0))


def _training(results: Results, draft: str) -> list[tuple[str, str]]:
    """What the draft was trained on and, for sequence-level KD, what it would need."""
    training = results.document["models"][draft]["training"]
    if training is None:
        return []
    text = TRAINED.format(**{**training, "objective": _objective(training["objective"])})
    return [("Training", text + TRAINED_ON_SAMPLES * (training["objective"] == "ce"))]


def _objective(spec: str) -> str:
    """An objective in words; one that is a sum, or not one of draftsmith's, as it is."""
    if spec == "ce":
        return "Sequence-level KD (cross-entropy)"
    name = DIVERGENCES.get(spec.partition(":")[0])
    return spec if name is None or "+" in spec or "@" in spec else f"Token-level KD ({name})"


def _work(results: Results, draft: str, temperature: float) -> list[tuple[str, str]]:
    """Tokens per target call and speed in distribution, with the method that does best there."""
    methods = [(method["tree"], method["verifier"]) for method in results.document["methods"]]
    found = [results.decoding(draft, "id", temperature, *method) for method in methods]
    rows = [row for row in found if row["tau"]["value"]]
    if not rows:
        return []

    def speedup(of: str, row: DecodingRow) -> Estimate | None:
        timed = results.speed(of, "id", temperature, row["tree"], row["verifier"])
        return timed["speedup"] if timed else None

    def merit(row: DecodingRow) -> tuple[bool, float, float]:
        timed = speedup(draft, row)
        # A lossy rule speaks for a draft only where nothing else was measured.
        return row["lossless"], (timed["value"] or 0.0) if timed else 0.0, row["tau"]["value"] or 0.0

    best = max(rows, key=merit)
    text = f"One target call yields {_figure(best['tau'])} tokens in distribution with {tree_name(best['tree'])}"
    if not best["lossless"]:
        text += f" and {best['verifier']} (lossless: false)"
    if draft != results.base:
        base = results.decoding(results.base, "id", temperature, best["tree"], best["verifier"])
        text += f"; with {results.base}, {number(base['tau']['value'], 2)}"
        text += ", no measurable difference" * (sign(best["tau_gain"]) == 0)
    said = [("Tokens per call", f"{text}.")]
    timed, before = speedup(draft, best), speedup(results.base, best)
    if timed is not None and timed["value"] is not None:
        text = f"{_figure(timed)} times the target alone in distribution{FASTER[sign(timed, 1.0)]}"
        if draft != results.base and before is not None and before["value"] is not None:
            text += f"; {results.base} reached {number(before['value'], 2)}"
        said.append(("Speed", f"{text}."))
    return said


def _figure(value: Estimate) -> str:
    ends = "" if sign(value) is None else f" ({number(value['low'], 2)} to {number(value['high'], 2)})"
    return number(value["value"], 2) + ends


LOSSY = "Outputs are not the target's own with {names}, lossy by design (lossless: false)."
NOT_COMPARED = (
    "The verifiers keep the target's output distribution; temperature 0 was not measured, so outputs were not compared "
    "token for token."
)
ALL_SAME = "{who}: at temperature 0, {same} of {total} outputs equal the target's own, token for token."
SOME_SAME = (
    "At temperature 0, {same} of {total} outputs equal the target's own, token for token. Where the others part, the "
    "target's two logits differ by at most {gap:.2g} in {dtype}, which is {cause}."
)
# The largest logit gap that rounding may turn over, by dtype: some units in the last place of a logit of 32.
TIES = {"float32": 2e-3, "float16": 0.15, "bfloat16": 1.0}


def _lossless(results: Results) -> str:
    document = results.document
    lossy = sorted({method["verifier"] for method in document["methods"] if not method["lossless"]})
    parts = [LOSSY.format(names=", ".join(lossy))] if lossy else []
    found = [row["identical_outputs"] for row in document["decoding"] if row["lossless"] and row["identical_outputs"]]
    same, total = sum(check["same"] for check in found), sum(check["of"] for check in found)
    if found and same == total:
        who = "The others are lossless" if lossy else "Lossless"
        parts.append(ALL_SAME.format(who=who, same=same, total=total))
    elif found:
        gap, dtype = max(check["largest_gap"] or 0.0 for check in found), document["models"]["target"]["dtype"]
        tie = gap <= TIES.get(dtype, TIES["float32"])
        cause = (
            "within the rounding of that type, a tie"
            if tie
            else "more than rounding explains: read the speeds with care"
        )
        parts.append(SOME_SAME.format(same=same, total=total, gap=gap, dtype=dtype, cause=cause))
    elif any(method["lossless"] for method in document["methods"]):
        parts.append(NOT_COMPARED)
    return " ".join(parts)
