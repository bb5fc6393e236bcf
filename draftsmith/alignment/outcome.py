"""What an alignment bought: a table, a few lines, and the object of `--json`."""

import shlex
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from draftsmith.alignment.config import AlignConfig
from eval.results import Results


def _table(results: Results) -> str:
    """alpha of every draft on every prompt set at the highest temperature, each with its 95 % interval."""
    table = Table(title=f"alpha at temperature {results.top_temperature:g}, 95 % interval")
    for heading in ("draft", *(f"{name} ({results.kind(name).upper()})" for name in results.domains())):
        table.add_column(heading)
    for draft in results.drafts:
        table.add_row(draft, *(figure(results.alpha(draft, domain)) for domain in results.domains()))
    console = Console()
    with console.capture() as printed:
        console.print(table)
    return printed.get().rstrip()


def summary(config: AlignConfig, results: Results) -> dict[str, Any]:
    """The object of `--json`: where everything is, and the figures of the best draft with their intervals."""
    best = best_draft(config, results)
    tree = _best_tree(results, best)
    shown: dict[str, Any] = {
        "out": config.out,
        "config": str(Path(config.out) / "align.yaml"),
        "results": str(results.directory / "results.json"),
        "report": str(results.directory / "report.html"),
        "best": best,
        "objective": config.offered()[best],
        "policy": config.policy,
        "checkpoint": str(Path(config.out) / best),
        "decode": shlex.join(_decode(config, results, best)),
        "temperature": results.top_temperature,
        "tree": tree,
    }
    for kind in results.kinds:
        shown[kind] = {
            "alpha": _interval(results.alpha(best, kind)),
            "gain": _interval(results.gain(best, kind)),
            "tau": _interval(results.tau(best, kind, tree=tree)),
            "tau_gain": _interval(results.figure("tau_gain", best, kind, tree=tree)),
            "speedup": _interval(results.speedup(best, kind, tree=tree)),
        }
    return shown


def lines(config: AlignConfig, results: Results) -> list[str]:
    """The table of alpha, what was bought, where the checkpoint is, and which command decodes with it."""
    best = best_draft(config, results)
    tree = _best_tree(results, best)
    bought = [f"{best} ({config.offered()[best]}) at temperature {results.top_temperature:g}, decoding with {tree}:"]
    for kind in results.kinds:
        gain, speedup = results.gain(best, kind), results.speedup(best, kind, tree=tree)
        parts = [f"alpha {figure(results.alpha(best, kind))}"]
        if gain is not None:
            parts.append(f"{figure(gain, signed=True)} over the draft it started from")
        parts.append(f"{figure(results.tau(best, kind, tree=tree), 2)} tokens per target call")
        if speedup is not None:
            parts.append(f"{figure(speedup, 2)} times the target alone")
        bought.append(f"  {'in' if kind == 'id' else 'out of'} distribution: {'; '.join(parts)}")
    return [
        _table(results),
        *bought,
        f"checkpoint: {Path(config.out) / best}",
        f"decode with it: {shlex.join(_decode(config, results, best))}",
        f"report: {(results.directory / 'report.html').resolve()}",
    ]


def best_draft(config: AlignConfig, results: Results) -> str:
    """The offered draft with the highest alpha in distribution at the highest temperature."""
    return max(config.offered(), key=lambda draft: results.alpha(draft, "id")["value"] or 0.0)


def _best_tree(results: Results, draft: str) -> str:
    """The fastest tree in distribution; without timings, the one with the most tokens per target call."""

    def merit(tree: str) -> float:
        row = results.speedup(draft, "id", tree=tree) or results.tau(draft, "id", tree=tree)
        return row["value"] or 0.0

    return max((tree for tree, _ in results.methods), key=merit)


def _decode(config: AlignConfig, results: Results, draft: str) -> list[str]:
    words = ["draftsmith", "decode", "--target", config.target, "--draft", str(Path(config.out) / draft)]
    words += ["--tree", _best_tree(results, draft), "--temperature", f"{results.top_temperature:g}"]
    words += ["--trust_remote_code"] if config.trust_remote_code else []
    return [*words, "--prompt", "TEXT"]


def _interval(row: Any) -> dict[str, float | None] | None:
    return None if row is None else {key: row[key] for key in ("value", "low", "high")}


def figure(row: Any, digits: int = 3, signed: bool = False) -> str:
    """A figure and its interval; "-" if it is undefined."""
    if row["value"] is None:
        return "-"
    form = f"{'+' if signed else ''}.{digits}f"
    if row["low"] is None or row["high"] is None:
        return format(row["value"], form)
    return f"{row['value']:{form}} [{row['low']:{form}}, {row['high']:{form}}]"
