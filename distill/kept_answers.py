"""Answers of unfinished parts, written as they come and read back by the run that continues."""

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from distill.engines import Answer, AnswerRequest, Done, Engine, Failed
from draftsmith_core.prompts import content_id
from draftsmith_core.runs import Journal, Run

# The number of a part, and its requests.
Numbered = tuple[int, Sequence[AnswerRequest]]
JOURNALS = (".part-*.answers.jsonl", ".prompts/.part-*.answers.jsonl")


@dataclass
class _Part:
    """answers: kept ones by request key, with the hash of their prompt. open: requests without an outcome."""

    journal: Journal
    answers: dict[tuple[int, ...], tuple[str, Answer]]
    open: int


def ask(engine: Engine, run: Run, parts: Iterator[Numbered], done: Done, where: str = "") -> None:
    """Run `engine` over the requests of `parts` that have no kept answer.

    Keep every answer in a journal in directory `where` of the run until its part is done.
    """
    part_of: dict[tuple[int, int], _Part] = {}  # by row and sample, which later turns share

    def pass_on(request: AnswerRequest, answer: Answer | Failed | None) -> AnswerRequest | None:
        """Pass on the answer, if any, and the kept ones of the turns after it; return the request to ask next."""
        part = part_of[request.key[:2]]
        while True:
            if answer is None:
                prompt, answer = part.answers.pop(request.key, ("", None))
                if answer is None or prompt != content_id(request.prompt_ids):
                    return request
            following = done(request, answer)
            if following is None:
                break
            request, answer = following, None
        del part_of[request.key[:2]]
        part.open -= 1
        if not part.open:
            part.journal.remove()
        return None

    def missing() -> Iterator[Sequence[AnswerRequest]]:
        for number, requests in parts:
            journal = run.journal(f"{where}.part-{number:05d}.answers.jsonl")
            part = _Part(journal, dict(map(_unpack, journal.rows)), len(requests))
            part_of.update({request.key[:2]: part for request in requests})
            left = [pass_on(request, None) for request in requests]
            if group := [request for request in left if request is not None]:
                yield group

    def answered(request: AnswerRequest, answer: Answer | Failed) -> AnswerRequest | None:
        if isinstance(answer, Answer):
            teacher = None if answer.teacher is None else base64.b64encode(answer.teacher).decode()
            ids, reason, prompt = answer.response_ids, answer.finish_reason, content_id(request.prompt_ids)
            part_of[request.key[:2]].journal.append([request.key, prompt, ids, reason, answer.tokens_from, teacher])
        return pass_on(request, answer)

    try:
        engine.run(missing(), answered)
    finally:
        for part in part_of.values():
            part.journal.close()


def _unpack(row: list[Any]) -> tuple[tuple[int, ...], tuple[str, Answer]]:
    key, prompt, ids, reason, tokens_from, teacher = row
    packed = None if teacher is None else base64.b64decode(teacher)
    return tuple(key), (prompt, Answer(tuple(ids), reason, tokens_from, packed))


def count_kept(out: Path) -> int:
    """Count the answers in the finished parts and the journals of an unfinished set."""
    rows: int = sum(pq.read_metadata(path).num_rows for path in out.glob("part-*.parquet"))
    return rows + sum(path.read_bytes().count(b"\n") for pattern in JOURNALS for path in out.glob(pattern))
