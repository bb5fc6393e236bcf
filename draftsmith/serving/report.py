"""What `draftsmith doctor --served` prints."""

from collections.abc import Sequence

from draftsmith.core.errors import RequirementError
from draftsmith.core.io import JsonObject
from draftsmith.eval.formats import with_interval

# Of each table, the columns that are printed.
_TABLES = {
    "settings": ("setting", "server", "assumed", "state"),
    "texts": ("text", "value", "z", "seen from", "first"),
    "acceptance": ("of", "served", "predicted", "tokens/s"),
    "replays": ("of", "predicted", "fits"),
}


def in_words(found: JsonObject) -> tuple[list[str], RequirementError | None]:
    """Return the four tables, and the error of exit code 3 if it is not as predicted."""
    lines = [
        f"{found['engine']} at {found['url']} drafts {found['draft_tokens']} tokens; "
        f"{found['prompts']} prompts, temperature {found['temperature']:g}"
    ]
    for name, keys in _TABLES.items():
        if found[name]:
            lines += ["", *_table(name, keys, found[name])]
    lines += [f"remark: {remark}" for remark in found["remarks"]]
    judgement = "; ".join([found["judgement"], *found["because"]])
    if found["judgement"] == "as predicted":
        return [*lines, judgement], None
    return lines, RequirementError([judgement])


def _table(name: str, keys: Sequence[str], rows: Sequence[JsonObject]) -> list[str]:
    table = [[name, *keys[1:]]]
    table += [[_cell(row.get(key)) for key in keys] for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def _cell(value: object) -> str:
    if isinstance(value, dict):
        return with_interval(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value)
