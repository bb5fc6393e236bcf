"""What `eval` prints: the decision and a table, and the compact object of `--json`."""

from dataclasses import asdict
from typing import Any

from eval.decision import decide
from eval.report.findings import lead
from eval.report.formats import named_set, number, text_table, tree_name, with_interval
from eval.report.tables import best_tau
from eval.results_table import ResultsTable
from eval.schema import Row


def headline_and_table(results: ResultsTable) -> list[str]:
    """The decision, and alpha, tokens per call and speed by draft and set at the highest
    temperature.
    """
    rows = []
    for alpha in results.rows("alpha"):
        if alpha["domain"] in results.domains() and alpha["temperature"] == results.top_temperature:
            tau = best_tau(results, alpha["draft"], alpha["domain"], alpha["temperature"])
            speedup, busy = (
                results.beside(tau, "speedup"),
                results.busy(alpha["domain"], alpha["temperature"]),
            )
            speed = (
                f"~{number(speedup['value'], 1)}" if speedup and busy else with_interval(speedup, 2)
            )
            row = {"draft": alpha["draft"], "set": named_set(alpha), "alpha": with_interval(alpha)}
            row |= {"tokens per call": with_interval(tau if tau["figure"] == "tau" else None, 2)}
            row |= {"predicted": with_interval(results.beside(tau, "tau_predicted"), 2)}
            row |= {"speed": speed, "tree": tree_name(tau["tree"] or "")}
            rows.append(row)
    head = lead(results)
    again = [f"time again on a quiet machine: {head.command}"] if head.command else []
    return [
        head.headline,
        *again,
        *text_table(f"temperature {results.top_temperature:g}, 95 % intervals", rows),
    ]


def summary(results: ResultsTable) -> dict[str, Any]:
    """Files, the decision, and the main figures with their intervals per draft, set and
    temperature.
    """
    decision, cells, transfers = decide(results), [], []
    decided = [
        {key: getattr(cell, key) for key in ("domain", "temperature", "sign", "busy")}
        | _figure(cell.speedup)
        for cell in decision.cells
    ]
    for row in results.rows("alpha"):
        if row["domain"] in results.domains():
            decoding = [_decoding(results, row, *method) for method in results.methods]
            gain = _figure(results.beside(row, "gain"), "gain")
            cells.append(
                {**_place(row), "kind": row["kind"], **_figure(row), **gain, "decoding": decoding}
            )
    for row in results.rows("transfer"):
        transfers.append({**_place(row), **_figure(row), "undefined": results.why_undefined(row)})
    return {
        "results": str(results.directory / "results.json"),
        "report": str(results.directory / "report.html"),
        "base": results.base,
        "decision": {
            "verdict": decision.verdict,
            "setting": decision.setting and asdict(decision.setting),
            "cells": decided,
            **_figure(decision.over_base, "over_base"),
        },
        "remarks": [remark["text"] for remark in results.document["remarks"]],
        "peak_memory_bytes": results.document["clock"]["peak_memory_bytes"],
        "cells": cells,
        "transfer": transfers,
    }


def _place(row: Row) -> dict[str, Any]:
    return {"draft": row["draft"], "domain": row["domain"], "temperature": row["temperature"]}


def _figure(row: Any, name: str = "") -> dict[str, Any]:
    name = name or row["figure"]
    return {name: row and row["value"], f"{name}_ci": row and [row["low"], row["high"]]}


def _decoding(results: ResultsTable, row: Row, tree: str, verifier: str) -> dict[str, Any]:
    def figure(name: str) -> Any:
        return results.figure(name, row["draft"], row["domain"], row["temperature"], tree, verifier)

    values = {
        name: (other := figure(name)) and other["value"]
        for name in ("tokens_per_s", "latency_s_per_token", "largest_gap")
    }
    run, same, gap = figure("tau_run"), figure("identical"), values.pop("largest_gap")
    return {
        "tree": tree,
        "verifier": verifier,
        "lossless": results.lossless(verifier),
        **_figure(figure("tau"), "tau"),
        **_figure(figure("tau_predicted"), "tau_predicted"),
        **_figure(figure("speedup"), "speedup"),
        "tau_predicted_run": run and [run["low"], run["high"]],
        "identical_outputs": same
        and {"same": int(same["value"] or 0), "of": same["n"], "largest_gap": gap},
        **values,
    }
