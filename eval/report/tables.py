"""The tables of a report: one line per row of a figure, with the other figures that
templates/words.yaml lists.

A column there is [figure, style of `STYLES`, digits], or the name of a column of `_special`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from draftsmith.eval.bootstrap import signs
from draftsmith.eval.formats import (
    CLEAR,
    NONE,
    kept,
    memory,
    named_set,
    number,
    tree_name,
    with_interval,
    with_seeds,
)
from draftsmith.eval.report import WORDS
from draftsmith.eval.results_table import ResultsTable
from draftsmith.eval.schema import TARGET, Row, read_of


@dataclass(frozen=True)
class Table:
    """A table as text; the first `names` columns are names, the others numbers."""

    title: str
    note: str
    names: int
    rows: Sequence[Mapping[str, str]]


Writes = Callable[[Row], str]
STYLES: dict[str, Callable[[Row, int], str]] = {
    "plain": lambda row, digits: number(row["value"], digits),
    "ms": lambda row, digits: NONE if row["value"] is None else f"{row['value'] * 1000:.3g}",
    "n": lambda row, digits: str(row["n"]),
    "of": lambda row, digits: f"{row['value']:.0f} of {row['n']}",
}
NAMES: dict[str, Writes] = {
    "set": named_set,
    "draft": lambda row: "target alone" if row["draft"] == TARGET else row["draft"],
    "T": lambda row: f"{row['temperature']:g}",
    "tree": lambda row: tree_name(row["tree"] or NONE),
    "where": lambda row: row["part"] or "",
    "token": lambda row: repr(row["part"]),
}


def tables(results: ResultsTable) -> list[Table]:
    """All tables of a report; one with no rows is left out."""
    every = [by_draft(results)]
    for name, words in WORDS["tables"].items():
        if "of" in words:
            every.append(_of_figures(results, name))
    every += [_suites(results), _models(results)]
    return [table for table in every if table.rows]


def by_draft(results: ResultsTable) -> Table:
    """Gains of each draft ID and OOD, and tau and speed with its best method."""

    def cited(row: Row | None, digits: int = 3, *, sign: bool = False) -> str:
        return with_seeds(row, results.spread(row), digits, sign=sign)

    rows = []
    for draft in sorted(results.shown, key=lambda draft: draft == results.base):
        for temperature in sorted(results.temperatures):
            tau = results.best_tau(draft, "id", temperature)
            worst = results.worst_set(draft, temperature)
            lost = f"{worst['domain']} {with_interval(worst, sign=True)}" if worst else NONE
            ood = results.gain(draft, "ood", temperature) if results.domains("ood") else None
            alphas = {
                f"α {kind.upper()} [95 %]": cited(results.alpha(draft, kind, temperature))
                for kind in results.kinds
            }
            row = {
                "draft": draft,
                "T": f"{temperature:g}",
                **alphas,
                "gain ID [95 %]": cited(results.gain(draft, "id", temperature), sign=True),
                "gain OOD [95 %]": cited(ood, sign=True),
                "worst OOD set": lost,
                "ID gain kept": kept(results.transfer(draft, "ood", temperature), ood),
                "τ ID [95 %]": cited(tau if tau["figure"] == "tau" else None, 2),
                "tree": tree_name(tau["tree"] or NONE),
                "predicted [95 %]": cited(tau if tau["figure"] != "tau" else None, 2),
                "speed ID [95 %]": cited(results.beside(tau, "speedup"), 2),
            }
            rows.append(row)
    return _table(_words(results, "drafts"), 2, rows)


def _words(results: ResultsTable, name: str) -> Mapping[str, Any]:
    """Title, note and columns of a table. A single draft has no base to be compared with."""
    words = WORDS["tables"][name]
    return words if results.aligned else words | words.get("alone", {})


def _table(words: Mapping[str, Any], names: int, rows: Sequence[Mapping[str, str]]) -> Table:
    """Make a table without the columns that are empty."""
    filled: dict[str, None] = {}
    for row in rows:
        keys = [key for key, cell in row.items() if cell not in ("", NONE)]
        filled |= dict.fromkeys(keys)
    kept_rows = []
    for row in rows:
        kept_rows.append({key: cell for key, cell in row.items() if key in filled})
    return Table(words["title"], words["note"], names, kept_rows)


def _of_figures(results: ResultsTable, name: str) -> Table:
    """Make a table of one figure: every set, and all sets of a kind if there are several."""
    words = _words(results, name)
    rows = list(results.rows(words["of"]))
    if any(row["domain"] != row["kind"] for row in rows):
        shown = results.domains()
        shown += [kind for kind in results.kinds if len(results.domains(kind)) > 1]
        rows = [row for row in rows if row["domain"] in shown]
    if name == "missing_mass":
        rows = [row for row in rows if row["value"]]
    special = _special(results, rows)
    columns: dict[str, Writes] = {key: NAMES.get(key) or special[key] for key in words["names"]}
    for heading, column in words["columns"].items():
        if isinstance(column, str):
            columns[heading] = special[column]
            continue
        figure = column[0]
        style = column[1] if len(column) > 1 else "plain"
        digits = column[2] if len(column) > 2 else 3
        deepest = max((row["at"] or 0 for row in results.rows(figure)), default=0)
        depths = range(1, deepest + 1) if "{at}" in heading else ()
        for at in depths or (None,):
            columns[heading.format(at=at)] = _column(results, figure, at, style, digits)
    cells = []
    for row in rows:
        cells.append({key: cell(row) for key, cell in columns.items()})
    return _table(words, len(words["names"]), cells)


def _column(results: ResultsTable, figure: str, at: int | None, style: str, digits: int) -> Writes:
    def cell(row: Row) -> str:
        other = results.beside(row, figure, at)
        if style in ("interval", "signed"):
            return with_seeds(other, results.spread(other), digits, sign=style == "signed")
        return NONE if other is None else STYLES[style](other, digits)

    return cell


def _special(results: ResultsTable, rows: Sequence[Row]) -> dict[str, Writes]:
    # Drafted nodes of a tree; the most if it grows.
    shapes = {method["tree"]: method["shape"] for method in results.document["methods"]}
    nodes = {tree: shape.get("nodes") or len(shape["parents"]) for tree, shape in shapes.items()}

    def verifier(row: Row) -> str:
        lossy = "" if results.lossless(row["verifier"]) else ", lossless: false"
        return (row["verifier"] or NONE) + lossy

    def id_gain(row: Row) -> str:
        gain = results.gain(row["draft"], "id", row["temperature"])
        return with_interval(gain, sign=True)

    def transfer(row: Row) -> str:
        if row["value"] is None or row["value"] < 0:
            return kept(row, results.beside(row, "gain"))
        return f"{with_interval(row, 0, scale=100)} %"

    return {
        "verifier": verifier,
        "nodes": lambda row: str(nodes[row["tree"]]),
        "Holm": _holm(results, rows),
        "ID gain": id_gain,
        "transfer": transfer,
        "why undefined": lambda row: results.why_undefined(row) or "",
    }


def _holm(results: ResultsTable, rows: Sequence[Row]) -> Writes:
    """Which gains are clear of zero under Holm's correction: over the sets of a draft and
    temperature, and over the kinds of position of a draft, temperature and kind of sets.
    """
    families: dict[tuple[str, float, str], list[Row]] = {}
    for row in rows:
        kind = row["kind"] if row["domain"] == row["kind"] else ""
        family = (row["draft"], row["temperature"], kind)
        families.setdefault(family, []).append(row)
    clear: dict[int, int | None] = {}
    for members in families.values():
        gains = [results.beside(row, "gain_by_part" if row["part"] else "gain") for row in members]
        for row, sign in zip(members, signs(gains), strict=True):
            clear[id(row)] = sign
    return lambda row: CLEAR[clear[id(row)]]


def _suites(results: ResultsTable) -> Table:
    rows = []
    for suite in results.document["suites"]:
        reasons = [f"{skip['row']}: {skip['reason']}" for skip in suite["skipped_rows"][:2]]
        row = {
            "set": f"{suite['name']} ({suite['kind'].upper()})",
            "source": suite["source"],
            "read": str(suite["read"]),
            "done": str(suite["done"]),
            "skipped": str(suite["skipped"]),
            "failed": str(suite["failed"]),
            "why skipped (first two)": "; ".join(reasons),
        }
        rows.append(row)
    return _table(_words(results, "suites"), 2, rows)


def _models(results: ResultsTable) -> Table:
    clock = results.document["clock"]
    models = results.models
    rows = []
    for role, model in models.items():
        training = model["training"]
        quantized = "" if model["quantize"] == "none" else f"{model['quantize']}, "
        row = {
            "role": role,
            "model": model["name"],
            "type": model["model_type"],
            "parameters": f"{model['parameters']:,}",
            "of target": number(read_of(model) / read_of(models["target"])),
            "memory": memory(model["memory_bytes"]),
            "vocabulary": f"{model['vocabulary']:,}",
            "dtype": quantized + model["dtype"],
            "trained with": training["objective"] if training else NONE,
            "on tokens": f"{training['response_tokens']:,}" if training else NONE,
            "best step": f"{training['best_step']} of {training['steps']}" if training else NONE,
            "device": model["device"],
            "fingerprint": model["fingerprint"],
        }
        rows.append(row)
    table = _table(_words(results, "models"), 2, rows)
    whole = "" if clock["machine"]["gpu"] else ", all of the process included"
    peak = memory(clock["peak_memory_bytes"])
    return replace(table, note=table.note.format(memory=peak, whole=whole))
