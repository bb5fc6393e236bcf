"""Ask an engine for the answers of unfinished parts, and journal them, so that a killed run
resumes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from draftsmith.core.prompts import content_id
from draftsmith.core.runs import Journal
from draftsmith.distill.engines import (
    WAVE_BATCHES,
    Answer,
    AnswerRequest,
    Done,
    Engine,
    Failed,
    Groups,
    Key,
)


@dataclass(frozen=True)
class PartRequests:
    """The first request of each conversation of part number `index`."""

    index: int
    requests: Sequence[AnswerRequest]


@dataclass(frozen=True)
class KeptAnswer:
    """An answer that a journal keeps. prompt: `content_id` of the prompt that it answers."""

    key: Key
    prompt: str
    answer: Answer


# A row of a journal.
_KEPT = TypeAdapter(list[KeptAnswer])


@dataclass
class _OpenPart:
    """A part with unfinished conversations. kept: answers of an earlier run. open: how many."""

    journal: Journal
    kept: dict[Key, KeptAnswer]
    open: int

    def keep(self, answers: list[KeptAnswer]) -> None:
        self.journal.append(_KEPT.dump_python(answers, mode="json"))


@dataclass
class _Wave:
    """Conversations that are asked together. open: unfinished ones. answers: kept once it is 0."""

    open: int
    answers: list[KeptAnswer] = field(default_factory=list)


class Asking:
    """Answers of unfinished parts, journalled under `out` until their part is done.

    Each answer is journalled at once, or per wave if the engine has waves. A row of a journal is a
    list of answers.
    """

    def __init__(self, engine: Engine, out: Path, done: Done) -> None:
        self._engine = engine
        self._out = out
        self._done = done
        self._parts: dict[tuple[int, int], _OpenPart] = {}  # by conversation
        self._waves: dict[tuple[int, int], _Wave] = {}

    def run(self, parts: Iterator[PartRequests]) -> None:
        """Pass an outcome for every request to `done`; ask the engine for those not kept."""
        try:
            self._engine.run(self._groups(parts), self._answered)
        finally:
            for part in self._parts.values():
                part.journal.close()

    def _groups(self, parts: Iterator[PartRequests]) -> Groups:
        """Yield groups of requests without a kept answer."""
        for part in parts:
            journal = Journal(self._out / f".part-{part.index:05d}.answers.jsonl")
            kept: dict[Key, KeptAnswer] = {}
            for row in journal.rows:
                kept |= {answer.key: answer for answer in _KEPT.validate_python(row)}
            opened = _OpenPart(journal, kept, len(part.requests))
            self._parts |= {request.conversation: opened for request in part.requests}
            for requests in self._waves_of(part):
                left = [self._unanswered(request) for request in requests]
                group = [request for request in left if request is not None]
                if self._engine.wave is not None:
                    wave = _Wave(len(group))
                    self._waves |= {request.conversation: wave for request in group}
                if group:
                    yield group

    def _waves_of(self, part: PartRequests) -> Groups:
        """Cut a part into waves, by position. Waves of the first part grow from one batch, so that
        a run that is stopped early has kept something.
        """
        requests = part.requests
        largest = self._engine.wave or len(requests)
        size = largest if part.index else max(1, largest // WAVE_BATCHES)
        start = 0
        while start < len(requests):
            yield requests[start : start + size]
            start += size
            size = min(2 * size, largest)

    def _answered(self, request: AnswerRequest, answer: Answer | Failed) -> AnswerRequest | None:
        """Keep a new answer and pass it on; return the request to ask next."""
        if isinstance(answer, Answer):
            kept = KeptAnswer(request.key, content_id(request.prompt_ids), answer)
            wave = self._waves.get(request.conversation)
            if wave is not None:
                wave.answers.append(kept)
            else:
                self._parts[request.conversation].keep([kept])
        following = self._pass_on(request, answer)
        return None if following is None else self._unanswered(following)

    def _unanswered(self, request: AnswerRequest) -> AnswerRequest | None:
        """Pass on the kept answers from `request` on; return the first request without one."""
        kept = self._parts[request.conversation].kept
        following: AnswerRequest | None = request
        while following is not None:
            answer = kept.pop(following.key, None)
            if answer is None or answer.prompt != content_id(following.prompt_ids):
                break
            following = self._pass_on(following, answer.answer)
        return following

    def _pass_on(self, request: AnswerRequest, answer: Answer | Failed) -> AnswerRequest | None:
        following = self._done(request, answer)
        if following is None:
            self._end(request.conversation)
        return following

    def _end(self, conversation: tuple[int, int]) -> None:
        """Journal a complete wave, and remove the journal of a complete part."""
        part = self._parts.pop(conversation)
        wave = self._waves.pop(conversation, None)
        if wave is not None:
            wave.open -= 1
            if not wave.open and wave.answers:
                part.keep(wave.answers)
        part.open -= 1
        if not part.open:
            part.journal.remove()
