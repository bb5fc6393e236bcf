"""What limits decoding, and how far this engine is from it: the table of README.md, from what `decode.py` measured.

    python benchmarks/decode.py --sections methods sixteen_bits four_bits forwards --peers true --out result.json
    python benchmarks/limits.py result.json [--into benchmarks/README.md]

Prints the table, or puts it between the markers of a page. What a result does not hold is "not measured".
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- limits: written by benchmarks/limits.py -->", "<!-- end of limits -->"
Result = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One figure: what it is, what limits it, where it stands in the result (keys, with slashes) or how it follows from
    that, and the bar, which is a least value unless `at_most`.
    """

    what: str
    limited_by: str
    value: str | Callable[[Result], float]
    bar: float | None
    at_most: bool = False


def _at(result: Result, keys: str) -> Any:
    for key in keys.split("/"):
        result = result[key]
    return result


def _best(methods: dict[str, float]) -> float:
    return max(speed for name, speed in methods.items() if name not in ("ar", "hf"))


def _drafted(result: Result, kept: str) -> str:
    """The fastest method with a draft of the section `sixteen_bits`."""
    methods: dict[str, Any] = {
        name: each[kept] for name, each in result["sixteen_bits"]["methods"].items() if name != "ar"
    }
    return max(methods, key=methods.__getitem__)


def _ours(result: Result) -> dict[str, float]:
    peers = result["peers"]
    return {name: statistics.mean(each["tokens_per_s"]) for name, each in peers.items() if name not in _ENGINES}


_ENGINES = ("openvino-genai f32", "llama-server")


def _llama_f16(result: Result) -> float:
    speed: float = result["peers"]["llama-server"]["F16"]["tokens_per_s"]
    return speed


def _openvino_drafted(result: Result) -> float:
    methods = result["peers"]["openvino-genai f32"]
    return max(each["tokens_per_s"] for name, each in methods.items() if name.startswith("draft"))


def _overhead(result: Result) -> float:
    found = _at(result, "methods/T=0").items()
    methods = {name: each for name, each in found if isinstance(each, dict) and "tau" in each}
    best = max(
        (name for name in methods if not name.startswith(("hf", "ar"))), key=lambda name: methods[name]["tokens_per_s"]
    )
    fraction: float = methods[best]["overhead_fraction"]
    return fraction


_MEMORY, _ARITHMETIC = "bandwidth of the memory", "multiply-adds in fp32"
ROWS = (
    Row("no draft, share of bytes read over bandwidth", _MEMORY, "methods/T=0/ar/share_of_memory_limit", 0.85),
    Row(
        "the same behind the prompt, which is more arithmetic than reading",
        _MEMORY,
        "methods/T=0/ar/share_of_memory_limit_after_prefill",
        None,
    ),
    Row(
        "no draft in fp32, share of bytes read over bandwidth",
        _MEMORY,
        "sixteen_bits/fp32_ar_share_of_memory_limit",
        0.85,
    ),
    Row(
        "one token's forward alone, share of weights and cache over bandwidth",
        _MEMORY,
        "forwards/target_behind_128/share_of_memory_limit",
        None,
    ),
    Row("no draft over llama.cpp, F16", _MEMORY, lambda r: _ours(r)["ar"] / _llama_f16(r), 0.95),
    Row("no draft, 16 bits over fp32", _MEMORY, "sixteen_bits/methods/ar/gain", 1.7),
    Row("no draft, nf4 over 16 bits", "decoding the codes", "four_bits/ar/nf4_over_sixteen", 1.0),
    Row(
        "best tree, 16 bits over fp32",
        "tau, and the draft's forwards",
        lambda r: r["sixteen_bits"]["methods"][_drafted(r, "sixteen")]["gain"],
        1.6,
    ),
    Row(
        "best tree over llama.cpp, F16", "tau, and the draft's forwards", lambda r: _best(_ours(r)) / _llama_f16(r), 1.5
    ),
    Row(
        "best tree in fp32 over OpenVINO GenAI with the same draft",
        "tau, and the draft's forwards",
        lambda r: r["sixteen_bits"]["methods"][_drafted(r, "fp32")]["fp32"] / _openvino_drafted(r),
        1.25,
    ),
    Row(
        "5 tokens in one forward, over one",
        _ARITHMETIC,
        "sixteen_bits/forwards/5/sixteen_over_one_row",
        1.15,
        at_most=True,
    ),
    Row(
        "29 tokens in one forward, over one",
        _ARITHMETIC,
        "sixteen_bits/forwards/29/sixteen_over_one_row",
        2.0,
        at_most=True,
    ),
    Row(
        "one token behind 4096, share of weights and cache over bandwidth",
        _MEMORY,
        "forwards/target_behind_4096/share_of_memory_limit",
        None,
    ),
    Row(
        "the draft's forward, share of its weights over bandwidth",
        "calls, and the cache that holds it",
        "forwards/draft_behind_128/share_of_memory_limit",
        None,
    ),
    Row("best tree, share of a step outside both forwards", "Python", _overhead, None),
    Row(
        "resident memory of the process, 16 bits over fp32",
        "the libraries themselves",
        "sixteen_bits/resident_over_fp32/process",
        0.6,
        at_most=True,
    ),
    Row(
        "of that, what the model adds",
        "bytes of the weights",
        "sixteen_bits/resident_over_fp32/model",
        0.6,
        at_most=True,
    ),
)


def table(result: Result) -> str:
    """The table as Markdown, and a line that says where and with what it was measured."""
    lines = ["| | limited by | measured | bar |", "|---|---|---|---|"]
    for row in ROWS:
        try:
            value: float | None = _at(result, row.value) if isinstance(row.value, str) else row.value(result)
        except (KeyError, ValueError):
            value = None
        lines.append(f"| {row.what} | {row.limited_by} | {_shown(value)} | {_judged(row, value)} |")
    setting = result["setting"]
    versions = ", ".join(f"{name} {version}" for name, version in setting["versions"].items())
    load = setting["load_average_before"][0]
    where = f"{setting['device']}, {setting['threads']} threads, load {load:.1f} before"
    lines += ["", f"{where}; commit {setting['git_commit']}; {versions}."]
    return "\n".join(lines)


def _shown(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2f}"


def _judged(row: Row, value: float | None) -> str:
    if row.bar is None:
        return ""
    bar = f"at {'most' if row.at_most else 'least'} {row.bar:g}"
    if value is None:
        return bar
    met = value <= row.bar if row.at_most else value >= row.bar
    return f"{bar}: {'met' if met else 'missed'}"


def put(page: Path, text: str) -> None:
    """The text between the markers of a page; ValueError where it has none."""
    whole = page.read_text()
    before, found, rest = whole.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not found or not end:
        raise ValueError(f"{page}: has no lines '{BEGIN}' and '{END}' for the table")
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def main() -> None:
    """Print or put the table."""
    parser = argparse.ArgumentParser(description="The table of limits from a result of benchmarks/decode.py.")
    parser.add_argument("result", type=Path)
    parser.add_argument("--into", type=Path, help="a page with markers; default: print")
    options = parser.parse_args()
    try:
        text = table(json.loads(options.result.read_text()))
        if options.into is None:
            sys.stdout.write(text + "\n")
        else:
            put(options.into, text)
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"benchmarks/limits.py: {options.result}: {error}")


if __name__ == "__main__":
    main()
