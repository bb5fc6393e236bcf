"""`draftsmith decode`: one prompt to the terminal, or many to a file."""

import dataclasses
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedModel

from decode import DecodeStats, DraftModelProposer, Generation, SpeculativeDecoder, parse_tree
from draftsmith.commands.output import finish
from draftsmith.commands.stream import Stream
from draftsmith.config import parse
from draftsmith.errors import InputError
from draftsmith.io import canonical_json, hash_json, make_dir, write_text_atomic
from draftsmith.models import (
    check_same_vocabulary,
    check_tokenizer,
    context_length,
    dtype_name,
    eos_ids,
    fingerprint,
    load_model,
)
from draftsmith.processes import alone
from draftsmith.progress import progress
from draftsmith.records import Prompt, PromptSet, read_prompts
from draftsmith.sampling import Sampling, generator, row_seed
from draftsmith.text import Tokenizer, decode_text, encode_text, load_tokenizer


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """Generate with a target and a draft; the output law is the target's own."""

    target: str
    """The target: a local directory or hub name."""
    draft: list[str] = field(default_factory=list)
    """The draft: a local directory or hub name. Without one the target decodes alone."""
    proposer: Literal["draft", "none"] | None = None
    """Default: draft where there is one, else none (autoregressive)."""
    tree: str = "chain:4"
    """What is drafted per step: chain:N, or kary:K1,K2,... (K1 candidates, K2 after each, ...)."""
    verifier: Literal["exact", "speculative", "mcsd"] | None = None
    """Default: speculative on a chain, mcsd on a tree."""
    prompt: str | None = None
    """A text to continue."""
    prompts: str | None = None
    """Or a .jsonl/.parquet file or hub dataset of prompts."""
    out: str | None = None
    """Write one JSON object per output to this .jsonl file; a killed run then continues."""
    num_samples: int = 1
    """Outputs per prompt."""
    max_new_tokens: int = 128
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    seed: int = 0
    batch_size: int = 1
    """Rows that are decoded together."""
    prompt_tokens: int = 32
    """For rows with `text`: how many of its first tokens make the prompt."""
    max_prompts: int | None = None
    """Use only the first rows of the prompts."""
    ignore_eos: bool = False
    """Go on to max_new_tokens even when the target ends."""
    device: str = "auto"
    dtype: str = "auto"
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        for key in ("num_samples", "max_new_tokens", "batch_size", "prompt_tokens"):
            if getattr(self, key) < 1:
                raise InputError(f"{key}: {getattr(self, key)} must be at least 1")
        if self.max_prompts is not None and self.max_prompts < 1:
            raise InputError(f"max_prompts: {self.max_prompts} must be at least 1")
        if (self.prompt is None) == (self.prompts is None):
            raise InputError("prompt: give either --prompt TEXT or --prompts FILE")
        if len(self.draft) > 1:
            raise InputError(f"draft: {len(self.draft)} were given; decode takes one")
        if self.proposer == "draft" and not self.draft:
            raise InputError("proposer: `draft` needs --draft")
        if self.out is not None and Path(self.out).is_dir():
            raise InputError(f"out: {self.out} is a directory; name a .jsonl file")
        try:
            self.sampling()
        except ValueError as error:
            raise InputError(str(error)) from None

    def sampling(self) -> Sampling:
        """The law of the output."""
        return Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)


@dataclass(frozen=True)
class Job:
    """One output to make."""

    prompt: Prompt
    sample_index: int


def run(argv: list[str]) -> None:
    """Decode."""
    config, as_json = parse(DecodeConfig, "decode", argv)
    alone("decode")
    tokenizer = load_tokenizer(config.target, config.trust_remote_code)
    target = load_model(
        config.target, device=config.device, dtype=config.dtype, trust_remote_code=config.trust_remote_code
    )
    check_tokenizer(config.target, target, tokenizer)
    draft = None
    if config.draft and config.proposer != "none":
        draft = load_model(
            config.draft[0],
            device=config.device,
            dtype=dtype_name(target) if config.dtype == "auto" else config.dtype,
            trust_remote_code=config.trust_remote_code,
        )
        check_same_vocabulary(target, [(config.draft[0], draft)])
    decoder = _decoder(config, target, draft)
    prompts = _prompts(config, tokenizer, target, draft)
    jobs = [Job(p, k) for p in prompts.prompts for k in range(config.num_samples)]
    eos = () if config.ignore_eos else eos_ids(target)
    show = config.prompt is not None and config.out is None and config.num_samples == 1
    rows: list[dict[str, Any]]
    if config.out is not None:
        identity = hash_json(
            [
                {k: v for k, v in dataclasses.asdict(config).items() if k not in ("out", "device")},
                prompts.digest,
                fingerprint(target),
                dtype_name(target),
                fingerprint(draft) if draft is not None else None,
            ]
        )
        rows = _to_file(Path(config.out), identity, decoder, config, jobs, eos, tokenizer)
    elif show:
        rows = [_to_terminal(decoder, config, jobs[0], eos, tokenizer)]
    else:
        rows = list(_rows(decoder, config, jobs, eos, tokenizer))
    summary = _summary(config, prompts, rows)
    finish(summary, _lines(config, summary, rows, show), as_json)


def _decoder(config: DecodeConfig, target: PreTrainedModel, draft: PreTrainedModel | None) -> SpeculativeDecoder:
    verifier = config.verifier or ("speculative" if config.tree.startswith("chain") else "mcsd")
    try:
        parse_tree(config.tree)  # a misspelt tree is an error even where nothing drafts
        proposer = None if draft is None else DraftModelProposer(draft)
        return SpeculativeDecoder(target, proposer, config.tree, verifier)
    except ValueError as error:
        raise InputError(str(error)) from None


def _prompts(
    config: DecodeConfig, tokenizer: Tokenizer, target: PreTrainedModel, draft: PreTrainedModel | None
) -> PromptSet:
    limits = [context_length(model) for model in (target, draft) if model is not None]
    room = min((limit for limit in limits if limit is not None), default=None)
    longest = None if room is None else room - config.max_new_tokens
    if longest is not None and longest < 1:
        raise InputError(f"max_new_tokens: {config.max_new_tokens} leaves no room in a context of {room}")
    if config.prompts is not None:
        return read_prompts(
            config.prompts,
            tokenizer,
            prompt_tokens=config.prompt_tokens,
            max_tokens=longest,
            limit=config.max_prompts,
        )
    assert config.prompt is not None
    ids = encode_text(tokenizer, config.prompt)
    if not ids:
        raise InputError("--prompt: is empty and the tokenizer adds no BOS; write some text")
    if longest is not None and len(ids) > longest:
        raise InputError(f"--prompt: has {len(ids)} tokens, more than the {longest} that fit")
    return PromptSet("--prompt", (Prompt("prompt", "default", tuple(ids)),), (), 1)


def _rows(
    decoder: SpeculativeDecoder,
    config: DecodeConfig,
    jobs: list[Job],
    eos: tuple[int, ...],
    tokenizer: Tokenizer,
    finished: int = 0,
) -> Iterator[dict[str, Any]]:
    """Output rows of all jobs from `finished` on, in order, batch by batch."""
    with progress("decode", len(jobs), finished) as advance:
        for start in range(finished, len(jobs), config.batch_size):
            batch_jobs = jobs[start : start + config.batch_size]
            batch = decoder.generate(
                [job.prompt.ids for job in batch_jobs],
                config.sampling(),
                config.max_new_tokens,
                [generator(row_seed(config.seed, f"{j.prompt.id}/{j.sample_index}")) for j in batch_jobs],
                eos,
            )
            seconds = (batch.prefill_s + batch.decode_s) / len(batch_jobs)
            for job, generation in zip(batch_jobs, batch.generations, strict=True):
                yield _row(job, generation, seconds, tokenizer)
            advance(len(batch_jobs), "")


def _row(job: Job, generation: Generation, seconds: float, tokenizer: Tokenizer) -> dict[str, Any]:
    """The row of the command contract. In a batch, `seconds` is the batch's wall clock shared evenly."""
    return {
        "id": job.prompt.id,
        "sample_index": job.sample_index,
        "prompt_ids": list(job.prompt.ids),
        "output_ids": generation.output_ids,
        "text": decode_text(tokenizer, generation.output_ids),
        "finish_reason": generation.finish_reason,
        "stats": {
            "target_calls": generation.stats.target_calls,
            "proposed": generation.stats.proposed,
            "accepted": generation.stats.accepted,
            "accepted_by_depth": list(generation.stats.accepted_by_depth),
            "seconds": seconds,
        },
    }


def _to_file(
    out: Path,
    identity: str,
    decoder: SpeculativeDecoder,
    config: DecodeConfig,
    jobs: list[Job],
    eos: tuple[int, ...],
    tokenizer: Tokenizer,
) -> list[dict[str, Any]]:
    """Rows go to `.OUT.partial` whole batch by whole batch; that becomes OUT at the end. A killed run continues it."""
    make_dir(out.parent, "--out")
    partial = out.with_name(f".{out.name}.partial")
    rows = _finished_rows(partial, identity, config.batch_size)
    write_text_atomic(partial, canonical_json({"identity": identity}) + "\n" + _jsonl(rows))
    with partial.open("a", encoding="utf-8") as file:
        for row in _rows(decoder, config, jobs, eos, tokenizer, len(rows)):
            rows.append(row)
            file.write(_jsonl([row]))
            file.flush()
    write_text_atomic(out, _jsonl(rows))
    partial.unlink()
    return rows


def _jsonl(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _finished_rows(partial: Path, identity: str, batch_size: int) -> list[dict[str, Any]]:
    """Rows of whole batches that an interrupted run of the same command left."""
    if not partial.exists():
        return []
    rows: list[dict[str, Any]] = []
    lines = partial.read_text(encoding="utf-8", errors="replace").split("\n")
    if lines[0] != canonical_json({"identity": identity}):
        return []
    for line in lines[1:-1]:
        rows.append(json.loads(line))
    return rows[: len(rows) // batch_size * batch_size]


def _to_terminal(
    decoder: SpeculativeDecoder, config: DecodeConfig, job: Job, eos: tuple[int, ...], tokenizer: Tokenizer
) -> dict[str, Any]:
    stream = Stream(tokenizer, sys.stdout)
    batch = decoder.generate(
        [job.prompt.ids],
        config.sampling(),
        config.max_new_tokens,
        [generator(row_seed(config.seed, f"{job.prompt.id}/{job.sample_index}"))],
        eos,
        on_tokens=lambda _, ids, from_draft: stream.add(ids, from_draft),
    )
    stream.close()
    return _row(job, batch.generations[0], batch.prefill_s + batch.decode_s, tokenizer)


def _summary(config: DecodeConfig, prompts: PromptSet, rows: list[dict[str, Any]]) -> dict[str, Any]:
    stats = DecodeStats()
    for row in rows:
        counts = row["stats"]
        stats += DecodeStats(
            target_calls=counts["target_calls"],
            emitted=len(row["output_ids"]),
            proposed=counts["proposed"],
            accepted=counts["accepted"],
        )
    seconds = sum(row["stats"]["seconds"] for row in rows)
    summary: dict[str, Any] = {
        "rows": len(rows),
        "prompts_read": prompts.rows,
        "prompts_done": len(prompts.prompts),
        "prompts_skipped": len(prompts.skipped),
        "prompts_failed": 0,
        "tokens": stats.emitted,
        "target_calls": stats.target_calls,
        "proposed": stats.proposed,
        "accepted": stats.accepted,
        "tau": stats.tau,
        "seconds": seconds,
    }
    if config.out is not None:
        summary["out"] = config.out
    else:
        summary["outputs"] = rows
    if prompts.skipped:
        summary["skipped"] = [dataclasses.asdict(skip) for skip in prompts.skipped]
    return summary


def _lines(config: DecodeConfig, summary: dict[str, Any], rows: list[dict[str, Any]], shown: bool) -> list[str]:
    lines = [] if shown or config.out is not None else [row["text"] for row in rows]
    if summary["prompts_skipped"]:
        first = summary["skipped"][0]
        lines.append(
            f"{summary['prompts_skipped']} of {summary['prompts_read']} prompts skipped "
            f"(row {first['row']}: {first['reason']})"
        )
    where = f"{config.out}: {summary['rows']} rows, " if config.out is not None else ""
    lines.append(
        f"{where}{summary['tokens']} tokens in {summary['target_calls']} target calls "
        f"({summary['tau']:.2f} a call), {summary['accepted']} of them drafted, {summary['seconds']:.2f} s"
    )
    return lines
