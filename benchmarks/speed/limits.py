r"""What limits decoding, and how far this engine is from it: the table of README.md, from what
`decode.py` measured.

    python benchmarks/speed/decode.py --sections methods sixteen_bits four_bits forwards \
        --peers true --out result.json
    python -m benchmarks.speed.limits result.json [--into benchmarks/README.md]

Prints the table, or puts it between the markers of a page. What a result does not hold is "not
measured".
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.lib.pages import put, table

MARKERS = "<!-- limits: written by benchmarks/speed/limits.py -->", "<!-- end of limits -->"
_MEMORY = "bandwidth of the memory"
_ARITHMETIC = "multiply-adds in fp32"
_TAU = "tau, and the draft's forwards"
_CACHE = "calls, and the cache that holds it"


class Row(NamedTuple):
    """One line of the table: what is measured, what limits it, how it follows from a result."""

    what: str
    limited_by: str
    figure: Callable[[], float]


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

    def rows_over_one(rows: int) -> float:
        return float(bits("forwards", str(rows), "sixteen_over_one_row"))

    def fp32_over_openvino() -> float:
        alone = float(bits("methods", "ar", "sixteen"))
        return float(drafted("fp32")["fp32"]) / (openvino() * alone)

    yield Row(
        "no draft, share of bytes read over bandwidth",
        _MEMORY,
        lambda: alone("share_of_memory_limit"),
    )
    yield Row(
        "the same behind the prompt, which is more arithmetic than reading",
        _MEMORY,
        lambda: alone("share_of_memory_limit_after_prefill"),
    )
    yield Row(
        "no draft in fp32, share of bytes read over bandwidth",
        _MEMORY,
        lambda: bits("fp32_ar_share_of_memory_limit"),
    )
    yield Row(
        "one token's forward alone, share of weights and cache over bandwidth",
        _MEMORY,
        lambda: forward("target", 128),
    )
    yield Row("no draft over llama.cpp, F16", _MEMORY, lambda: 1 / llama())
    yield Row("no draft, 16 bits over fp32", _MEMORY, lambda: bits("methods", "ar", "gain"))
    yield Row(
        "no draft, nf4 over 16 bits",
        "decoding the codes",
        lambda: result["four_bits"]["ar"]["nf4_over_sixteen"],
    )
    yield Row("best tree, 16 bits over fp32", _TAU, lambda: drafted("sixteen")["gain"])
    yield Row("best tree over llama.cpp, F16", _TAU, lambda: best() / llama())
    yield Row("best tree in fp32 over OpenVINO GenAI with the same draft", _TAU, fp32_over_openvino)
    yield Row("5 tokens in one forward, over one", _ARITHMETIC, lambda: rows_over_one(5))
    yield Row("29 tokens in one forward, over one", _ARITHMETIC, lambda: rows_over_one(29))
    yield Row(
        "one token behind 4096, share of weights and cache over bandwidth",
        _MEMORY,
        lambda: forward("target", 4096),
    )
    yield Row(
        "the draft's forward, share of its weights over bandwidth",
        _CACHE,
        lambda: forward("draft", 128),
    )
    yield Row("best tree, share of a step outside both forwards", "Python", overhead)
    yield Row(
        "resident memory of the process, 16 bits over fp32",
        "the libraries themselves",
        lambda: bits("resident_over_fp32", "process"),
    )
    yield Row(
        "of that, what the model adds",
        "bytes of the weights",
        lambda: bits("resident_over_fp32", "model"),
    )


def limits(result: Any) -> str:
    """The table as Markdown, and a line that says where and with what it was measured."""
    rows = []
    for row in rows_of(result):
        try:
            figure = f"{row.figure():.2f}"
        except (KeyError, ValueError):
            figure = "not measured"
        rows.append([row.what, row.limited_by, figure])
    setting = result["setting"]
    versions = ", ".join(f"{name} {version}" for name, version in setting["versions"].items())
    load = setting["load_average_before"][0]
    where = f"{setting['device']}, {setting['threads']} threads, load {load:.1f} before"
    head = ["", "limited by", "measured"]
    return f"{table(head, rows)}\n\n{where}; commit {setting['git_commit']}; {versions}."


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
