"""Compare a run of `doctor --served` with an earlier one, prompt by prompt."""

import json
from collections.abc import Sequence
from pathlib import Path

from draftsmith.core.errors import InputError
from draftsmith.core.io import JsonObject, hash_json
from draftsmith.eval.bootstrap import PromptSums
from draftsmith.eval.formats import sign
from draftsmith.serving.asking import ServedPrompt
from draftsmith.serving.patterns import Compared

LESS = "less than before"
VERDICTS = {None: "not comparable", 0: "no significant change", 1: "more than before", -1: LESS}


def served_rows(asked: Sequence[ServedPrompt]) -> list[JsonObject]:
    """Return what a later run compares itself with."""
    rows = []
    for each in asked:
        answer = each.answer
        row: JsonObject = {
            "asked": f"{each.prompt.asked:x}",
            "answer": hash_json(answer.output_ids),
        }
        row |= {"prompt_tokens": len(answer.prompt_ids), "cached": answer.cached}
        row |= {"tokens": len(answer.output_ids) - 1, "calls": answer.calls}
        rows.append(row)
    return rows


def read_earlier(path: str) -> JsonObject:
    """Read what `doctor --served --json` printed, whole or its last line."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8").strip()
        earlier = json.loads(text if text.startswith("{") else text.splitlines()[-1])
        if {"server", "rows", "engine"} <= set(earlier):
            return dict(earlier)
    except (OSError, ValueError, IndexError, TypeError):
        pass
    raise InputError(
        f"--against {path}: is not the output of `draftsmith doctor --served ... --json`; name a "
        "file that it was written to"
    )


def changes(
    earlier: JsonObject, rows: Sequence[JsonObject], groups: Sequence[int], facts: JsonObject
) -> JsonObject:
    """Return what differs from an earlier run: facts of the server, answers, tokens per call."""
    before = earlier["server"]
    changed = {}
    for key in before | facts:
        if before.get(key) != facts.get(key):
            changed[key] = [before.get(key), facts.get(key)]
    old = {row["asked"]: row for row in earlier["rows"]}
    common = [index for index, row in enumerate(rows) if row["asked"] in old]
    new_rows = [rows[index] for index in common]
    old_rows = [old[row["asked"]] for row in new_rows]
    compared = Compared(_sums(new_rows), _sums(old_rows), [groups[index] for index in common])
    away = compared.away
    other = sum(new["answer"] != was["answer"] for new, was in zip(new_rows, old_rows, strict=True))
    return {
        "changed": changed,
        "prompts": len(common),
        "other_answers": other,
        "before": compared.predicted.pooled,
        "now": compared.served.pooled,
        "difference": away,
        "verdict": VERDICTS[sign(away)],
    }


def _sums(rows: Sequence[JsonObject]) -> PromptSums:
    return PromptSums.of([row["tokens"] for row in rows], [row["calls"] for row in rows])
