"""Prompts that the target writes itself, as the user of its chat template (`magpie:N`; Xu et al.
2024, 2406.08464).

The target continues the template from where a user's text begins. These continuations are an
ordinary distilled set, in OUT/.prompts; the first process turns them into OUT/prompts.jsonl, from
which the set itself is distilled.
"""

import dataclasses
import hashlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from draftsmith.core.chats import Chat, chat_text
from draftsmith.core.errors import InputError, RunError, at
from draftsmith.core.io import JsonObject, canonical_json, sha256_file, write_sealed
from draftsmith.core.prompts import Skipped
from draftsmith.core.ranks import from_main, on_main, wait_for_everyone
from draftsmith.core.row_reasons import Reasons
from draftsmith.core.runs import Run
from draftsmith.core.tokenization import Tokenizer, decode_text, text_with_specials
from draftsmith.distill.config import DistillConfig, magpie
from draftsmith.distill.engines import Engine
from draftsmith.distill.manifest import DRAWN, OWN_PROMPTS, PROMPTS
from draftsmith.distill.part_maker import Job, make_parts
from draftsmith.distill.parts import part_path, read_summary
from draftsmith.distill.prompt_sources import Openings

# Stands in for a user's text, to find what a chat template writes around it.
_CONTENT = "USER-TEXT-STANDS-HERE"


def find_openings(config: DistillConfig, engine: Engine, tokenizer: Tokenizer) -> Openings | None:
    """Return how the target writes its prompts; None if prompts are data. Raise InputError if it
    cannot.
    """
    count = magpie(config.prompts)
    if count is None:
        return None
    where = f"prompts: {config.prompts}"
    if not engine.takes_ids:
        raise InputError(
            f"{where}: needs servers that take token ids (vLLM, llama-server); these take text"
        )
    opening = user_opening(tokenizer, where)
    if not opening.ids:
        raise InputError(
            f"{where}: the chat template puts nothing before a user's text to go on from; use "
            "self:N"
        )
    return Openings(config.prompts, count, opening.ids, opening.end)


@dataclass(frozen=True)
class UserOpening:
    """What a chat template writes around a user's text: tokens before it, first line behind it."""

    ids: tuple[int, ...]
    end: str


def user_opening(tokenizer: Tokenizer, where: str) -> UserOpening:
    """Return what the chat template writes around the text of a user's first turn."""
    with at(where):
        chat = chat_text(tokenizer, Chat([{"role": "user", "content": _CONTENT}]))
    before, _, after = chat.partition(_CONTENT)
    ids = tokenizer(before, add_special_tokens=False)["input_ids"]
    lines = after.strip().splitlines()
    return UserOpening(tuple(ids), lines[0] if lines else "")


def draw_prompts(job: Job, openings: Openings, run: Run) -> Path:
    """Write the prompts, or resume a killed run's; return their file. Every process calls this.

    Raise RunError if no text can be a prompt.
    """
    config = dataclasses.replace(
        job.config,
        num_samples=1,
        max_prompts=None,
        turns="last",
        thinking="keep",
        drop=[],
        teacher_top_k=0,
        temperature=None,
        # At temperature 0 all texts would be equal.
        temperatures=["1:1"] if job.engine.sampling.sampling.greedy else [],
    )
    drawn = run.out / DRAWN
    if not from_main(lambda: run.finished(PROMPTS)):
        make_parts(dataclasses.replace(job, config=config), openings, drawn, "prompts")
        wait_for_everyone()
    prompts: Path = run.step(PROMPTS, lambda file: _write_prompts(job, openings, run.out, file))
    on_main(lambda: shutil.rmtree(drawn, ignore_errors=True))
    return prompts


def _write_prompts(job: Job, openings: Openings, out: Path, prompts: Path) -> None:
    """Write each text that can be a prompt once, and count the reasons of the others."""
    reasons = Reasons()
    hashes: set[bytes] = set()
    with prompts.open("w", encoding="utf-8") as file:
        for row, text in enumerate(_drawn_texts(out / DRAWN, openings, job.tokenizer), 1):
            if isinstance(text, Skipped):
                reasons.add(row, text.reason)
                continue
            words = " ".join(text.lower().split())
            content = hashlib.blake2b(words.encode(), digest_size=16).digest()
            if content in hashes:
                reasons.add(row, "was drawn before")
                continue
            hashes.add(content)
            prompt = {
                "id": f"magpie-{row - 1}",
                "domain": job.config.domain,
                "messages": [{"role": "user", "content": text}],
            }
            file.write(canonical_json(prompt) + "\n")
    because = reasons.lines("left out")
    if not hashes:
        raise RunError(
            f"{out}: none of the {openings.rows} texts that the target drew can be a prompt: "
            f"{because[0]}"
        )
    record = {
        "drawn": openings.rows,
        "kept": len(hashes),
        "left_out_because": because,
        "sha256": sha256_file(prompts),
    }
    write_sealed(out / OWN_PROMPTS, record)


def _drawn_texts(drawn: Path, openings: Openings, tokenizer: Tokenizer) -> Iterator[str | Skipped]:
    """Yield all draws in their order: the text, or why it cannot be a prompt."""
    index = 0
    row = 0
    while (summary := read_summary(drawn, index)) is not None:
        part = part_path(drawn, index)
        answers = iter(pq.read_table(part).to_pylist() if part.exists() else [])
        failed = dict(summary["failed"])
        for _ in range(summary["read"]):
            row += 1
            if row in failed:
                yield Skipped(row, failed[row])
            else:
                yield _text_of(next(answers), row, openings.end, tokenizer)
        index += 1


def _text_of(answer: JsonObject, row: int, end: str, tokenizer: Tokenizer) -> str | Skipped:
    ids = answer["response_ids"]
    text = decode_text(tokenizer, ids)
    whole = text_with_specials(tokenizer, ids)
    if end and end in whole:
        text = whole.partition(end)[0]
        if any(token in text for token in tokenizer.all_special_tokens):
            return Skipped(row, "holds a special token")
    elif answer["finish_reason"] != "stop":
        return Skipped(row, f"had no end within {len(ids)} tokens")
    return text.strip() or Skipped(row, "empty")
