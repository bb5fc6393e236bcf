"""The numbers behind the figures, as rows of text."""

from dataclasses import dataclass

from eval.report.row_figure import number, share, signed, tree_name
from eval.schema import DecodingRow, Difference, Estimate, ResultsDocument, SpeedRow


@dataclass(frozen=True)
class Table:
    """A table: the first `names` columns are names, the others numbers."""

    title: str
    note: str
    names: int
    columns: list[str]
    rows: list[list[str]]


def tables(results: ResultsDocument) -> list[Table]:
    """All tables of a report; one with no rows is left out."""
    every = [
        _alpha(results),
        _transfer(results),
        _decoding(results),
        _speed(results),
        _suites(results),
        _models(results),
    ]
    return [table for table in every if table.rows]


def _domain(domain: str | None, kind: str) -> str:
    return f"all {kind.upper()}" if domain is None else f"{domain} ({kind.upper()})"


def _bounds(value: Estimate | Difference, digits: int, sign: bool = False) -> str:
    if value["low"] is None or value["high"] is None:
        return ""
    write = signed if sign else number
    return f" [{write(value['low'], digits)}, {write(value['high'], digits)}]"


def _with_interval(value: Estimate | None, digits: int = 3) -> str:
    return "–" if value is None else number(value["value"], digits) + _bounds(value, digits)


def _gain(value: Difference | None, digits: int = 3) -> str:
    return "–" if value is None else signed(value["value"], digits) + _bounds(value, digits, True)


def _milliseconds(value: float | None) -> str:
    return "–" if value is None else f"{value * 1000:.3g}"


def memory(value: int) -> str:
    """Bytes for people, in decimal units."""
    size, unit = float(value), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 999.5:
            break
        size, unit = size / 1000, larger
    return f"{size:.3g} {unit}"


def _seconds(value: float) -> str:
    return number(value, 2)


def _alpha(results: ResultsDocument) -> Table:
    several = {kind for kind in ("id", "ood") if sum(s["kind"] == kind for s in results["suites"]) > 1}
    pooled = [row for row in results["overall_alpha"] if row["kind"] in several]
    return Table(
        "Expected acceptance α",
        "Pooled over positions, then the mean of per-prompt means. Gains are over the base draft, paired by prompt.",
        2,
        ["domain", "draft", "T", "α [95 %]", "per prompt", "gain [95 %]", "prompts", "positions"],
        [
            [
                _domain(row["domain"], row["kind"]),
                row["draft"],
                f"{row['temperature']:g}",
                _with_interval(row["alpha"]),
                number(row["alpha"]["mean_per_prompt"]),
                _gain(row["gain"]),
                str(row["alpha"]["prompts"]),
                f"{row['alpha']['denominator']:.0f}",
            ]
            for row in results["alpha"] + pooled
        ],
    )


def _transfer(results: ResultsDocument) -> Table:
    reasons = any(row["undefined"] for row in results["transfer"])
    return Table(
        "Transfer",
        "Gain out of distribution over the gain in distribution, all ID sets pooled.",
        2,
        [
            "domain",
            "draft",
            "T",
            "transfer [95 %]",
            "gain here [95 %]",
            "gain at home [95 %]",
            "why undefined",
        ],
        [
            [
                _domain(row["domain"], "ood"),
                row["draft"],
                f"{row['temperature']:g}",
                share(row, True) if row["value"] is not None else "–",
                _gain(row["gain_ood"]),
                _gain(row["gain_id"]),
                *[row["undefined"] or ""] * reasons,
            ]
            for row in results["transfer"]
        ],
    )


def _identical(row: DecodingRow) -> str:
    check = row["identical_outputs"]
    return "–" if check is None else f"{check['same']} of {check['of']}"


def way(row: DecodingRow | SpeedRow) -> str:
    """The verifier, and beside it, before any figure, that it is lossy."""
    name = row["verifier"] or "–"
    return name if row["lossless"] else f"{name}, lossless: false"


def _decoding(results: ResultsDocument) -> Table:
    deepest = max((len(row["accept_at"]) for row in results["decoding"]), default=0)

    def at(row: DecodingRow, depth: int) -> str:
        return number(row["accept_at"][depth]["value"]) if depth < len(row["accept_at"]) else "–"

    return Table(
        "Decoding, measured",
        "τ pooled over the set, then the mean of per-prompt τ. A dash stands where nothing was on offer. "
        "Identical outputs are compared at temperature 0 only.",
        4,
        [
            "domain",
            "draft",
            "tree",
            "verifier",
            "T",
            "τ [95 %]",
            "per prompt",
            "gain [95 %]",
            *[f"accept@{depth}" for depth in range(1, deepest + 1)],
            "α MCSD",
            "target calls",
            "tokens",
            "identical",
        ],
        [
            [
                _domain(row["domain"], row["kind"]),
                row["draft"],
                tree_name(row["tree"]),
                way(row),
                f"{row['temperature']:g}",
                _with_interval(row["tau"], 2),
                number(row["tau"]["mean_per_prompt"], 2),
                _gain(row["tau_gain"], 2),
                *[at(row, depth) for depth in range(deepest)],
                number(row["alpha_mcsd"]["value"]),
                str(row["counts"]["target_calls"]),
                str(row["counts"]["emitted"]),
                _identical(row),
            ]
            for row in results["decoding"]
        ],
    )


def _speed(results: ResultsDocument) -> Table:
    return Table(
        "Speed",
        "Batch 1, interleaved. Tokens per second, and the milliseconds a token takes, leave the prefill out; it "
        "stands beside. These are clock times of one machine.",
        4,
        [
            "domain",
            "draft",
            "tree",
            "verifier",
            "T",
            "tokens/s",
            "ms/token",
            "speedup [95 %]",
            "tokens",
            "decode s",
            "prefill s",
        ],
        [
            [
                _domain(row["domain"], row["kind"]),
                row["draft"] or "target alone",
                tree_name(row["tree"] or "–"),
                way(row),
                f"{row['temperature']:g}",
                number(row["tokens_per_s"], 1),
                _milliseconds(row["latency_s_per_token"]),
                _with_interval(row["speedup"], 2),
                str(row["tokens"]),
                _seconds(row["decode_s"]),
                _seconds(row["prefill_s"]),
            ]
            for row in results["speed"]["domains"]
        ],
    )


def _suites(results: ResultsDocument) -> Table:
    return Table(
        "Prompts",
        "Every row read is done, skipped or failed.",
        2,
        ["set", "source", "read", "done", "skipped", "failed", "why skipped (first)"],
        [
            [
                _domain(suite["name"], suite["kind"]),
                suite["source"],
                str(suite["read"]),
                str(suite["done"]),
                str(suite["skipped"]),
                str(suite["failed"]),
                "; ".join(f"{skip['row']}: {skip['reason']}" for skip in suite["skipped_rows"][:2]),
            ]
            for suite in results["suites"]
        ],
    )


def _models(results: ResultsDocument) -> Table:
    return Table(
        "Models",
        "The fingerprint changes with the architecture or the weights. Memory is that of a model's own tensors; at "
        f"its peak the run held {memory(results['clock']['peak_memory_bytes'])}"
        f"{'' if results['clock']['machine']['gpu'] else ', all of the process included'}.",
        2,
        [
            "role",
            "model",
            "type",
            "parameters",
            "of target",
            "memory",
            "vocabulary",
            "dtype",
            "device",
            "fingerprint",
        ],
        [
            [
                role,
                model["name"],
                model["model_type"],
                f"{model['parameters']:,}",
                number(model["parameters"] / results["models"]["target"]["parameters"], 3),
                memory(model["memory_bytes"]),
                f"{model['vocabulary']:,}",
                model["dtype"] if model["quantize"] == "none" else f"{model['quantize']}, {model['dtype']}",
                model["device"],
                model["fingerprint"],
            ]
            for role, model in results["models"].items()
        ],
    )
