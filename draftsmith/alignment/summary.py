"""What a run of `align` bought, for `--json` and for a person."""

from dataclasses import asdict

from draftsmith.alignment.config import AlignConfig
from draftsmith.alignment.serving import Advice, advise, decode_command
from draftsmith.core.io import JsonObject
from draftsmith.eval.formats import with_interval
from draftsmith.eval.results import Results
from draftsmith.eval.schema import Row
from draftsmith.eval.summary import headline_and_table


def summary(config: AlignConfig, results: Results) -> JsonObject:
    """Return where everything is, and the figures of the best draft with their intervals."""
    best = best_draft(config, results)
    temperature = results.top_temperature
    tau = results.best_tau(best, "id", temperature)
    decoded = bool(results.methods_of(best))
    tree = tau["tree"] if decoded else None
    verifier = tau["verifier"] if decoded else None
    checkpoint = str(config.directory / best)
    how = ["--draft", checkpoint]
    if tree is not None:
        how += ["--tree", tree]
    shown: JsonObject = {
        "out": config.out,
        "config": str(config.file),
        "results": str(results.directory / "results.json"),
        "report": str(results.directory / "report.html"),
        "best": best,
        "objective": config.drafts()[best],
        "policy": config.policy,
        "checkpoint": checkpoint,
        "decode": decode_command(config, how, temperature),
        "serve": asdict(advise(config, results)),
        "temperature": temperature,
        "tree": tree,
    }
    for kind in results.kinds:
        figures = {
            "alpha": _interval(results.alpha(best, kind)),
            "gain": _interval(results.gain(best, kind)),
        }
        for name in ("tau", "tau_gain", "speedup"):
            row = results.figure(name, best, kind, None, tree, verifier) if decoded else None
            figures[name] = _interval(row)
        shown[kind] = figures
    return shown


def _interval(row: Row | None) -> dict[str, float | None] | None:
    return row and {"value": row["value"], "low": row["low"], "high": row["high"]}


def lines(shown: JsonObject, results: Results) -> list[str]:
    """Return a summary in words: the decision, the table of figures, what was bought, how to decode
    with it, and what to serve.
    """
    return [
        *headline_and_table(results),
        *bought(shown, results),
        *how_to_decode(shown),
        f"report: {(results.directory / 'report.html').resolve()}",
        *Advice(**shown["serve"]).lines(),
    ]


def how_to_decode(shown: JsonObject) -> list[str]:
    """Return where the best draft is, and the command that decodes with it and nothing else."""
    return [f"checkpoint: {shown['checkpoint']}", f"with this draft alone: {shown['decode']}"]


def bought(shown: JsonObject, results: Results) -> list[str]:
    """Return the alphas and gains of the best draft, in distribution and out of it."""
    best = shown["best"]
    temperature = shown["temperature"]
    head = f"{best} ({shown['objective']}) at temperature {temperature:g}"
    if shown["tree"] is not None:
        head += f", decoding with {shown['tree']}"
    found = [f"{head}:"]
    for kind in results.kinds:
        gain = shown[kind]["gain"]
        parts = [f"alpha {with_interval(shown[kind]['alpha'])}"]
        if gain:
            parts.append(f"{with_interval(gain, sign=True)} over the draft it started from")
        if gain and kind == "ood" and len(results.domains("ood")) > 1:
            worst = results.worst_set(best, temperature)
            if worst:
                parts.append(f"worst on {worst['domain']}, {with_interval(worst, sign=True)}")
        found.append(f"  {'in' if kind == 'id' else 'out of'} distribution: {'; '.join(parts)}")
    return found


def best_draft(config: AlignConfig, results: Results) -> str:
    """Return the draft of the policy with the highest alpha ID at the highest temperature."""
    return max(config.drafts(), key=lambda draft: results.alpha(draft, "id")["value"] or 0.0)
