"""What `eval` prints: the decision and a table, and the compact object of `--json`."""

from dataclasses import asdict
from typing import Any

from draftsmith.core.records import train_longer
from draftsmith.eval.decision import Setting, decide
from draftsmith.eval.formats import (
    named_set,
    number,
    text_table,
    tree_name,
    with_interval,
    with_seeds,
)
from draftsmith.eval.report.findings import lead
from draftsmith.eval.results_table import ResultsTable
from draftsmith.eval.schema import Estimate, Row


def headline_and_table(results: ResultsTable) -> list[str]:
    """The decision, what to do next, and `rows_by_set` as a table."""
    head = lead(results)
    todo = " ".join([head.todo, head.command]).strip()
    longer = []
    for name in head.rises:
        if command := train_longer(results.models[name]["name"]):
            longer.append(f"train {name} longer: {command}")
    more = filter(None, [head.rising, *longer, head.seeds])
    return [head.headline, todo, *more, *table(results, head.temperature)]


def table(results: ResultsTable, decided: float) -> list[str]:
    """`rows_by_set` as a table for the highest temperature, and one for the decided temperature if
    that is another.
    """
    lines = []
    for temperature in sorted({results.top_temperature, decided}):
        title = f"temperature {temperature:g}, 95 % intervals"
        lines += text_table(title, rows_by_set(results, temperature))
    return lines


def rows_by_set(results: ResultsTable, temperature: float) -> list[dict[str, str]]:
    """Alpha, tokens per call and speed by draft and set at a temperature: of the decided draft with
    its decided tree, of others with the fastest there.
    """
    rows = []
    decided = decide(results).setting
    for alpha in results.by_set("alpha"):
        if alpha["temperature"] == temperature and alpha["draft"] in results.shown:
            tau = _tau(results, alpha, decided)
            speedup = results.beside(tau, "speedup")
            speed = with_interval(speedup, 2)
            if speedup and results.busy(alpha["domain"], temperature):
                speed = f"~{number(speedup['value'], 1)}"
            row = {
                "draft": alpha["draft"],
                "set": named_set(alpha),
                "alpha": with_seeds(alpha, results.spread(alpha)),
                "tokens per call": with_interval(tau if tau["figure"] == "tau" else None, 2),
                "predicted": with_interval(results.beside(tau, "tau_predicted"), 2),
                "speed": speed,
                "tree": tree_name(tau["tree"] or ""),
            }
            if not results.methods:
                row = {name: row[name] for name in ("draft", "set", "alpha")}
            rows.append(row)
    return rows


def _tau(results: ResultsTable, alpha: Row, decided: Setting | None) -> Row:
    draft, domain, temperature = alpha["draft"], alpha["domain"], alpha["temperature"]
    if decided is None or decided.draft != draft:
        return results.best_tau(draft, domain, temperature)
    return results.tau(draft, domain, temperature, decided.tree, decided.verifier)


def summary(results: ResultsTable) -> dict[str, Any]:
    """Files, the decision, and the main figures with their intervals per draft, set and
    temperature.
    """
    decision = decide(results)
    decided = []
    for cell in decision.cells:
        where = {"domain": cell.domain, "temperature": cell.temperature}
        signs = {"sign": cell.sign, "busy": cell.busy}
        decided.append({**where, **signs, **_figure("speedup", cell.speedup)})
    cells = []
    for row in results.by_set("alpha"):
        alphas = _figure("alpha", row) | _figure("gain", results.beside(row, "gain"))
        taus = results.taus(row["draft"], row["domain"], row["temperature"])
        decoding = [_decoding(results, tau) for tau in taus]
        cells.append({**_about(row), "kind": row["kind"], **alphas, "decoding": decoding})
    transfers = []
    for row in results.rows("transfer"):
        undefined = {"undefined": results.why_undefined(row)}
        transfers.append({**_about(row), **_figure("transfer", row), **undefined})
    return {
        "results": str(results.directory / "results.json"),
        "report": str(results.directory / "report.html"),
        "base": results.base,
        "decision": {
            "verdict": decision.verdict,
            "setting": asdict(decision.setting) if decision.setting else None,
            "cells": decided,
            **_figure("over_base", decision.over_base),
        },
        "remarks": [remark["text"] for remark in results.document["remarks"]],
        "peak_memory_bytes": results.document["clock"]["peak_memory_bytes"],
        "cells": cells,
        "transfer": transfers,
    }


def _about(row: Row) -> dict[str, object]:
    return {"draft": row["draft"], "domain": row["domain"], "temperature": row["temperature"]}


def _figure(name: str, row: Row | Estimate | None) -> dict[str, object]:
    if row is None:
        return {name: None, f"{name}_ci": None}
    return {name: row["value"], f"{name}_ci": [row["low"], row["high"]]}


def _decoding(results: ResultsTable, tau: Row) -> dict[str, object]:
    def value(name: str) -> float | None:
        found = results.beside(tau, name)
        return found["value"] if found else None

    identical: dict[str, object] | None = None
    if same := results.beside(tau, "identical"):
        gap = value("largest_gap")
        identical = {"same": int(same["value"] or 0), "of": same["n"], "largest_gap": gap}
    run = results.beside(tau, "tau_run")
    return {
        "tree": tau["tree"],
        "verifier": tau["verifier"],
        "lossless": results.lossless(tau["verifier"]),
        **_figure("tau", tau),
        **_figure("tau_predicted", results.beside(tau, "tau_predicted")),
        **_figure("speedup", results.beside(tau, "speedup")),
        "tau_predicted_run": [run["low"], run["high"]] if run else None,
        "identical_outputs": identical,
        "tokens_per_s": value("tokens_per_s"),
        "latency_s_per_token": value("latency_s_per_token"),
    }
