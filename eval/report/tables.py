"""The tables of a report. Each is a pivot of the results: one line per row of a figure, with other figures beside it.

A new table is a `_table(...)` in `tables()`, with its title and note in templates/words.yaml.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from eval.bootstrap import bounds, signs
from eval.report.formats import NONE, WORDS, interval, memory, number, percent, signed, tree_name, with_interval
from eval.results import Results
from eval.schema import TARGET, Row

Cell = Callable[[Row], str]
CLEAR = {None: NONE, 0: "not shown", 1: "higher", -1: "lower"}
COUNTS = ("read", "done", "skipped", "failed")


@dataclass(frozen=True)
class Table:
    """A table as text; the first `names` columns are names, the others numbers."""

    title: str
    note: str
    names: int
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


def _table(name: str, names: int, rows: Iterable[Any], columns: dict[str, Callable[[Any], str]]) -> Table:
    lines = [[cell(row) for cell in columns.values()] for row in rows]
    return Table(WORDS["tables"][name]["title"], WORDS["tables"][name]["note"], names, list(columns), lines)


def _set(domain: str, kind: str) -> str:
    return f"all {kind.upper()}" if domain == kind else f"{domain} ({kind.upper()})"


def tree_nodes(shape: dict[str, Any]) -> int:
    """Drafted nodes of a tree; the most if it grows."""
    return int(shape["nodes"]) if "nodes" in shape else len(shape["parents"])


def _holm(results: Results, gain: str, rows: Iterable[Row], *family: str) -> Cell:
    """A column that says which gains are clear of zero under Holm's correction over rows alike in `family`."""
    families: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        families.setdefault(tuple(row[key] for key in family), []).append(row)  # type: ignore[literal-required]
    clear: dict[int, int | None] = {}
    for members in families.values():
        gains = [bounds(results.beside(row, gain)) for row in members]
        clear |= {id(row): sign for row, sign in zip(members, signs(gains), strict=True)}
    return lambda row: CLEAR[clear.get(id(row))]


def tables(results: Results) -> list[Table]:
    """All tables of a report; one with no rows is left out."""
    domains = results.domains()
    several = [kind for kind in results.kinds if len(results.domains(kind)) > 1]

    def rows(figure: str, pooled: Sequence[str] = ()) -> list[Row]:
        of = list(results.rows(figure))
        return [row for row in of if row["domain"] in domains] + [row for row in of if row["domain"] in pooled]

    def beside(figure: str, write: Cell, at: int | None = None) -> Cell:
        """A column with another figure of the same draft, set, temperature and method."""

        def cell(row: Row) -> str:
            other = results.beside(row, figure, at)
            return NONE if other is None else write(other)

        return cell

    def plain(figure: str, digits: int = 3, at: int | None = None) -> Cell:
        return beside(figure, lambda row: number(row["value"], digits), at)

    def ranged(figure: str, digits: int = 3, *, sign: bool = False) -> Cell:
        return beside(figure, lambda row: with_interval(row, digits, sign=sign))

    def verifier(row: Row) -> str:
        name = row["verifier"] or NONE
        return name if results.lossless(row["verifier"]) else f"{name}, lossless: false"

    named: dict[str, Cell] = {
        "domain": lambda row: _set(row["domain"], row["kind"]),
        "draft": lambda row: "target alone" if row["draft"] == TARGET else row["draft"],
        "T": lambda row: f"{row['temperature']:g}",
    }
    place, temperature = {key: named[key] for key in ("domain", "draft")}, {"T": named["T"]}
    method = {**place, "tree": lambda row: tree_name(row["tree"] or NONE), "verifier": verifier, **temperature}
    sets, why, transfers = rows("alpha"), rows("alpha_by_part", results.kinds), rows("transfer", several)
    reasons: dict[str, Cell] = {"why undefined": lambda row: results.why_undefined(row) or ""}
    nodes = {each["tree"]: tree_nodes(each["shape"]) for each in results.document["methods"]}
    depths = range(1, 1 + max((row["at"] or 0 for row in results.rows("accept")), default=0))
    every = [
        _table(
            *("alpha", 2, rows("alpha", several)),
            {
                **named,
                "α [95 %]": ranged("alpha"),
                "per prompt": plain("alpha_per_prompt"),
                "gain [95 %]": ranged("gain", sign=True),
            }
            | {"Holm": _holm(results, "gain", sets, "draft", "temperature"), "prompts": lambda row: str(row["n"])}
            | {"positions": plain("positions", 0)},
        ),
        _table(
            *("missing_mass", 2, [row for row in sets if _value(results.beside(row, "missing_mass"))]),
            {**named, "missing mass [95 %]": ranged("missing_mass")},
        ),
        _table(
            *("transfer", 2, transfers),
            {**named, "transfer [95 %]": _share, "OOD gain [95 %]": ranged("gain", sign=True)}
            | {"ID gain [95 %]": lambda row: with_interval(_id_gain(results, row), sign=True)}
            | (reasons if any(map(results.why_undefined, transfers)) else {}),
        ),
        _table(
            *("tau", 4, rows("tau")),
            {
                **method,
                "nodes": lambda row: str(nodes[row["tree"]]),
                "τ [95 %]": ranged("tau", 2),
                "per prompt": plain("tau_per_prompt", 2),
                "gain [95 %]": ranged("tau_gain", 2, sign=True),
                **{f"accept@{depth}": plain("accept", at=depth) for depth in depths},
                "headroom [95 %]": ranged("headroom", 2),
                "α MCSD": plain("alpha_mcsd"),
                "target calls": plain("target_calls", 0),
                "tokens": plain("emitted", 0),
                "identical": beside("identical", lambda row: f"{row['value']:.0f} of {row['n']}"),
            },
        ),
        _table(
            *("speed", 4, rows("tokens_per_s")),
            {
                **method,
                "tokens/s": plain("tokens_per_s", 1),
                "ms/token": beside("latency_s_per_token", _milliseconds),
                "speedup [95 %]": ranged("speedup", 2),
                "tokens": plain("tokens", 0),
                "decode s": plain("decode_s", 2),
                "prefill s": plain("prefill_s", 2),
                "machine": lambda row: "busy" if results.busy(row["domain"], row["temperature"]) else "quiet",
            },
        ),
        _table(
            *("why", 4, why),
            {"where": lambda row: row["part"], **named, "α [95 %]": ranged("alpha_by_part")}
            | {"gain [95 %]": ranged("gain_by_part", sign=True)}
            | {
                "Holm": _holm(results, "gain_by_part", why, "draft", "kind", "temperature"),
                "positions": plain("positions_by_part", 0),
            },
        ),
        _table(
            *("lost", 4, rows("lost", results.kinds)),
            {
                "token": lambda row: repr(row["part"]),
                **named,
                "change in all": lambda row: signed(row["value"], 2),
                "α": plain("lost_alpha"),
                "α of the base": plain("lost_base_alpha"),
                "seen": lambda row: str(row["n"]),
            },
        ),
        _table("ece", 3, rows("ece", results.kinds), {**named, "ECE [95 %]": ranged("ece")}),
        _table(
            *("suites", 2, results.document["suites"]),
            {
                "set": lambda suite: _set(suite["name"], suite["kind"]),
                "source": lambda suite: suite["source"],
                **{key: _key(key) for key in COUNTS},
                "why skipped (first two)": _skipped,
            },
        ),
        _models(results),
    ]
    if len({*nodes.values()}) > 1:
        every[3] = replace(every[3], note=every[3].note + WORDS["tables"]["tau"]["unequal"])
    return [table for table in every if table.rows]


def _value(row: Row | None) -> float:
    return (row["value"] or 0.0) if row else 0.0


def _id_gain(results: Results, row: Row) -> Row | None:
    return results.gain(row["draft"], "id", row["temperature"])


def _share(row: Row) -> str:
    return NONE if row["value"] is None else f"{percent(row['value'])} {interval(row, 0, scale=100)}".strip()


def _milliseconds(row: Row) -> str:
    return NONE if row["value"] is None else f"{row['value'] * 1000:.3g}"


def _key(key: str) -> Callable[[Any], str]:
    return lambda row: str(row[key])


def _skipped(suite: Any) -> str:
    return "; ".join(f"{skip['row']}: {skip['reason']}" for skip in suite["skipped_rows"][:2])


def _models(results: Results) -> Table:
    clock, whole = results.document["clock"], results.document["models"]["target"]["parameters"]
    table = _table(
        *("models", 2, [{"role": role, **model} for role, model in results.document["models"].items()]),
        {
            "role": _key("role"),
            "model": _key("name"),
            "type": _key("model_type"),
            "parameters": lambda model: f"{model['parameters']:,}",
            "of target": lambda model: number(model["parameters"] / whole),
            "memory": lambda model: memory(model["memory_bytes"]),
            "vocabulary": lambda model: f"{model['vocabulary']:,}",
            "dtype": lambda m: m["dtype"] if m["quantize"] == "none" else f"{m['quantize']}, {m['dtype']}",
            "device": _key("device"),
            "fingerprint": _key("fingerprint"),
        },
    )
    process = "" if clock["machine"]["gpu"] else ", all of the process included"
    return replace(table, note=table.note.format(memory=memory(clock["peak_memory_bytes"]), whole=process))
