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
    sets = results.domains()
    return {
        "results": str(results.directory / "results.json"),
        "report": str(results.directory / "report.html"),
        "base": results.base,
        "decision": {
            "verdict": decision.verdict,
            "setting": asdict(decision.setting) if decision.setting else None,
            "cells": [
                {
                    **{key: getattr(cell, key) for key in ("domain", "temperature", "sign")},
                    **_figure("speedup", cell.speedup),
                    "busy": cell.busy,
                }
                for cell in decision.cells
            ],
            **_figure("over_base", decision.over_base),
        },
        "remarks": [remark["text"] for remark in document["remarks"]],
        "peak_memory_bytes": document["clock"]["peak_memory_bytes"],
        "cells": [
            {
                **{key: row[key] for key in ("draft", "domain", "kind", "temperature")},
                **_figure("alpha", row),
                **_figure("gain", results.gain(row["draft"], row["domain"], row["temperature"])),
                "decoding": [_decoding(results, row, *method) for method in results.methods],
            }
            for row in results.rows("alpha")
            if row["domain"] in sets
        ],
        "transfer": [
            {
                **{key: row[key] for key in ("draft", "domain", "temperature")},
                **_figure("transfer", row),
                "undefined": results.why_undefined(row),
            }
            for row in results.rows("transfer")
        ],
    }


def _figure(name: str, row: Any) -> dict[str, Any]:
    """A figure and, beside it, its interval."""
    return {name: row and row["value"], f"{name}_ci": row and [row["low"], row["high"]]}


def _decoding(results: Results, row: Row, tree: str, verifier: str) -> dict[str, Any]:
    def figure(name: str) -> Row | None:
        return results.figure(name, row["draft"], row["domain"], row["temperature"], tree, verifier)

    def value(name: str) -> float | None:
        return (other := figure(name)) and other["value"]

    run, same = figure("tau_run"), figure("identical")
    identical = same and {"same": int(same["value"] or 0), "of": same["n"], "largest_gap": value("largest_gap")}
    return {
        "tree": tree,
        "verifier": verifier,
        "lossless": results.lossless(verifier),
        **_figure("tau", figure("tau")),
        "tau_predicted": value("tau_predicted"),
        "tau_predicted_run": run and [run["low"], run["high"]],
        "identical_outputs": identical,
        **_figure("speedup", figure("speedup")),
        "tokens_per_s": value("tokens_per_s"),
        "latency_s_per_token": value("latency_s_per_token"),
    }
