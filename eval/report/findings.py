"""The answer in words, made from the numbers: what a report says before it shows anything.

A change is called a change only when its interval leaves out zero. Sentences are templates, chosen by the sign of what
they are about: 1 and -1 where the interval lies on one side of zero, 0 where it does not, None where there is none.
"""

from dataclasses import dataclass

from eval.report.formats import KIND_TITLES, interval, number, percent, points, tree_name
from eval.results import KINDS, Results
from eval.schema import DecodingRow, Difference, Estimate, SpeedRow, SuiteKind


@dataclass(frozen=True)
class Finding:
    """What is to be said about one draft: a label and a sentence each."""

    draft: str
    points: list[tuple[str, str]]


@dataclass(frozen=True)
class Lead:
    """The head of the report: one sentence, the other temperatures, what to run, one finding per aligned draft."""

    headline: str
    others: list[str]
    decision: list[tuple[str, str]]
    findings: list[Finding]
    lossless: str


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
TRAINED = (
    "{objective} on {tokens:,} tokens of the target's answers, {epochs:.1f} passes; best on held-out prompts at step "
    "{best} of {steps}."
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


def sign(gain: Difference | None) -> int | None:
    """1 or -1 when the interval leaves out zero, 0 when it does not, None when there is no interval."""
    if gain is None or gain["value"] is None or gain["low"] is None or gain["high"] is None:
        return None
    return 1 if gain["low"] > 0 else -1 if gain["high"] < 0 else 0


def lead(results: Results) -> Lead:
    """Headline, what to run, one finding per aligned draft (or the base alone), and whether outputs are unchanged."""
    if not results.aligned:
        findings = [_plain_finding(results)]
        return Lead(_plain_headline(results), [], _decision(results), findings, _lossless(results))
    best = max(results.aligned, key=lambda draft: _value(results.gain(draft, "id")))
    others = [
        f"At temperature {temperature:g}, {_headline(results, best, temperature, best)}"
        for temperature in sorted(results.temperatures, reverse=True)[1:]
    ]
    findings = [_finding(results, draft) for draft in [best, *(d for d in results.aligned if d != best)]]
    count = len(results.aligned)
    who = "Alignment" if count == 1 else f"The best of {count} alignments, {best},"
    headline = _headline(results, best, results.top_temperature, who)
    return Lead(headline, others, _decision(results), findings, _lossless(results))


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


def _plain_headline(results: Results) -> str:
    shares = {kind: percent(results.alpha(results.base, kind)["value"]) for kind in KINDS if results.has(kind)}
    text = f"The target accepts {shares['id']} of what {results.base} drafts in distribution"
    return f"{text} and {shares['ood']} out of distribution." if "ood" in shares else f"{text}."


def _decision(results: Results) -> list[tuple[str, str]]:
    """Which draft and tree to run, by temperature and kind of prompts: the fastest lossless one, or none."""
    decided = []
    for temperature in sorted(results.temperatures, reverse=True):
        for kind in KINDS:
            rows = [row for row in results.document["speed"]["overall"] if row["speedup"] and row["lossless"]]
            rows = [row for row in rows if (row["kind"], row["temperature"]) == (kind, temperature)]
            if rows:
                decided.append((f"T = {temperature:g}, {kind.upper()}", _fastest(rows)))
    return decided


def _fastest(rows: list[SpeedRow]) -> str:
    best = max(rows, key=lambda row: (row["speedup"]["value"] if row["speedup"] else None) or 0.0)
    speedup = best["speedup"]
    assert speedup is not None
    what = f"{best['draft']} with {tree_name(best['tree'] or '')} and {best['verifier']}"
    if speedup["low"] is None:
        return f"Too few prompts to judge; {what} was fastest, {_figure(speedup)} times the target alone."
    if speedup["low"] > 1:
        return f"{what}: {_figure(speedup)} times the target alone."
    if speedup["high"] is not None and speedup["high"] < 1:
        return f"None: no draft pays. The fastest, {what}, is {_figure(speedup)} times the target alone."
    return f"None is measurably faster than the target alone. The fastest, {what}: {_figure(speedup)} times."


def _bounds(low: float | None, high: float | None, text: str) -> str:
    return "no interval: too few prompts" if low is None or high is None else f"95 % interval {text}"


def _finding(results: Results, draft: str) -> Finding:
    said = []
    for kind in KINDS:
        if results.has(kind):
            text = _change(results, draft, kind) + (_by_domain(results, draft) if kind == "ood" else "")
            said.append((KIND_TITLES[kind], text))
    said += _transfer(results, draft)
    return Finding(draft, said + _work(results, draft) + _training(results, draft))


def _change(results: Results, draft: str, kind: SuiteKind) -> str:
    gain = results.gain(draft, kind)
    assert gain is not None
    before, after = (percent(results.alpha(each, kind)["value"]) for each in (results.base, draft))
    spread = _bounds(gain["low"], gain["high"], interval(gain, 1, scale=100, sign=True))
    return CHANGE[sign(gain)].format(before=before, after=after, detail=f"{points(gain)}, {spread}")


def _by_domain(results: Results, draft: str) -> str:
    """What the pooled change out of distribution is made of, where there are few enough domains to name."""
    names = results.domains("ood")
    if not 2 <= len(names) <= 4:
        return ""
    gains = {name: results.gain(draft, name) for name in names}
    parts = [f"{name} {points(gain)}" + " (includes zero)" * (sign(gain) == 0) for name, gain in gains.items()]
    return f" By domain: {', '.join(parts)}."


def _transfer(results: Results, draft: str) -> list[tuple[str, str]]:
    row = results.transfer(draft)
    if row is None:
        return []
    share, bounds = percent(row["value"]), _bounds(row["low"], row["high"], interval(row, 0, scale=100))
    if row["value"] is None:
        text = f"Undefined: {row['undefined']}."
    elif row["high"] is not None and row["high"] < 0:
        text = f"None of it: the change out of distribution is {share} of the ID gain ({bounds})."
    elif row["low"] is not None and row["low"] <= 0:
        text = f"Cannot be told from none: {share} of the ID gain ({bounds})."
    else:
        text = f"{share} of the ID gain holds out of distribution ({bounds})."
    return [("Transfer", text)]


def _training(results: Results, draft: str) -> list[tuple[str, str]]:
    """What the draft was trained on and, for sequence-level KD, what it would need."""
    training = results.document["models"][draft]["training"]
    if training is None:
        return []
    text = TRAINED.format(
        objective=_objective(training["objective"]),
        tokens=training["response_tokens"],
        epochs=training["epochs"],
        best=training["best_step"],
        steps=training["steps"],
    )
    return [("Training", text + TRAINED_ON_SAMPLES * (training["objective"] == "ce"))]


def _objective(spec: str) -> str:
    """An objective in words; one that is a sum, or not one of draftsmith's, as it is."""
    if spec == "ce":
        return "Sequence-level KD (cross-entropy)"
    name = DIVERGENCES.get(spec.partition(":")[0])
    return spec if name is None or "+" in spec or "@" in spec else f"Token-level KD ({name})"


def _plain_finding(results: Results) -> Finding:
    said = []
    for kind in KINDS:
        if results.has(kind):
            alpha = results.alpha(results.base, kind)
            bounds = _bounds(alpha["low"], alpha["high"], interval(alpha, 1, scale=100))
            said.append((KIND_TITLES[kind], f"{percent(alpha['value'])} of draft tokens are accepted ({bounds})."))
    said.append(("Alignment", "Only one draft was measured, so there is no gain to report; add an aligned one."))
    return Finding(results.base, said + _work(results, results.base))


def _work(results: Results, draft: str) -> list[tuple[str, str]]:
    """Tokens per target call and speed in distribution, with the method that does best there."""
    methods = [(method["tree"], method["verifier"]) for method in results.document["methods"]]
    rows = [row for method in methods if (row := results.decoding(draft, "id", None, *method))["tau"]["value"]]
    if not rows:
        return []

    def speedup(of: str, row: DecodingRow) -> Estimate | None:
        timed = results.speed(of, "id", None, row["tree"], row["verifier"])
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
        base = results.decoding(results.base, "id", None, best["tree"], best["verifier"])
        text += f"; with {results.base}, {number(base['tau']['value'], 2)}"
        text += ", no measurable difference" * (sign(best["tau_gain"]) == 0)
    said = [("Tokens per call", f"{text}.")]
    timed, before = speedup(draft, best), speedup(results.base, best)
    if timed is not None and timed["value"] is not None:
        text = f"{_figure(timed)} times the target alone in distribution, on this machine, one prompt at a time"
        if timed["high"] is not None and timed["high"] < 1:
            text += ": slower than no draft at all"
        elif timed["low"] is not None and timed["low"] <= 1:
            text += ": no measurable speedup"
        if draft != results.base and before is not None and before["value"] is not None:
            text += f"; {results.base} reached {number(before['value'], 2)}"
        said.append(("Speed", f"{text}."))
    return said


def _figure(value: Estimate) -> str:
    text = number(value["value"], 2)
    if value["low"] is None or value["high"] is None:
        return text
    return f"{text} ({number(value['low'], 2)} to {number(value['high'], 2)})"


def _lossless(results: Results) -> str:
    document = results.document
    lossy = sorted({method["verifier"] for method in document["methods"] if not method["lossless"]})
    parts = []
    if lossy:
        parts.append(f"Outputs are not the target's own with {', '.join(lossy)}, lossy by design (lossless: false).")
    found = [row["identical_outputs"] for row in document["decoding"] if row["lossless"] and row["identical_outputs"]]
    same, total = sum(check["same"] for check in found), sum(check["of"] for check in found)
    if not found:
        if any(method["lossless"] for method in document["methods"]):
            parts.append(
                "The verifiers keep the target's output distribution; temperature 0 was not measured, so outputs were "
                "not compared token for token."
            )
    elif same == total:
        who = "The others are lossless" if lossy else "Lossless"
        parts.append(f"{who}: at temperature 0, {same} of {total} outputs equal the target's own, token for token.")
    else:
        gap, dtype = max(check["largest_gap"] or 0.0 for check in found), document["models"]["target"]["dtype"]
        cause = (
            "which is within the rounding of that type, a tie"
            if gap <= TIES.get(dtype, TIES["float32"])
            else "which is more than rounding explains: read the speeds with care"
        )
        parts.append(
            f"At temperature 0, {same} of {total} outputs equal the target's own, token for token. Where the others "
            f"part, the target's two logits differ by at most {gap:.2g} in {dtype}, {cause}."
        )
    return " ".join(parts)


# The largest logit gap that rounding may turn over, by dtype: some units in the last place of a logit of 32.
TIES = {"float32": 2e-3, "float16": 0.15, "bfloat16": 1.0}
