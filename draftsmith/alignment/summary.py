"""What a run of `align` bought, for `--json` and for a person."""

import json
import shlex
from pathlib import Path
from typing import Any

from decode import parse_tree
from draftsmith.alignment.config import AlignConfig
from draftsmith.alignment.stage_configs import LOOKUP
from eval.decision import decide
from eval.report.findings import worst_set
from eval.report.formats import with_interval
from eval.report.tables import best_tau
from eval.results import Results
from eval.schema import Row
from eval.summary import headline_and_table


def summary(config: AlignConfig, results: Results) -> dict[str, Any]:
    """Return where everything is, and the figures of the best draft with their intervals."""
    best = best_draft(config, results)
    tau = best_tau(results, best, "id", results.top_temperature)
    tree = tau["tree"] or ""
    verifier = tau["verifier"] or ""
    checkpoint = str(Path(config.out) / best)
    shown: dict[str, Any] = {
        "out": config.out,
        "config": str(Path(config.out) / "align.yaml"),
        "results": str(results.directory / "results.json"),
        "report": str(results.directory / "report.html"),
        "best": best,
        "objective": config.drafts()[best],
        "policy": config.policy,
        "checkpoint": checkpoint,
        "decode": _decode_command(config, checkpoint, tree, results.top_temperature),
        "temperature": results.top_temperature,
        "tree": tree,
    }
    for kind in results.kinds:
        figures = {
            "alpha": _interval(results.alpha(best, kind)),
            "gain": _interval(results.gain(best, kind)),
        }
        for name in ("tau", "tau_gain", "speedup"):
            figures[name] = _interval(results.figure(name, best, kind, None, tree, verifier))
        shown[kind] = figures
    return shown


def _interval(row: Row | None) -> dict[str, float | None] | None:
    return row and {"value": row["value"], "low": row["low"], "high": row["high"]}


def _decode_command(config: AlignConfig, checkpoint: str, tree: str, temperature: float) -> str:
    words = ["draftsmith", "decode", "--target", config.target, "--draft", checkpoint]
    words += ["--tree", tree, "--temperature", f"{temperature:g}"]
    if config.trust_remote_code:
        words.append("--trust_remote_code")
    if config.revision:
        words += ["--revision", config.revision]
    return shlex.join([*words, "--prompt", "TEXT"])


def lines(config: AlignConfig, results: Results) -> list[str]:
    """Return the decision, the table of figures, what was bought, and how to decode with it."""
    shown = summary(config, results)
    best = shown["best"]
    temperature = shown["temperature"]
    found = [
        *headline_and_table(results),
        f"{best} ({shown['objective']}) at temperature {temperature:g}, decoding with "
        f"{shown['tree']}:",
    ]
    for kind in results.kinds:
        gain = shown[kind]["gain"]
        parts = [f"alpha {with_interval(shown[kind]['alpha'])}"]
        if gain:
            parts.append(f"{with_interval(gain, sign=True)} over the draft it started from")
        if gain and kind == "ood" and len(results.domains("ood")) > 1:
            worst = worst_set(results, best, temperature)
            if worst:
                parts.append(f"worst on {worst['domain']}, {with_interval(worst, sign=True)}")
        found.append(f"  {'in' if kind == 'id' else 'out of'} distribution: {'; '.join(parts)}")
    return [
        *found,
        *_lookup_elsewhere(config, results),
        f"checkpoint: {shown['checkpoint']}",
        f"decode with it: {shown['decode']}",
        f"report: {Path(shown['report']).resolve()}",
    ]


def _lookup_elsewhere(config: AlignConfig, results: Results) -> list[str]:
    """Return how other engines serve prompt lookup, if the decision is to serve it."""
    decision = decide(results)
    setting = decision.setting
    if setting is None or setting.draft != LOOKUP or decision.verdict not in ("ship", "ship_for"):
        return []
    tokens = parse_tree(setting.tree).depth
    ngram = {"method": "ngram", "num_speculative_tokens": tokens, "prompt_lookup_max": 3}
    serve = ["vllm", "serve", config.target, "--speculative-config", json.dumps(ngram)]
    return [
        f"prompt lookup in vLLM: {shlex.join(serve)}",
        f"prompt lookup in transformers: model.generate(..., prompt_lookup_num_tokens={tokens})",
    ]


def best_draft(config: AlignConfig, results: Results) -> str:
    """Return the draft of the policy with the highest alpha ID at the highest temperature."""
    return max(config.drafts(), key=lambda draft: results.alpha(draft, "id")["value"] or 0.0)
