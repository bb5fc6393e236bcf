"""The tables of a report: a line for what was measured, a column for each figure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from draftsmith.eval.decision import Decision
from draftsmith.eval.formats import (
    NONE,
    memory,
    named_set,
    number,
    times,
    tree_name,
    with_seeds,
)
from draftsmith.eval.report import WORDS
from draftsmith.eval.results_table import FigureRow, ResultsTable
from draftsmith.eval.schema import TARGET, read_of

Line = dict[str, str]
DIGITS = {"speedup": 2, "speedup_with_prompt": 2, "tokens_per_s": 1, "accept": 2}
HEADINGS = {
    "missing_mass": "cannot draft",
    "tau": "tokens per call",
    "tau_predicted": "predicted",
    "speedup": "speed",
}
COLUMNS = ("draft", "set", "alpha", "gain", *HEADINGS.values(), "tree")
# The least missing mass that is shown.
_SHOWN = 5e-4
# Rows of the first table, and of the terminal's.
MOST_ROWS = 14
SIGNED = ("gain", "tau_gain")


@dataclass(frozen=True)
class Table:
    """A table as text; the first `names` columns are names, the others numbers."""

    title: str
    note: str
    names: int
    rows: Sequence[Mapping[str, str]]


def tables(results: ResultsTable) -> list[Table]:
    """The tables of a report but the first; one with no rows is left out."""
    found = [of_figures(results, name) for name in WORDS["tables"]]
    found += [_suites(results), _models(results)]
    return [table for table in found if table.rows]


def first_rows(results: ResultsTable, decision: Decision, temperature: float) -> list[Line]:
    """Acceptance, tokens per call and speed of every draft on every set, or on all sets of a kind
    if these are too many: of the decided draft with its tree, of others with the fastest lossless
    one there.
    """
    pooled = len(results.drafts) * len(results.domains()) > MOST_ROWS
    cells: dict[tuple[str, str], list[FigureRow]] = {}
    for row in results.select("alpha", "gain", *HEADINGS):
        # A draft of the whole vocabulary lacks nothing.
        lacks = row["figure"] != "missing_mass" or (row["value"] or 0.0) >= _SHOWN
        if lacks and row["temperature"] == temperature and (row["set"] is None) == pooled:
            cell = (named_set(row), row["draft"])
            cells.setdefault(cell, []).append(row)
    lines = []
    for (name, draft), rows in cells.items():
        method = _method(results, decision, rows)
        line = {"draft": draft, "set": name, "tree": tree_name(method[0] or "")}
        for row in rows:
            if (row["tree"], row["rule"]) in (method, (None, None)):
                figure = str(row["figure"])
                line[HEADINGS.get(figure, figure)] = _text(row)
                if figure == "speedup" and results.busy(row["set"] or row["kind"], temperature):
                    line["speed"] = times(row["value"], rough=True)
        lines.append(line)
    return _filled(lines, COLUMNS)


def _method(
    results: ResultsTable, decision: Decision, rows: Sequence[FigureRow]
) -> tuple[str | None, str | None]:
    """Tree and verifier to show; if nothing was decoded, those of the highest predicted tau."""
    speeds = {}
    for row in rows:
        if row["figure"] == "speedup":
            speeds[row["tree"], row["rule"]] = row["value"] or 0.0

    def merit(row: FigureRow) -> tuple[bool, bool, bool, float, float]:
        how = (row["tree"], row["rule"])
        return (
            decision.setting == (row["draft"], *how),
            row["figure"] == "tau",
            results.lossless(row["rule"]),
            speeds.get(how, 0.0),
            row["value"] or 0.0,
        )

    taus = [row for row in rows if row["figure"] in ("tau", "tau_predicted")]
    best = max(taus, key=merit, default=None)
    return (best["tree"], best["rule"]) if best else (None, None)


def _text(row: FigureRow) -> str:
    figure = row["figure"]
    usual = 2 if figure.startswith("tau") else 3
    return with_seeds(row, DIGITS.get(figure, usual), sign=figure in SIGNED)


def _filled(lines: Sequence[Line], columns: Sequence[str]) -> list[Line]:
    """Lines with the columns that are not empty in all of them."""
    used = []
    for name in columns:
        if {line.get(name, NONE) for line in lines} - {"", NONE}:
            used.append(name)
    filled = []
    for line in lines:
        filled.append({name: line.get(name, NONE) for name in used})
    return filled


def of_figures(results: ResultsTable, name: str) -> Table:
    """A table of some figures: of every set and of all sets of a kind, or by part of the text."""
    words = WORDS["tables"][name]
    parts = name == "part"
    # The pool of one set says nothing more.
    several = [kind for kind in results.kinds if len(results.domains(kind)) > 1]
    pools = results.kinds if parts else several
    # Nor do parts that are the only ones of their kind.
    named = {str(row["part"]) for row in results.document["rows"] if parts}
    kinds = Counter(map(_kind, named))
    lines: dict[tuple[str, ...], Line] = {}
    headings = []
    for figure in words["figures"]:
        for row in results.select(figure, parts=parts):
            shown = not parts if row["set"] else row["kind"] in pools
            predicted = figure == "tau_predicted" and results.methods
            how = (row["tree"], row["rule"])
            alone = kinds[_kind(str(row["part"]))] == 1
            if not shown or alone or (predicted and how not in results.methods):
                continue
            heading = figure if row["depth"] is None else f"{figure}@{row['depth']}"
            headings.append(heading)
            names = _names(results, row)
            key = tuple(names.values())
            lines.setdefault(key, names)[heading] = _text(row)
    names_of = ("set", "draft", "part", "tree", "verifier", "T")
    columns = [*names_of, *dict.fromkeys(headings)]
    filled = _filled(list(lines.values()), columns)
    used = list(filled[0]) if filled else []
    names_used = [name for name in used if name in names_of]
    if used == names_used:
        filled = []
    return Table(words["title"], words.get("note", ""), len(names_used), filled)


def _kind(part: str) -> str:
    return part.partition(": ")[0]


def _names(results: ResultsTable, row: FigureRow) -> Line:
    lossy = "" if results.lossless(row["rule"]) else ", lossless: false"
    return {
        "set": named_set(row),
        "draft": "target alone" if row["draft"] == TARGET else row["draft"],
        "part": row["part"] or "",
        "tree": tree_name(row["tree"] or ""),
        "verifier": f"{row['rule'] or ''}{lossy}",
        "T": f"{row['temperature']:g}",
    }


def _suites(results: ResultsTable) -> Table:
    lines = []
    for suite in results.document["suites"]:
        reasons = [f"{skip['row']}: {skip['reason']}" for skip in suite["skipped_rows"][:2]]
        kind = suite["kind"].upper()
        line = {"set": f"{suite['name']} ({kind})", "source": suite["source"]}
        line |= {key: str(suite[key]) for key in ("read", "done", "skipped", "failed")}
        line["why skipped (first two)"] = "; ".join(reasons)
        lines.append(line)
    return Table("Prompts", WORDS["prompts"], 2, _filled(lines, list(lines[0])))


def _models(results: ResultsTable) -> Table:
    clock = results.document["clock"]
    models = results.models
    lines = []
    for role, model in models.items():
        training = model["training"]
        quantized = "" if model["quantize"] == "none" else f"{model['quantize']}, "
        line = {
            "role": role,
            "model": model["name"],
            "type": model["model_type"],
            "parameters": f"{model['parameters']:,}",
            "of target": number(read_of(model) / read_of(models["target"])),
            "memory": memory(model["memory_bytes"]),
            "dtype": quantized + model["dtype"],
            "trained with": training["objective"] if training else NONE,
            "on tokens": f"{training['response_tokens']:,}" if training else NONE,
            "device": model["device"],
            "fingerprint": model["fingerprint"],
        }
        lines.append(line)
    whole = "" if clock["machine"]["gpu"] else ", all of the process included"
    note = WORDS["models"].format(memory=memory(clock["peak_memory_bytes"]), whole=whole)
    return Table("Models", note, 2, _filled(lines, list(lines[0])))
