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
from pathlib import Path
from typing import Any

import torch

import draftsmith as ds
from benchmarks.lib.engines import complete, how_to_get, llama_server, program, vllm_answers, work
from benchmarks.speed.methods import Method, Pair
from benchmarks.speed.sections import Bench
from draftsmith.core.errors import InputError, RunError
from draftsmith.core.io import JsonObject
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


def beside(bench: Bench, asked: Asked, engine: Callable[[Asked], JsonObject]) -> JsonObject:
    """One engine, with `ar` before and after."""
    alone = {
        f"T={temperature:g}": bench.build("ar", temperature) for temperature in asked.temperatures
    }
    before = {at: _speed(method, asked.rounds) for at, method in alone.items()}
    try:
        found = engine(asked)
    except (InputError, RunError) as error:
        return {"failed": str(error)}
    after = {at: _speed(method, asked.rounds) for at, method in alone.items()}
    greedy = [
        bench.build("ar", 0.0).decode([prompt], 0)[0]
        for prompts in asked.rounds
        for prompt in prompts
    ]
    for way in found.values():
        for at in alone.keys() & way.keys() if isinstance(way, dict) else ():
            outputs = way[at].pop("outputs")
            way[at]["over_ar"] = way[at]["tokens_per_s"] / statistics.mean([before[at], after[at]])
            if at == "T=0":
                same = sum(mine == theirs for mine, theirs in zip(greedy, outputs, strict=True))
                way[at]["equal"] = f"{same} of {len(greedy)}"
    return found | {"ar": {at: [before[at], after[at]] for at in alone}}


def _speed(method: Method, rounds: Sequence[Sequence[Sequence[int]]]) -> float:
    method.decode([rounds[0][0]], 0)
    speeds = []
    for turn, prompts in enumerate(rounds):
        started = time.perf_counter()
        emitted = sum(len(method.decode([prompt], turn)[0]) for prompt in prompts)
        speeds.append(emitted / (time.perf_counter() - started))
    return statistics.median(speeds)


def openvino(asked: Asked) -> JsonObject:
    """OpenVINO GenAI through `peer_openvino.py`: in 16 bits as it comes, else with fp32 arithmetic
    and cache.
    """
    python = program("openvino")
    if python is None:
        return {"skipped": f"not here: {how_to_get('openvino')}"}
    with tempfile.TemporaryDirectory() as directory:
        names = asked.save(Path(directory))
        for name in names.values():
            # It refuses a model without an end; the request says to go on behind it.
            for file in Path(name).glob("*config.json"):
                file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": 0}))
        request = {
            "prompts": asked.rounds,
            "max_new_tokens": asked.max_new_tokens,
            "threads": asked.threads,
        }
        request |= {
            "ahead": AHEAD,
            "temperatures": asked.temperatures,
            "sixteen_bits": asked.sixteen_bits,
        }
        file = Path(directory) / "request.json"
        file.write_text(json.dumps(request))
        found = work(
            python, Path(__file__).resolve().with_name("peer_openvino.py"), *names.values(), file
        )
    ways = {
        name: each if "failed" in each else asked.measured(**each)
        for name, each in found["ways"].items()
    }
    return {"version": found["version"]} | ways


def llama_cpp(asked: Asked) -> JsonObject:
    """llama.cpp's server as it comes, alone, with the draft and with the head: the target in F16,
    and in F32 or, for models in 16 bits, Q8_0.
    """
    server = program("llama-server")
    if server is None:
        return {"skipped": f"not here: {how_to_get('llama-server')}"}
    found: JsonObject = {}
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        tokenizer = asked.tokenizer
        drafts = {"draft": ("draft-simple", gguf(place / "draft", tokenizer, asked.pair.draft))}
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
                for ahead in AHEAD:
                    more = [
                        "-md",
                        str(file),
                        "--spec-type",
                        method,
                        "--spec-draft-n-max",
                        str(ahead),
                    ]
                    found[f"{kind}, {name}, {ahead} tokens"] = _served(
                        server, [*words, *more], asked
                    )
    return found


def gguf(directory: Path, tokenizer: Tokenizer, model: Any, kind: str = "F16") -> Path:
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
                for turn, prompts in enumerate(asked.rounds):
                    started = time.perf_counter()
                    options = {
                        "temperature": temperature,
                        "top_k": 0,
                        "top_p": 1.0,
                        "min_p": 0.0,
                        "seed": turn,
                    }
                    answers = [
                        complete(port, prompt, asked.max_new_tokens, **options)["tokens"]
                        for prompt in prompts
                    ]
                    speeds[place].append(sum(map(len, answers)) / (time.perf_counter() - started))
                    outputs[place] += answers
    except RunError as error:
        return {"failed": str(error)}
    return asked.measured(speeds, outputs)


def vllm(asked: Asked) -> JsonObject:
    """vLLM in the dtype of the models, one request at a time: alone, with the draft, and with the
    head.
    """
    python = program("vllm")
    if python is None:
        return {"skipped": f"not here: {how_to_get('vllm')}"}
    prompts = [prompt for turn in asked.rounds for prompt in turn]
    longest = max(map(len, prompts)) + asked.max_new_tokens + 16
    with tempfile.TemporaryDirectory() as directory:
        names = asked.save(Path(directory))
        dtype = str(asked.pair.target.dtype).removeprefix("torch.")
        engine = {
            "model": names["target"],
            "dtype": dtype,
            "max_model_len": longest,
            "max_num_seqs": 1,
        }
        ways: JsonObject = {"alone": engine}
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
        common: JsonObject = {"max_new_tokens": asked.max_new_tokens, "threads": asked.threads}
        common["ways"] = [
            {"temperature": temperature, "seed": 0} for temperature in asked.temperatures
        ]
        # The first is a warm-up.
        common["prompts"] = [prompts[0], *prompts]
        # Compiled, as it comes; what it cannot compile runs as in our proofs.
        asked_runs = {
            name: common | {"engine": each | {"enforce_eager": False}}
            for name, each in ways.items()
        }
        answers = vllm_answers(python, asked_runs)
        by_name = answers["answers"]
        refused = {
            name: common | {"engine": ways[name]}
            for name, rows in by_name.items()
            if isinstance(rows, dict)
        }
        by_name |= vllm_answers(python, refused)["answers"] if refused else {}
    found: JsonObject = {"version": answers["engine"], "not_compiled": list(refused)}
    for name, by_way in by_name.items():
        if isinstance(by_way, dict):
            found[name] = {"failed": by_way["refused"]}
            continue
        rows_of = [rows[1:] for rows in by_way]
        count = len(asked.rounds[0])
        speeds = [
            [
                sum(len(row["tokens"][0]) for row in rows[start : start + count])
                / sum(row["seconds"] for row in rows[start : start + count])
                for start in range(0, len(rows), count)
            ]
            for rows in rows_of
        ]
        found[name] = asked.measured(
            speeds, [[row["tokens"][0] for row in rows] for rows in rows_of]
        )
        for rows, each in zip(rows_of, found[name].values(), strict=True):
            if drafted := sum(row.get("drafts", 0) for row in rows):
                each["accepted_per_draft"] = sum(sum(row["per_position"]) for row in rows) / drafted
    return found


ENGINES: dict[str, Callable[[Asked], JsonObject]] = {
    "llama-server": llama_cpp,
    "openvino-genai": openvino,
    "vllm": vllm,
}
