"""What an alignment bought: the object of `--json`, and lines for a person."""

import shlex
from pathlib import Path
from typing import Any

from draftsmith.alignment.config import AlignConfig
from eval.report.findings import worst_set
from eval.report.formats import with_interval
from eval.results import Results
from eval.summary import best_method, headline_and_table


def summary(config: AlignConfig, results: Results) -> dict[str, Any]:
    """Where everything is, and the figures of the best draft with their intervals."""
    best = best_draft(config, results)
    method = best_method(results, best)
    checkpoint = str(Path(config.out) / best)
    decode = ["draftsmith", "decode", "--target", config.target, "--draft", checkpoint]
    decode += ["--tree", method[0], "--temperature", f"{results.top_temperature:g}"]
    decode += ["--trust_remote_code"] if config.trust_remote_code else []
    decode += ["--revision", config.revision] if config.revision else []
    shown: dict[str, Any] = {
        "out": config.out,
        "config": str(Path(config.out) / "align.yaml"),
        "results": str(results.directory / "results.json"),
        "report": str(results.directory / "report.html"),
        "best": best,
        "objective": config.offered()[best],
        "policy": config.policy,
        "checkpoint": checkpoint,
        "decode": shlex.join([*decode, "--prompt", "TEXT"]),
        "temperature": results.top_temperature,
        "tree": method[0],
    }
    for kind in results.kinds:
        rows = {"alpha": results.alpha(best, kind), "gain": results.gain(best, kind)}
        rows |= {name: results.figure(name, best, kind, None, *method) for name in ("tau", "tau_gain", "speedup")}
        shown[kind] = {name: row and {key: row[key] for key in ("value", "low", "high")} for name, row in rows.items()}
    return shown


def lines(config: AlignConfig, results: Results) -> list[str]:
    """The decision, the table of figures, what was bought, where the checkpoint is, and how to decode with it."""
    shown = summary(config, results)
    where = f"at temperature {shown['temperature']:g}, decoding with {shown['tree']}"
    bought = [f"{shown['best']} ({shown['objective']}) {where}:"]
    for kind in results.kinds:
        figures = shown[kind]
        parts = [f"alpha {with_interval(figures['alpha'])}"]
        if figures["gain"]:
            parts.append(f"{with_interval(figures['gain'], sign=True)} over the draft it started from")
        if figures["gain"] and kind == "ood" and len(results.domains("ood")) > 1:
            worst = worst_set(results, shown["best"], results.top_temperature)
            parts += [f"worst on {worst['domain']}, {with_interval(worst, sign=True)}"] if worst else []
        bought.append(f"  {'in' if kind == 'id' else 'out of'} distribution: {'; '.join(parts)}")
    return [
        *headline_and_table(results),
        *bought,
        f"checkpoint: {shown['checkpoint']}",
        f"decode with it: {shown['decode']}",
        f"report: {Path(shown['report']).resolve()}",
    ]


def best_draft(config: AlignConfig, results: Results) -> str:
    """The offered draft with the highest alpha in distribution at the highest temperature."""
    return max(config.offered(), key=lambda draft: results.alpha(draft, "id")["value"] or 0.0)
