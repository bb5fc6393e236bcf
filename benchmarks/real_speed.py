"""The piece `speed` of benchmarks/real_pair.py: tokens per second of chats at batch 1 in 16 bits, ours and of other
engines, and what keeps ours from the limit.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks import decode as bench_decode
from benchmarks import peers, sections
from benchmarks.objectives_data import once
from benchmarks.pages import table
from benchmarks.real_study import Study
from drafts.load import draft_kind
from draftsmith_core.io import write_json_atomic
from draftsmith_core.prompts import read_prompts
from draftsmith_core.tokenization import load_tokenizer
from eval.config import PlanConfig
from eval.plan import plan

BITS: dict[str, Any] = {"dtype": "bfloat16", "device": "cpu"}
TEMPERATURES = (0.0, 1.0)
# Few, so that the four plans take minutes.
PLANNED: dict[str, Any] = {"max_prompts": 8, "confirm_prompts": 4}
PARTS = ("memory", "one_token", "more_rows", "draft", "prompt", "outside", "step", "limit")


def measure(study: Study, language_model: str, head: str) -> dict[str, Any]:
    """Plan the trees of both drafts, time them beside the target alone and transformers, then the other engines. Every
    part is a file in OUT/speed, and results.json holds all.
    """
    place, chats = study.out / "speed", study.prompts("chat")
    drafts = {"": str(study.out / "drafts" / language_model), "head@": str(study.out / "drafts" / head)}
    options = bench_decode.Options(
        target=study.options.target,
        draft=drafts[""],
        head=drafts["head@"],
        rounds=1 if study.options.tiny else 3,
        prompts=2,
        max_new_tokens=study.sizes.new_tokens,
        temperature=list(TEMPERATURES),
        **BITS,
    )
    names: dict[float, list[str]] = {}
    for temperature in TEMPERATURES:
        names[temperature] = ["hf-assisted"]
        for which, draft in drafts.items():
            file = place / f"{Path(draft).name}-{temperature:g}.plan.json"
            if not file.exists():
                words = {"target": options.target, "draft": draft, "prompts": chats, "out": str(file)}
                words |= {"temperature": temperature, "max_new_tokens": options.max_new_tokens}
                plan(PlanConfig(**words, **PLANNED, **BITS))
            names[temperature] += [f"{which}{tree}" for tree in ("chain:2", "chain:4", f"auto:{file}")]
    bench = bench_decode.load_bench(options)
    read = read_prompts(chats, load_tokenizer(study.options.target)).prompts
    bench = replace(bench, prompts=[list(prompt.ids) for prompt in islice(read, options.rounds * options.prompts)])

    def ours() -> dict[str, Any]:
        found: dict[str, Any] = {"setting": bench_decode.setting(options, bench)}
        for temperature in TEMPERATURES:
            found |= sections.methods(bench, names[temperature], [temperature], options.rounds)
        return found | {"forwards": sections.forwards(bench, sections.FORWARD_CONTEXTS[:1])}

    asked = bench_decode.asked(bench, options)
    if draft_kind(drafts["head@"]) != "eagle3":
        asked = replace(asked, head=None)
    makers: dict[str, Callable[[], dict[str, Any]]] = {"ours": ours}
    makers |= {name: partial(peers.beside, bench, asked, engine) for name, engine in peers.ENGINES.items()}
    found: dict[str, Any] = {}
    for name, make in makers.items():
        found[name] = once(place / f"{name}.json", make)
        if found[name].keys() & {"failed", "skipped"}:
            (place / f"{name}.json").unlink()
    write_json_atomic(place / "results.json", found)
    return found


def speed_tables(found: dict[str, Any]) -> str:
    """Speeds of ours and of the others; the milliseconds of a step of ours; forwards by rows."""
    heading = ["", *(f"{what}, T = {at:g}" for at in TEMPERATURES for what in ("tokens/s", "over ours alone", "tau"))]
    text = f"\n{table(heading, _speeds(found))}\n"
    for at in TEMPERATURES:
        methods = found["ours"][f"T={at:g}"]
        rows = (
            [_short(name), *(f"{way['parts_of_a_step'][part]:.2f}" for part in PARTS)]
            for name, way in methods.items()
            if "parts_of_a_step" in way
        )
        alone = methods["ar"]
        text += f"\nMilliseconds of a step, T = {at:g}\n\n{table(['', *PARTS], rows)}\n"
        text += (
            f"\nTarget alone: {alone['share_of_memory_limit']:.2f} of the bandwidth, "
            f"{alone['share_of_memory_limit_after_prefill']:.2f} behind the prompt; "
            f"{alone['weight_MB_per_token']:.1f} MB a token.\n"
        )
    forwards = found["ours"]["forwards"]
    kinds = [(name, by_rows) for name, each in forwards.items() if "ours" in each for by_rows in [each["ours"]]]
    counts = list(max((by_rows for _, by_rows in kinds), key=len))
    rows = ([name, *(f"{by_rows[n]['ms']:.2f}" if n in by_rows else "" for n in counts)] for name, by_rows in kinds)
    return text + f"\nMilliseconds of a forward by number of tokens\n\n{table(['', *counts], rows)}\n"


def _speeds(found: dict[str, Any]) -> Iterator[list[str]]:
    methods = [found["ours"][f"T={at:g}"] for at in TEMPERATURES]
    for name in methods[0]:
        if isinstance(methods[0][name], dict) and "tau" in methods[0][name]:
            # The plans of the two temperatures differ in the file's name.
            ways = [next(each for own, each in by_name.items() if _short(own) == _short(name)) for by_name in methods]
            cells = [[_number(way[key]) for key in ("tokens_per_s", "speed_over_ar", "tau")] for way in ways]
            yield [_short(name), *cells[0], *cells[1]]
    for engine in peers.ENGINES:
        for name, way in found[engine].items():
            if isinstance(way, dict) and "T=0" in way and name != "ar":
                cells = [[_number(way[f"T={at:g}"][key]) for key in ("tokens_per_s", "over_ar")] for at in TEMPERATURES]
                yield [f"{engine}, {name}", *cells[0], "", *cells[1], ""]
        for key in found[engine].keys() & {"failed", "skipped"}:
            yield [engine, f"{key}: {found[engine][key]}", "", "", "", "", ""]


def _number(value: float) -> str:
    return f"{value:.2f}"


def _short(name: str) -> str:
    which, colon, _ = name.partition("auto:")
    return f"{which}planned tree" if colon else name
