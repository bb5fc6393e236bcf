"""The files of a distilled set: parts with the rows of a fixed number of prompts each, answers of
unfinished parts, and the manifest that the parts add up to.

The Parquet metadata records those prompts and why some gave nothing, so the parts alone add up to
the set. Answers are kept as they come, and the run that resumes reads them back.
"""

import base64
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from distill.engines import Answer, AnswerRequest, Done, Engine, Failed
from draftsmith_core.cards import distilled_set_card
from draftsmith_core.errors import InputError, RunError, one_line, without_secrets
from draftsmith_core.io import (
    atomic_file,
    canonical_json,
    hash_json,
    read_json,
    sha256_file,
    write_json_atomic,
    write_text_atomic,
    writing,
)
from draftsmith_core.prompts import Prompt, Reasons, Skipped, content_id
from draftsmith_core.ranks import on_main
from draftsmith_core.runs import Journal, Run, provenance
from draftsmith_core.teacher_rows import COLUMN
from draftsmith_core.tokenization import Tokenizer, vocabulary_sample

SCHEMA = pa.schema(
    [
        pa.field("id", pa.string()),
        pa.field("prompt_id", pa.string()),
        pa.field("prompt_hash", pa.string()),
        pa.field("domain", pa.string()),
        pa.field("prompt_ids", pa.list_(pa.int32())),
        pa.field("response_ids", pa.list_(pa.int32())),
        pa.field("finish_reason", pa.string()),
        pa.field("temperature", pa.float64()),
        pa.field("seed", pa.int64()),
        pa.field("sample_index", pa.int32()),
        pa.field("turn", pa.int32()),
        pa.field("tokens_from", pa.string()),
    ]
)
# With `teacher_top_k`.
TEACHER = [pa.field(COLUMN, pa.large_binary())]
_METADATA = b"draftsmith"
# Of prompts that the target wrote: the number of texts drawn, of those kept, and why the others
# were left out.
RECORD = "own_prompts.json"
KINDS = ("part-*.parquet", "empty-*.json")
# The number of a part, and its requests.
Numbered = tuple[int, Sequence[AnswerRequest]]
JOURNALS = (".part-*.answers.jsonl", ".prompts/.part-*.answers.jsonl")


def names_of(index: int) -> tuple[str, str]:
    """Return the file names of a part with rows, and of one without, because `datasets` refuses a
    file without rows.
    """
    return f"part-{index:05d}.parquet", f"empty-{index:05d}.json"


@dataclass
class Part:
    """An unfinished part.

    left: unfinished samples by row of the source. failed, shortened: reasons by row that has no
    answer, or not to all turns. dropped: reasons by answer that is not written.
    """

    index: int
    digest: str
    read: int
    skipped: list[Skipped]
    prompts: dict[int, Prompt]
    left: dict[int, int] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    shortened: dict[int, str] = field(default_factory=dict)
    rows: dict[tuple[int, int, int], dict[str, Any]] = field(default_factory=dict)
    dropped: dict[tuple[int, int, int], str] = field(default_factory=dict)

    def write(self, out: Path, schema: pa.Schema) -> Path:
        """Write the rows in the order of the prompts; return the file.

        A prompt without any answer left is skipped, with the reason of its first one.
        """
        keys = sorted(self.rows.keys() - self.dropped.keys())
        rows = {key[0] for key in keys} | self.failed.keys()
        empty = {
            key[0]: self.dropped[key]
            for key in sorted(self.dropped, reverse=True)
            if key[0] not in rows
        }
        skipped = [
            *self.skipped,
            *(Skipped(row, f"every answer dropped: {why}") for row, why in sorted(empty.items())),
        ]
        record = {
            "read": self.read,
            "digest": self.digest,
            "skipped": [[skip.row, skip.reason] for skip in skipped],
            "failed": sorted(self.failed.items()),
            "shortened": sorted(self.shortened.items()),
            "dropped": [[key[0], why] for key, why in sorted(self.dropped.items())],
        }
        return write_part(out, self.index, record, [self.rows[key] for key in keys], schema)


def write_part(
    out: Path, index: int, record: dict[str, Any], rows: list[dict[str, Any]], schema: pa.Schema
) -> Path:
    """Write a part and return its path. record: digest of its prompts, and what was left out and
    why.
    """
    path, empty = (out / name for name in names_of(index))
    if not rows:
        with writing(empty):
            write_json_atomic(empty, record)
        return empty
    columns = {name: [row[name] for row in rows] for name in schema.names}
    table = pa.table(
        columns, schema=schema.with_metadata({_METADATA: canonical_json(record).encode()})
    )
    with writing(path), atomic_file(path) as temporary:
        pq.write_table(table, temporary)
    return path


def check_digest(out: Path, index: int, digest: str, source: str) -> int | None:
    """Return the number of prompts of a finished part, None if it is not finished.

    Raise InputError if it was made from other prompts than `source` has now.
    """
    record = read_record(out, index)
    if record is not None and record["digest"] != digest:
        raise InputError(
            f"{source}: its rows changed since {out / names_of(index)[0]} was made; choose "
            "another --out or "
            f"delete the directory"
        )
    return None if record is None else int(record["read"])


def read_record(out: Path, index: int) -> dict[str, Any] | None:
    """Return the record of a part (see `write_part`), None if it is not finished."""
    path, empty = (out / name for name in names_of(index))
    if empty.exists():
        return read_json(empty, "the record of prompts that gave no rows")
    if not path.exists():
        return None
    with reading(path):
        record: dict[str, Any] = json.loads((pq.read_schema(path).metadata or {})[_METADATA])
    return record


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise InputError that names `path` if the block cannot read it."""
    try:
        yield
    except (OSError, pa.ArrowException, KeyError):
        raise InputError(f"{path}: is damaged; delete it and run the command again") from None


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


def count_kept(out: Path) -> int:
    """Count the answers in the finished parts and the journals of an unfinished set."""
    rows: int = sum(pq.read_metadata(path).num_rows for path in out.glob("part-*.parquet"))
    journals = [path for pattern in JOURNALS for path in out.glob(pattern)]
    return rows + sum(len(json.loads(line)) for path in journals for line in path.open())


SET_FORMAT = "draftsmith distilled set"
# `manifest.json` of a finished set, `run.json` of one in the making.
RECORDS = ("manifest.json", "run.json")


def check_empty(out: Path) -> None:
    """Raise InputError if `out` holds another set or a model, which this run would overwrite or mix
    up.
    """
    if not any((out / name).exists() for name in RECORDS):
        for pattern in (KINDS[0], "README.md", "config.json"):
            if foreign := next(out.glob(pattern), None):
                raise InputError(
                    f"--out {out}: holds {foreign.name} of something else; choose another --out"
                )


def finish(
    out: Path, parts: int, identity: dict[str, Any], command: str, tokenizer: Tokenizer
) -> None:
    """Add up the parts and write card and manifest, which finishes the set. Raise RunError if no
    row is left.
    """
    expected = {name for index in range(parts) for name in names_of(index)}
    if beyond := sorted(
        path.name for kind in KINDS for path in out.glob(kind) if path.name not in expected
    ):
        raise InputError(
            f"{out / beyond[0]}: the prompts have fewer rows now; choose another --out or delete "
            f"{out}"
        )
    with writing(out / "manifest.json"):
        sums = _add_up(out, parts)
        if not sums["parts"]:
            for empty in out.glob("empty-*.json"):
                empty.unlink()
            reasons = [*sums["failed_because"], *sums["skipped_because"], "there were none"]
            raise RunError(f"{out}: no row is left: {reasons[0]}")
        drawn = (
            read_json(out / RECORD, "the record of prompts") if (out / RECORD).exists() else None
        )
        manifest = {"format": SET_FORMAT, "version": 2, "complete": True} | sums
        manifest |= {
            "identity": identity,
            **provenance(command, identity["config"]),
            "own_prompts": drawn,
        }
        manifest |= {"vocabulary": vocabulary_sample(tokenizer)}
        write_text_atomic(out / "README.md", distilled_set_card(manifest))
        write_json_atomic(out / "manifest.json", manifest)
        (out / "run.json").unlink(missing_ok=True)


def _add_up(out: Path, parts: int) -> dict[str, Any]:
    """Return the sums over all parts, as the manifest has them. Write a line of `errors.jsonl` per
    prompt that gave less than it should.
    """
    files, digests = [], []
    reasons = {name: Reasons() for name in ("skipped", "failed", "shortened", "dropped")}
    ends, tokens_from = Counter(stop=0, length=0), Counter[str]()
    read = rows = tokens = 0
    path = out / "errors.jsonl"
    with atomic_file(path) as temporary, temporary.open("w", encoding="utf-8") as errors:
        for index in range(parts):
            part, record = out / names_of(index)[0], read_record(out, index)
            assert record is not None, f"{part} was deleted while the run wrote others"
            if part.exists():
                with reading(part):
                    table = pq.read_table(
                        part, columns=["response_ids", "finish_reason", "tokens_from"]
                    )
                files.append({"file": part.name, "rows": len(table), "sha256": sha256_file(part)})
                rows += len(table)
                tokens += pc.sum(pc.list_value_length(table["response_ids"])).as_py() or 0
                ends.update(table["finish_reason"].to_pylist())
                tokens_from.update(table["tokens_from"].to_pylist())
            read += record["read"]
            digests.append(record["digest"])
            for row, outcome, reason in sorted(
                (row, name, why) for name in reasons for row, why in record.get(name, [])
            ):
                reasons[outcome].add(row, reason)
                errors.write(
                    canonical_json({"row": row, "outcome": outcome, "reason": reason}) + "\n"
                )
    if not path.stat().st_size:
        path.unlink()
    skipped, failed = reasons["skipped"].total(), reasons["failed"].total()
    counts = {
        "prompts_read": read,
        "prompts_done": read - skipped - failed,
        "prompts_skipped": skipped,
    }
    counts |= {"prompts_failed": failed, "rows": rows, "rows_dropped": reasons["dropped"].total()}
    return {
        "parts": files,
        "counts": counts,
        **{f"{name}_because": reasons[name].lines(name) for name in reasons},
        "finish_reasons": dict(ends),
        "tokens_from": dict(tokens_from),
        "response_tokens": tokens,
        "prompts_digest": hash_json(digests),
        "digest": hash_json([file["sha256"] for file in files]),
    }


def copy_set(out: Path, url: str | None) -> dict[str, str]:
    """Copy a finished set to a store, its manifest last; return `{"copied_to": url}` for the
    summary.
    """
    if url is None:
        return {}

    def copy() -> None:
        files = [path for path in out.iterdir() if path.is_file() and not path.name.startswith(".")]
        try:
            store, directory = fsspec.core.url_to_fs(url)
            store.makedirs(directory, exist_ok=True)
            for path in sorted(files, key=lambda path: (path.name == "manifest.json", path.name)):
                store.put_file(str(path), f"{directory.rstrip('/')}/{path.name}")
        except Exception as error:  # every store's package has errors of its own
            raise RunError(
                f"copy_to {url}: {one_line(error)}; {out} is complete, run again to copy it"
            ) from None

    on_main(copy)
    return {"copied_to": without_secrets(url)}
