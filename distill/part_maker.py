"""Prompts to parts: read, ask, write.

Groups of consecutive rows become parts. The options alone decide which rows a part has, whatever
the number of processes or kills.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from draftsmith.core.asked_hash import asked_in_chat
from draftsmith.core.chats import Chat
from draftsmith.core.errors import InputError
from draftsmith.core.io import canonical_json
from draftsmith.core.progress import Advance, progress
from draftsmith.core.prompt_rows import Record, digest_of
from draftsmith.core.prompts import Prompt, Skipped, content_id
from draftsmith.core.ranks import groups, own_group
from draftsmith.core.sampling import row_seed
from draftsmith.core.tokenization import Tokenizer
from draftsmith.distill.asking import Asking, PartRequests
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.conversations import answer_text, answered_turns, turn_prompt
from draftsmith.distill.engines import Answer, AnswerRequest, Engine, Failed, Key
from draftsmith.distill.filters import why_dropped
from draftsmith.distill.parts import SCHEMA, TEACHER_SCHEMA, Part, SetRow, prompts_of_finished
from draftsmith.distill.prompt_sources import PromptSource


@dataclass(frozen=True)
class Job:
    """What a distillation works with. date: what the chat template prints, if it prints one."""

    config: DistillConfig
    engine: Engine
    tokenizer: Tokenizer
    date: str | None = None

    @property
    def group_rows(self) -> int:
        """Number of prompts of a part."""
        return max(1, self.config.part_rows // self.config.num_samples)


def make_parts(job: Job, prompts: PromptSource, out: Path, title: str) -> int:
    """Make every part of this process that is not finished; return the number of all parts."""
    rows = prompts.count()
    if rows is not None:
        starts = range(0, rows, job.group_rows)
        own = starts[own_group() :: groups()]
        rows = sum(min(job.group_rows, rows - start) for start in own)
    with progress(title, rows) as advance:
        maker = _PartMaker(job, prompts, out, advance)
        Asking(job.engine, out, maker.take_answer).run(maker.unfinished())
    return maker.count


class _PartMaker:
    """Parts number i, i + n, i + 2 n, ... in process i of n.

    count: number of parts of all processes that were met so far.
    """

    def __init__(self, job: Job, prompts: PromptSource, out: Path, advance: Advance) -> None:
        self._job = job
        self._prompts = prompts
        self._out = out
        self._advance = advance
        self._schema = TEACHER_SCHEMA if job.config.teacher_top_k else SCHEMA
        self._mixture = job.config.mixture()
        self._part_of: dict[int, Part] = {}  # by row
        self._tokens = 0
        self.count = 0

    def unfinished(self) -> Iterator[PartRequests]:
        """Yield the parts to make. Check a finished part against the prompts."""
        records = self._prompts.records()
        while group := list(islice(records, self._job.group_rows)):
            index = self.count
            self.count += 1
            if index % groups() != own_group():
                continue
            digest = digest_of(group)
            finished = prompts_of_finished(self._out, index, digest, self._prompts.name)
            if finished is not None:
                self._advance(finished, "")
                continue
            requests = self._begin(index, digest, group)
            if requests:
                yield PartRequests(index, requests)

    def _begin(self, index: int, digest: str, group: list[Record]) -> list[AnswerRequest]:
        """Read the prompts of a part; return what to ask first."""
        read = [self._prompts.read(record) for record in group]
        prompts = {each.row: each for each in read if isinstance(each, Prompt)}
        skipped = [each for each in read if isinstance(each, Skipped)]
        part = Part(index, digest, len(group), skipped, prompts)
        self._part_of |= dict.fromkeys(prompts, part)
        first = []
        count = self._job.config.num_samples
        for prompt in prompts.values():
            # The first turn is the same for all samples.
            ids = self._turn_ids(prompt, Key(prompt.row, 0, 0))
            if ids is None:
                part.skipped.append(Skipped(prompt.row, part.shortened.pop(prompt.row)))
                continue
            keys = [Key(prompt.row, sample, 0) for sample in range(count)]
            first += [self._request(prompt, key, ids) for key in keys]
            part.left[prompt.row] = count
        self._advance(len(part.skipped), "")
        if not part.left:
            part.write(self._out, self._schema)
        return first

    def _request(self, prompt: Prompt, key: Key, ids: Sequence[int]) -> AnswerRequest:
        name = self._prompts.sample_name(prompt, key.sample)
        seed = row_seed(self._job.config.seed, f"{name}/{key.turn}" if key.turn else name)
        # Of a mixture, one for all turns of a sample.
        point = row_seed(self._job.config.seed, f"temperature of {name}") / 2**63
        sampling = self._job.engine.sampling.sampling
        temperatures = (share.temperature for share in self._mixture if point <= share.upto)
        temperature = next(temperatures, sampling.temperature)
        return AnswerRequest(key, tuple(ids), seed, replace(sampling, temperature=temperature))

    def _turn_ids(self, prompt: Prompt, key: Key) -> Sequence[int] | None:
        """Return what a turn asks; None after the last turn. If it does not fit, return None and
        record why in `part.shortened`.
        """
        chat = self._answered_by_turns(prompt)
        if chat is None:
            return prompt.ids if key.turn == 0 else None
        tokenizer = self._job.tokenizer
        longest = self._job.engine.max_prompt_tokens
        part = self._part_of[prompt.row]
        rows = [part.rows[key._replace(turn=earlier)] for earlier in range(key.turn)]
        try:
            answers = [answer_text(tokenizer, row["response_ids"]) for row in rows]
            ids = turn_prompt(chat, answers, tokenizer)
            if ids is None and not key.turn:
                raise InputError("every assistant turn calls tools; none is the target's to answer")
            if ids is not None and longest is not None and len(ids) > longest:
                raise InputError(f"{len(ids)} tokens, more than the {longest} that fit")
        except InputError as error:
            part.shortened.setdefault(prompt.row, f"turn {key.turn + 1}: {error}")
            return None
        return ids

    def _answered_by_turns(self, prompt: Prompt) -> Chat | None:
        return None if self._job.config.turns == "last" else prompt.chat

    def take_answer(self, request: AnswerRequest, answer: Answer | Failed) -> AnswerRequest | None:
        """Put an answer into its part, and write a complete part; return the next request."""
        key = request.key
        part = self._part_of[key.row]
        following = None
        if isinstance(answer, Failed):
            part.failed.setdefault(key.row, answer.reason)
        else:
            self._keep(part, request, answer)
            prompt = part.prompts[key.row]
            after = key._replace(turn=key.turn + 1)
            ids = self._turn_ids(prompt, after)
            if ids is not None:
                following = self._request(prompt, after, ids)
        if following is None:
            part.left[key.row] -= 1
            if not part.left[key.row]:
                del part.left[key.row], self._part_of[key.row]
                self._advance(1, f"{self._tokens:,} tokens")
            if not part.left:
                part.write(self._out, self._schema)
        return following

    def _keep(self, part: Part, request: AnswerRequest, answer: Answer) -> None:
        key = request.key
        prompt = part.prompts[key.row]
        content = canonical_json([prompt.id, list(request.prompt_ids), list(key)])
        asked = prompt.asked
        if chat := self._answered_by_turns(prompt):
            # With the earlier answers that the prompts have.
            asked = asked_in_chat(chat.first(answered_turns(chat)[key.turn]))
        row = SetRow(
            id=hashlib.sha256(content.encode()).hexdigest()[:16],
            prompt_id=prompt.id,
            prompt_hash=content_id(prompt.ids),
            asked=f"{asked:016x}",
            domain=prompt.domain,
            prompt_ids=request.prompt_ids,
            response_ids=answer.response_ids,
            finish_reason=answer.finish_reason,
            temperature=request.sampling.temperature,
            seed=request.seed,
            sample_index=key.sample,
            turn=key.turn,
            tokens_from=answer.tokens_from,
        )
        part.rows[key] = row
        self._tokens += len(answer.response_ids)
        reason = why_dropped(self._job.config, self._job.tokenizer, answer)
        if reason:
            part.dropped[key] = reason
        elif answer.teacher is not None:
            row["teacher"] = answer.teacher
