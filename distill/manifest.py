"""The end of a run: parts add up to a manifest, a card, the held-out prompts, and a copy elsewhere."""

from itertools import islice
from pathlib import Path
from typing import Any

import fsspec

from distill.config import DistillConfig
from distill.drafting import DECISION
from distill.own_prompts import RECORD
from distill.parts import KINDS, Totals, add_up, names_of
from draftsmith_core.cards import distilled_set_card
from draftsmith_core.errors import InputError, RunError, one_line
from draftsmith_core.io import (
    atomic_file,
    canonical_json,
    hash_json,
    read_json,
    write_json_atomic,
    write_text_atomic,
    writing,
)
from draftsmith_core.processes import on_main
from draftsmith_core.prompt_rows import asked_of, iterate_records, parse_record
from draftsmith_core.runs import provenance

SET_FORMAT = "draftsmith distilled set"
# `manifest.json` of a finished set, `run.json` of one in the making.
RECORDS = ("manifest.json", "run.json")


def check_empty(out: Path) -> None:
    """Raise InputError if `out` holds another set or a model, which this run would overwrite or mix up."""
    if not any((out / name).exists() for name in RECORDS):
        for pattern in (KINDS[0], "README.md", "config.json"):
            if foreign := next(out.glob(pattern), None):
                raise InputError(f"--out {out}: holds {foreign.name} of something else; choose another --out")


def finish(
    out: Path,
    parts: int,
    identity: dict[str, Any],
    command: str,
    extra: dict[str, Any],
    config: DistillConfig | None = None,
) -> None:
    """Add up the parts and write card and manifest, which makes the set a finished one.

    extra: further keys of the manifest. config: of a run that may hold prompts out. Raise RunError if no row is left.
    """
    expected = {name for index in range(parts) for name in names_of(index)}
    if beyond := sorted(path.name for kind in KINDS for path in out.glob(kind) if path.name not in expected):
        raise InputError(f"{out / beyond[0]}: the prompts have fewer rows now; choose another --out or delete {out}")
    with writing(out / "manifest.json"):
        totals = add_up(out, parts)
        if not totals.rows:
            for empty in out.glob("empty-*.json"):
                empty.unlink()
            reasons = [*totals.failed.lines("failed"), *totals.skipped.lines("skipped")]
            raise RunError(f"{out}: no row is left: {reasons[0]}")
        if totals.held_out and config is not None:
            _write_held_out(config, set(totals.held_out))
        drawn = read_json(out / RECORD, "the record of prompts") if (out / RECORD).exists() else None
        manifest = _manifest(totals, identity, command) | {"own_prompts": drawn} | extra
        write_text_atomic(out / "README.md", distilled_set_card(manifest))
        write_json_atomic(out / "manifest.json", manifest)
        for name in ("run.json", DECISION):
            (out / name).unlink(missing_ok=True)


def _write_held_out(config: DistillConfig, numbers: set[int]) -> None:
    with atomic_file(Path(config.out) / "heldout.jsonl") as temporary, temporary.open("w", encoding="utf-8") as file:
        for record in islice(iterate_records(config.prompts), config.max_prompts):
            if record.number in numbers:
                row = parse_record(record, config.prompts)
                named = {"domain": config.domain} | {key: row[key] for key in ("id", "domain") if row.get(key)}
                file.write(canonical_json(named | asked_of(row)) + "\n")


def _manifest(totals: Totals, identity: dict[str, Any], command: str) -> dict[str, Any]:
    skipped, failed = totals.skipped.total(), totals.failed.total()
    return {
        "format": SET_FORMAT,
        "version": 2,
        "complete": True,
        "parts": totals.files,
        "counts": {
            "prompts_read": totals.read,
            "prompts_done": totals.read - skipped - failed,
            "prompts_skipped": skipped,
            "prompts_failed": failed,
            "rows": totals.rows,
            "rows_dropped": totals.dropped.total(),
        },
        "skipped_because": totals.skipped.lines("skipped"),
        "failed_because": totals.failed.lines("failed"),
        "shortened_because": totals.shortened.lines("shortened"),
        "dropped_because": totals.dropped.lines("dropped"),
        "finish_reasons": dict(totals.finish_reasons),
        "tokens_from": dict(totals.tokens_from),
        "response_tokens": totals.tokens,
        "prompts_digest": hash_json(totals.digests),
        "digest": hash_json([file["sha256"] for file in totals.files]),
        "identity": identity,
        **provenance(command, identity["config"]),
    }


def copy_set(out: Path, url: str | None) -> dict[str, str]:
    """Copy a finished set to a store, its manifest last; return `{"copied_to": url}` for the summary."""
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
            raise RunError(f"copy_to {url}: {one_line(error)}; {out} is complete, call again to copy") from None

    on_main(copy)
    return {"copied_to": url}
