"""What finishes a distilled set: the manifest that the parts add up to, the card, and copies."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from draftsmith.core.distilled_sets import repeats
from draftsmith.core.errors import InputError, RunError
from draftsmith.core.io import (
    JsonObject,
    atomic_file,
    canonical_json,
    checksum_file,
    hash_json,
    kept_json,
    read_json,
    read_manifest,
    refuse_foreign,
    require_keys,
    write_sealed,
    write_text_atomic,
    writing,
)
from draftsmith.core.ranks import is_main, on_main, wait_for_everyone
from draftsmith.core.records import provenance, read_run
from draftsmith.core.row_reasons import Reasons
from draftsmith.core.runs import Run
from draftsmith.core.teacher_rows import COLUMN, unpack
from draftsmith.core.tokenization import Tokenizer, vocabulary_sample
from draftsmith.distill.parts import (
    SHORTFALLS,
    Shortfall,
    empty_path,
    part_path,
    read_summary,
    reading,
)
from draftsmith.distill.teacher_measures import LEAST_NATS, entropies
from draftsmith.drafts.cards import distilled_set_card

# Prompts that the target wrote, and their record: number of texts drawn and kept, why the others
# were left out, and the sha256 of the prompts.
PROMPTS = "prompts.jsonl"
OWN_PROMPTS = "own_prompts.json"
# The directory of those texts, a distilled set in the making.
DRAWN = ".prompts"
_JOURNALS = ".part-*.answers.jsonl"
# Checksums of the files of a set in the making.
_BESIDE = (".part-*.sha256", checksum_file(Path(PROMPTS)).name)
SET_FORMAT = "draftsmith distilled set"
_PARTS = "part-*.parquet"
_EMPTY = "empty-*.json"
# Columns of a part that the manifest sums over, if it has them.
_COLUMNS = ["prompt_id", "turn", "response_ids", "finish_reason", "tokens_from", COLUMN]


def kept_date(out: Path) -> str | None:
    """Return the date that the chat template printed in the set that began in `out`, if any."""
    return read_run(out).get("identity", {}).get("date")


def make_set(
    run: Run,
    command: str,
    identity: JsonObject,
    make: Callable[[], int],
    *,
    tokenizer: Tokenizer,
    inputs: JsonObject,
) -> JsonObject:
    """Claim the directory of a run, let `make` write the parts and return their number, and finish
    the set; return its manifest. Every process calls this.

    inputs: options that are known by their content. Raise InputError if the directory holds
    another set or a model, which this run would overwrite or mix up.
    """
    out = run.out
    if not read_run(out):
        foreign = (_PARTS, _EMPTY, _JOURNALS, "errors.jsonl", "README.md", "config.json")
        on_main(lambda: refuse_foreign(out, foreign))
    run.begin("distilled set", identity, command, inputs)
    with _reopened(out):
        parts = make()
    wait_for_everyone()
    origin = provenance(command, identity["config"] | inputs)
    on_main(lambda: _finish(out, parts, identity, origin, tokenizer))
    run.finish("parts", parts)
    return read_json(out / "manifest.json", "the manifest that this run has written")


@contextmanager
def _reopened(out: Path) -> Iterator[None]:
    """Give the files of a finished set the checksums that its manifest has, while the block runs.
    If the block refuses its input, the set stays as it was.
    """
    on_main(lambda: _reopen(out))
    try:
        yield
    except InputError:
        if is_main() and (out / "manifest.json").exists():
            _remove_all(out, _BESIDE)
        raise


def _reopen(out: Path) -> None:
    file = out / "manifest.json"
    if not file.exists():
        return
    manifest = require_keys(read_manifest(out), ["own_prompts"], file)
    digests = {part["file"]: part["sha256"] for part in manifest["parts"]}
    if manifest["own_prompts"]:
        digests[PROMPTS] = manifest["own_prompts"]["sha256"]
    for name, digest in digests.items():
        write_text_atomic(checksum_file(out / name), digest)


def _finish(
    out: Path, parts: int, identity: JsonObject, origin: JsonObject, tokenizer: Tokenizer
) -> None:
    """Add up the parts and write card and manifest, unless these are finished and say the same.
    Raise RunError if no row is left.
    """
    beyond = {*out.glob(_PARTS), *out.glob(_EMPTY)}
    for index in range(parts):
        beyond -= {part_path(out, index), empty_path(out, index)}
    if beyond:
        raise InputError(
            f"{min(beyond)}: the prompts have fewer rows now; choose another --out or delete {out}"
        )
    with writing(out / "manifest.json"):
        sums = _add_up(out, parts)
        if not sums["parts"]:
            for empty in out.glob(_EMPTY):
                empty.unlink()
            reasons = [*sums["failed_because"], *sums["skipped_because"], "there were none"]
            raise RunError(f"{out}: no row is left: {reasons[0]}")
        drawn = out / OWN_PROMPTS
        content = {
            "format": SET_FORMAT,
            "version": 2,
            "complete": True,
            **sums,
            "identity": identity,
            "own_prompts": read_json(drawn, "the record of prompts") if drawn.exists() else None,
            "vocabulary": vocabulary_sample(tokenizer),
        }
        kept = kept_json(out / "manifest.json", "the manifest of a set") or {}
        if kept | json.loads(canonical_json(content)) != kept:
            write_manifest(out, content | origin)
        # A kill may have left the journal of a part that it had just written.
        _remove_all(out, (_JOURNALS, *_BESIDE))


def write_manifest(out: Path, manifest: JsonObject) -> None:
    """Write the card and the manifest of a set."""
    write_text_atomic(out / "README.md", distilled_set_card(manifest))
    write_sealed(out / "manifest.json", manifest)


def _remove_all(out: Path, patterns: Sequence[str]) -> None:
    for pattern in patterns:
        for path in out.glob(pattern):
            path.unlink()


def _add_up(out: Path, parts: int) -> JsonObject:
    """Return the sums over all parts, as the manifest has them. Write `errors.jsonl`."""
    files: list[dict[str, str | int]] = []
    digests = []
    reasons = {shortfall: Reasons() for shortfall in SHORTFALLS}
    ends = Counter(stop=0, length=0)
    tokens_from: Counter[str] = Counter()
    read = 0
    teacher: Counter[str] = Counter()
    texts: Counter[str] = Counter()
    path = out / "errors.jsonl"
    with atomic_file(path) as temporary, temporary.open("w", encoding="utf-8") as lines:
        for index in range(parts):
            part = part_path(out, index)
            summary = read_summary(out, index)
            if summary is None:
                raise RunError(f"{part}: was deleted while the run wrote; run it again")
            if part.exists():
                with reading(part), pq.ParquetFile(part) as opened:
                    rows = opened.read(_COLUMNS).to_pylist()
                digest = checksum_file(part).read_text()
                files.append({"file": part.name, "rows": len(rows), "sha256": digest})
                # All samples of a prompt are in one part.
                prompts = [(row["prompt_id"], row["turn"]) for row in rows]
                answers = [tuple(row["response_ids"]) for row in rows]
                texts.update(
                    prompts=len(set(prompts)),
                    different=len(set(zip(prompts, answers, strict=True))),
                    repeating=sum(map(repeats, answers)),
                    tokens=sum(map(len, answers)),
                )
                ends.update(row["finish_reason"] for row in rows)
                tokens_from.update(row["tokens_from"] for row in rows)
                for row in rows if COLUMN in rows[0] else ():
                    teacher.update(_teacher(row))
            read += summary["read"]
            digests.append(summary["digest"])
            errors: list[tuple[int, Shortfall, str]] = []
            for why in SHORTFALLS:
                errors += [(row, why, reason) for row, reason in summary.get(why, ())]
            for row, why, reason in sorted(errors):
                reasons[why].add(row, reason)
                error = {"row": row, "outcome": why, "reason": reason}
                lines.write(canonical_json(error) + "\n")
    if not path.stat().st_size:
        path.unlink()
    skipped = reasons["skipped"].total()
    failed = reasons["failed"].total()
    return {
        "parts": files,
        "counts": {
            "prompts_read": read,
            "prompts_done": read - skipped - failed,
            "prompts_skipped": skipped,
            "prompts_failed": failed,
            "rows": ends.total(),
            "rows_dropped": reasons["dropped"].total(),
        },
        **{f"{why}_because": reasons[why].lines(why) for why in SHORTFALLS},
        "finish_reasons": dict(ends),
        "tokens_from": dict(tokens_from),
        "response_tokens": texts.pop("tokens", 0),
        "texts": {**texts, "teacher": dict(teacher)},
        "prompts_digest": hash_json(digests),
        "digest": hash_json([file["sha256"] for file in files]),
    }


def _teacher(row: JsonObject) -> dict[str, float]:
    """Sums over the positions of a row: nats, those with one token, and the answer's mass."""
    rows = unpack(row[COLUMN])
    nats_R = entropies(rows)
    drawn_RK = rows.ids_RK == np.array(row["response_ids"])[:, None]
    return {
        "nats": float(nats_R.sum()),
        "one_token": float((nats_R < LEAST_NATS).sum()),
        "mass": float((np.exp(rows.logprobs_RK) * drawn_RK).sum()),
    }
