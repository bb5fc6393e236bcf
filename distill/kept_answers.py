"""Answers of parts that are not whole yet, kept as they come by engines whose answers are worth it.

A run that was killed finds them again, so that nothing that a server has answered is asked twice.
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
    """`engine.run` over the requests of `parts`, whose answers stand in `directory` until `done` has had the last of
    their part, where the engine keeps answers.
    """
    if not engine.keeps_answers:
        engine.run((requests for _, requests in parts), done)
        return
    kept = _Kept(directory, done)
    try:
        engine.run(kept.left(parts), kept.answered)
    finally:
        for part in kept.of.values():
            part.file.close()


class _Part:
    """The answers of a part: those that were found, and the file that the others are put into. `left`: how many of its
    requests are not done, with all turns that follow them.

    A line of the file counts for the request with its key and prompt; one that was cut short does not count.
    """

    def __init__(self, path: Path, left: int) -> None:
        self.path, self.left = path, left
        text = path.read_bytes() if path.exists() else b""
        whole = text[: text.rfind(b"\n") + 1]
        self.found: dict[tuple[int, int, int], tuple[str, Answer]] = {}
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                key, prompt, ids, *rest = json.loads(line)
                self.found[tuple(key)] = (prompt, Answer(tuple(ids), *rest))
            except (ValueError, TypeError):
                raise InputError(
                    f"{path}:{number}: was damaged; delete the file, and its rows are asked again"
                ) from None
        with writing(path):
            self.file = path.open("ab")
            self.file.truncate(len(whole))

    def get(self, request: AnswerRequest) -> Answer | None:
        """The answer to a request, if it was kept."""
        prompt, answer = self.found.pop(request.key, ("", None))
        return answer if prompt == content_id(request.prompt_ids) else None

    def keep(self, request: AnswerRequest, answer: Answer) -> None:
        """Append one answer."""
        line = [request.key, content_id(request.prompt_ids), answer.response_ids, answer.finish_reason]
        with writing(self.path):
            self.file.write(canonical_json([*line, answer.tokens_from]).encode() + b"\n")
            self.file.flush()


class _Kept:
    """The parts that are being asked. `of`: by row and sample of a request, which its later turns share."""

    def __init__(self, directory: Path, done: Done) -> None:
        self.directory, self.done = directory, done
        self.of: dict[tuple[int, int], _Part] = {}

    def left(self, parts: Iterator[Numbered]) -> Iterator[Sequence[AnswerRequest]]:
        """The requests of each part that no kept answer is for."""
        for number, requests in parts:
            part = _Part(self.directory / f".part-{number:05d}.answers.jsonl", len(requests))
            self.of |= {request.key[:2]: part for request in requests}
            if left := [each for request in requests if (each := self._not_kept(part, request)) is not None]:
                yield left

    def answered(self, request: AnswerRequest, answer: Answer | Failed) -> AnswerRequest | None:
        """As `done`, after keeping the answer."""
        part = self.of[request.key[:2]]
        if isinstance(answer, Answer):
            part.keep(request, answer)
        return self._not_kept(part, self._after(part, request, answer))

    def _not_kept(self, part: _Part, request: AnswerRequest | None) -> AnswerRequest | None:
        """The request, or what follows once the answers that were kept are taken; None when nothing does."""
        while request is not None and (answer := part.get(request)) is not None:
            request = self._after(part, request, answer)
        return request

    def _after(self, part: _Part, request: AnswerRequest, answer: Answer | Failed) -> AnswerRequest | None:
        after = self.done(request, answer)
        if after is None:
            del self.of[request.key[:2]]
            part.left -= 1
            if not part.left:
                part.file.close()
                part.path.unlink()
        return after
