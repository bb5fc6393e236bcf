"""The compact object that `eval --json` prints."""

from dataclasses import asdict
from typing import Any

from eval.decision import decide
from eval.results import Results
from eval.schema import Row


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
