"""Prompts that the target writes itself, as the user of its chat template (`magpie:N`; Xu et al.
2024, 2406.08464).

The target continues the template from where a user's text begins. All processes draw groups of
texts, each a file in OUT/.prompts; the first process joins them into OUT/prompts.jsonl. The files
depend on the options alone.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from distill.asking import Numbered, ask
from distill.config import DistillConfig, magpie
from distill.engines import Answer, AnswerRequest, Engine, Failed
from distill.manifest import RECORD
from draftsmith_core.errors import InputError, RunError
from draftsmith_core.io import canonical_json, write_json_atomic
from draftsmith_core.progress import progress
from draftsmith_core.prompts import Reasons
from draftsmith_core.ranks import on_main
from draftsmith_core.runs import Run
from draftsmith_core.sampling import row_seed
from draftsmith_core.tokenization import Tokenizer, chat_text, decode_text

if TYPE_CHECKING:
    from accelerate import PartialState

PROMPTS = "prompts.jsonl"
_GROUPS = ".prompts"
# Stands in for a user's text, to find what a chat template writes around it.
_CONTENT = "USER-TEXT-STANDS-HERE"


@dataclass(frozen=True)
class Opening:
    """count: texts to draw. ids: what they continue. end: the text that ends a user's turn ("":
    only a token does).
    """

    count: int
    ids: tuple[int, ...]
    end: str


def find_opening(config: DistillConfig, engine: Engine, tokenizer: Tokenizer) -> Opening | None:
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
    before, _, after = chat_text(
        tokenizer, [{"role": "user", "content": _CONTENT}], where
    ).partition(_CONTENT)
    ids = tokenizer(before, add_special_tokens=False)["input_ids"]
    if not ids:
        raise InputError(
            f"{where}: the chat template puts nothing before a user's text to go on from; use "
            "self:N"
        )
    return Opening(count, tuple(ids), (after.strip().splitlines() or [""])[0])


def draw_prompts(
    opening: Opening,
    config: DistillConfig,
    engine: Engine,
    tokenizer: Tokenizer,
    run: Run,
    processes: "PartialState",
) -> Path:
    """Write the prompts, or resume a killed run's; return their file. Every process calls this.

    Raise RunError if no text can be a prompt.
    """
    draws = range(opening.count)
    groups = [
        draws[start : start + config.part_rows]
        for start in range(0, opening.count, config.part_rows)
    ]
    own = range(len(groups))[processes.process_index :: processes.num_processes]
    # At temperature 0 all texts would be equal.
    temperature = 1.0 if engine.sampling.sampling.greedy else None
    texts: dict[int, dict[int, tuple[str, str]]] = {
        index: {} for index in own
    }  # with the reason to leave it out

    def requests() -> Iterator[Numbered]:
        for index in own:
            if (run.out / _group(index)).exists():
                advance(len(groups[index]), "")
            else:
                seeds = {draw: row_seed(config.seed, f"magpie/{draw}") for draw in groups[index]}
                yield (
                    index,
                    [
                        AnswerRequest((draw, 0, 0), opening.ids, seeds[draw], temperature)
                        for draw in seeds
                    ],
                )

    def record(request: AnswerRequest, answer: Answer | Failed) -> None:
        draw = request.key[0]
        index = draw // config.part_rows
        group = texts[index]
        group[draw] = (
            ("", answer.reason) if isinstance(answer, Failed) else _text(opening, tokenizer, answer)
        )
        advance(1, "")
        if len(group) == len(groups[index]):
            lines = "".join(canonical_json([n, *group[n]]) + "\n" for n in sorted(group))
            run.step(
                _group(index), lambda file: file.write_text(lines, encoding="utf-8"), who="each"
            )
            del texts[index]

    if not (run.out / PROMPTS).exists():
        with progress("prompts", sum(len(groups[index]) for index in own)) as advance:
            ask(engine, run, requests(), record, f"{_GROUPS}/")
        processes.wait_for_everyone()
    prompts: Path = run.step(PROMPTS, lambda file: _join(opening, config, run.out, file))
    on_main(lambda: shutil.rmtree(run.out / _GROUPS, ignore_errors=True))
    return prompts


def _text(opening: Opening, tokenizer: Tokenizer, answer: Answer) -> tuple[str, str]:
    """Return the prompt in an answer and the reason to leave it out ("": keep)."""
    ids = list(answer.response_ids)
    text = decode_text(tokenizer, ids)
    whole = str(
        tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )
    if opening.end and opening.end in whole:
        text = whole.partition(opening.end)[0]
        if any(token in text for token in tokenizer.all_special_tokens):
            return "", "holds a special token"
    elif answer.finish_reason != "stop":
        return "", f"had no end within {len(ids)} tokens"
    return (text.strip(), "") if text.strip() else ("", "empty")


def _group(index: int) -> str:
    return f"{_GROUPS}/{index:05d}.jsonl"


def _join(opening: Opening, config: DistillConfig, out: Path, prompts: Path) -> None:
    """Write the prompts of all groups into one file, each text once, and count the reasons of the
    others.
    """
    reasons, hashes, kept = Reasons(), set(), 0
    groups = range(-(-opening.count // config.part_rows))
    with prompts.open("w", encoding="utf-8") as file:
        for line in (
            line for index in groups for line in (out / _group(index)).open(encoding="utf-8")
        ):
            draw, text, reason = json.loads(line)
            content = hashlib.blake2b(
                " ".join(text.lower().split()).encode(), digest_size=16
            ).digest()
            if reason or content in hashes:
                reasons.add(draw + 1, reason or "was drawn before")
                continue
            hashes.add(content)
            kept += 1
            turn = {"role": "user", "content": text}
            row = {"id": f"magpie-{draw}", "domain": config.domain, "messages": [turn]}
            file.write(canonical_json(row) + "\n")
    because = reasons.lines("left out")
    if not kept:
        raise RunError(
            f"{out}: none of the {opening.count} texts that the target drew can be a prompt: "
            f"{because[0]}"
        )
    write_json_atomic(
        out / RECORD, {"drawn": opening.count, "kept": kept, "left_out_because": because}
    )
