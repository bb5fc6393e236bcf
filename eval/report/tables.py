"""The tables of a report: one line per row of a figure, with the other figures that
templates/words.yaml lists.

A column there is [figure, style of `STYLES`, digits], or the name of a column of `_special`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from decode.propose import CHAIN
from eval.bootstrap import signs
from eval.report.findings import worst_set
from eval.report.formats import (
    CLEAR,
    NONE,
    WORDS,
    kept,
    memory,
    named_set,
    number,
    tree_name,
    with_interval,
)
from eval.results_table import ResultsTable
from eval.schema import TARGET, Row


@dataclass(frozen=True)
class Table:
    """A table as text; the first `names` columns are names, the others numbers."""

    title: str
    note: str
    names: int
    rows: Sequence[Mapping[str, str]]


STYLES: dict[str, Callable[[Row, int], str]] = {
    "plain": lambda row, digits: number(row["value"], digits),
    "interval": with_interval,
    "signed": lambda row, digits: with_interval(row, digits, sign=True),
    "ms": lambda row, digits: NONE if row["value"] is None else f"{row['value'] * 1000:.3g}",
    "n": lambda row, digits: str(row["n"]),
    "of": lambda row, digits: f"{row['value']:.0f} of {row['n']}",
}
NAMES: dict[str, Callable[[Row], str]] = {
    "set": named_set,
    "draft": lambda row: "target alone" if row["draft"] == TARGET else row["draft"],
    "T": lambda row: f"{row['temperature']:g}",
    "tree": lambda row: tree_name(row["tree"] or NONE),
    "where": lambda row: row["part"] or "",
    "token": lambda row: repr(row["part"]),
}


def tables(results: ResultsTable) -> list[Table]:
    """All tables of a report; one with no rows is left out."""
    every = [
        by_draft(results),
        *(_of_figures(results, name) for name, words in WORDS["tables"].items() if "of" in words),
    ]
    return [table for table in (*every, _suites(results), _models(results)) if table.rows]


def best_tau(results: ResultsTable, draft: str, domain: str, temperature: float) -> Row:
    """tau with the method that is fastest there, or, if nothing was timed, emits most; lossless
    ones first.

    If nothing was decoded, the tau that is predicted of chains.
    """
    if not results.methods:
        predicted = results.figure(
            "tau_predicted", draft, domain, temperature, f"chain:{CHAIN}", "speculative"
        )
        assert predicted is not None, "chains are predicted at every temperature"
        return predicted

    def merit(tau: Row) -> tuple[bool, float, float]:
        timed = results.beside(tau, "speedup")
        return (
            results.lossless(tau["verifier"]),
            (timed and timed["value"]) or 0.0,
            tau["value"] or 0.0,
        )

    return max(
        (results.tau(draft, domain, temperature, *method) for method in results.methods), key=merit
    )


def by_draft(results: ResultsTable) -> Table:
    """Gains of each draft ID and OOD, and tau and speed with its best method."""
    rows = []
    for draft in sorted(results.drafts, key=lambda draft: draft == results.base):
        for temperature in sorted(results.temperatures):
            tau, worst = (
                best_tau(results, draft, "id", temperature),
                worst_set(results, draft, temperature),
            )
            ood = results.gain(draft, "ood", temperature) if results.domains("ood") else None
            row = {
                "draft": draft,
                "T": f"{temperature:g}",
                "gain ID [95 %]": with_interval(results.gain(draft, "id", temperature), sign=True),
                "gain OOD [95 %]": with_interval(ood, sign=True),
                "worst OOD set": f"{worst['domain']} {with_interval(worst, sign=True)}"
                if worst
                else NONE,
                "of the ID gain": kept(results.transfer(draft, "ood", temperature), ood),
                "τ ID [95 %]": with_interval(tau if tau["figure"] == "tau" else None, 2),
                "tree": tree_name(tau["tree"] or NONE),
                "predicted [95 %]": with_interval(results.beside(tau, "tau_predicted"), 2),
                "speed ID [95 %]": with_interval(results.beside(tau, "speedup"), 2),
            }
            rows.append(row)
    return _table("drafts", 2, rows)


def _table(name: str, names: int, rows: Iterable[Mapping[str, str]]) -> Table:
    rows = list(rows)
    empty = [
        key for key in (rows[0] if rows else ()) if all(row[key] in ("", NONE) for row in rows)
    ]
    rows = [{key: cell for key, cell in row.items() if key not in empty} for row in rows]
    return Table(WORDS["tables"][name]["title"], WORDS["tables"][name]["note"], names, rows)


def _of_figures(results: ResultsTable, name: str) -> Table:
    """A table of the rows of one figure: of every set, and of all sets of a kind where that says
    more.
    """
    words = WORDS["tables"][name]
    rows = list(results.rows(words["of"]))
    if any(row["domain"] != row["kind"] for row in rows):
        several = [kind for kind in results.kinds if len(results.domains(kind)) > 1]
        rows = [row for row in rows if row["domain"] in (*results.domains(), *several)]
    if name == "missing_mass":
        rows = [row for row in rows if row["value"]]
    special = _special(results, rows)
    columns: dict[str, Callable[[Row], str]] = {
        key: NAMES.get(key) or special[key] for key in words["names"]
    }
    for heading, column in words["columns"].items():
        if isinstance(column, str):
            columns[heading] = special[column]
            continue
        figure, style, digits = (
            column if len(column) == 3 else (*column, *("plain", 3)[len(column) - 1 :])
        )
        depths = (
            max((row["at"] or 0 for row in results.rows(figure)), default=0)
            if "{at}" in heading
            else 0
        )
        for at in range(1, depths + 1) or (None,):
            columns[heading.format(at=at)] = _column(results, figure, at, style, digits)
    return _table(
        name,
        len(words["names"]),
        ({key: cell(row) for key, cell in columns.items()} for row in rows),
    )


def _column(
    results: ResultsTable, figure: str, at: int | None, style: str, digits: int
) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        other = results.beside(row, figure, at)
        return NONE if other is None else STYLES[style](other, digits)

    return cell


def _special(results: ResultsTable, rows: Sequence[Row]) -> dict[str, Callable[[Row], str]]:
    # Drafted nodes of a tree; the most if it grows.
    shapes = {method["tree"]: method["shape"] for method in results.document["methods"]}
    nodes = {tree: shape.get("nodes") or len(shape["parents"]) for tree, shape in shapes.items()}

    def verifier(row: Row) -> str:
        return (row["verifier"] or NONE) + ", lossless: false" * (
            not results.lossless(row["verifier"])
        )

    def transfer(row: Row) -> str:
        if row["value"] is None or row["value"] < 0:
            return kept(row, results.beside(row, "gain"))
        return f"{with_interval(row, 0, scale=100)} %"

    return {
        "verifier": verifier,
        "nodes": lambda row: str(nodes[row["tree"]]),
        "Holm": _holm(results, rows),
        "ID gain": lambda row: with_interval(
            results.gain(row["draft"], "id", row["temperature"]), sign=True
        ),
        "transfer": transfer,
        "why undefined": lambda row: results.why_undefined(row) or "",
    }


def _holm(results: ResultsTable, rows: Sequence[Row]) -> Callable[[Row], str]:
    """Which gains are clear of zero under Holm's correction: over the sets of a draft and
    temperature, and over the kinds of position of a draft, temperature and kind of sets.
    """
    families: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        pooled = row["domain"] == row["kind"]
        families.setdefault((row["draft"], row["temperature"], pooled and row["kind"]), []).append(
            row
        )
    clear: dict[int, int | None] = {}
    for members in families.values():
        gains = [results.beside(row, "gain_by_part" if row["part"] else "gain") for row in members]
        clear |= {id(row): sign for row, sign in zip(members, signs(gains), strict=True)}
    return lambda row: CLEAR[clear[id(row)]]


def _suites(results: ResultsTable) -> Table:
    rows = [
        {"set": f"{suite['name']} ({suite['kind'].upper()})", "source": suite["source"]}
        | {key: str(suite[key]) for key in ("read", "done", "skipped", "failed")}
        | {
            "why skipped (first two)": "; ".join(
                f"{s['row']}: {s['reason']}" for s in suite["skipped_rows"][:2]
            )
        }
        for suite in results.document["suites"]
    ]
    return _table("suites", 2, rows)


def _models(results: ResultsTable) -> Table:
    clock, models, rows = results.document["clock"], results.document["models"], []
    for role, model in models.items():
        training, quantize = model["training"], model["quantize"]
        row = {"role": role, "model": model["name"], "type": model["model_type"]}
        row["parameters"] = f"{model['parameters']:,}"
        row["of target"] = number(model["parameters"] / models["target"]["parameters"])
        row["memory"] = memory(model["memory_bytes"])
        row["vocabulary"] = f"{model['vocabulary']:,}"
        row["dtype"] = model["dtype"] if quantize == "none" else f"{quantize}, {model['dtype']}"
        row["trained with"] = training["objective"] if training else NONE
        row["on tokens"] = f"{training['response_tokens']:,}" if training else NONE
        row["best step"] = f"{training['best_step']} of {training['steps']}" if training else NONE
        rows.append(row | {"device": model["device"], "fingerprint": model["fingerprint"]})
    table = _table("models", 2, rows)
    whole = "" if clock["machine"]["gpu"] else ", all of the process included"
    return replace(
        table, note=table.note.format(memory=memory(clock["peak_memory_bytes"]), whole=whole)
    )
