"""What finishes a distilled set: the manifest that the parts add up to, the card, and copies."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.compute as pc
import pyarrow.parquet as pq

from distill.parts import names_of, read_record, reading
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
from draftsmith_core.prompts import Reasons
from draftsmith_core.ranks import on_main
from draftsmith_core.runs import provenance
from draftsmith_core.tokenization import Tokenizer, vocabulary_sample

# Of prompts that the target wrote: the number of texts drawn, of those kept, and why the others
# were left out.
RECORD = "own_prompts.json"
KINDS = ("part-*.parquet", "empty-*.json")
SET_FORMAT = "draftsmith distilled set"
# `manifest.json` of a finished set, `run.json` of one in the making.
RECORDS = ("manifest.json", "run.json")
JOURNALS = (".part-*.answers.jsonl", ".prompts/.part-*.answers.jsonl")


def count_kept(out: Path) -> int:
    """Count the answers in the finished parts and the journals of an unfinished set."""
    rows: int = sum(pq.read_metadata(path).num_rows for path in out.glob("part-*.parquet"))
    journals = [path for pattern in JOURNALS for path in out.glob(pattern)]
    return rows + sum(len(json.loads(line)) for path in journals for line in path.open())


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
