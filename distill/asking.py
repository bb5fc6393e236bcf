"""Answers of unfinished parts: kept as they come, and read back by the run that resumes."""

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from distill.engines import Answer, AnswerRequest, Done, Engine, Failed
from draftsmith_core.prompts import content_id
from draftsmith_core.runs import Journal, Run

# The number of a part, and its requests.
Numbered = tuple[int, Sequence[AnswerRequest]]


@dataclass
class _Asked:
    """answers: kept ones by request key, with the hash of their prompt. open: requests without an
    outcome.
    """

    journal: Journal
    answers: dict[tuple[int, ...], tuple[str, Answer]]
    open: int


@dataclass
class _Wave:
    """Requests that are asked together. rows: answers to keep once all are there. open: requests
    without an outcome.
    """

    open: int
    rows: list[Any] = field(default_factory=list)


def ask(engine: Engine, run: Run, parts: Iterator[Numbered], done: Done, where: str = "") -> None:
    """Run `engine` over the requests of `parts` that have no kept answer.

    Keep answers in a journal per part, in directory `where` of the run, until the part is done:
    each at once, or those of a wave together. A row of a journal is a list of answers.
    """
    part_of: dict[tuple[int, int], _Asked] = {}  # by row and sample, which later turns share
    wave_of: dict[tuple[int, int], _Wave] = {}

    def pass_on(request: AnswerRequest, answer: Answer | Failed | None) -> AnswerRequest | None:
        """Pass on the answer, if any, and the kept ones of the turns after it; return the request
        to ask next.
        """
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
        if (wave := wave_of.pop(request.key[:2], None)) is not None:
            wave.open -= 1
            if not wave.open and wave.rows:
                part.journal.append(wave.rows)
        del part_of[request.key[:2]]
        part.open -= 1
        if not part.open:
            part.journal.remove()
        return None

    def missing() -> Iterator[Sequence[AnswerRequest]]:
        for number, requests in parts:
            journal = run.journal(f"{where}.part-{number:05d}.answers.jsonl")
            part = _Asked(journal, {}, len(requests))
            for key, prompt, ids, reason, tokens_from, teacher in (
                answer for row in journal.rows for answer in row
            ):
                packed = None if teacher is None else base64.b64decode(teacher)
                part.answers[tuple(key)] = prompt, Answer(tuple(ids), reason, tokens_from, packed)
            part_of.update({request.key[:2]: part for request in requests})
            size = engine.wave or len(requests)
            for start in range(0, len(requests), size):
                left = [pass_on(request, None) for request in requests[start : start + size]]
                if group := [request for request in left if request is not None]:
                    if engine.wave is not None:
                        wave = _Wave(len(group))
                        wave_of.update({request.key[:2]: wave for request in group})
                    yield group

    def answered(request: AnswerRequest, answer: Answer | Failed) -> AnswerRequest | None:
        place = request.key[:2]
        if isinstance(answer, Answer):
            teacher = None if answer.teacher is None else base64.b64encode(answer.teacher).decode()
            ids, reason, prompt = (
                answer.response_ids,
                answer.finish_reason,
                content_id(request.prompt_ids),
            )
            row = [request.key, prompt, ids, reason, answer.tokens_from, teacher]
            if place in wave_of:
                wave_of[place].rows.append(row)
            else:
                part_of[place].journal.append([row])
        return pass_on(request, answer)

    try:
        engine.run(missing(), answered)
    finally:
        for part in part_of.values():
            part.journal.close()
