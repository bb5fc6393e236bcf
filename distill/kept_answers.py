"""Answers of unfinished parts, written as they come, for engines whose answers are expensive.

A killed run reads them back, so no server is asked twice for the same answer.
"""

from collections.abc import Iterator, Sequence

from distill.engines import Answer, AnswerRequest, Done, Engine, Failed
from draftsmith_core.prompts import content_id
from draftsmith_core.runs import Run

# The number of a part, and its requests.
Numbered = tuple[int, Sequence[AnswerRequest]]


def ask(engine: Engine, run: Run, parts: Iterator[Numbered], done: Done, where: str = "") -> None:
    """Run `engine` over the requests of `parts`.

    If the engine keeps answers, keep them in journals in directory `where` of the run until their part is done.
    """
    if not engine.keeps_answers:
        engine.run((requests for _, requests in parts), done)
        return
    kept = _Kept(run, where, done)
    try:
        engine.run(kept.missing(parts), kept.answered)
    finally:
        for part in kept.parts.values():
            part.journal.close()


class _Part:
    """The journal of one part, a row per answer. open: number of requests without an outcome."""

    def __init__(self, run: Run, name: str, requests: int) -> None:
        self.journal, self.open = run.journal(name), requests
        self.answers = {
            tuple(key): (prompt, Answer(tuple(ids), *rest)) for key, prompt, ids, *rest in self.journal.rows
        }

    def pop(self, request: AnswerRequest) -> Answer | None:
        prompt, answer = self.answers.pop(request.key, ("", None))
        return answer if prompt == content_id(request.prompt_ids) else None


class _Kept:
    """The parts that are being asked, by row and sample of their requests, which later turns share."""

    def __init__(self, run: Run, where: str, done: Done) -> None:
        self.run, self.where, self.done = run, where, done
        self.parts: dict[tuple[int, int], _Part] = {}

    def missing(self, parts: Iterator[Numbered]) -> Iterator[Sequence[AnswerRequest]]:
        """Yield the requests of each part that have no kept answer."""
        for number, requests in parts:
            part = _Part(self.run, f"{self.where}.part-{number:05d}.answers.jsonl", len(requests))
            self.parts |= {request.key[:2]: part for request in requests}
            missing = [self._first_missing(part, request) for request in requests]
            if group := [request for request in missing if request is not None]:
                yield group

    def answered(self, request: AnswerRequest, answer: Answer | Failed) -> AnswerRequest | None:
        """Keep the answer, pass it on and return the next request without a kept answer."""
        part = self.parts[request.key[:2]]
        if isinstance(answer, Answer):
            prompt, ids = content_id(request.prompt_ids), answer.response_ids
            part.journal.append([request.key, prompt, ids, answer.finish_reason, answer.tokens_from])
        return self._first_missing(part, self._pass_on(part, request, answer))

    def _first_missing(self, part: _Part, request: AnswerRequest | None) -> AnswerRequest | None:
        while request is not None and (answer := part.pop(request)) is not None:
            request = self._pass_on(part, request, answer)
        return request

    def _pass_on(self, part: _Part, request: AnswerRequest, answer: Answer | Failed) -> AnswerRequest | None:
        following = self.done(request, answer)
        if following is None:
            del self.parts[request.key[:2]]
            part.open -= 1
            if not part.open:
                part.journal.remove()
        return following
