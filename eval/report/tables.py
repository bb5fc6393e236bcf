"""The numbers behind the figures. A table is a list of columns, each a heading and what it says of a row."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from eval.bootstrap import bounds, signs
from eval.report.formats import NONE, interval, memory, number, signed, transfer, tree_name, with_interval
from eval.results import KINDS, Results
from eval.schema import SuiteKind

Say = Callable[[Any], str]
Column = tuple[str, Say]


@dataclass(frozen=True)
class Table:
    """Rows, and the columns that say something of each: the first `names` are names, the others numbers."""

    title: str
    note: str
    names: int
    columns: Sequence[Column]
    rows: Sequence[Any]


def _text(key: str) -> Say:
    return lambda row: str(row[key])


def _number(key: str, digits: int = 3) -> Say:
    return lambda row: number(row[key], digits)


def _interval(key: str, digits: int = 3, *, sign: bool = False) -> Say:
    return lambda row: with_interval(row[key], digits, sign=sign)


def _domain(domain: str | None, kind: SuiteKind) -> str:
    return f"all {kind.upper()}" if domain is None else f"{domain} ({kind.upper()})"


def verifier_name(row: Any) -> str:
    """The verifier, and beside it, before any figure, that it is lossy."""
    name = row["verifier"] or NONE
    return name if row["lossless"] else f"{name}, lossless: false"


def _milliseconds(row: Any) -> str:
    value = row["latency_s_per_token"]
    return NONE if value is None else f"{value * 1000:.3g}"


def _identical(row: Any) -> str:
    check = row["identical_outputs"]
    return NONE if check is None else f"{check['same']} of {check['of']}"


def _accept_at(depth: int) -> Say:
    return lambda row: number(row["accept_at"][depth - 1]["value"]) if depth <= len(row["accept_at"]) else NONE


DOMAIN: Column = ("domain", lambda row: _domain(row["domain"], row["kind"]))
SETS: Column = ("sets", lambda row: _domain(None, row["kind"]))
DRAFT: Column = ("draft", lambda row: row["draft"] or "target alone")
TEMPERATURE: Column = ("T", lambda row: f"{row['temperature']:g}")
TREE: Column = ("tree", lambda row: tree_name(row["tree"] or NONE))
METHOD: list[Column] = [DOMAIN, DRAFT, TREE, ("verifier", verifier_name), TEMPERATURE]
ESTIMATED: Column = ("α [95 %]", _interval("alpha"))
GAIN: Column = ("gain [95 %]", _interval("gain", sign=True))
POSITIONS: Column = ("positions", lambda row: f"{row['alpha']['denominator']:.0f}")
CLEAR = {None: NONE, 0: "not shown", 1: "higher", -1: "lower"}
HOLM: Column = ("Holm", lambda row: CLEAR[row["sign"]])
PER_PROMPT: Column = ("per prompt", lambda row: number(row["alpha"]["mean_per_prompt"]))
PROMPTS: Column = ("prompts", lambda row: str(row["alpha"]["prompts"]))
ALPHA: list[Column] = [DOMAIN, DRAFT, TEMPERATURE, ESTIMATED, PER_PROMPT, GAIN, HOLM, PROMPTS, POSITIONS]
UNDRAFTED: list[Column] = [
    DOMAIN,
    DRAFT,
    TEMPERATURE,
    ("missing mass [95 %]", _interval("missing_mass")),
]
TRANSFER: list[Column] = [
    ("domain", lambda row: _domain(row["domain"], "ood")),
    DRAFT,
    TEMPERATURE,
    ("transfer [95 %]", transfer),
    ("OOD gain [95 %]", _interval("gain_ood", sign=True)),
    ("ID gain [95 %]", _interval("gain_id", sign=True)),
]
WHY_UNDEFINED: Column = ("why undefined", lambda row: row["undefined"] or "")
SPEED: list[Column] = [
    *METHOD,
    ("tokens/s", _number("tokens_per_s", 1)),
    ("ms/token", _milliseconds),
    ("speedup [95 %]", _interval("speedup", 2)),
    ("tokens", _text("tokens")),
    ("decode s", _number("decode_s", 2)),
    ("prefill s", _number("prefill_s", 2)),
    ("machine", lambda row: "busy" if row["busy"] else "quiet"),
]
SUITES: list[Column] = [
    ("set", lambda row: _domain(row["name"], row["kind"])),
    ("source", _text("source")),
    *[(key, _text(key)) for key in ("read", "done", "skipped", "failed")],
    (
        "why skipped (first two)",
        lambda row: "; ".join(f"{skip['row']}: {skip['reason']}" for skip in row["skipped_rows"][:2]),
    ),
]


def _with_signs(rows: Sequence[Any]) -> list[dict[str, Any]]:
    """Rows of alpha with the sign of their gain; the sets of one draft and temperature are one family."""
    families: dict[tuple[str, float], list[dict[str, Any]]] = {}
    found = [dict(row) for row in rows]
    for row in found:
        families.setdefault((row["draft"], row["temperature"]), []).append(row)
    for family in families.values():
        for row, sign in zip(family, signs([bounds(row["gain"]) for row in family]), strict=True):
            row["sign"] = sign
    return found


def tree_nodes(shape: dict[str, Any]) -> int:
    """Drafted nodes of a tree, at most those of one that grows."""
    return int(shape["nodes"]) if "nodes" in shape else len(shape["parents"])


def _decoding(deepest: int, nodes: dict[str, int]) -> list[Column]:
    return [
        *METHOD,
        ("nodes", lambda row: str(nodes[row["tree"]])),
        ("τ [95 %]", _interval("tau", 2)),
        ("per prompt", lambda row: number(row["tau"]["mean_per_prompt"], 2)),
        ("gain [95 %]", _interval("tau_gain", 2, sign=True)),
        *[(f"accept@{depth}", _accept_at(depth)) for depth in range(1, deepest + 1)],
        ("headroom [95 %]", _interval("headroom", 2)),
        ("α MCSD", lambda row: number(row["alpha_mcsd"]["value"])),
        ("target calls", lambda row: str(row["counts"]["target_calls"])),
        ("tokens", lambda row: str(row["counts"]["emitted"])),
        ("identical", _identical),
    ]


MODELS: list[Column] = [
    ("role", _text("role")),
    ("model", _text("name")),
    ("type", _text("model_type")),
    ("parameters", lambda row: f"{row['parameters']:,}"),
    ("of target", _number("of_target")),
    ("memory", lambda row: memory(row["memory_bytes"])),
    ("vocabulary", lambda row: f"{row['vocabulary']:,}"),
    ("dtype", lambda row: row["dtype"] if row["quantize"] == "none" else f"{row['quantize']}, {row['dtype']}"),
    ("device", _text("device")),
    ("fingerprint", _text("fingerprint")),
]


WHERE: Column = ("where", lambda row: f"{row['by']}: {row['bin']}")
WHY: list[Column] = [WHERE, SETS, DRAFT, TEMPERATURE, ESTIMATED, GAIN, HOLM, POSITIONS]
LOST: list[Column] = [
    ("token", lambda row: repr(row["token"])),
    SETS,
    DRAFT,
    TEMPERATURE,
    ("change in all", lambda row: signed(row["change"], 2)),
    ("α", _number("alpha")),
    ("α of the base", _number("base_alpha")),
    ("seen", _text("count")),
]
ECE: Column = ("ECE [95 %]", lambda row: f"{number(row['ece'])} {interval(row, 3)}".strip())
CALIBRATION: list[Column] = [SETS, DRAFT, TEMPERATURE, ECE]


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
    whole_target = document["models"]["target"]["parameters"]
    models = [
        {"role": role, "of_target": row["parameters"] / whole_target, **row} for role, row in document["models"].items()
    ]
    whole = "" if document["clock"]["machine"]["gpu"] else ", all of the process included"
    every = [
        Table(
            "Expected acceptance α",
            "Pooled over positions; beside it the mean of per-prompt means. Gains are over the base, paired by "
            "prompt. Higher and lower hold at 95 % under Holm's correction over the sets of a draft and temperature.",
            2,
            ALPHA,
            _with_signs(document["alpha"]) + [{**row, "sign": None} for row in pooled],
        ),
        Table(
            "What cannot be drafted",
            "Drafts of another tokenizer, or of a part of the vocabulary: α is at most 1 minus the missing mass.",
            2,
            UNDRAFTED,
            [row for row in document["alpha"] if row["missing_mass"] and row["missing_mass"]["value"]],
        ),
        Table(
            "Transfer",
            "Gain out of distribution over the gain in distribution, all ID sets pooled.",
            2,
            [*TRANSFER, *[WHY_UNDEFINED] * reasons],
            document["transfer"],
        ),
        Table(
            "Decoding, measured",
            "τ pooled over the set, then the mean of per-prompt τ. A dash stands where nothing was on offer. "
            f"Identical outputs are compared at temperature 0 only, headroom is taken above it.{unequal}",
            4,
            _decoding(deepest, nodes),
            document["decoding"],
        ),
        Table(
            "Speed",
            "Batch 1, interleaved. Tokens per second and milliseconds per token leave the prefill out; it stands "
            "beside them. These are clock times of one machine; those of a busy one are marked.",
            4,
            SPEED,
            [{**row, "busy": results.busy(str(row["domain"]), row["temperature"])} for row in speeds],
        ),
        Table(
            "Why it moved",
            "α by kind of position, all sets of a kind pooled. Higher and lower hold at 95 % under Holm's correction "
            "over the rows of a draft, kind and temperature.",
            4,
            WHY,
            diagnosis["why"],
        ),
        Table(
            "Tokens that lost most",
            "Tokens of the target's text, seen five times or more, at which a draft lost most acceptance to the base "
            "in all: suspects, without intervals.",
            4,
            LOST,
            diagnosis["lost"],
        ),
        Table(
            "Calibration",
            "ECE is the mean distance of confidence and acceptance.",
            3,
            CALIBRATION,
            diagnosis["calibration"],
        ),
        Table("Prompts", "Every row read is done, skipped or failed.", 2, SUITES, document["suites"]),
        Table(
            "Models",
            "The fingerprint changes with the architecture or the weights. Memory is that of a model's own tensors; at "
            f"its peak the run held {memory(document['clock']['peak_memory_bytes'])}{whole}.",
            2,
            MODELS,
            models,
        ),
    ]
    return [table for table in every if table.rows]
