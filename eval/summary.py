"""The compact object that `eval --json` prints."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from eval.decision import Decision, decide
from eval.results import Results
from eval.schema import Interval


def _bounds(figure: Interval | None) -> list[float | None] | None:
    return [figure["low"], figure["high"]] if figure else None


def summary(results: Results) -> dict[str, Any]:
    """Files, the decision, alpha and gain per draft, domain and temperature with what was decoded, transfer."""
    document = results.document
    untyped: Any = document
    return {
        "results": str(results.directory / "results.json"),
        "report": str(results.directory / "report.html"),
        "base": results.base,
        "decision": _decided(decide(results)),
        "remarks": [remark["text"] for remark in document["remarks"]],
        "peak_memory_bytes": document["clock"]["peak_memory_bytes"],
        "cells": [
            {
                **{key: row[key] for key in ("draft", "domain", "kind", "temperature")},
                **_figures(row, "alpha", "gain"),
                "decoding": [_decoding(results, row, method) for method in document["methods"]],
            }
            for row in untyped["alpha"]
        ],
        "transfer": [
            {
                **{key: row[key] for key in ("draft", "domain", "temperature")},
                "transfer": row["value"],
                "transfer_ci": _bounds(row),
                "undefined": row["undefined"],
            }
            for row in untyped["transfer"]
        ],
    }


def _decided(decision: Decision) -> dict[str, Any]:
    return {
        "verdict": decision.verdict,
        "setting": asdict(decision.setting) if decision.setting else None,
        "cells": [
            {
                **{key: getattr(cell, key) for key in ("domain", "temperature", "sign")},
                **_figures({"speedup": cell.speedup}, "speedup"),
                "busy": cell.busy,
            }
            for cell in decision.cells
        ],
        **_figures({"over_base": decision.over_base}, "over_base"),
    }


def _figures(row: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """Each figure and, beside it, its interval; None for what there is none of."""
    found: dict[str, Any] = {}
    for key in keys:
        found |= {key: row[key] and row[key]["value"], f"{key}_ci": _bounds(row[key])}
    return found


def _decoding(results: Results, row: Any, method: dict[str, Any]) -> dict[str, Any]:
    at = (row["draft"], row["domain"], row["temperature"], method["tree"], method["verifier"])
    decoded, timed, predicted = results.decoding(*at), results.speed(*at), results.predicted(*at)
    return {
        **{key: method[key] for key in ("tree", "verifier", "lossless")},
        **_figures(decoded, "tau"),
        "tau_predicted": predicted and predicted["tau"]["value"],
        "tau_predicted_run": predicted and [predicted["run_low"], predicted["run_high"]],
        "identical_outputs": decoded["identical_outputs"],
        **_figures(timed or {"speedup": None}, "speedup"),
        "tokens_per_s": timed and timed["tokens_per_s"],
        "latency_s_per_token": timed and timed["latency_s_per_token"],
    }
