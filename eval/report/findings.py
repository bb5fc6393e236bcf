"""The answer in words, made from the numbers: what a report says before it shows anything.

A change is called a change only when its interval leaves out zero.
"""

from dataclasses import dataclass

from eval.report.figures import headline_temperature
from eval.report.row_figure import MINUS, number, percent, tree_name
from eval.schema import AlphaRow, DecodingRow, Difference, Estimate, ResultsDocument, TransferRow


@dataclass(frozen=True)
class Finding:
    """What is to be said about one aligned draft: a label and a sentence each."""

    draft: str
    points: list[tuple[str, str]]


@dataclass(frozen=True)
class Lead:
    """The head of the report."""

    headline: str
    findings: list[Finding]
    lossless: str


def lead(results: ResultsDocument) -> Lead:
    """Headline, one finding a draft that is not the base (or the base alone), and whether outputs are
    unchanged."""
    aligned = [draft for draft in results["drafts"] if draft != results["base"]]
    if not aligned:
        return Lead(_plain_headline(results), [_plain_finding(results)], _lossless(results))
    best = max(aligned, key=lambda draft: _gain_value(_alpha(results, draft, "id")))
    findings = [_finding(results, draft) for draft in [best, *(d for d in aligned if d != best)]]
    return Lead(_headline(results, best, len(aligned)), findings, _lossless(results))


def _alpha(results: ResultsDocument, draft: str, kind: str) -> AlphaRow | None:
    temperature = headline_temperature(results)
    for row in results["overall_alpha"]:
        if (row["draft"], row["kind"], row["temperature"]) == (draft, kind, temperature):
            return row
    return None


def _gain_value(row: AlphaRow | None) -> float:
    gain = row["gain"]["value"] if row and row["gain"] else None
    return gain if gain is not None else -1.0


def overall_transfer(results: ResultsDocument, draft: str) -> TransferRow | None:
    """transfer to all OOD suites together, at the headline temperature."""
    rows = [
        row
        for row in results["transfer"]
        if row["draft"] == draft and row["temperature"] == headline_temperature(results)
    ]
    return next((row for row in rows if row["domain"] is None), rows[0] if rows else None)


def sign(gain: Difference | None) -> int | None:
    """1 or -1 when the interval leaves out zero, 0 when it does not, None when there is no interval."""
    if gain is None or gain["value"] is None or gain["low"] is None or gain["high"] is None:
        return None
    return 1 if gain["low"] > 0 else -1 if gain["high"] < 0 else 0


def _headline(results: ResultsDocument, draft: str, count: int) -> str:
    base, home = _alpha(results, results["base"], "id"), _alpha(results, draft, "id")
    assert base is not None and home is not None
    before, after = percent(base["alpha"]["value"]), percent(home["alpha"]["value"])
    who = "Alignment" if count == 1 else f"The best of {count} alignments, {draft},"
    match sign(home["gain"]):
        case 1:
            text = f"{who} raised acceptance at home from {before} to {after}"
        case -1:
            text = f"{who} lowered acceptance at home from {before} to {after}"
        case 0:
            text = f"{who} made no measurable change at home ({before} before, {after} after)"
        case _:
            text = f"{who} took acceptance at home from {before} to {after}, on too few prompts to judge"
    away, share = _alpha(results, draft, "ood"), overall_transfer(results, draft)
    if away is None:
        return f"{text}."
    gained, lost = (_domains_with(results, draft, wanted) for wanted in (1, -1))
    if gained and lost:
        return f"{text}; away from home it gained on {_listed(gained)} and lost on {_listed(lost)}."
    match sign(away["gain"]):
        case 1 if share is not None and share["value"] is not None:
            return f"{text}; away from home {percent(share['value'])} of that gain survived."
        case 1:
            return f"{text}; away from home it gained {_points(away['gain'])}."
        case -1:
            return f"{text}; away from home it cost {_points(away['gain'], bare=True)}."
        case 0:
            return f"{text}; away from home nothing measurable changed."
        case _:
            return f"{text}; away from home there are too few prompts to judge."


def _away_rows(results: ResultsDocument, draft: str) -> list[AlphaRow]:
    """The draft's rows on each OOD suite at the headline temperature."""
    temperature = headline_temperature(results)
    return [
        row
        for row in results["alpha"]
        if (row["draft"], row["kind"], row["temperature"]) == (draft, "ood", temperature) and row["domain"] is not None
    ]


def _domains_with(results: ResultsDocument, draft: str, wanted: int) -> list[str]:
    return [str(row["domain"]) for row in _away_rows(results, draft) if sign(row["gain"]) == wanted]


def _listed(names: list[str]) -> str:
    return " and ".join(names) if len(names) <= 2 else f"{len(names)} domains"


def _plain_headline(results: ResultsDocument) -> str:
    home, away = (_alpha(results, results["base"], kind) for kind in ("id", "ood"))
    assert home is not None
    text = f"The target accepts {percent(home['alpha']['value'])} of what {results['base']} drafts at home"
    if away is None:
        return f"{text}."
    return f"{text} and {percent(away['alpha']['value'])} away from home."


def _points(gain: Difference | None, *, bare: bool = False) -> str:
    """A difference of shares in points, +4.2; `bare` drops the sign."""
    if gain is None or gain["value"] is None:
        return "–"
    value = abs(gain["value"]) if bare else gain["value"]
    return f"{value * 100:{'' if bare else '+'}.1f} points".replace("-", MINUS)


def _bounds(low: float | None, high: float | None, scale: float, digits: int, plus: str = "") -> str:
    if low is None or high is None:
        return "no interval: too few prompts"
    a, b = (f"{bound * scale:{plus}.{digits}f}".replace("-", MINUS) for bound in (low, high))
    return f"95 % interval {a} to {b}"


def _change(base: AlphaRow, new: AlphaRow) -> str:
    gain = new["gain"]
    assert gain is not None
    before, after = percent(base["alpha"]["value"]), percent(new["alpha"]["value"])
    detail = f"{_points(gain)}, {_bounds(gain['low'], gain['high'], 100, 1, '+')}"
    match sign(gain):
        case 1:
            return f"Acceptance rose from {before} to {after} ({detail})."
        case -1:
            return f"Acceptance fell from {before} to {after} ({detail})."
        case 0:
            return f"No measurable change: {before} before, {after} after ({detail}, which holds zero)."
        case _:
            return f"Acceptance went from {before} to {after} ({detail})."


def _finding(results: ResultsDocument, draft: str) -> Finding:
    points = []
    for kind, label in (("id", "At home"), ("ood", "Away")):
        base, new = _alpha(results, results["base"], kind), _alpha(results, draft, kind)
        if base is not None and new is not None:
            points.append((label, _change(base, new) + (_by_domain(results, draft) if kind == "ood" else "")))
    share = overall_transfer(results, draft)
    if share is not None:
        if share["value"] is None:
            text = f"Undefined: {share['undefined']}."
        else:
            bounds = _bounds(share["low"], share["high"], 100, 0)
            if share["high"] is not None and share["high"] < 0:
                change = f"the change away from home is {percent(share['value'])} of the gain ({bounds})"
                text = f"None of it: {change}."
            elif share["low"] is not None and share["low"] <= 0:
                text = f"Cannot be told from none: {percent(share['value'])} of the gain at home ({bounds})."
            else:
                text = f"{percent(share['value'])} of the gain at home holds away from home ({bounds})."
        points.append(("Transfer", text))
    return Finding(draft, points + _work(results, draft) + _training(results, draft))


def _by_domain(results: ResultsDocument, draft: str) -> str:
    """What the pooled change away from home is made of, where there are few enough domains to name."""
    rows = _away_rows(results, draft)
    if not 2 <= len(rows) <= 4:
        return ""
    parts = [
        f"{row['domain']} {_points(row['gain'])}" + (" (holds zero)" if sign(row["gain"]) == 0 else "") for row in rows
    ]
    return f" By domain: {', '.join(parts)}."


def _training(results: ResultsDocument, draft: str) -> list[tuple[str, str]]:
    """What the draft was trained on and, for sequence-level KD, what it would need."""
    training = results["models"][draft]["training"]
    if training is None:
        return []
    text = (
        f"{_objective(training['objective'])} on {training['response_tokens']:,} tokens "
        f"of the target's answers, {training['epochs']:.1f} passes; best on held-out prompts at step "
        f"{training['best_step']} of {training['steps']}."
    )
    if training["objective"] == "ce":
        text += (
            " A sampled token says less than the law it was drawn from: this objective usually needs more fresh "
            "samples than token-level KD for the same gain, and a held-out stop against overfitting."
        )
    return [("Training", text)]


_DIVERGENCES = {
    "fkl": "forward KL",
    "rkl": "reverse KL",
    "jsd": "Jensen-Shannon divergence",
    "tvd": "total variation",
    "tvd_pp": "TVD++",
    "lk_alpha": "-log alpha",
    "lk_hybrid": "KL, then total variation",
}


def _objective(spec: str) -> str:
    """An objective in words; one that is a sum, or was not made here, as it is."""
    if spec == "ce":
        return "Sequence-level KD (cross-entropy)"
    name = _DIVERGENCES.get(spec.partition(":")[0])
    return spec if name is None or "+" in spec or "@" in spec else f"Token-level KD ({name})"


def _plain_finding(results: ResultsDocument) -> Finding:
    points = []
    for kind, label in (("id", "At home"), ("ood", "Away")):
        row = _alpha(results, results["base"], kind)
        if row is not None:
            bounds = _bounds(row["alpha"]["low"], row["alpha"]["high"], 100, 1)
            points.append(
                (
                    label,
                    f"{percent(row['alpha']['value'])} of draft tokens are accepted ({bounds}).",
                )
            )
    points.append(
        (
            "Alignment",
            "Only one draft was measured, so there is no gain to report; add an aligned one.",
        )
    )
    return Finding(results["base"], points + _work(results, results["base"]))


def _work(results: ResultsDocument, draft: str) -> list[tuple[str, str]]:
    """Tokens per target call and speed, in distribution, with the way of decoding that does best there."""
    temperature = headline_temperature(results)
    rows = [
        row
        for row in results["overall_decoding"]
        if (row["draft"], row["kind"], row["temperature"]) == (draft, "id", temperature)
        and row["tau"]["value"] is not None
    ]
    if not rows:
        return []
    speeds = {
        (row["draft"], row["tree"], row["verifier"]): row["speedup"]
        for row in results["speed"]["overall"]
        if row["kind"] == "id" and row["temperature"] == temperature
    }

    def merit(row: DecodingRow) -> tuple[bool, float, float]:
        timed = speeds.get((draft, row["tree"], row["verifier"]))
        # A lossy rule speaks for a draft only where nothing else was measured.
        return (row["lossless"], timed["value"] or 0.0 if timed else 0.0, row["tau"]["value"] or 0.0)

    best = max(rows, key=merit)
    base_tau = next(
        row["tau"]
        for row in results["overall_decoding"]
        if (row["draft"], row["kind"], row["temperature"], row["tree"], row["verifier"])
        == (results["base"], "id", temperature, best["tree"], best["verifier"])
    )
    gain = best["tau_gain"]
    text = f"One call of the target yields {_figure(best['tau'])} tokens at home with {tree_name(best['tree'])}"
    if not best["lossless"]:
        text += f" and {best['verifier']} (lossless: false)"
    if draft != results["base"]:
        text += f"; with {results['base']}, {number(base_tau['value'], 2)}"
        if sign(gain) == 0:
            text += ", no measurable difference"
    points = [("Tokens per call", f"{text}.")]
    timed = speeds.get((draft, best["tree"], best["verifier"]))
    if timed is not None and timed["value"] is not None:
        before = speeds.get((results["base"], best["tree"], best["verifier"]))
        points.append(("Speed", _speed(timed, before if draft != results["base"] else None, results["base"])))
    return points


def _figure(value: Estimate) -> str:
    text = number(value["value"], 2)
    if value["low"] is None or value["high"] is None:
        return text
    return f"{text} ({number(value['low'], 2)} to {number(value['high'], 2)})"


def _speed(now: Estimate, before: Estimate | None, base: str) -> str:
    text = f"{_figure(now)} times the target alone at home, on this machine, one prompt at a time"
    if now["high"] is not None and now["high"] < 1:
        text += ": slower than no draft at all"
    elif now["low"] is not None and now["low"] <= 1:
        text += ": no measurable speedup"
    if before is not None and before["value"] is not None:
        text += f"; {base} reached {number(before['value'], 2)}"
    return f"{text}."


def _lossless(results: ResultsDocument) -> str:
    lossy = sorted({way["verifier"] for way in results["methods"] if not way["lossless"]})
    parts = []
    if lossy:
        parts.append(
            f"Outputs are not the target's own with {', '.join(lossy)}, which is lossy by design (lossless: false)."
        )
    checks = [row["identical_outputs"] for row in results["decoding"] if row["lossless"]]
    found = [check for check in checks if check is not None]
    if not found:
        if len(lossy) < len({way["verifier"] for way in results["methods"]}):
            parts.append(
                "The verifiers keep the target's output law; temperature 0 was not measured, so outputs "
                "were not "
                "compared token for token."
            )
        return " ".join(parts)
    same, total = sum(check["same"] for check in found), sum(check["of"] for check in found)
    if same == total:
        who = "The others are lossless" if lossy else "Lossless"
        parts.append(f"{who}: at temperature 0, {same} of {total} outputs equal the target's own, token for token.")
        return " ".join(parts)
    gap = max(check["largest_gap"] or 0.0 for check in found)
    dtype = results["models"]["target"]["dtype"]
    cause = (
        "which is within the rounding of that type, a tie"
        if gap <= _tie(dtype)
        else "which is more than rounding explains: read the speeds with care"
    )
    parts.append(
        f"At temperature 0, {same} of {total} outputs equal the target's own, token for token. Where "
        f"the others part, "
        f"the target's two logits differ by at most {gap:.2g} in {dtype}, {cause}."
    )
    return " ".join(parts)


def _tie(dtype: str) -> float:
    """The largest logit gap that rounding may turn over: some units in the last place of a logit of 32."""
    return {"float32": 2e-3, "float16": 0.15, "bfloat16": 1.0}.get(dtype, 2e-3)
