"""Answers of unfinished parts, written as they come, for engines whose answers are expensive.

A killed run reads them back, so no server is asked twice for the same answer.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from distill.engines import Answer, AnswerRequest, Done, Engine, Failed
from draftsmith_core.errors import InputError
from draftsmith_core.io import canonical_json, writing
from draftsmith_core.prompts import content_id

# The number of a part, and its requests.
Numbered = tuple[int, Sequence[AnswerRequest]]


def ask(engine: Engine, directory: Path, parts: Iterator[Numbered], done: Done) -> None:
    """Run `engine` over the requests of `parts`; if it keeps answers, keep them in `directory` until a part is done."""
    if not engine.keeps_answers:
        engine.run((requests for _, requests in parts), done)
        return
    kept = _Kept(directory, done)
    try:
        engine.run(kept.missing(parts), kept.answered)
    finally:
        for part in kept.parts.values():
            part.file.close()


class _Part:
    """The file of one part, a line per answer. open: number of requests without an outcome."""

    def __init__(self, path: Path, requests: int) -> None:
        self.path, self.open = path, requests
        text = path.read_bytes() if path.exists() else b""
        whole = text[: text.rfind(b"\n") + 1]  # the last line may be cut short
        self.answers: dict[tuple[int, int, int], tuple[str, Answer]] = {}
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                key, prompt, ids, *rest = json.loads(line)
                self.answers[tuple(key)] = (prompt, Answer(tuple(ids), *rest))
            except (ValueError, TypeError):
                raise InputError(f"{path}:{number}: damaged; delete the file to ask its rows again") from None
        with writing(path):
            self.file = path.open("ab")
            self.file.truncate(len(whole))

    def pop(self, request: AnswerRequest) -> Answer | None:
        prompt, answer = self.answers.pop(request.key, ("", None))
        return answer if prompt == content_id(request.prompt_ids) else None

    def append(self, request: AnswerRequest, answer: Answer) -> None:
        line = [request.key, content_id(request.prompt_ids), answer.response_ids, answer.finish_reason]
        with writing(self.path):
            self.file.write(canonical_json([*line, answer.tokens_from]).encode() + b"\n")
            self.file.flush()


class _Kept:
    """The parts that are being asked, by row and sample of their requests, which later turns share."""

    def __init__(self, directory: Path, done: Done) -> None:
        self.directory, self.done = directory, done
        self.parts: dict[tuple[int, int], _Part] = {}

    def missing(self, parts: Iterator[Numbered]) -> Iterator[Sequence[AnswerRequest]]:
        """Yield the requests of each part that have no kept answer."""
        for number, requests in parts:
            part = _Part(self.directory / f".part-{number:05d}.answers.jsonl", len(requests))
            self.parts |= {request.key[:2]: part for request in requests}
            missing = [self._first_missing(part, request) for request in requests]
            if group := [request for request in missing if request is not None]:
                yield group

    def answered(self, request: AnswerRequest, answer: Answer | Failed) -> AnswerRequest | None:
        """Keep the answer, pass it on and return the next request without a kept answer."""
        part = self.parts[request.key[:2]]
        if isinstance(answer, Answer):
            part.append(request, answer)
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
                part.file.close()
                part.path.unlink()
        return following
