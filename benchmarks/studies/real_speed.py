"""The piece `speed` of `real_pair.py`: tokens per second of chats at batch 1 in 16 bits, ours and
of other engines, and what keeps ours from the limit.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from statistics import median

from benchmarks.lib.pages import by_temperature, table
from benchmarks.lib.sets import once
from benchmarks.lib.timing import rotated
from benchmarks.speed import decode as bench_decode, peers, sections
from benchmarks.studies.real_study import Study
from draftsmith.core.io import JsonObject, read_json, write_json_atomic
from draftsmith.core.prompts import read_prompts
from draftsmith.core.sampling import Sampling
from draftsmith.core.tokenization import load_tokenizer
from draftsmith.decode import DecodeStats, SpeculativeDecoder
from draftsmith.drafts.load import draft_kind
from draftsmith.eval.config import PlanConfig
from draftsmith.eval.formats import number, with_interval
from draftsmith.eval.plan import plan
from draftsmith.eval.results import Results
from draftsmith.pair import load_pair

BITS: JsonObject = {"dtype": "bfloat16", "device": "cpu"}
TEMPERATURES = (0.0, 1.0)
# Of `every_draft`.
TREES = ("chain:2", "chain:4", "kary:4")
ROUNDS = 5
CHATS = 2
WARM_UP = 8
# Decoders by draft and tree.
Ways = dict[tuple[str, str], SpeculativeDecoder]
KEYS = ("tokens_per_s", "speed_over_ar", "tau")
# Few, so that the four plans take minutes.
PLANNED: JsonObject = {"max_prompts": 8, "confirm_prompts": 4}
# What the table of the page calls the drafts of the kept speeds.
TIMED = {
    "pruned": "two pruned layers, AdamW, 624 steps",
    "eagle3": "EAGLE-3, AdamW, 624 steps",
    "pruned-recipe": "two pruned layers, Muon, 312 steps",
    "eagle3-longest": "EAGLE-3, Muon, 611 steps of 16",
    "base": "EAGLE-3, Muon, 1,248 steps",
    "jsd-plain": "the same, aligned to maths, plain",
    "jsd-balanced": "the same, aligned to maths, balanced",
    "lookup": "prompt lookup",
}
PARTS = ("memory", "one_token", "more_rows", "draft", "prompt", "outside", "step", "limit")


def measure(study: Study, language_model: str, head: str) -> JsonObject:
    """Plan the trees of both drafts, time them beside the target alone and transformers, then the
    other engines. Every part is a file in OUT/speed, and results.json holds all.
    """
    asked = study.options
    drafts = {"": study.draft(language_model), "head@": study.draft(head)}
    options = bench_decode.Options(
        target=asked.target,
        draft=drafts[""],
        head=drafts["head@"],
        rounds=1 if asked.tiny else 3,
        prompts=2,
        max_new_tokens=study.sizes.new_tokens,
        temperature=list(TEMPERATURES),
        **BITS,
    )
    names: dict[float, list[str]] = {}
    plans: JsonObject = {}
    for temperature in TEMPERATURES:
        names[temperature] = ["hf-assisted", "prompt_lookup@chain:2", "prompt_lookup@chain:4"]
        for which, draft in drafts.items():
            file = _plan(study, draft, temperature)
            trees = ("chain:2", "chain:4", f"auto:{file}")
            names[temperature] += [f"{which}{tree}" for tree in trees]
            planned = read_json(file, "a plan")
            shown = {key: planned[key] for key in ("name", "speedup")}
            plans[f"{which}planned tree, T = {temperature:g}"] = shown
    read = read_prompts(study.prompts("chat"), load_tokenizer(asked.target)).prompts
    chats = islice(read, options.rounds * options.prompts)
    prompts = [list(chat.ids) for chat in chats]
    bench = replace(bench_decode.load_bench(options), prompts=prompts)
    of_peers = bench_decode.asked(bench, options)
    if draft_kind(drafts["head@"]) != "eagle3":
        of_peers = replace(of_peers, head=None)
    makers: dict[str, Callable[[], JsonObject]] = {
        "ours": partial(_ours, bench, options, plans, names)
    }
    for name, engine in peers.ENGINES.items():
        makers[name] = partial(peers.beside, bench, of_peers, engine)
    place = study.out / "speed"
    found: JsonObject = {}
    for name, make in makers.items():
        file = place / f"{name}-{language_model}-{head}.json"
        found[name] = once(file, make)
        if found[name].keys() & {"failed", "skipped"}:
            file.unlink()
    write_json_atomic(place / "results.json", found)
    return found


def _plan(study: Study, draft: str, temperature: float) -> Path:
    """The file of the plan of a draft's tree, which is made unless it is there."""
    name = Path(draft).name
    file = study.out / "speed" / f"{name}-{temperature:g}.plan.json"
    if not file.exists():
        config = PlanConfig(
            target=study.options.target,
            draft=draft,
            prompts=study.prompts("chat"),
            out=str(file),
            temperature=temperature,
            max_new_tokens=study.sizes.new_tokens,
            **PLANNED,
            **BITS,
        )
        plan(config)
    return file


def _ours(
    bench: sections.Bench,
    options: bench_decode.Options,
    plans: JsonObject,
    names: Mapping[float, Sequence[str]],
) -> JsonObject:
    """This engine and transformers. names: of the methods, by temperature."""
    setting = bench_decode.setting(options, bench)
    # Without the paths of the machine.
    for key in ("target", "draft", "head"):
        place = Path(setting["options"][key])
        setting["options"][key] = place.name
    found: JsonObject = {"setting": setting, "plans": plans}
    for temperature in TEMPERATURES:
        by_way = sections.methods(bench, names[temperature], [temperature], options.rounds)
        for at, methods in by_way.items():
            found[at] = {_short(name): way for name, way in methods.items()}
    return found | {"forwards": sections.forwards(bench, sections.FORWARD_CONTEXTS[:1])}


def every_draft(
    study: Study,
    names: Sequence[str],
    piece: str,
    *,
    domains: Sequence[str] = ("chat",),
    trees: Sequence[str] = TREES,
    behind_lookup: Sequence[str] = (),
) -> list[JsonObject]:
    """Speed of every draft that is there, with the same trees, in OUT/PIECE/results.json.

    domains: of the prompts. behind_lookup: trees with which each also drafts where prompt lookup
    finds nothing.
    """
    known = {}
    for name in names:
        run = study.seeded(name)
        if study.has_draft(run):
            known[name] = study.draft(run)
    pair = load_pair(study.options.target, known, **BITS)
    ways: Ways = {("", ""): pair.decoding(draft=[]).decoder}
    for name in known:
        for tree in trees:
            ways[name, tree] = pair.decoding(draft=name, tree=tree).decoder
        for tree in behind_lookup:
            joined = pair.decoding(draft=name, proposer="prompt_lookup", tree=tree)
            ways[f"lookup, {name}", tree] = joined.decoder
    rows = []
    for domain in domains:
        read = read_prompts(study.prompts(domain), pair.tokenizer).prompts
        texts = [prompt.ids for prompt in islice(read, ROUNDS * CHATS)]
        for temperature in TEMPERATURES:
            timed = _timed(ways, texts, temperature, study.sizes.new_tokens)
            rows += [{"domain": domain, "temperature": temperature, **row} for row in timed]
    place = study.out / piece / "results.json"
    place.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(place, rows)
    return rows


def _timed(
    ways: Ways, texts: Sequence[Sequence[int]], temperature: float, new_tokens: int
) -> Iterator[JsonObject]:
    """Yield the figures of every way. Rounds alternate between all of them; each has other texts.
    Speeds are medians of the rounds, over the target alone in the same round; the prompt's forward
    is not counted.
    """
    spent: dict[tuple[str, str], list[DecodeStats]] = {way: [] for way in ways}
    speeds: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
    for turn in range(-1, ROUNDS):
        for way in rotated(list(ways), turn):
            # A short set comes round again.
            begin = max(turn, 0) * CHATS % len(texts)
            count = 1 if turn < 0 else CHATS
            chats = texts[begin : begin + count]
            tokens = WARM_UP if turn < 0 else new_tokens
            made = [
                ways[way].generate([ids], Sampling(temperature=temperature), tokens, seed=turn + 1)
                for ids in chats
            ]
            if turn >= 0:
                answers = [batch.generations[0] for batch in made]
                written = sum(len(answer.output_ids) for answer in answers)
                decode_s = sum(batch.decode_s for batch in made)
                speeds[way].append(written / decode_s)
                spent[way] += [answer.stats for answer in answers]
    for (draft, tree), by_round in speeds.items():
        first, *others = spent[draft, tree]
        pairs = zip(by_round, speeds["", ""], strict=True)
        over_alone = median(speed / alone for speed, alone in pairs)
        yield {
            "draft": draft,
            "tree": tree,
            "tau": sum(others, first).tau,
            "over_alone": over_alone,
            "tokens_per_s": median(by_round),
        }


def speeds_table(found: JsonObject) -> str:
    """Speeds of ours and of the others."""
    heading = by_temperature(["tokens/s", "over ours alone", "tau"], TEMPERATURES)
    return table(["one chat at a time", *heading], _speeds(found))


def with_intervals(engines: Sequence[JsonObject], command: Results) -> str:
    """Every speed over the target alone that was kept with its interval. engines: plans of
    `measure`, one per machine. command: an evaluation of drafts that were aligned to maths.
    """
    rows = []
    for found in engines:
        setting = found["ours"]["setting"]
        options = setting["options"]
        for which, planned in found["ours"]["plans"].items():
            draft = options["head"] if which.startswith("head@") else options["draft"]
            at = which.rpartition(" ")[2]
            speedup = planned["speedup"]
            row = [TIMED[draft], "chat", planned["name"], at, setting["device"]]
            rows.append([*row, str(speedup["n"]), with_interval(speedup, 2)])
    cpu = command.document["clock"]["machine"]["cpu"]
    for draft in command.drafts:
        for domain in ("maths", "chat", "code"):
            figure = command.figure("speedup", draft, domain, 1.0, "kary:4", "mcsd")
            if figure is not None:
                row = [TIMED[draft], domain, "kary:4", "1", cpu]
                rows.append([*row, str(figure["n"]), with_interval(figure, 2)])
    return table(["draft", "set", "tree", "T", "processor", "prompts", "over alone"], rows)


def speed_tables(found: JsonObject) -> str:
    """Speeds of ours and of the others; the milliseconds of a step of ours; forwards by rows."""
    text = f"\n{speeds_table(found)}\n"
    ours = found["ours"]
    for which, planned in ours["plans"].items():
        text += f"\n{which}: {planned['name']}\n"
    for at in TEMPERATURES:
        alone = _ways(found, at)["ar"]
        text += _best(found, at)
        text += f"\nMilliseconds of a step, T = {at:g}\n\n{ledger(found, at)}\n"
        text += (
            f"\nTarget alone: {alone['share_of_memory_limit']:.2f} of the bandwidth, "
            f"{alone['share_of_memory_limit_after_prefill']:.2f} behind the prompt; "
            f"{alone['weight_MB_per_token']:.1f} MB a token.\n"
        )
    forwards: dict[str, dict[str, str]] = {}
    for name, each in ours["forwards"].items():
        if "ours" in each:
            forwards[name] = {n: number(timed["ms"], 2) for n, timed in each["ours"].items()}
    counts = max(forwards.values(), key=len)
    rows = []
    for name, by_count in forwards.items():
        cells = [by_count.get(n, "") for n in counts]
        rows.append([name, *cells])
    forward_table = table(["", *counts], rows)
    return text + f"\nMilliseconds of a forward by number of tokens\n\n{forward_table}\n"


def ledger(found: JsonObject, temperature: float) -> str:
    """Milliseconds of a step of ours, by part."""
    rows = []
    for name, way in _ways(found, temperature).items():
        if parts := way.get("parts_of_a_step"):
            cells = [number(parts[part], 2) for part in PARTS]
            rows.append([_name(found, name), *cells])
    return table(["", *PARTS], rows)


def _ways(found: JsonObject, temperature: float) -> dict[str, JsonObject]:
    methods = found["ours"][f"T={temperature:g}"]
    return {name: way for name, way in methods.items() if isinstance(way, dict) and "tau" in way}


def _speeds(found: JsonObject) -> Iterator[list[str]]:
    cold, hot = (_ways(found, at) for at in TEMPERATURES)
    for name in cold:
        cells = [number(way[name][key], 2) for way, key in product((cold, hot), KEYS)]
        yield [_name(found, name), *cells]
    for engine in peers.ENGINES:
        for name, way in _served(found, engine).items():
            row = [f"{engine}, {name}"]
            for at in TEMPERATURES:
                timed = way[f"T={at:g}"]
                row += [number(timed["tokens_per_s"], 2), number(timed["over_ar"], 2), ""]
            yield row
        for name, way in {"": found[engine], **found[engine]}.items():
            for key in way.keys() & {"failed", "skipped"} if isinstance(way, dict) else ():
                reason = f"{key}: {way[key]}"
                yield [f"{engine} {name}", reason, "", "", "", "", ""]


def _name(found: JsonObject, method: str) -> str:
    """What the table calls a method of `decode.py`."""
    if method.startswith("hf"):
        return "transformers, " + ("assisted" if method == "hf-assisted" else "alone")
    proposer, _, tree = method.rpartition("@")
    options = found["ours"]["setting"]["options"]
    drafts = {"": options["draft"], "head": options["head"]}
    draft = drafts.get(proposer, proposer.replace("_", " "))
    return "draftsmith, alone" if method == "ar" else f"draftsmith, {draft}, {tree}"


def _served(found: JsonObject, engine: str) -> JsonObject:
    ways = found[engine].items()
    return {
        name: way for name, way in ways if isinstance(way, dict) and "T=0" in way and name != "ar"
    }


def _best(found: JsonObject, temperature: float) -> str:
    """Our best draft, over ours alone and over the best that others do in 16 bits."""
    ways = _ways(found, temperature)
    ours = {name: way["speed_over_ar"] for name, way in ways.items()}
    others = {name: ours.pop(name) for name in list(ours) if name.startswith("hf")}
    for engine in peers.ENGINES:
        for name, way in _served(found, engine).items():
            if not name.startswith("Q8_0"):
                timed = way[f"T={temperature:g}"]
                others[f"{engine}, {name}"] = timed["over_ar"]
    best = max(ours, key=lambda name: ours[name])
    theirs = max(others, key=lambda name: others[name])
    over_theirs = number(ours[best] / others[theirs], 2)
    return (
        f"\nT = {temperature:g}: {best} is {number(ours[best], 2)} times ours alone, and "
        f"{over_theirs} times the best of the others in 16 bits ({theirs}).\n"
    )


def _short(name: str) -> str:
    which, colon, _ = name.partition("auto:")
    return f"{which}planned tree" if colon else name
