"""The compact object that `eval --json` prints."""

from dataclasses import asdict
from typing import Any

from eval.decision import Decision, decide
from eval.results import Results
from eval.schema import Difference, Estimate


def _bounds(figure: Estimate | Difference | None) -> list[float | None] | None:
    return [figure["low"], figure["high"]] if figure else None


def summary(results: Results) -> dict[str, Any]:
    """Files, the decision, alpha and gain per draft, domain and temperature with what was decoded, transfer."""
    document = results.document
    return {
        "results": str(results.directory / "results.json"),
        "report": str(results.directory / "report.html"),
        "base": results.base,
        "decision": _decided(decide(results)),
        "remarks": [remark["text"] for remark in document["remarks"]],
        "peak_memory_bytes": document["clock"]["peak_memory_bytes"],
        "cells": [
            {
                "draft": row["draft"],
                "domain": row["domain"],
                "kind": row["kind"],
                "temperature": row["temperature"],
                "alpha": row["alpha"]["value"],
                "alpha_ci": _bounds(row["alpha"]),
                "gain": row["gain"]["value"] if row["gain"] else None,
                "gain_ci": _bounds(row["gain"]),
                "decoding": [
                    _decoding(results, row["draft"], str(row["domain"]), row["temperature"], method)
                    for method in document["methods"]
                ],
            }
            for row in document["alpha"]
        ],
        "transfer": [
            {
                "draft": row["draft"],
                "domain": row["domain"],
                "temperature": row["temperature"],
                "transfer": row["value"],
                "transfer_ci": [row["low"], row["high"]],
                "undefined": row["undefined"],
            }
            for row in document["transfer"]
        ],
    }


def _decided(decision: Decision) -> dict[str, Any]:
    return {
        "verdict": decision.verdict,
        "setting": asdict(decision.setting) if decision.setting else None,
        "cells": [
            {
                "domain": cell.domain,
                "temperature": cell.temperature,
                "sign": cell.sign,
                "speedup": cell.speedup["value"],
                "speedup_ci": _bounds(cell.speedup),
                "busy": cell.busy,
            }
            for cell in decision.cells
        ],
        "over_base": decision.over_base["value"] if decision.over_base else None,
        "over_base_ci": _bounds(decision.over_base),
    }


def _decoding(results: Results, draft: str, domain: str, temperature: float, method: dict[str, Any]) -> dict[str, Any]:
    row = results.decoding(draft, domain, temperature, method["tree"], method["verifier"])
    timed = results.speed(draft, domain, temperature, method["tree"], method["verifier"])
    speedup = timed["speedup"] if timed else None
    predicted = results.predicted(draft, domain, temperature, method["tree"], method["verifier"])
    return {
        "tree": row["tree"],
        "verifier": row["verifier"],
        "lossless": row["lossless"],
        "tau": row["tau"]["value"],
        "tau_ci": _bounds(row["tau"]),
        "tau_predicted": predicted["tau"]["value"] if predicted else None,
        "tau_predicted_run": [predicted["run_low"], predicted["run_high"]] if predicted else None,
        "identical_outputs": row["identical_outputs"],
        "speedup": speedup["value"] if speedup else None,
        "speedup_ci": _bounds(speedup),
        "tokens_per_s": timed["tokens_per_s"] if timed else None,
        "latency_s_per_token": timed["latency_s_per_token"] if timed else None,
    }
