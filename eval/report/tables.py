"""The numbers behind the figures. A table is a list of columns, each a heading and what it says of a row."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from eval.bootstrap import bounds, signs
from eval.report.formats import NONE, interval, memory, number, signed, transfer, tree_name, with_interval
from eval.results import KINDS, Results
from eval.schema import SuiteKind


@dataclass(frozen=True)
class Table:
    """A table of text: the first `names` columns are names, the others numbers."""

    title: str
    note: str
    names: int
    columns: list[str]
    rows: list[list[str]]


Column = tuple[str, Callable[[Any], str]]


def _table(title: str, note: str, names: int, columns: Sequence[Column], rows: Sequence[Any]) -> Table:
    return Table(
        title, note, names, [heading for heading, _ in columns], [[say(row) for _, say in columns] for row in rows]
    )


def _domain(domain: str | None, kind: SuiteKind) -> str:
    return f"all {kind.upper()}" if domain is None else f"{domain} ({kind.upper()})"


def verifier_name(row: Any) -> str:
    """The verifier, and beside it, before any figure, that it is lossy."""
    name = row["verifier"] or NONE
    return name if row["lossless"] else f"{name}, lossless: false"


DOMAIN: Column = ("domain", lambda row: _domain(row["domain"], row["kind"]))
DRAFT: Column = ("draft", lambda row: row["draft"] or "target alone")
TEMPERATURE: Column = ("T", lambda row: f"{row['temperature']:g}")
METHOD: list[Column] = [
    DOMAIN,
    DRAFT,
    ("tree", lambda row: tree_name(row["tree"] or NONE)),
    ("verifier", verifier_name),
    TEMPERATURE,
]

CLEAR = {None: NONE, 0: "not shown", 1: "higher", -1: "lower"}
HOLM: Column = ("Holm", lambda row: CLEAR[row["sign"]])
ALPHA: list[Column] = [
    DOMAIN,
    DRAFT,
    TEMPERATURE,
    ("α [95 %]", lambda row: with_interval(row["alpha"])),
    ("per prompt", lambda row: number(row["alpha"]["mean_per_prompt"])),
    ("gain [95 %]", lambda row: with_interval(row["gain"], sign=True)),
    HOLM,
    ("prompts", lambda row: str(row["alpha"]["prompts"])),
    ("positions", lambda row: f"{row['alpha']['denominator']:.0f}"),
]
UNDRAFTED: list[Column] = [
    DOMAIN,
    DRAFT,
    TEMPERATURE,
    ("missing mass [95 %]", lambda row: with_interval(row["missing_mass"])),
    ("α by text [95 %]", lambda row: with_interval(row["alpha_string"])),
    ("texts written whole [95 %]", lambda row: with_interval(row["round_trip"])),
]
TRANSFER: list[Column] = [
    ("domain", lambda row: _domain(row["domain"], "ood")),
    DRAFT,
    TEMPERATURE,
    ("transfer [95 %]", transfer),
    ("OOD gain [95 %]", lambda row: with_interval(row["gain_ood"], sign=True)),
    ("ID gain [95 %]", lambda row: with_interval(row["gain_id"], sign=True)),
]
WHY_UNDEFINED: Column = ("why undefined", lambda row: row["undefined"] or "")
SPEED: list[Column] = [
    *METHOD,
    ("tokens/s", lambda row: number(row["tokens_per_s"], 1)),
    ("ms/token", lambda row: _milliseconds(row["latency_s_per_token"])),
    ("speedup [95 %]", lambda row: with_interval(row["speedup"], 2)),
    ("tokens", lambda row: str(row["tokens"])),
    ("decode s", lambda row: number(row["decode_s"], 2)),
    ("prefill s", lambda row: number(row["prefill_s"], 2)),
    ("machine", lambda row: "busy" if row["busy"] else "quiet"),
]
SUITES: list[Column] = [
    ("set", lambda row: _domain(row["name"], row["kind"])),
    ("source", lambda row: row["source"]),
    *[(key, lambda row, key=key: str(row[key])) for key in ("read", "done", "skipped", "failed")],
    (
        "why skipped (first two)",
        lambda row: "; ".join(f"{skip['row']}: {skip['reason']}" for skip in row["skipped_rows"][:2]),
    ),
]


def _with_signs(rows: Sequence[Any]) -> list[dict[str, Any]]:
    """Rows of alpha with the sign of their gain; the sets of one draft and temperature are one family."""
    families: dict[tuple[str, float], list[int]] = {}
    for index, row in enumerate(rows):
        families.setdefault((row["draft"], row["temperature"]), []).append(index)
    found: dict[int, int | None] = {}
    for family in families.values():
        found |= dict(zip(family, signs([bounds(rows[index]["gain"]) for index in family]), strict=True))
    return [{**row, "sign": found[index]} for index, row in enumerate(rows)]


def _figure(estimate: Any) -> float | None:
    return None if estimate is None else estimate["value"]


def _milliseconds(value: float | None) -> str:
    return NONE if value is None else f"{value * 1000:.3g}"


def _identical(row: Any) -> str:
    check = row["identical_outputs"]
    return NONE if check is None else f"{check['same']} of {check['of']}"


def _accept_at(depth: int) -> Column:
    def say(row: Any) -> str:
        return number(row["accept_at"][depth - 1]["value"]) if depth <= len(row["accept_at"]) else NONE

    return (f"accept@{depth}", say)


def tree_nodes(shape: dict[str, Any]) -> int:
    """Drafted nodes of a tree, at most those of one that grows."""
    return int(shape["nodes"]) if "nodes" in shape else len(shape["parents"])


def _decoding(deepest: int, nodes: dict[str, int]) -> list[Column]:
    return [
        *METHOD,
        ("nodes", lambda row: str(nodes[row["tree"]])),
        ("τ [95 %]", lambda row: with_interval(row["tau"], 2)),
        ("per prompt", lambda row: number(row["tau"]["mean_per_prompt"], 2)),
        ("gain [95 %]", lambda row: with_interval(row["tau_gain"], 2, sign=True)),
        *[_accept_at(depth) for depth in range(1, deepest + 1)],
        ("headroom [95 %]", lambda row: with_interval(row["headroom"], 2)),
        ("α MCSD", lambda row: number(row["alpha_mcsd"]["value"])),
        ("target calls", lambda row: str(row["counts"]["target_calls"])),
        ("tokens", lambda row: str(row["counts"]["emitted"])),
        ("identical", _identical),
    ]


def _models(target_parameters: int) -> list[Column]:
    return [
        ("role", lambda row: row["role"]),
        ("model", lambda row: row["name"]),
        ("type", lambda row: row["model_type"]),
        ("parameters", lambda row: f"{row['parameters']:,}"),
        ("of target", lambda row: number(row["parameters"] / target_parameters)),
        ("memory", lambda row: memory(row["memory_bytes"])),
        ("vocabulary", lambda row: f"{row['vocabulary']:,}"),
        ("dtype", lambda row: row["dtype"] if row["quantize"] == "none" else f"{row['quantize']}, {row['dtype']}"),
        ("device", lambda row: row["device"]),
        ("fingerprint", lambda row: row["fingerprint"]),
    ]


WHY: list[Column] = [
    ("where", lambda row: f"{row['by']}: {row['bin']}"),
    ("sets", lambda row: _domain(None, row["kind"])),
    DRAFT,
    TEMPERATURE,
    ("α [95 %]", lambda row: with_interval(row["alpha"])),
    ("gain [95 %]", lambda row: with_interval(row["gain"], sign=True)),
    HOLM,
    ("positions", lambda row: f"{row['alpha']['denominator']:.0f}"),
]
LOST: list[Column] = [
    ("token", lambda row: repr(row["token"])),
    ("sets", lambda row: _domain(None, row["kind"])),
    DRAFT,
    TEMPERATURE,
    ("change in all", lambda row: signed(row["change"], 2)),
    ("α", lambda row: number(row["alpha"])),
    ("α of the base", lambda row: number(row["base_alpha"])),
    ("seen", lambda row: str(row["count"])),
]
CALIBRATION: list[Column] = [
    ("sets", lambda row: _domain(None, row["kind"])),
    DRAFT,
    TEMPERATURE,
    ("ECE [95 %]", lambda row: f"{number(row['ece'])} {interval(row, 3)}".strip()),
]


def tables(results: Results) -> list[Table]:
    """All tables of a report; one with no rows is left out."""
    document = results.document
    several = [kind for kind in KINDS if len(results.domains(kind)) > 1]
    pooled = [row for row in document["overall_alpha"] if row["kind"] in several]
    reasons = any(row["undefined"] for row in document["transfer"])
    nodes = {method["tree"]: tree_nodes(method["shape"]) for method in document["methods"]}
    unequal = " Trees here have different numbers of nodes: their τ is not for equal work." * (
        len({*nodes.values()}) > 1
    )
    deepest = max((len(row["accept_at"]) for row in document["decoding"]), default=0)
    speeds = document["speed"]["domains"]
    diagnosis: Any = document["diagnosis"] or {"why": [], "lost": [], "calibration": []}
    models = [{"role": role, **row} for role, row in document["models"].items()]
    whole = "" if document["clock"]["machine"]["gpu"] else ", all of the process included"
    every = [
        _table(
            "Expected acceptance α",
            "Pooled over positions; beside it the mean of per-prompt means. Gains are over the base, paired by "
            "prompt. Higher and lower hold at 95 % under Holm's correction over the sets of a draft and temperature.",
            2,
            ALPHA,
            _with_signs(document["alpha"]) + [{**row, "sign": None} for row in pooled],
        ),
        _table(
            "What cannot be drafted",
            "Drafts of another tokenizer, or of a part of the vocabulary: α is at most 1 minus the missing mass. By "
            "text: what a draft of another tokenizer is worth by string-level match.",
            2,
            UNDRAFTED,
            [row for row in document["alpha"] if row["round_trip"] or _figure(row["missing_mass"])],
        ),
        _table(
            "Transfer",
            "Gain out of distribution over the gain in distribution, all ID sets pooled.",
            2,
            [*TRANSFER, *[WHY_UNDEFINED] * reasons],
            document["transfer"],
        ),
        _table(
            "Decoding, measured",
            "τ pooled over the set, then the mean of per-prompt τ. A dash stands where nothing was on offer. "
            f"Identical outputs are compared at temperature 0 only, headroom is taken above it.{unequal}",
            4,
            _decoding(deepest, nodes),
            document["decoding"],
        ),
        _table(
            "Speed",
            "Batch 1, interleaved. Tokens per second and milliseconds per token leave the prefill out; it stands "
            "beside them. These are clock times of one machine; those of a busy one are marked.",
            4,
            SPEED,
            [{**row, "busy": results.busy(str(row["domain"]), row["temperature"])} for row in speeds],
        ),
        _table(
            "Why it moved",
            "α by kind of position, all sets of a kind pooled. Higher and lower hold at 95 % under Holm's correction "
            "over the rows of a draft, kind and temperature.",
            4,
            WHY,
            diagnosis["why"],
        ),
        _table(
            "Tokens that lost most",
            "Tokens of the target's text, seen five times or more, at which a draft lost most acceptance to the base "
            "in all: suspects, without intervals.",
            4,
            LOST,
            diagnosis["lost"],
        ),
        _table("Calibration", "ECE: see below.", 3, CALIBRATION, diagnosis["calibration"]),
        _table("Prompts", "Every row read is done, skipped or failed.", 2, SUITES, document["suites"]),
        _table(
            "Models",
            "The fingerprint changes with the architecture or the weights. Memory is that of a model's own tensors; at "
            f"its peak the run held {memory(document['clock']['peak_memory_bytes'])}{whole}.",
            2,
            _models(document["models"]["target"]["parameters"]),
            models,
        ),
    ]
    return [table for table in every if table.rows]
