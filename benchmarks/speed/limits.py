"""What limits decoding, and how far this engine is from it: the table of README.md, from what
`decode.py` measured.

    python benchmarks/speed/decode.py --sections methods sixteen_bits four_bits forwards --peers true
    --out result.json python -m benchmarks.speed.limits result.json [--into benchmarks/README.md]

Prints the table, or puts it between the markers of a page. What a result does not hold is "not
measured".
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.lib.pages import put, table

MARKERS = "<!-- limits: written by benchmarks/speed/limits.py -->", "<!-- end of limits -->"
_MEMORY, _ARITHMETIC, _TAU = (
    "bandwidth of the memory",
    "multiply-adds in fp32",
    "tau, and the draft's forwards",
)
_CACHE = "calls, and the cache that holds it"
# What it is, what limits it, how it follows from a result, and the bar, if there is one.
Row = tuple[str, str, Callable[[], float], str | None]


def rows_of(result: Any) -> Iterator[Row]:
    """The figures of a result; one whose section is missing raises KeyError when it is called."""

    def alone(key: str) -> float:
        return float(result["methods"]["T=0"]["ar"][key])

    def bits(key: str, *keys: str) -> Any:
        found = result["sixteen_bits"][key]
        for each in keys:
            found = found[each]
        return found

    def forward(model: str, context: int) -> float:
        return float(result["forwards"][f"{model}_behind_{context}"]["share_of_memory_limit"])

    def drafted(weights: str) -> Any:
        return max(
            (way for name, way in bits("methods").items() if name != "ar"),
            key=lambda way: way[weights],
        )

    def llama() -> float:
        return float(result["peers"]["llama-server"]["F16"]["T=0"]["over_ar"])

    def openvino() -> float:
        ways = result["peers"]["openvino-genai"].items()
        return max(float(way["T=0"]["over_ar"]) for name, way in ways if name.startswith("draft"))

    def best() -> float:
        return max(float(way["speed_over_ar"]) for way in trees())

    def trees() -> list[Any]:
        ways = result["methods"]["T=0"].items()
        return [
            way
            for name, way in ways
            if isinstance(way, dict) and not name.startswith(("hf", "ar", "raw"))
        ]

    def overhead() -> float:
        return float(max(trees(), key=lambda way: way["tokens_per_s"])["overhead_fraction"])

    what = "no draft, share of bytes read over bandwidth"
    yield what, _MEMORY, lambda: alone("share_of_memory_limit"), ">= 0.85"
    what = "the same behind the prompt, which is more arithmetic than reading"
    yield what, _MEMORY, lambda: alone("share_of_memory_limit_after_prefill"), None
    what = "no draft in fp32, share of bytes read over bandwidth"
    yield what, _MEMORY, lambda: bits("fp32_ar_share_of_memory_limit"), ">= 0.85"
    what = "one token's forward alone, share of weights and cache over bandwidth"
    yield what, _MEMORY, lambda: forward("target", 128), None
    yield "no draft over llama.cpp, F16", _MEMORY, lambda: 1 / llama(), ">= 0.95"
    yield "no draft, 16 bits over fp32", _MEMORY, lambda: bits("methods", "ar", "gain"), ">= 1.7"
    what = "no draft, nf4 over 16 bits"
    yield what, "decoding the codes", lambda: result["four_bits"]["ar"]["nf4_over_sixteen"], ">= 1"
    yield "best tree, 16 bits over fp32", _TAU, lambda: drafted("sixteen")["gain"], ">= 1.6"
    yield "best tree over llama.cpp, F16", _TAU, lambda: best() / llama(), ">= 1.5"
    what = "best tree in fp32 over OpenVINO GenAI with the same draft"
    ar = partial(bits, "methods", "ar", "sixteen")
    yield what, _TAU, lambda: drafted("fp32")["fp32"] / (openvino() * ar()), ">= 1.25"
    for rows, bar in ((5, "<= 1.15"), (29, "<= 2")):
        what = f"{rows} tokens in one forward, over one"
        yield (
            what,
            _ARITHMETIC,
            lambda rows=rows: bits("forwards", str(rows), "sixteen_over_one_row"),
            bar,
        )  # type: ignore[misc]
    what = "one token behind 4096, share of weights and cache over bandwidth"
    yield what, _MEMORY, lambda: forward("target", 4096), None
    what = "the draft's forward, share of its weights over bandwidth"
    yield what, _CACHE, lambda: forward("draft", 128), None
    yield "best tree, share of a step outside both forwards", "Python", overhead, None
    what = "resident memory of the process, 16 bits over fp32"
    yield what, "the libraries themselves", lambda: bits("resident_over_fp32", "process"), "<= 0.6"
    what = "of that, what the model adds"
    yield what, "bytes of the weights", lambda: bits("resident_over_fp32", "model"), "<= 0.6"


def limits(result: Any) -> str:
    """The table as Markdown, and a line that says where and with what it was measured."""
    rows = []
    for what, limited_by, figure, bar in rows_of(result):
        try:
            value: float | None = figure()
        except (KeyError, ValueError):
            value = None
        rows.append(
            [
                what,
                limited_by,
                "not measured" if value is None else f"{value:.2f}",
                _judged(value, bar),
            ]
        )
    setting = result["setting"]
    versions = ", ".join(f"{name} {version}" for name, version in setting["versions"].items())
    load = setting["load_average_before"][0]
    where = f"{setting['device']}, {setting['threads']} threads, load {load:.1f} before"
    head = ["", "limited by", "measured", "bar"]
    return f"{table(head, rows)}\n\n{where}; commit {setting['git_commit']}; {versions}."


def _judged(value: float | None, bar: str | None) -> str:
    if bar is None:
        return ""
    side, number = bar.split()
    text = f"at {'least' if side == '>=' else 'most'} {number}"
    if value is None:
        return text
    met = value >= float(number) if side == ">=" else value <= float(number)
    return f"{text}: {'met' if met else 'missed'}"


def main() -> None:
    """Print or put the table."""
    parser = argparse.ArgumentParser(
        description="The table of limits from a result of benchmarks/speed/decode.py."
    )
    parser.add_argument("result", type=Path)
    parser.add_argument("--into", type=Path, help="a page with markers; default: print")
    options = parser.parse_args()
    try:
        text = limits(json.loads(options.result.read_text()))
        if options.into is None:
            sys.stdout.write(text + "\n")
        else:
            put(options.into, MARKERS, text)
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"benchmarks/speed/limits.py: {options.result}: {error}")


if __name__ == "__main__":
    main()
