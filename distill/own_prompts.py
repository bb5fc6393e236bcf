"""Prompts that the target writes itself, as the user of its chat template (`magpie:N`).

It is given the template up to where a user's text begins, and goes on as the user (Xu et al. 2024, arXiv 2406.08464).
Texts are drawn in groups, each a file in OUT/.prompts, by all processes. The first process then joins the groups into
OUT/prompts.jsonl, without what is empty, has no end, or was drawn before. The files depend on the options alone.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from distill.config import DistillConfig, magpie
from distill.engines import Answer, AnswerRequest, Engine, Failed
from distill.kept_answers import Numbered, ask
from draftsmith_core.errors import InputError, RunError
from draftsmith_core.io import atomic_file, canonical_json, make_dir, write_json_atomic, write_text_atomic, writing
from draftsmith_core.processes import on_main
from draftsmith_core.progress import Advance, progress
from draftsmith_core.prompts import Reasons
from draftsmith_core.sampling import row_seed
from draftsmith_core.tokenization import Tokenizer, chat_text, decode_text

if TYPE_CHECKING:
    from accelerate import PartialState

PROMPTS = "prompts.jsonl"
# How many texts were drawn, how many are prompts, and why the others are not.
RECORD = "own_prompts.json"
_GROUPS = ".prompts"
# Stands for a user's text, to find what a chat template writes around it.
_CONTENT = "USER-TEXT-STANDS-HERE"


@dataclass(frozen=True)
class Opening:
    """What the target goes on from, how often, and the text at which a user's turn ends ("": only a token ends it)."""

    count: int
    ids: tuple[int, ...]
    end: str


def find_opening(config: DistillConfig, engine: Engine, tokenizer: Tokenizer) -> Opening | None:
    """How the target writes its prompts, None for prompts that are data; InputError where it cannot."""
    count = magpie(config.prompts)
    if count is None:
        return None
    where = f"prompts: {config.prompts}"
    if not engine.takes_ids:
        raise InputError(f"{where}: needs servers that take token ids (vLLM, llama-server); these take text")
    before, _, after = chat_text(tokenizer, [{"role": "user", "content": _CONTENT}], where).partition(_CONTENT)
    ids = tokenizer(before, add_special_tokens=False)["input_ids"]
    if not ids:
        raise InputError(f"{where}: the chat template puts nothing before a user's text to go on from; use self:N")
    opening = Opening(count, tuple(ids), (after.strip().splitlines() or [""])[0])
    if engine.max_prompt_tokens is not None and len(opening.ids) > engine.max_prompt_tokens:
        raise InputError(f"{where}: max_new_tokens {config.max_new_tokens} leaves no room in the target's context")
    return opening


def draw_prompts(
    opening: Opening, config: DistillConfig, engine: Engine, tokenizer: Tokenizer, processes: "PartialState"
) -> Path:
    """Write the prompts, continuing what a killed run left, and return their file; every process calls it.

    RunError when none of the texts can be a prompt.
    """
    out = Path(config.out)
    if not (out / PROMPTS).exists():
        groups = out / _GROUPS
        on_main(lambda: make_dir(groups, "--out"))
        draws = _Draws(opening, config, engine, tokenizer, groups)
        draws.make(range(processes.process_index, draws.groups, processes.num_processes))
        processes.wait_for_everyone()
        on_main(lambda: _join(opening, config.domain, out, draws.groups))
    return out / PROMPTS


class _Draws:
    """The texts that one process draws, group by group."""

    def __init__(
        self, opening: Opening, config: DistillConfig, engine: Engine, tokenizer: Tokenizer, directory: Path
    ) -> None:
        self.opening, self.config, self.engine, self.tokenizer = opening, config, engine, tokenizer
        self.directory = directory
        self.groups = -(-opening.count // config.part_rows)
        # At temperature 0 all texts would be one.
        self.temperature = 1.0 if engine.sampling.sampling.greedy else None
        self.making: dict[int, dict[int, tuple[str, str]]] = {}
        self.advance: Advance

    def make(self, indices: Sequence[int]) -> None:
        """Draw the groups of these numbers that are not there yet."""
        with progress("prompts", sum(len(self._draws(index)) for index in indices)) as self.advance:
            ask(self.engine, self.directory, self._requests(indices), self._record)

    def _draws(self, index: int) -> range:
        size = self.config.part_rows
        return range(index * size, min((index + 1) * size, self.opening.count))

    def _requests(self, indices: Sequence[int]) -> Iterator[Numbered]:
        for index in indices:
            if _group(self.directory, index).exists():
                self.advance(len(self._draws(index)), "")
            else:
                self.making[index] = {}
                yield index, [self._request(draw) for draw in self._draws(index)]

    def _request(self, draw: int) -> AnswerRequest:
        seed = row_seed(self.config.seed, f"magpie/{draw}")
        return AnswerRequest((draw, 0, 0), self.opening.ids, seed, self.temperature)

    def _record(self, request: AnswerRequest, answer: Answer | Failed) -> None:
        draw = request.key[0]
        index = draw // self.config.part_rows
        made = self.making[index]
        made[draw] = ("", answer.reason) if isinstance(answer, Failed) else self._text(answer)
        self.advance(1, "")
        if len(made) == len(self._draws(index)):
            path = _group(self.directory, index)
            with writing(path):
                write_text_atomic(path, "".join(canonical_json([n, *made[n]]) + "\n" for n in sorted(made)))
            del self.making[index]

    def _text(self, answer: Answer) -> tuple[str, str]:
        """The prompt in what was drawn, and why there is none ("" when there is)."""
        ids = list(answer.response_ids)
        text = decode_text(self.tokenizer, ids)
        whole = str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        if self.opening.end and self.opening.end in whole:
            text = whole.partition(self.opening.end)[0]
            if any(token in text for token in self.tokenizer.all_special_tokens):
                return "", "holds a special token"
        elif answer.finish_reason != "stop":
            return "", f"had no end within {len(ids)} tokens"
        return (text.strip(), "") if text.strip() else ("", "empty")


def _group(directory: Path, index: int) -> Path:
    return directory / f"{index:05d}.jsonl"


def _join(opening: Opening, domain: str, out: Path, groups: int) -> None:
    """Write the prompts of all groups into one file, each text once, and what became of the others."""
    reasons, seen, kept = Reasons(), set(), 0
    with writing(out / PROMPTS), atomic_file(out / PROMPTS) as temporary:
        with temporary.open("w", encoding="utf-8") as file:
            for index in range(groups):
                for line in _group(out / _GROUPS, index).read_text(encoding="utf-8").splitlines():
                    draw, text, reason = json.loads(line)
                    same = hashlib.blake2b(" ".join(text.lower().split()).encode(), digest_size=16).digest()
                    if reason or same in seen:
                        reasons.add(draw + 1, reason or "was drawn before")
                        continue
                    seen.add(same)
                    kept += 1
                    turn = {"role": "user", "content": text}
                    row = {"id": f"magpie-{draw}", "domain": domain, "messages": [turn]}
                    file.write(canonical_json(row) + "\n")
        if not kept:
            why = reasons.lines("left out")[0]
            raise RunError(f"{out}: none of the {opening.count} texts that the target drew can be a prompt: {why}")
        because = reasons.lines("left out")
        write_json_atomic(out / RECORD, {"drawn": opening.count, "kept": kept, "left_out_because": because})
    shutil.rmtree(out / _GROUPS)
