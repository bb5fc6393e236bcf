"""`draftsmith decode` behind its options: load, decode, write or print."""

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from itertools import chain, dropwhile, product
from pathlib import Path
from typing import TextIO

from pydantic import TypeAdapter
from rich.console import Console
from rich.text import Text

from draftsmith.cli.command_result import CommandResult
from draftsmith.config import DecodeConfig
from draftsmith.core.devices import peak_memory
from draftsmith.core.errors import InputError, shown
from draftsmith.core.hub import quiet
from draftsmith.core.io import JsonObject, hash_json, jsonl, write_text_atomic
from draftsmith.core.models import eos_ids
from draftsmith.core.options import identity
from draftsmith.core.progress import progress
from draftsmith.core.prompts import Prompt, PromptSet, content_id, read_prompts, room_for_prompts
from draftsmith.core.ranks import say
from draftsmith.core.runs import Run
from draftsmith.core.settings import (
    Sampling,
    loading,
    resolve_sampling,
    sampling_options,
    tokenizing,
)
from draftsmith.core.template_date import fix_date
from draftsmith.core.tokenization import load_tokenizer, tokenizer_digest
from draftsmith.decode import DecodeStats
from draftsmith.decode.native import missing_kernel
from draftsmith.decode.propose.choosing import ChoosingProposer, relative_cost
from draftsmith.decode.propose.sources import choose_proposer
from draftsmith.drafts.draft_sources import (
    check_sources,
    copies_first,
    is_copying,
    is_joined,
    model_of,
)
from draftsmith.drafts.load import draft_kind, other_targets
from draftsmith.outputs import Output, Piece
from draftsmith.pair import Decoding, Job, Pair, load_pair

DRAFT_STYLE = "bold green"
# Makes the batches of outputs, from a request on.
Batches = Callable[[int], Iterator[list[Output]]]


@quiet()
def decode(config: DecodeConfig) -> CommandResult:
    """Decode; stream the text of a single output to the terminal."""
    pair, decoding = load(config)
    if config.fast and (line := missing_kernel(pair.target.device)):
        _say(f"warning: {line}")
    if not decoding.lossless:
        name = decoding.decoder.verifier.name
        _say(
            f"warning: verifier {name} is lossy; above temperature 0 outputs do not follow the "
            "target's distribution"
        )
    prompts = _prompts(config, pair)
    for line in prompts.skipped_lines():
        _say(line)
    resolved = resolve_sampling(config.target, pair.target, sampling_options(config))
    drawn = resolved.sampling.record()
    requests = list(product(prompts.prompts, range(config.num_samples)))
    job = Job(decoding.decoder, requests, resolved.sampling, config)
    job.check()

    def batches(first: int = 0) -> Iterator[list[Output]]:
        with progress("decode", len(requests), first) as advance:
            for batch in pair.decode(dataclasses.replace(job, requests=requests[first:])):
                yield batch
                advance(len(batch), "")

    streamed = config.prompt is not None and config.out is None and config.num_samples == 1
    if config.out is not None:
        settings = [
            identity(config) | drawn,
            prompts.digest,
            tokenizer_digest(pair.tokenizer),
            decoding.identity(),
        ]
        outputs = _to_file(Path(config.out), {"identity": hash_json(settings)}, batches)
    elif streamed:
        outputs = [write_pieces(pair.pieces(job), sys.stdout)]
    else:
        outputs = list(chain.from_iterable(batches()))
    summary = _summary(config, decoding, prompts, outputs)
    summary |= _chosen(decoding, resolved.sampling, outputs)
    summary |= {"sampling": drawn, "sampling_from_target": resolved.from_target}
    return CommandResult(summary, _in_words(summary, resolved.note, streamed))


def _say(line: str) -> None:
    say(f"draftsmith decode: {line}")


def load(config: DecodeConfig) -> tuple[Pair, Decoding]:
    """Return the pair and its decoder. Refuse drafts that do not go together before they load."""
    config = _with_proposer(config)
    kinds = {name: draft_kind(name) for name in config.draft}
    chosen = choose_proposer(kinds, config.proposer, retrieves=config.datastore is not None)
    tokenizer = load_tokenizer(config.target, **tokenizing(config))
    fix_date(tokenizer, config.date)
    pair = load_pair(
        config.target,
        config.draft,
        **loading(config),
        quantize=config.quantize,
        quantize_draft=config.quantize_draft,
        tokenizer=tokenizer,
        heterogeneous_vocab=config.heterogeneous_vocab,
        fast=config.fast,
        compile=config.compile,
    )
    for line in other_targets(config.draft, pair.target):
        _say(f"warning: {line}")
    names = list(pair.drafts)
    decoding = pair.decoding_by(chosen, names, config.tree, config.verifier, config.datastore)
    if chosen != "none" and decoding.method is None:
        _say(f"{config.tree}: no draft is faster here, so the target decodes alone")
    return pair, decoding


def _with_proposer(config: DecodeConfig) -> DecodeConfig:
    """Read `--draft` as `eval --draft` does: a method without weights, or lookup before a draft, is
    a proposer.
    """
    # Else a path that does not exist would be looked up on the hub.
    check_sources(name for name in config.draft if not is_copying(name))
    copying = [name for name in config.draft if copies_first(name)]
    if not copying:
        return config
    source = copying[0]
    if len(config.draft) > 1 or config.proposer is not None:
        raise InputError(f"--draft {source}: drafts by itself; give no other --draft or --proposer")
    if is_joined(source):
        return dataclasses.replace(config, draft=[model_of(source)], proposer="prompt_lookup")
    kind, _, file = source.partition(":")
    return dataclasses.replace(config, draft=[], proposer=kind, datastore=file or config.datastore)


def _prompts(config: DecodeConfig, pair: Pair) -> PromptSet:
    if config.prompts is not None:
        return read_prompts(
            config.prompts,
            pair.tokenizer,
            prompt_tokens=config.prompt_tokens,
            max_tokens=room_for_prompts(pair.context, config.max_new_tokens),
            limit=config.max_prompts,
        )
    assert config.prompt is not None
    ids = pair.encode(config.prompt, raw=config.raw)
    return PromptSet("--prompt", (Prompt(content_id(ids), "default", tuple(ids)),), (), 1)


def _to_file(out: Path, head: dict[str, str], batches: Batches) -> list[Output]:
    """Journal every batch of outputs, so that a killed run resumes; write all rows at the end."""
    partial = f".{out.name}.partial"
    with Run(out, file=True) as run:
        run.lock()
        with run.journal(partial, head) as journal:
            rows = list(chain.from_iterable(journal.rows))
            outputs = TypeAdapter(list[Output]).validate_python(rows)
            for batch in batches(len(outputs)):
                outputs += batch
                journal.append([dataclasses.asdict(output) for output in batch])
            write_text_atomic(out, jsonl(output.row() for output in outputs))
            journal.remove()
    return outputs


def write_pieces(pieces: Generator[Piece, None, Output], file: TextIO) -> Output:
    """Write a stream, with drafted tokens in colour on a terminal. Return its output."""
    console = Console(file=file, highlight=False, soft_wrap=True)
    try:
        while True:
            piece = next(pieces)
            if console.is_terminal:
                style = DRAFT_STYLE if piece.from_draft else ""
                console.print(Text(shown(piece), style=style), end="")
            else:
                file.write(piece)
                file.flush()
    except StopIteration as end:
        output: Output = end.value
    console.print()
    return output


def _summary(
    config: DecodeConfig, decoding: Decoding, prompts: PromptSet, outputs: list[Output]
) -> JsonObject:
    method = decoding.method
    stats = sum((output.stats for output in outputs), DecodeStats())
    prefill_s = sum(output.prefill_s for output in outputs)
    decode_s = sum(output.decode_s for output in outputs)
    ends = eos_ids(decoding.decoder.target)
    behind_end = 0
    for output in outputs:
        ended = dropwhile(lambda token: token not in ends, output.output_ids)
        behind_end += len(list(ended)[1:])
    peak, kind = peak_memory(decoding.decoder.target.device)
    summary: JsonObject = {
        "rows": len(outputs),
        "prompts_read": prompts.rows,
        "prompts_done": len(prompts.prompts),
        "prompts_skipped": len(prompts.skipped),
        "prompts_failed": 0,
        "proposer": decoding.name,
        "tree": method and method.tree,
        "verifier": method and method.verifier,
        "lossless": decoding.lossless,
        "tokens": stats.emitted,
        "target_calls": stats.target_calls,
        "proposed": stats.proposed,
        "accepted": stats.accepted,
        "tau": stats.tau,
        "accept_at": list(stats.accept_at),
        "copied_calls": stats.copied_calls,
        "copied_accepted": stats.copied_accepted,
        "alpha_mcsd": stats.alpha_mcsd,
        "seconds": prefill_s + decode_s,
        "behind_end": behind_end,
        "prefill_s": prefill_s,
        "decode_s": decode_s,
        "tokens_per_s": stats.emitted / decode_s if decode_s else None,
        "recorded_steps": sum(steps.count for steps in decoding.decoder.every_steps),
        "recording_s": decoding.decoder.compile_s,
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


def _chosen(decoding: Decoding, sampling: Sampling, outputs: list[Output]) -> JsonObject:
    """Return what `--tree auto` drafted: steps by choice, their cost over those of the target
    alone, and the gain.
    """
    proposer = decoding.decoder.proposer
    stats = sum((output.stats for output in outputs), DecodeStats())
    if not isinstance(proposer, ChoosingProposer):
        return {}
    cost = relative_cost(stats.chosen, proposer.prices(sampling))
    gain = stats.tau / cost if stats.tau and cost else None
    return {"chosen": stats.chosen, "step_cost": cost, "gain": gain}


def _in_words(summary: JsonObject, note: str, streamed: bool) -> list[str]:
    """Return the summary in words, behind the texts that no file has and that were not streamed."""
    outputs = [] if streamed else summary.get("outputs", [])
    lines = []
    for row in outputs:
        if len(outputs) > 1:
            lines.append(f"--- {row['id']}, sample {row['sample_index']}")
        lines.append(row["text"])
    if note:
        lines.append(f"sampling: {note}")
    where = f"{summary['out']}: {summary['rows']} rows, " if "out" in summary else ""
    copied = summary["copied_accepted"]
    lines.append(
        f"{where}{summary['tokens']} tokens in {summary['target_calls']} target calls "
        f"({_number(summary['tau'], 2)} per call), {summary['accepted'] - copied} accepted from "
        f"the draft, {copied} copied from the text; prompt {summary['prefill_s']:.2f} s, then "
        f"{summary['decode_s']:.2f} s ({_number(summary['tokens_per_s'], 1)} tokens/s)"
    )
    if behind := summary["behind_end"]:
        lines.append(f"{behind} of these tokens are behind the end of their text (--ignore_eos)")
    if summary.get("gain"):
        steps = Counter[str]()
        for name, count in summary["chosen"].items():
            steps["lookup" if name.startswith("lookup") else name] += count
        shares = [
            f"{name} {count / steps.total():.0%}".replace("%", " %")
            for name, count in steps.most_common()
        ]
        lines.append(
            f"{summary['tau']:.2f} tokens per call, a step costs {summary['step_cost']:.2f} of one "
            f"without a draft: {summary['gain']:.2f} times the target alone "
            f"({', '.join(shares)} of steps)"
        )
    method = "the target alone"
    if summary["tree"] is not None:
        by_depth = " ".join(_number(rate, 2) for rate in summary["accept_at"])
        method = (
            f"{summary['proposer']}, {summary['tree']}, {summary['verifier']}; accepted at "
            f"depth 1, 2, ... if reached: {by_depth}"
        )
    lines.append(f"{method}; peak memory {summary['peak_memory_bytes'] / 2**20:.0f} MiB")
    return lines


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
