"""What a decode run made, and what it adds up to."""

import dataclasses
import resource
import sys
from dataclasses import dataclass
from typing import Any

import torch

from decode import DecodeStats
from draftsmith.cli.decode_setup import DecodeConfig, Setup
from draftsmith_core.prompts import PromptSet


@dataclass(frozen=True)
class Output:
    """One output: its row, its counts, and the clock in seconds.

    `prefill_s` is its share of the batch's prefill, as `row["stats"]["seconds"]` is of the whole; `waited_s` is what
    passed from the end of prefill to its last token.
    """

    row: dict[str, Any]
    counts: DecodeStats
    prefill_s: float
    waited_s: float

    def to_json(self) -> dict[str, Any]:
        """As an interrupted run keeps it."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(kept: dict[str, Any]) -> "Output":
        """What `to_json` gave."""
        counts: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in kept["counts"].items()
        }
        return Output(kept["row"], DecodeStats(**counts), kept["prefill_s"], kept["waited_s"])


def summarise(config: DecodeConfig, setup: Setup, prompts: PromptSet, outputs: list[Output]) -> dict[str, Any]:
    """The summary of `--json`. Ratios over nothing are None."""
    stats = sum((output.counts for output in outputs), DecodeStats())
    seconds = sum(output.row["stats"]["seconds"] for output in outputs)
    prefill_s = sum(output.prefill_s for output in outputs)
    peak, kind = _peak_memory(setup.target.device)
    summary: dict[str, Any] = {
        "rows": len(outputs),
        "prompts_read": prompts.rows,
        "prompts_done": len(prompts.prompts),
        "prompts_skipped": len(prompts.skipped),
        "prompts_failed": 0,
        "proposer": setup.choice.proposer if setup.choice else "none",
        "tree": setup.choice.spec if setup.choice else None,
        "verifier": setup.choice.verifier if setup.choice else None,
        "lossless": setup.lossless,
        "tokens": stats.emitted,
        "target_calls": stats.target_calls,
        "proposed": stats.proposed,
        "accepted": stats.accepted,
        "tau": stats.tau,
        "accept_at": list(stats.accept_at),
        "alpha_mcsd": stats.alpha_mcsd,
        "seconds": seconds,
        "prefill_s": prefill_s,
        "decode_s": seconds - prefill_s,
        "tokens_per_s": stats.emitted / seconds if seconds else None,
        "latency_s_per_token": sum(o.waited_s for o in outputs) / stats.emitted if stats.emitted else None,
        "peak_memory_bytes": peak,
        "peak_memory_kind": kind,
    }
    if config.out is not None:
        summary["out"] = config.out
    else:
        summary["outputs"] = [output.row for output in outputs]
    if prompts.skipped:
        summary["skipped"] = [dataclasses.asdict(skip) for skip in prompts.skipped]
    return summary


def in_words(summary: dict[str, Any], shown: bool) -> list[str]:
    """The summary for a person; with the texts, where they neither went to a file nor were `shown` as they came."""
    lines = [] if shown else [row["text"] for row in summary.get("outputs", [])]
    if summary["prompts_skipped"]:
        first = summary["skipped"][0]
        lines.append(
            f"{summary['prompts_skipped']} of {summary['prompts_read']} prompts skipped "
            f"(row {first['row']}: {first['reason']})"
        )
    where = f"{summary['out']}: {summary['rows']} rows, " if "out" in summary else ""
    lines.append(
        f"{where}{summary['tokens']} tokens in {summary['target_calls']} target calls "
        f"({_number(summary['tau'], 2)} a call), {summary['accepted']} of them drafted, {summary['seconds']:.2f} s "
        f"({_number(summary['tokens_per_s'], 1)} tokens/s)"
    )
    way = "the target alone"
    if summary["tree"] is not None:
        by_depth = " ".join(_number(rate, 2) for rate in summary["accept_at"])
        way = f"{summary['proposer']}, {summary['tree']}, {summary['verifier']}; accepted by depth: {by_depth}"
    kind = {"cuda": "CUDA", "process_rss": "process"}[summary["peak_memory_kind"]]
    lines.append(f"{way}; peak memory {summary['peak_memory_bytes'] / 2**20:.0f} MiB ({kind})")
    return lines


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _peak_memory(device: torch.device) -> tuple[int, str]:
    """The most bytes that were held at once, and where: by tensors on a CUDA device, else by this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), "cuda"
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "process_rss"
