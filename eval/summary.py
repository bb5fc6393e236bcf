"""The compact object that `eval --json` prints."""

from pathlib import Path
from typing import Any

from eval.schema import Results


def summary(document: Results, out: Path) -> dict[str, Any]:
    """The compact object that `--json` prints."""
    tau: dict[tuple[str, str | None, float], list[dict[str, Any]]] = {}
    for row in document["decoding"]:
        tau.setdefault((row["draft"], row["domain"], row["temperature"]), []).append(
            {
                "tree": row["tree"],
                "verifier": row["verifier"],
                "lossless": row["lossless"],
                "tau": row["tau"]["value"],
                "tau_ci": [row["tau"]["low"], row["tau"]["high"]],
                "identical_outputs": row["identical_outputs"],
            }
        )
    clocked = {
        (row["draft"], row["domain"], row["temperature"], row["tree"], row["verifier"]): row
        for row in document["speed"]["domains"]
    }
    for (draft, domain, temperature), ways in tau.items():
        for way in ways:
            clock = clocked.get((draft, domain, temperature, way["tree"], way["verifier"]))
            timed = clock["speedup"] if clock else None
            way["speedup"] = timed["value"] if timed else None
            way["speedup_ci"] = [timed["low"], timed["high"]] if timed else None
            way["tokens_per_s"] = clock["tokens_per_s"] if clock else None
            way["latency_s_per_token"] = clock["latency_s_per_token"] if clock else None
    return {
        "results": str(out / "results.json"),
        "report": str(out / "report.html"),
        "base": document["base"],
        "peak_memory_bytes": document["clock"]["peak_memory_bytes"],
        "cells": [
            {
                "draft": cell["draft"],
                "domain": cell["domain"],
                "kind": cell["kind"],
                "temperature": cell["temperature"],
                "alpha": cell["alpha"]["value"],
                "alpha_ci": [cell["alpha"]["low"], cell["alpha"]["high"]],
                "gain": cell["gain"]["value"] if cell["gain"] else None,
                "gain_ci": [cell["gain"]["low"], cell["gain"]["high"]] if cell["gain"] else None,
                "decoding": tau[cell["draft"], cell["domain"], cell["temperature"]],
            }
            for cell in document["alpha"]
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
