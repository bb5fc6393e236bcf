"""A distilled set from prompts: read, tokenise, ask, write.

Groups of consecutive rows become parts. The options alone decide which rows a part has, whatever
the number of processes or kills.
"""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from distill.asking import Numbered, ask
from distill.config import DistillConfig
from distill.conversations import answer_text, switch_thinking_off, turn_prompt
from distill.engines import ENGINES, Answer, AnswerRequest, Engine, Failed, at_temperature
from distill.filters import WORDS, Suites, why_dropped
from distill.manifest import RECORDS, check_empty, copy_set, count_kept, finish
from distill.own_prompts import draw_prompts, find_opening
from distill.parts import SCHEMA, TEACHER, Part, check_digest
from draftsmith_core import options
from draftsmith_core.errors import InputError, counted
from draftsmith_core.hub import check_push, pushed
from draftsmith_core.io import canonical_json, hash_json, read_json, write_text_atomic
from draftsmith_core.launcher import join_processes
from draftsmith_core.options import configured
from draftsmith_core.progress import Advance, progress
from draftsmith_core.prompt_rows import (
    KEYS,
    Record,
    count_rows,
    digest_of,
    iterate_records,
    parse_record,
)
from draftsmith_core.prompts import Prompt, PromptReader, Skipped, content_id
from draftsmith_core.ranks import on_main
from draftsmith_core.runs import Run, command_line
from draftsmith_core.sampling import row_seed
from draftsmith_core.settings import tokenizing
from draftsmith_core.signals import Terminated
from draftsmith_core.teacher_rows import COLUMN
from draftsmith_core.tokenization import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from accelerate import PartialState

# Keys of the manifest that the summary repeats.
_SUMMARY = ["response_tokens", "tokens_from", "own_prompts"]
_SUMMARY += ["skipped_because", "failed_because", "shortened_because", "dropped_because"]


def distill(
    config: DistillConfig | None = None, command: str | None = None, **options: Any
) -> dict[str, Any]:
    """Make the distilled set, or resume one that a killed run left; return its summary.

    command: the command line to record, by default the one of `config`. Raise InputError for
    invalid input and RunError for failures of the run.
    """
    config = configured(DistillConfig, config, options)
    if config.push_to_hub is not None:
        check_push(config.push_to_hub)
    try:
        with Run(config.out) as run:
            processes = join_processes(config.device)
            tokenizer = load_tokenizer(config.target, **tokenizing(config))
            if config.thinking == "drop":
                switch_thinking_off(tokenizer)
            with closing(ENGINES[config.engine](config, tokenizer)) as engine:
                return _distill(
                    config,
                    engine,
                    tokenizer,
                    command or command_line("distill", config),
                    run,
                    processes,
                )
    except (KeyboardInterrupt, Terminated) as stop:
        if answers := count_kept(Path(config.out)):
            stop.add_note(
                f"kept {counted(answers, 'answer')}; run the same command again to resume"
            )
        raise


def _distill(
    config: DistillConfig,
    engine: Engine,
    tokenizer: Tokenizer,
    command: str,
    run: Run,
    processes: "PartialState",
) -> dict[str, Any]:
    out = run.out
    reader = PromptReader(
        config.prompts,
        tokenizer,
        config.domain,
        config.prompt_tokens,
        max_tokens=engine.max_prompt_tokens,
        whole_chats=config.turns == "last",
    )
    suites = Suites(config.decontaminate) if config.decontaminate else None
    process = processes.process_index, processes.num_processes
    parts = _Parts(config, config.prompts, engine, reader, suites, run, *process)
    opening = find_opening(config, engine, tokenizer)
    if opening is None:
        parts.check_usable()
    # A chat template counts by its content, not by the name of its file.
    choices = options.identity(config) | dataclasses.asdict(engine.sampling.sampling)
    del choices["chat_template"]
    template = hash_json(tokenizer.chat_template)[:16] if tokenizer.chat_template else None
    identity = {"config": choices, **engine.identity, "chat_template": template}
    if suites is not None:
        identity["decontaminated"] = suites.digest
    on_main(lambda: check_empty(out))
    run.begin(identity, RECORDS)
    if config.thinking == "drop":
        on_main(
            lambda: write_text_atomic(out / "chat_template.jinja", str(tokenizer.chat_template))
        )
    if opening is not None:
        prompts = draw_prompts(opening, config, engine, tokenizer, run, processes)
        parts.source, parts.reader = str(prompts), dataclasses.replace(reader, source=str(prompts))
    parts.make()
    processes.wait_for_everyone()
    on_main(lambda: finish(out, parts.count, identity, command, tokenizer))
    manifest = read_json(out / "manifest.json", "the manifest that this run has written")
    copies = copy_set(out, config.copy_to) | pushed(out, config.push_to_hub, "dataset")
    return {
        "out": config.out,
        **manifest["counts"],
        **{key: manifest[key] for key in _SUMMARY},
        "sampling": dataclasses.asdict(engine.sampling.sampling),
        "sampling_from_target": engine.sampling.note,
        **copies,
    }


@dataclasses.dataclass
class _Parts:
    """The parts that this process makes: `process`, `process + processes`, `process + 2 *
    processes`, ...

    source: where prompts are opened. `reader.source` is the same without secrets, for messages.
    """

    config: DistillConfig
    source: str
    engine: Engine
    reader: PromptReader
    suites: Suites | None
    run: Run
    process: int
    processes: int
    count: int = 0  # of all processes, known once the source has been read to its end
    tokens: int = 0
    part_of: dict[int, Part] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.group_rows = max(1, self.config.part_rows // self.config.num_samples)
        self.schema = pa.schema([*SCHEMA, *TEACHER]) if self.config.teacher_top_k else SCHEMA
        self.mixture = self.config.mixture()
        self.advance: Advance

    def check_usable(self) -> None:
        """Raise InputError if the source has no usable prompt."""
        reason, number = f"a row needs one of the keys {', '.join(KEYS)}", 0
        for number, record in enumerate(self._records(), 1):
            row = self._read(record)
            if isinstance(row, Prompt):
                return
            if number == 1:
                reason = f"row {row.row}: {row.reason}"
        raise InputError(f"{self.reader.source}: none of its {number} rows can be used ({reason})")

    def _records(self) -> Iterator[Record]:
        return islice(iterate_records(self.source), self.config.max_prompts)

    def _read(self, record: Record) -> Prompt | Skipped:
        """Read the prompt of a row. Skip it if it shares words with a suite or (not `strict`) is
        broken.
        """
        source = self.reader.source
        try:
            prompt = self.reader.read(record)
        except InputError as error:
            if self.config.strict:
                raise
            return Skipped(record.number, str(error).removeprefix(f"{source}:{record.number}: "))
        if self.suites is not None and isinstance(prompt, Prompt):
            if (name := self.suites.shared_with(parse_record(record, source))) is not None:
                return Skipped(
                    record.number, f"shares {WORDS} words in a row with the evaluation's {name}"
                )
        return prompt

    def make(self) -> None:
        """Make every part that is not finished."""
        rows = count_rows(self.source)
        if rows is not None:
            numbers = range(min(rows, self.config.max_prompts or rows))
            rows = sum(
                number // self.group_rows % self.processes == self.process for number in numbers
            )
        with progress("distill", rows) as self.advance:
            ask(self.engine, self.run, self._groups(), self._record)

    def _groups(self) -> Iterator[Numbered]:
        """Yield number and requests of each part to make; check a finished part against the
        prompts.
        """
        records = self._records()
        while group := list(islice(records, self.group_rows)):
            index, self.count = self.count, self.count + 1
            if index % self.processes != self.process:
                continue
            digest = digest_of(group)
            if (
                finished := check_digest(self.run.out, index, digest, self.reader.source)
            ) is not None:
                self.advance(finished, "")
            elif requests := self._open(index, digest, group):
                yield index, requests

    def _open(self, index: int, digest: str, group: list[Record]) -> list[AnswerRequest]:
        """Begin a part: read its prompts, and return what to ask first."""
        rows = [self._read(record) for record in group]
        prompts = {row.row: row for row in rows if isinstance(row, Prompt)}
        skipped = [row for row in rows if isinstance(row, Skipped)]
        part = Part(index, digest, len(group), skipped, prompts)
        self.part_of |= dict.fromkeys(prompts, part)
        requests: list[AnswerRequest] = []
        for prompt in prompts.values():
            samples = [
                self._request(prompt, sample, 0) for sample in range(self.config.num_samples)
            ]
            if first := [request for request in samples if request is not None]:
                requests += first
                part.left[prompt.row] = len(samples)
            else:
                part.skipped.append(Skipped(prompt.row, part.shortened.pop(prompt.row)))
        self.advance(len(part.skipped), "")
        if not part.left:
            part.write(self.run.out, self.schema)
        return requests

    def _request(self, prompt: Prompt, sample: int, turn: int) -> AnswerRequest | None:
        """Return the request for a turn (0 is the first); None if there is no such turn or it does
        not fit.
        """
        ids: Sequence[int] | None = prompt.ids if turn == 0 else None
        if prompt.chat is not None and self.config.turns == "all":
            part, tokenizer, most = (
                self.part_of[prompt.row],
                self.reader.tokenizer,
                self.engine.max_prompt_tokens,
            )
            answers = [
                part.rows[prompt.row, sample, earlier]["response_ids"] for earlier in range(turn)
            ]
            try:
                texts = [answer_text(tokenizer, answer) for answer in answers]
                ids = turn_prompt(prompt.chat, texts, tokenizer, f"turn {turn + 1}")
                if ids is not None and most is not None and len(ids) > most:
                    raise InputError(
                        f"turn {turn + 1}: {len(ids)} tokens, more than the {most} that fit"
                    )
            except InputError as error:
                part.shortened.setdefault(prompt.row, str(error))
                return None
        if ids is None:
            return None
        # Prompts without an explicit id may repeat; each row needs its own seed, hence the row
        # number.
        name = f"{prompt.id}/{sample}" if prompt.own_id else f"{prompt.id}/{prompt.row}/{sample}"
        seed = row_seed(self.config.seed, f"{name}/{turn}" if turn else name)
        return AnswerRequest((prompt.row, sample, turn), tuple(ids), seed, self._temperature(name))

    def _temperature(self, name: str) -> float | None:
        """Choose the temperature of a sample from the mixture, for all its turns; None without a
        mixture.
        """
        point = row_seed(self.config.seed, f"temperature of {name}") / 2**63
        return next((value for value, upto in self.mixture if point <= upto), None)

    def _record(self, request: AnswerRequest, answer: Answer | Failed) -> AnswerRequest | None:
        """Put an answer into its part; write a complete part. Return the request for the next turn,
        if any.
        """
        number, sample, turn = request.key
        part, following = self.part_of[number], None
        if isinstance(answer, Failed):
            part.failed.setdefault(number, answer.reason)
        else:
            prompt = part.prompts[number]
            content = canonical_json([prompt.id, list(request.prompt_ids), list(request.key)])
            part.rows[request.key] = {
                "id": hashlib.sha256(content.encode()).hexdigest()[:16],
                "prompt_id": prompt.id,
                "prompt_hash": content_id(prompt.ids),
                "domain": prompt.domain,
                "prompt_ids": request.prompt_ids,
                "response_ids": answer.response_ids,
                "finish_reason": answer.finish_reason,
                "temperature": at_temperature(
                    self.engine.sampling.sampling, request.temperature
                ).temperature,
                "seed": request.seed,
                "sample_index": sample,
                "turn": turn,
                "tokens_from": answer.tokens_from,
            }
            self.tokens += len(answer.response_ids)
            if why := why_dropped(self.config, self.reader.tokenizer, answer):
                part.dropped[request.key] = why
            elif answer.teacher is not None:
                part.rows[request.key][COLUMN] = answer.teacher
            following = self._request(prompt, sample, turn + 1)
        if following is not None:
            return following
        part.left[number] -= 1
        if not part.left[number]:
            del part.left[number], self.part_of[number]
            self.advance(1, f"{self.tokens:,} tokens")
        if not part.left:
            part.write(self.run.out, self.schema)
        return None
