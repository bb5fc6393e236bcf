"""The tables of a report. Each is a pivot of the results: one line per row of its first figure, others beside it.

A new table is a `Table(...)` in `tables()`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from eval.bootstrap import bounds, signs
from eval.report.formats import NONE, interval, memory, number, percent, signed, tree_name, with_interval
from eval.results import Results
from eval.schema import TARGET, Row

Cell = Callable[[Row], str]
Column = tuple[str, Cell]


@dataclass(frozen=True)
class Table:
    """A table as text; the first `names` columns are names, the others numbers."""

    title: str
    note: str
    names: int
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


def _set(domain: str, kind: str) -> str:
    return f"all {kind.upper()}" if domain == kind else f"{domain} ({kind.upper()})"


SET: Column = ("domain", lambda row: _set(row["domain"], row["kind"]))
DRAFT: Column = ("draft", lambda row: "target alone" if row["draft"] == TARGET else row["draft"])
TEMPERATURE: Column = ("T", lambda row: f"{row['temperature']:g}")
BIN: Column = ("where", lambda row: row["part"] or "")
CLEAR = {None: NONE, 0: "not shown", 1: "higher", -1: "lower"}


def tree_nodes(shape: dict[str, Any]) -> int:
    """Drafted nodes of a tree; the most if it grows."""
    return int(shape["nodes"]) if "nodes" in shape else len(shape["parents"])


class _Pivot:
    """Columns of one set of results."""

    def __init__(self, results: Results) -> None:
        self.results = results

    def table(self, title: str, note: str, names: int, rows: Iterable[Row], columns: Sequence[Column]) -> Table:
        """One line per row."""
        lines = [[cell(row) for _, cell in columns] for row in rows]
        return Table(title, note, names, [heading for heading, _ in columns], lines)

    def beside(self, figure: str, write: Callable[[Row], str], at: int | None = None) -> Cell:
        """A column with another figure of the same draft, set, temperature and method; a dash if there is none."""

        def cell(row: Row) -> str:
            found = self.results.beside(row, figure, at)
            return NONE if found is None else write(found)

        return cell

    def plain(self, figure: str, digits: int = 3, at: int | None = None) -> Cell:
        """A column of numbers."""
        return self.beside(figure, lambda row: number(row["value"], digits), at)

    def ranged(self, figure: str, digits: int = 3, *, sign: bool = False) -> Cell:
        """A column of numbers with their intervals."""
        return self.beside(figure, lambda row: with_interval(row, digits, sign=sign))

    def clear(self, rows: Iterable[Row], *family: str) -> Cell:
        """Whether a gain is clear of zero under Holm's correction over the rows that are alike in `family`."""
        families: dict[tuple[Any, ...], list[Row]] = {}
        for row in rows:
            families.setdefault(tuple(row[key] for key in family), []).append(row)  # type: ignore[literal-required]
        found: dict[int, int | None] = {}
        for members in families.values():
            gains = [bounds(self.results.beside(row, "gain")) for row in members]
            found |= {id(row): sign for row, sign in zip(members, signs(gains), strict=True)}
        return lambda row: CLEAR[found.get(id(row))]


def tables(results: Results) -> list[Table]:
    """All tables of a report; one with no rows is left out."""
    document, pivot = results.document, _Pivot(results)
    shapes = {method["tree"]: tree_nodes(method["shape"]) for method in document["methods"]}
    several = [kind for kind in results.kinds if len(results.domains(kind)) > 1]
    domains = results.domains()

    def rows(figure: str, *, pooled: Sequence[str] = (), bins: bool = False) -> list[Row]:
        of = [row for row in results.rows(figure) if (row["part"] is not None) == bins]
        return [row for row in of if row["domain"] in domains] + [row for row in of if row["domain"] in pooled]

    def verifier(row: Row) -> str:
        """A lossy verifier is marked before any figure."""
        name = row["verifier"] or NONE
        return name if results.lossless(row["verifier"]) else f"{name}, lossless: false"

    def transfer(row: Row) -> str:
        return NONE if row["value"] is None else f"{percent(row['value'])} {interval(row, 0, scale=100)}".strip()

    def identical(row: Row) -> str:
        return f"{row['value']:.0f} of {row['n']}"

    def id_gain(row: Row) -> str:
        return with_interval(results.gain(row["draft"], "id", row["temperature"]), sign=True)

    method: list[Column] = [
        SET,
        DRAFT,
        ("tree", lambda row: tree_name(row["tree"] or NONE)),
        ("verifier", verifier),
        TEMPERATURE,
    ]
    sets, why = rows("alpha"), rows("alpha", pooled=results.kinds, bins=True)
    alpha, positions = ("α [95 %]", pivot.ranged("alpha")), ("positions", pivot.plain("positions", 0))
    gain = ("gain [95 %]", pivot.ranged("gain", sign=True))
    missing = [row for row in sets if (found := results.beside(row, "missing_mass")) and found["value"]]
    transfers = rows("transfer", pooled=several)
    reasons: list[Column] = [("why undefined", lambda row: results.why_undefined(row) or "")]
    unequal = " Trees here have different numbers of nodes: their τ is not for equal work."
    depths = range(1, 1 + max((row["at"] or 0 for row in results.rows("accept")), default=0))
    tables = [
        pivot.table(
            "Expected acceptance α",
            "Pooled over positions; beside it the mean of per-prompt means. Gains are over the base, paired by "
            "prompt. Higher and lower hold at 95 % under Holm's correction over the sets of a draft and temperature.",
            2,
            rows("alpha", pooled=several),
            [
                *(SET, DRAFT, TEMPERATURE, alpha, ("per prompt", pivot.plain("alpha_per_prompt")), gain),
                ("Holm", pivot.clear(sets, "draft", "temperature")),
                ("prompts", lambda row: str(row["n"])),
                positions,
            ],
        ),
        pivot.table(
            "What cannot be drafted",
            "Drafts of another tokenizer, or of a part of the vocabulary: α is at most 1 minus the missing mass.",
            2,
            missing,
            [SET, DRAFT, TEMPERATURE, ("missing mass [95 %]", pivot.ranged("missing_mass"))],
        ),
        pivot.table(
            "Transfer",
            "Gain out of distribution over the gain in distribution, all ID sets pooled.",
            2,
            transfers,
            [
                *(SET, DRAFT, TEMPERATURE, ("transfer [95 %]", transfer)),
                ("OOD gain [95 %]", pivot.ranged("gain", sign=True)),
                ("ID gain [95 %]", id_gain),
                *(reasons if any(map(results.why_undefined, transfers)) else []),
            ],
        ),
        pivot.table(
            "Decoding, measured",
            "τ pooled over the set, then the mean of per-prompt τ. A dash: nothing was on offer. Outputs are compared "
            f"at temperature 0 only, headroom is taken above it.{unequal * (len({*shapes.values()}) > 1)}",
            4,
            rows("tau"),
            [
                *method,
                ("nodes", lambda row: str(shapes[row["tree"] or ""])),
                ("τ [95 %]", pivot.ranged("tau", 2)),
                ("per prompt", pivot.plain("tau_per_prompt", 2)),
                ("gain [95 %]", pivot.ranged("tau_gain", 2, sign=True)),
                *((f"accept@{depth}", pivot.plain("accept", at=depth)) for depth in depths),
                ("headroom [95 %]", pivot.ranged("headroom", 2)),
                ("α MCSD", pivot.plain("alpha_mcsd")),
                ("target calls", pivot.plain("target_calls", 0)),
                ("tokens", pivot.plain("emitted", 0)),
                ("identical", pivot.beside("identical", identical)),
            ],
        ),
        pivot.table(
            "Speed",
            "Batch 1, interleaved. Tokens per second and milliseconds per token leave the prefill out; it stands "
            "beside them. These are clock times of one machine; those of a busy one are marked.",
            4,
            rows("tokens_per_s"),
            [
                *method,
                ("tokens/s", pivot.plain("tokens_per_s", 1)),
                ("ms/token", pivot.beside("latency_s_per_token", _milliseconds)),
                ("speedup [95 %]", pivot.ranged("speedup", 2)),
                ("tokens", pivot.plain("tokens", 0)),
                ("decode s", pivot.plain("decode_s", 2)),
                ("prefill s", pivot.plain("prefill_s", 2)),
                ("machine", lambda row: "busy" if results.busy(row["domain"], row["temperature"]) else "quiet"),
            ],
        ),
        pivot.table(
            "Why it moved",
            "α by kind of position, all sets of a kind pooled. Higher and lower hold at 95 % under Holm's correction "
            "over the rows of a draft, kind and temperature.",
            4,
            why,
            [
                *(BIN, SET, DRAFT, TEMPERATURE, alpha, gain),
                ("Holm", pivot.clear(why, "draft", "kind", "temperature")),
                positions,
            ],
        ),
        pivot.table(
            "Tokens that lost most",
            "Tokens of the target's text, seen five times or more, at which a draft lost most acceptance to the base "
            "in all: suspects, without intervals.",
            4,
            rows("lost", pooled=results.kinds, bins=True),
            [
                ("token", lambda row: repr(row["part"])),
                *(SET, DRAFT, TEMPERATURE),
                ("change in all", lambda row: signed(row["value"], 2)),
                ("α", pivot.plain("lost_alpha")),
                ("α of the base", pivot.plain("lost_base_alpha")),
                ("seen", lambda row: str(row["n"])),
            ],
        ),
        pivot.table(
            "Calibration",
            "ECE is the mean distance of confidence and acceptance.",
            3,
            rows("ece", pooled=results.kinds),
            [SET, DRAFT, TEMPERATURE, ("ECE [95 %]", pivot.ranged("ece"))],
        ),
        _suites(results),
        _models(results),
    ]
    return [table for table in tables if table.rows]


def _milliseconds(row: Row) -> str:
    return NONE if row["value"] is None else f"{row['value'] * 1000:.3g}"


def _suites(results: Results) -> Table:
    counts = ("read", "done", "skipped", "failed")
    rows = []
    for suite in results.document["suites"]:
        why = "; ".join(f"{skip['row']}: {skip['reason']}" for skip in suite["skipped_rows"][:2])
        numbers = [str(suite[key]) for key in counts]  # type: ignore[literal-required]
        rows.append([_set(suite["name"], suite["kind"]), suite["source"], *numbers, why])
    headings = ["set", "source", *counts, "why skipped (first two)"]
    return Table("Prompts", "Every row read is done, skipped or failed.", 2, headings, rows)


def _models(results: Results) -> Table:
    models, clock = results.document["models"], results.document["clock"]
    headings = "role,model,type,parameters,of target,memory,vocabulary,dtype,device,fingerprint".split(",")
    rows = [
        [
            role,
            model["name"],
            model["model_type"],
            f"{model['parameters']:,}",
            number(model["parameters"] / models["target"]["parameters"]),
            memory(model["memory_bytes"]),
            f"{model['vocabulary']:,}",
            model["dtype"] if model["quantize"] == "none" else f"{model['quantize']}, {model['dtype']}",
            model["device"],
            model["fingerprint"],
        ]
        for role, model in models.items()
    ]
    whole = "" if clock["machine"]["gpu"] else ", all of the process included"
    note = (
        "The fingerprint changes with the architecture or the weights. Memory is that of a model's own tensors; at its "
        f"peak the run held {memory(clock['peak_memory_bytes'])}{whole}."
    )
    return Table("Models", note, 2, headings, rows)
