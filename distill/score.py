"""Teacher rows: the target's top-k tokens and the remaining mass at every token of an answer,
without generating.

Legend: P prompt tokens, R response tokens, C positions of a chunk, V vocabulary, K kept tokens.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow.parquet as pq
import torch
from transformers import PreTrainedModel

from draftsmith.core.distilled_sets import described, set_file
from draftsmith.core.errors import InputError, RunError, without_secrets
from draftsmith.core.io import JsonObject, hash_json, read_json, read_manifest
from draftsmith.core.launcher import join_processes
from draftsmith.core.models import (
    check_tokenizer,
    context_length,
    dtype_name,
    eos_ids,
    fingerprint,
    load_model,
    vocabulary_size,
)
from draftsmith.core.options import command_line, configured
from draftsmith.core.progress import progress
from draftsmith.core.prompt_rows import (
    Record,
    count_rows,
    digest_of,
    iterate_records,
    parse_record,
    text_of,
)
from draftsmith.core.prompts import Skipped, answers, content_id
from draftsmith.core.ranks import groups, own_group
from draftsmith.core.runs import Run
from draftsmith.core.settings import loading, tokenizing
from draftsmith.core.teacher_rows import bytes_per_token, pack
from draftsmith.core.template_date import fix_date
from draftsmith.core.token_rows import ID_KEYS
from draftsmith.core.tokenization import (
    Tokenizer,
    check_vocabulary,
    load_tokenizer,
    tokenizer_digest,
)
from draftsmith.distill.config import ScoreConfig
from draftsmith.distill.manifest import SET_FORMAT, kept_date, make_set
from draftsmith.distill.parts import (
    SCHEMA,
    TEACHER_SCHEMA,
    PartSummary,
    SetRow,
    prompts_of_finished,
    write_part,
)

# Bounds the memory of the float64 copy of a chunk's logits.
_CHUNK_VALUES = 2**24


@torch.inference_mode()
def score(
    model: PreTrainedModel, prompt_ids: Sequence[int], response_ids: Sequence[int], k: int
) -> bytes:
    """Return the top k tokens at every token of an answer, packed as in
    `draftsmith.core.teacher_rows`.

    Log-probabilities are at temperature 1 over the whole vocabulary. Rows do not depend on a batch.
    Without a prompt nothing predicts the first token; its row, which training skips, repeats the
    second's. Raise RunError if logits are not finite.
    """
    ids_1T = torch.tensor([[*prompt_ids, *response_ids]], device=model.device)
    # The last position predicts what follows the answer. Some models ignore `logits_to_keep` and
    # return all positions.
    length = len(response_ids)
    # Without a mask some take a token that equals their padding for padding (XLM).
    output = model(
        input_ids=ids_1T,
        attention_mask=torch.ones_like(ids_1T),
        use_cache=False,
        logits_to_keep=length + 1,
    )
    logits_TV = output.logits[0]
    if prompt_ids:
        logits_RV = logits_TV[-length - 1 : -1]
    else:
        logits_RV = logits_TV[[0, *range(length - 1)]]
    if not logits_RV.amax(-1).isfinite().all():
        raise RunError(
            f"{model.name_or_path}: gives logits that are NaN or infinite on an answer; try "
            "--dtype float32"
        )
    vocabulary = logits_RV.shape[-1]
    ids, logprobs, tails = [], [], []
    for logits_CV in logits_RV.split(max(1, _CHUNK_VALUES // vocabulary)):
        top = logits_CV.double().log_softmax(-1).topk(min(k, vocabulary), dim=-1)
        tail_C = (1 - top.values.exp().sum(-1)).clamp_min(0)
        ids.append(top.indices.cpu().numpy())
        logprobs.append(top.values.cpu().numpy())
        tails.append(tail_C.cpu().numpy())
    return pack(np.concatenate(ids), np.concatenate(logprobs), np.concatenate(tails), vocabulary)


@dataclass(frozen=True)
class NumberedRow:
    """The answers to score in a row, with its number in its file or set.

    Each answer's prompt holds the earlier answers. left_out: the reason of each that is not scored.
    """

    number: int
    answers: list[SetRow]
    left_out: Sequence[str] = ()


@dataclass(frozen=True)
class AnswerPart:
    """Rows that become one part. digest: of what they are read from. read: give the rows, with the
    reasons of those that cannot be read.
    """

    digest: str
    read: Callable[[], Iterable[NumberedRow | Skipped]]


@dataclass(frozen=True)
class Answers:
    """The answers to score.

    identity: of the file or set, for the run. count: number of rows, None if unknown. config:
    options that the manifest records. date: what the chat template printed, if it prints one.
    """

    identity: JsonObject
    count: int | None
    config: JsonObject
    parts: Iterator[AnswerPart]
    date: str | None


def score_set(
    config: ScoreConfig | None = None, command: str | None = None, **options: Any
) -> JsonObject:
    """Write the scored set, or resume a killed run's; return its summary. Raise InputError for
    answers or a target that cannot be read, RunError for a run that failed.

    command: the command line to record.
    """
    config = configured(ScoreConfig, config, options)
    with Run(config.out) as run:
        out = run.out
        join_processes(config.device, config)
        tokenizer = load_tokenizer(config.target, **tokenizing(config))
        model = load_model(config.target, **loading(config))
        check_tokenizer(config.target, model, tokenizer)
        if Path(config.score).is_dir():
            answers = _of_set(Path(config.score), tokenizer)
        else:
            date = fix_date(tokenizer, config.date, kept_date(out))
            answers = _of_file(config, tokenizer, eos_ids(model), date)
        size = vocabulary_size(model)
        choices = answers.config | {
            "target": config.target,
            "teacher_top_k": config.teacher_top_k,
        }
        identity = {
            "config": choices,
            **({} if answers.date is None else {"date": answers.date}),
            "scored": answers.identity,
            "tokenizer": tokenizer_digest(tokenizer),
            "target_fingerprint": fingerprint(model),
            "target_dtype": dtype_name(model),
        }
        manifest = make_set(
            run,
            command or command_line("distill", config),
            identity,
            lambda: _score_parts(answers, config, model),
            tokenizer=tokenizer,
            inputs={"target": config.target, "score": config.score},
        )
        return {
            "out": config.out,
            **manifest["counts"],
            "response_tokens": manifest["response_tokens"],
            "skipped_because": manifest["skipped_because"],
            "dropped_because": manifest["dropped_because"],
            "texts": described(manifest),
            "bytes_per_token": bytes_per_token(min(config.teacher_top_k, size), size),
        }


def _score_parts(answers: Answers, config: ScoreConfig, model: PreTrainedModel) -> int:
    """Write the parts of this process that are not finished; return the number of all parts."""
    out = Path(config.out)
    count = answers.count if groups() == 1 else None
    parts = 0
    with progress("score", count) as advance:
        for index, part in enumerate(answers.parts):
            parts += 1
            if index % groups() != own_group():
                continue
            finished = prompts_of_finished(out, index, part.digest, config.score)
            if finished is None:
                rows = list(part.read())
                finished = len(rows)
                summary = PartSummary(
                    read=finished,
                    digest=part.digest,
                    skipped=[],
                    failed=[],
                    shortened=[],
                    dropped=[],
                )
                scored = _scored(rows, summary, model, config.teacher_top_k)
                write_part(out, index, summary, scored, TEACHER_SCHEMA)
            advance(finished, "")
    return parts


def _scored(
    rows: list[NumberedRow | Skipped], summary: PartSummary, model: PreTrainedModel, k: int
) -> list[SetRow]:
    """Return the answers of rows with their teacher rows; put the others into the summary."""
    scored: list[SetRow] = []
    for row in rows:
        if isinstance(row, Skipped):
            summary["skipped"].append((row.row, row.reason))
        elif reason := _why_not_scored(row.answers[-1], model):
            summary["skipped"].append((row.number, reason))
        else:
            summary["dropped"] += [(row.number, left_out) for left_out in row.left_out]
            for answer in row.answers:
                teacher = score(model, answer["prompt_ids"], answer["response_ids"], k)
                scored.append({**answer, "teacher": teacher})
    return scored


def _why_not_scored(row: SetRow, model: PreTrainedModel) -> str:
    """Return the reason to skip a row, "" to score it."""
    tokens = [*row["prompt_ids"], *row["response_ids"]]
    longest = context_length(model)
    size = vocabulary_size(model)
    if not row["response_ids"]:
        return "no answer"
    if longest is not None and len(tokens) > longest:
        return f"{len(tokens)} tokens, more than the {longest} that fit"
    if not all(0 <= token < size for token in tokens):
        return f"holds a token that the target, with {size}, does not have"
    return ""


def _set_rows(directory: Path, part: JsonObject, first: int) -> Iterator[NumberedRow]:
    """Read a part of a distilled set. first: number of its first row."""
    stored_rows = pq.read_table(set_file(directory, part)).to_pylist()
    for number, stored in enumerate(stored_rows, first):
        row = {name: stored.get(name) for name in SCHEMA.names}
        yield NumberedRow(number, [cast(SetRow, row)])


def _of_set(directory: Path, tokenizer: Tokenizer) -> Answers:
    file = directory / "manifest.json"
    if read_json(file, "the manifest of a finished distilled set").get("format") != SET_FORMAT:
        raise InputError(f"{directory}: its manifest.json is not that of a distilled set")
    manifest = read_manifest(directory)
    check_vocabulary(tokenizer, manifest.get("vocabulary", {}), str(directory))
    parts = []
    first = 1
    for part in manifest["parts"]:
        rows = partial(_set_rows, directory, part, first)
        parts.append(AnswerPart(part["sha256"], rows))
        first += part["rows"]
    made = manifest.get("identity", {})
    fingerprint = made.get("target_fingerprint")
    identity = {"set": hash_json(manifest["parts"]), "target_fingerprint": fingerprint}
    return Answers(identity, first - 1, manifest.get("config", {}), iter(parts), made.get("date"))


def _of_file(
    config: ScoreConfig, tokenizer: Tokenizer, ends: Sequence[int], date: str | None
) -> Answers:
    def parts() -> Iterator[AnswerPart]:
        records = iterate_records(config.score)
        while group := list(islice(records, config.part_rows)):
            read = partial(map, partial(_row, tokenizer=tokenizer, ends=ends), group)
            yield AnswerPart(digest_of(group), read)

    name = without_secrets(config.score)
    # What is known of answers that `distill` made is unknown here.
    unknown = ("num_samples", "max_new_tokens", "temperature", "top_p", "top_k", "seed")
    known = {"prompts": name, "part_rows": config.part_rows}
    return Answers(
        {"file": name}, count_rows(config.score), dict.fromkeys(unknown) | known, parts(), date
    )


def _row(record: Record, tokenizer: Tokenizer, ends: Sequence[int]) -> NumberedRow | Skipped:
    """Return the answers in a row of a file, or why it cannot be read."""
    try:
        stored = parse_record(record)
        cut = answers(stored, tokenizer, ends)
    except InputError as error:
        return Skipped(record.number, str(error))
    own_id = text_of(stored, "id")
    from_target = any(stored.get(key) is not None for key in ID_KEYS)
    rows = []
    for turn, answer in enumerate(cut.kept):
        prompt, response = answer.prompt_ids, answer.answer_ids
        numbered_id = f"{own_id}-{turn}" if turn else own_id
        row = SetRow(
            id=numbered_id if own_id else content_id([*prompt, *response]),
            prompt_id=own_id or content_id(prompt),
            prompt_hash=content_id(cut.kept[-1].prompt_ids),
            asked=f"{answer.asked:016x}",
            domain=text_of(stored, "domain") or "default",
            prompt_ids=prompt,
            response_ids=response,
            finish_reason="stop" if response and response[-1] in ends else "length",
            temperature=None,
            seed=None,
            sample_index=0,
            turn=turn,
            tokens_from="target" if from_target else "text",
        )
        rows.append(row)
    return NumberedRow(record.number, rows, cut.left_out)
