"""What a decode run made, and what it adds up to."""

import dataclasses
from typing import Any

from decode import DecodeStats
from draftsmith.cli.decode_options import DecodeConfig
from draftsmith.outputs import Output
from draftsmith.pair import Decoding
from draftsmith_core.generation_defaults import ResolvedSampling
from draftsmith_core.memory import peak_memory
from draftsmith_core.prompts import PromptSet
from draftsmith_core.sampling_options import Sampling


def summarise(
    config: DecodeConfig, decoding: Decoding, sampling: ResolvedSampling, prompts: PromptSet, outputs: list[Output]
) -> dict[str, Any]:
    """The summary of `--json`. Ratios over nothing are None."""
    method = decoding.method
    stats = sum((output.stats for output in outputs), DecodeStats())
    seconds = sum(output.prefill_s + output.decode_s for output in outputs)
    prefill_s = sum(output.prefill_s for output in outputs)
    peak, kind = peak_memory(decoding.decoder.target.device)
    recorded = decoding.decoder.every_steps
    summary: dict[str, Any] = {
        "rows": len(outputs),
        "prompts_read": prompts.rows,
        "prompts_done": len(prompts.prompts),
        "prompts_skipped": len(prompts.skipped),
        "prompts_failed": 0,
        "proposer": method.proposer if method else "none",
        "tree": method.tree if method else None,
        "verifier": method.verifier.name if method else None,
        "lossless": decoding.lossless,
        "sampling": dataclasses.asdict(sampling.sampling),
        "sampling_from_target": sampling.from_target,
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
        "recorded_steps": sum(steps.count for steps in recorded),
        "recording_s": decoding.decoder.compile_s,
        "latency_s_per_token": sum(o.waited_s for o in outputs) / stats.emitted if stats.emitted else None,
        "peak_memory_bytes": peak,
        "peak_memory_kind": kind,
    }
    if config.out is not None:
        summary["out"] = config.out
    else:
        summary["outputs"] = [output.row() for output in outputs]
    if prompts.skipped:
        summary["skipped"] = [dataclasses.asdict(skip) for skip in prompts.skipped]
    return summary


def in_words(summary: dict[str, Any], shown: bool) -> list[str]:
    """The summary for a person; with the texts, where they neither went to a file nor were `shown` as they came."""
    outputs = [] if shown else summary.get("outputs", [])
    lines = [
        line
        for row in outputs
        # Of several outputs each has a heading: their texts may end and begin anywhere.
        for line in ([f"--- {row['id']}, sample {row['sample_index']}"] if len(outputs) > 1 else []) + [row["text"]]
    ]
    if summary["prompts_skipped"]:
        first = summary["skipped"][0]
        lines.append(
            f"{summary['prompts_skipped']} of {summary['prompts_read']} prompts skipped "
            f"(row {first['row']}: {first['reason']})"
        )
    if summary["sampling_from_target"]:
        lines.append(f"sampling: {ResolvedSampling(Sampling(), summary['sampling_from_target']).note}")
    where = f"{summary['out']}: {summary['rows']} rows, " if "out" in summary else ""
    lines.append(
        f"{where}{summary['tokens']} tokens in {summary['target_calls']} target calls "
        f"({_number(summary['tau'], 2)} per call), {summary['accepted']} of them drafted, {summary['seconds']:.2f} s "
        f"({_number(summary['tokens_per_s'], 1)} tokens/s)"
    )
    method = "the target alone"
    if summary["tree"] is not None:
        by_depth = " ".join(_number(rate, 2) for rate in summary["accept_at"])
        method = f"{summary['proposer']}, {summary['tree']}, {summary['verifier']}; accepted by depth: {by_depth}"
    if summary["recorded_steps"]:
        lines.append(
            f"{summary['recorded_steps']} kinds of steps recorded as graphs in {summary['recording_s']:.1f} s, "
            f"which are not in the time above"
        )
    kind = {"cuda": "CUDA", "process_rss": "process"}[summary["peak_memory_kind"]]
    lines.append(f"{method}; peak memory {summary['peak_memory_bytes'] / 2**20:.0f} MiB ({kind})")
    return lines


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
