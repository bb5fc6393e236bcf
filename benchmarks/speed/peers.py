"""Other engines on the same models, prompts and threads, for `decode.py --peers true` and the speed
of `real_pair.py`.

`make engines` installs them (`benchmarks.lib.engines`), in environments of their own, because they
need other versions of the same libraries. An engine that is not there is left out with the reason.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from transformers import PreTrainedModel

import draftsmith as ds
from benchmarks.lib.engines import complete, how_to_get, llama_server, program, vllm_answers, work
from benchmarks.speed.methods import Method, Pair, Prompts
from benchmarks.speed.sections import Bench
from draftsmith.core.errors import InputError, RunError
from draftsmith.core.io import JsonObject
from draftsmith.core.models import dtype_name
from draftsmith.core.tokenization import Tokenizer
from draftsmith.drafts.layouts import gguf_file
from draftsmith.drafts.load import Source, load_source

# Tokens that the others draft at a time.
AHEAD = (2, 4)
# Of one temperature: median tokens per second over rounds (prefill included), and the outputs of
# all prompts.
Measured = JsonObject


@dataclass(frozen=True)
class Asked:
    """What every engine is asked. pair: whole models, as they are on disk; head: the directory of
    an EAGLE-3 head.
    """

    pair: Pair
    tokenizer: Tokenizer
    head: str | None
    rounds: list[list[list[int]]]
    temperatures: Sequence[float]
    max_new_tokens: int
    threads: int

    @property
    def prompts(self) -> list[list[int]]:
        """Those of all rounds."""
        return list(chain.from_iterable(self.rounds))

    @property
    def sixteen_bits(self) -> bool:
        """Whether the models are held in 16 bits, so that engines compute in these too."""
        return self.pair.target.dtype != torch.float32

    def save(self, directory: Path) -> dict[str, str]:
        """Target and draft as directories."""
        places = {"target": self.pair.target, "draft": self.pair.draft}
        for name, model in places.items():
            model.save_pretrained(directory / name)
            self.tokenizer.save_pretrained(directory / name)
        return {name: str(directory / name) for name in places}

    def measured(
        self, speeds: Sequence[Sequence[float]], outputs: Sequence[list[list[int]]]
    ) -> dict[str, Measured]:
        """The result of one way to decode, from speeds and outputs by temperature."""
        return {
            f"T={temperature:g}": {"tokens_per_s": statistics.median(own), "outputs": tokens}
            for temperature, own, tokens in zip(self.temperatures, speeds, outputs, strict=True)
        }


def compare(bench: Bench, asked: Asked) -> JsonObject:
    """Tokens per second of every engine that is there, by way and temperature, over those of this
    engine's target alone (`over_ar`), and how many greedy outputs equal its own. Nothing can be
    interleaved between processes, so `ar` is timed before and after each engine: the two figures
    should agree.
    """
    return {name: beside(bench, asked, engine) for name, engine in ENGINES.items()}


# The program that it needs, and what asks it.
Engine = tuple[str, Callable[[Asked, Path], JsonObject]]


def beside(bench: Bench, asked: Asked, engine: Engine) -> JsonObject:
    """One engine, with `ar` before and after."""
    alone = {
        f"T={temperature:g}": bench.build("ar", temperature) for temperature in asked.temperatures
    }
    alone_greedy = bench.build("ar", 0.0)
    before = {at: _speed(method, asked.rounds) for at, method in alone.items()}
    name, ask = engine
    place = program(name)
    found: JsonObject = {}
    try:
        if place is None:
            found["skipped"] = f"not here: {how_to_get(name)}"
        else:
            found = ask(asked, place)
    except (InputError, RunError) as error:
        return {"failed": str(error)}
    after = {at: _speed(method, asked.rounds) for at, method in alone.items()}
    greedy: list[list[int]] = []
    for prompt in asked.prompts:
        greedy += alone_greedy.decode([prompt], 0)
    for way in found.values():
        for at in alone.keys() & way.keys() if isinstance(way, dict) else ():
            timed = way[at]
            equal = [a == b for a, b in zip(greedy, timed.pop("outputs"), strict=True)]
            timed["over_ar"] = timed["tokens_per_s"] / statistics.mean([before[at], after[at]])
            if at == "T=0":
                timed["equal"] = f"{sum(equal)} of {len(greedy)}"
    found["ar"] = {at: [before[at], after[at]] for at in alone}
    return found


def _speed(method: Method, rounds: Sequence[Prompts]) -> float:
    method.decode([rounds[0][0]], 0)
    speeds = []
    for turn, prompts in enumerate(rounds):
        started = time.perf_counter()
        answers = [method.decode([prompt], turn)[0] for prompt in prompts]
        seconds = time.perf_counter() - started
        speeds.append(sum(map(len, answers)) / seconds)
    return statistics.median(speeds)


def openvino(asked: Asked, python: Path) -> JsonObject:
    """OpenVINO GenAI through `peer_openvino.py`: in 16 bits as it comes, else with fp32 arithmetic
    and cache.
    """
    with tempfile.TemporaryDirectory() as directory:
        names = asked.save(Path(directory))
        for name in names.values():
            # It refuses a model without an end; the request says to go on behind it.
            for file in Path(name).glob("*config.json"):
                config = json.loads(file.read_text()) | {"eos_token_id": 0}
                file.write_text(json.dumps(config))
        request = {
            "prompts": asked.rounds,
            "max_new_tokens": asked.max_new_tokens,
            "threads": asked.threads,
            "ahead": AHEAD,
            "temperatures": asked.temperatures,
            "sixteen_bits": asked.sixteen_bits,
        }
        file = Path(directory) / "request.json"
        file.write_text(json.dumps(request))
        script = Path(__file__).with_name("peer_openvino.py")
        answer = work(python, script, names["target"], names["draft"], file)
    found: JsonObject = {"version": answer["version"]}
    for name, each in answer["ways"].items():
        found[name] = each if "failed" in each else asked.measured(**each)
    return found


def llama_cpp(asked: Asked, server: Path) -> JsonObject:
    """llama.cpp's server as it comes, alone, with the draft and with the head: the target in F16,
    and in F32 or, for models in 16 bits, Q8_0.
    """
    found: JsonObject = {}
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        tokenizer = asked.tokenizer
        draft = gguf(place / "draft", tokenizer, asked.pair.draft)
        drafts = {"draft": ("draft-simple", draft)}
        if asked.head is not None:
            head = load_source(asked.head, asked.pair.target.name_or_path, "float16")
            (place / "head").mkdir()
            gguf_file.write(head, place / "head")
            drafts["eagle3"] = ("draft-eagle3", place / "head" / gguf_file.FILE)
        for kind in ("F16", "Q8_0" if asked.sixteen_bits else "F32"):
            target = gguf(place / kind, tokenizer, asked.pair.target, kind)
            words = ["-m", str(target), "-t", str(asked.threads), "-c", "4096", "-np", "1"]
            found[kind] = _served(server, words, asked)
            for name, (method, file) in drafts.items():
                more = ["-md", str(file), "--spec-type", method, "--spec-draft-n-max"]
                for ahead in AHEAD:
                    timed = _served(server, [*words, *more, str(ahead)], asked)
                    found[f"{kind}, {name}, {ahead} tokens"] = timed
    return found


def gguf(directory: Path, tokenizer: Tokenizer, model: PreTrainedModel, kind: str = "F16") -> Path:
    """The model as a GGUF file in `directory`; InputError, one line, for one that cannot be
    written.
    """
    directory.mkdir()
    gguf_file.write(Source(directory.name, model, model.dtype, tokenizer), directory, matrices=kind)
    return directory / gguf_file.FILE


def _served(server: Path, words: Sequence[str], asked: Asked) -> JsonObject:
    speeds: list[list[float]] = [[] for _ in asked.temperatures]
    outputs: list[list[list[int]]] = [[] for _ in asked.temperatures]
    try:
        with llama_server(server, words) as port:
            complete(port, asked.rounds[0][0], asked.max_new_tokens)
            for place, temperature in enumerate(asked.temperatures):
                options = {"temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
                for turn, prompts in enumerate(asked.rounds):
                    options["seed"] = turn
                    started = time.perf_counter()
                    answers = [
                        complete(port, prompt, asked.max_new_tokens, **options)["tokens"]
                        for prompt in prompts
                    ]
                    seconds = time.perf_counter() - started
                    speeds[place].append(sum(map(len, answers)) / seconds)
                    outputs[place] += answers
    except RunError as error:
        return {"failed": str(error)}
    return asked.measured(speeds, outputs)


def vllm(asked: Asked, python: Path) -> JsonObject:
    """vLLM in the dtype of the models, one request at a time: alone, with the draft, and with the
    head.
    """
    common: JsonObject = {"max_new_tokens": asked.max_new_tokens, "threads": asked.threads}
    common["ways"] = [{"temperature": temperature, "seed": 0} for temperature in asked.temperatures]
    # The first is a warm-up.
    common["prompts"] = [asked.prompts[0], *asked.prompts]
    with tempfile.TemporaryDirectory() as directory:
        engines = _vllm_engines(asked, Path(directory))
        # Compiled, as it comes; what it cannot compile runs as in our proofs.
        compiled = {name: engine | {"enforce_eager": False} for name, engine in engines.items()}
        runs = {name: common | {"engine": engine} for name, engine in compiled.items()}
        answers = vllm_answers(python, runs)
        by_name = answers["answers"]
        refused = [name for name, rows in by_name.items() if isinstance(rows, dict)]
        if refused:
            again = {name: common | {"engine": engines[name]} for name in refused}
            by_name |= vllm_answers(python, again)["answers"]
    found: JsonObject = {"version": answers["engine"], "not_compiled": refused}
    for name, by_way in by_name.items():
        if isinstance(by_way, dict):
            found[name] = {"failed": by_way["refused"]}
        else:
            found[name] = _vllm_measured(asked, [rows[1:] for rows in by_way])
    return found


def _vllm_engines(asked: Asked, directory: Path) -> dict[str, JsonObject]:
    """The options of vLLM by way; models are written to the directory."""
    names = asked.save(directory)
    dtype = dtype_name(asked.pair.target)
    longest = max(map(len, asked.prompts)) + asked.max_new_tokens + 16
    engine = {
        "model": names["target"],
        "dtype": dtype,
        "max_model_len": longest,
        "max_num_seqs": 1,
    }
    ways = {"alone": engine}
    drafts = {"draft": ("draft_model", names["draft"])}
    if asked.head is not None:
        out = f"{directory}/head"
        ds.export(
            draft=asked.head, target=names["target"], format="speculators", out=out, dtype=dtype
        )
        drafts["eagle3"] = ("eagle3", out)
    for name, (method, model) in drafts.items():
        for ahead in AHEAD:
            how = {"method": method, "model": model, "num_speculative_tokens": ahead}
            ways[f"{name}, {ahead} tokens"] = engine | {"speculative_config": how}
    return ways


def _vllm_measured(asked: Asked, by_way: Sequence[Sequence[JsonObject]]) -> JsonObject:
    """The result of one run. by_way: a row for each prompt, by temperature."""
    count = len(asked.rounds[0])
    speeds = []
    outputs = []
    for rows in by_way:
        rounds = [rows[start : start + count] for start in range(0, len(rows), count)]
        speeds.append([_rate(some) for some in rounds])
        outputs.append([row["tokens"][0] for row in rows])
    found = asked.measured(speeds, outputs)
    for rows, timed in zip(by_way, found.values(), strict=True):
        if drafted := sum(row.get("drafts", 0) for row in rows):
            accepted = sum(sum(row["per_position"]) for row in rows)
            timed["accepted_per_draft"] = accepted / drafted
    return found


def _rate(rows: Sequence[JsonObject]) -> float:
    tokens = sum(len(row["tokens"][0]) for row in rows)
    return tokens / sum(row["seconds"] for row in rows)


ENGINES: dict[str, Engine] = {
    "llama-server": ("llama-server", llama_cpp),
    "openvino-genai": ("openvino", openvino),
    "vllm": ("vllm", vllm),
}
