"""What `eval` prints: the decision and a table, and the compact object of `--json`."""

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from eval.decision import decide
from eval.report.findings import lead
from eval.report.formats import with_interval
from eval.results import Results
from eval.schema import Row


def best_method(results: Results, draft: str) -> tuple[str, str]:
    """The fastest tree and verifier of a draft, in distribution; untimed, those with the most tokens per call."""

    def merit(method: tuple[str, str]) -> float:
        names: Any = (draft, results.kinds[0], None, *method)
        return (results.speedup(*names) or results.tau(*names))["value"] or 0.0

    return max(results.methods, key=merit)


def headline_and_table(results: Results) -> list[str]:
    """The decision, and alpha, tokens per call and speed by draft and set at the highest temperature."""
    table = Table(title=f"temperature {results.top_temperature:g}, 95 % intervals")
    for heading in ("draft", "set", "alpha", "tokens per call", "speed", "tree"):
        table.add_column(heading)
    for draft in results.drafts:
        method = best_method(results, draft)
        for domain in results.domains():
            names: Any = (draft, domain, None, *method)
            figures = (results.alpha(draft, domain), 3), (results.tau(*names), 2), (results.speedup(*names), 2)
            cells = [with_interval(figure, digits) for figure, digits in figures]
            table.add_row(draft, f"{domain} ({results.kind(domain).upper()})", *cells, method[0])
    console = Console()
    console.width = console.width if console.is_terminal else 120
    with console.capture() as printed:
        console.print(table)
    return [lead(results).headline, printed.get().rstrip()]


def summary(results: Results) -> dict[str, Any]:
    """Files, the decision, and the main figures with their intervals per draft, set and temperature."""
    document, decision = results.document, decide(results)
    decided = [
        {"domain": cell.domain, "temperature": cell.temperature, "sign": cell.sign, "busy": cell.busy}
        | _figure("speedup", cell.speedup)
        for cell in decision.cells
    ]
    cells = [
        _place(row, "kind")
        | _figure("alpha", row)
        | _figure("gain", results.beside(row, "gain"))
        | {"decoding": [_decoding(results, row, *method) for method in results.methods]}
        for row in results.rows("alpha")
        if row["domain"] in results.domains()
    ]
    setting = decision.setting and asdict(decision.setting)
    return {
        "results": str(results.directory / "results.json"),
        "report": str(results.directory / "report.html"),
        "base": results.base,
        "decision": {"verdict": decision.verdict, "setting": setting, "cells": decided}
        | _figure("over_base", decision.over_base),
        "remarks": [remark["text"] for remark in document["remarks"]],
        "peak_memory_bytes": document["clock"]["peak_memory_bytes"],
        "cells": cells,
        "transfer": [
            _place(row) | _figure("transfer", row) | {"undefined": results.why_undefined(row)}
            for row in results.rows("transfer")
        ],
    }


def _place(row: Any, *more: str) -> dict[str, Any]:
    return {key: row[key] for key in ("draft", "domain", *more, "temperature")}


def _figure(name: str, row: Any) -> dict[str, Any]:
    """A figure and, beside it, its interval."""
    return {name: row and row["value"], f"{name}_ci": row and [row["low"], row["high"]]}


def _decoding(results: Results, row: Row, tree: str, verifier: str) -> dict[str, Any]:
    names = ("tau", "tau_predicted", "tau_run", "identical", "largest_gap", "speedup", "tokens_per_s")
    figures: dict[str, Any] = {
        name: results.figure(name, row["draft"], row["domain"], row["temperature"], tree, verifier)
        for name in (*names, "latency_s_per_token")
    }
    values = {name: figure and figure["value"] for name, figure in figures.items()}
    run, same = figures["tau_run"], figures["identical"]
    return {
        "tree": tree,
        "verifier": verifier,
        "lossless": results.lossless(verifier),
        **_figure("tau", figures["tau"]),
        "tau_predicted": values["tau_predicted"],
        "tau_predicted_run": run and [run["low"], run["high"]],
        "identical_outputs": same
        and {"same": int(same["value"] or 0), "of": same["n"], "largest_gap": values["largest_gap"]},
        **_figure("speedup", figures["speedup"]),
        "tokens_per_s": values["tokens_per_s"],
        "latency_s_per_token": values["latency_s_per_token"],
    }
