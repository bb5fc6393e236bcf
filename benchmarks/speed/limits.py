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
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.lib.pages import put, table
from draftsmith.core.io import JsonObject

MARKERS = "<!-- limits: written by benchmarks/speed/limits.py -->", "<!-- end of limits -->"
_MEMORY = "bandwidth of the memory"
_ARITHMETIC = "multiply-adds in fp32"
_TAU = "tau, and the draft's forwards"
_CACHE = "calls, and the cache that holds it"


class Row(NamedTuple):
    """One line of the table: what is measured, what limits it, how it follows from a result: the
    keys of a figure, or a function.
    """

    what: str
    limited_by: str
    figure: str | Callable[[JsonObject], float]


def at(result: JsonObject, keys: str) -> Any:
    """What a result holds under these keys. Raises KeyError for a section that is missing."""
    found: Any = result
    for key in keys.split("/"):
        found = found[key]
    return found


def llama(result: JsonObject) -> float:
    """llama.cpp's target alone over ours."""
    return float(at(result, "peers/llama-server/F16/T=0/over_ar"))


def drafted(result: JsonObject, weights: str) -> JsonObject:
    """The fastest method with a draft, with these weights."""
    ways = at(result, "sixteen_bits/methods")
    found = [way for name, way in ways.items() if name != "ar"]
    return max(found, key=lambda way: float(way[weights]))


def trees(result: JsonObject) -> list[JsonObject]:
    """What our methods with a draft measured."""
    ways = at(result, "methods/T=0").items()
    ours = [way for name, way in ways if not name.startswith(("hf", "ar", "raw"))]
    return [way for way in ours if isinstance(way, dict)]


def best_over_llama(result: JsonObject) -> float:
    """Our fastest tree over llama.cpp's target alone."""
    return max(float(way["speed_over_ar"]) for way in trees(result)) / llama(result)


def fp32_over_openvino(result: JsonObject) -> float:
    """Our fastest draft in fp32 over OpenVINO's."""
    ways = at(result, "peers/openvino-genai").items()
    theirs = [way["T=0"]["over_ar"] for name, way in ways if name.startswith("draft")]
    alone = at(result, "sixteen_bits/methods/ar/sixteen")
    return float(drafted(result, "fp32")["fp32"] / (max(theirs) * alone))


def overhead(result: JsonObject) -> float:
    """The share of a step of our fastest tree outside both forwards."""
    fastest = max(trees(result), key=lambda way: float(way["tokens_per_s"]))
    return float(fastest["overhead_fraction"])


ROWS = (
    Row(
        "no draft, share of bytes read over bandwidth",
        _MEMORY,
        "methods/T=0/ar/share_of_memory_limit",
    ),
    Row(
        "the same behind the prompt, which is more arithmetic than reading",
        _MEMORY,
        "methods/T=0/ar/share_of_memory_limit_after_prefill",
    ),
    Row(
        "no draft in fp32, share of bytes read over bandwidth",
        _MEMORY,
        "sixteen_bits/fp32_ar_share_of_memory_limit",
    ),
    Row(
        "one token's forward alone, share of weights and cache over bandwidth",
        _MEMORY,
        "forwards/target_behind_128/share_of_memory_limit",
    ),
    Row("no draft over llama.cpp, F16", _MEMORY, lambda result: 1 / llama(result)),
    Row("no draft, 16 bits over fp32", _MEMORY, "sixteen_bits/methods/ar/gain"),
    Row("no draft, nf4 over 16 bits", "decoding the codes", "four_bits/ar/nf4_over_sixteen"),
    Row(
        "best tree, 16 bits over fp32",
        _TAU,
        lambda result: float(drafted(result, "sixteen")["gain"]),
    ),
    Row("best tree over llama.cpp, F16", _TAU, best_over_llama),
    Row("best tree in fp32 over OpenVINO GenAI with the same draft", _TAU, fp32_over_openvino),
    Row(
        "5 tokens in one forward, over one",
        _ARITHMETIC,
        "sixteen_bits/forwards/5/sixteen_over_one_row",
    ),
    Row(
        "29 tokens in one forward, over one",
        _ARITHMETIC,
        "sixteen_bits/forwards/29/sixteen_over_one_row",
    ),
    Row(
        "one token behind 4096, share of weights and cache over bandwidth",
        _MEMORY,
        "forwards/target_behind_4096/share_of_memory_limit",
    ),
    Row(
        "the draft's forward, share of its weights over bandwidth",
        _CACHE,
        "forwards/draft_behind_128/share_of_memory_limit",
    ),
    Row("best tree, share of a step outside both forwards", "Python", overhead),
    Row(
        "resident memory of the process, 16 bits over fp32",
        "the libraries themselves",
        "sixteen_bits/resident_over_fp32/process",
    ),
    Row(
        "of that, what the model adds",
        "bytes of the weights",
        "sixteen_bits/resident_over_fp32/model",
    ),
)


def limits(result: JsonObject) -> str:
    """The table as Markdown, and a line that says where and with what it was measured."""
    rows = []
    for what, limited_by, figure in ROWS:
        try:
            value = at(result, figure) if isinstance(figure, str) else figure(result)
            rows.append([what, limited_by, f"{value:.2f}"])
        except (KeyError, ValueError):
            rows.append([what, limited_by, "not measured"])
    setting = result["setting"]
    versions = setting["versions"].items()
    made_with = ", ".join(f"{name} {version}" for name, version in versions)
    load = setting["load_average_before"][0]
    where = f"{setting['device']}, {setting['threads']} threads, load {load:.1f} before"
    head = ["", "limited by", "measured"]
    return f"{table(head, rows)}\n\n{where}; commit {setting['git_commit']}; {made_with}."


def main() -> None:
    """Print or put the table."""
    parser = argparse.ArgumentParser(
        description="The table of limits from a result of benchmarks/speed/decode.py."
    )
    parser.add_argument("result", type=Path)
    parser.add_argument("--into", type=Path, help="a page with markers; default: print")
    options = parser.parse_args()
    try:
        result = json.loads(options.result.read_text())
        text = limits(result)
        if options.into is None:
            sys.stdout.write(text + "\n")
        else:
            put(options.into, MARKERS, text)
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"benchmarks/speed/limits.py: {options.result}: {error}")


if __name__ == "__main__":
    main()
