"""The pairs of `objectives.py`: prompts, base drafts and training sets, as files."""

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PreTrainedModel

from draftsmith.config import InitConfig
from draftsmith.core.errors import InputError
from draftsmith.core.io import (
    atomic_dir,
    hash_json,
    read_json,
    sha256_file,
    write_json_atomic,
    write_rows,
)
from draftsmith.core.models import eos_ids, fingerprint
from draftsmith.core.prompt_rows import iterate_rows
from draftsmith.core.prompts import Prompt
from draftsmith.core.runs import Run
from draftsmith.core.sampling import Sampling
from draftsmith.core.tokenization import decode_text, encode_text, load_tokenizer
from draftsmith.demo import corpus
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.generate import distill
from draftsmith.eval import measuring
from draftsmith.eval.acceptance import Continuation
from draftsmith.eval.evaluation import MEASUREMENT_VERSION
from draftsmith.starting import init
from draftsmith.train.config import Optim, TrainConfig
from draftsmith.train.training_run import train

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "benchmarks/studies/objectives.py"
ALIKE = "fkl"  # what differences are taken from, and what every data mode is trained with


@dataclass(frozen=True, kw_only=True)
class Size:
    """Where everything goes, and how much of it there is."""

    out: str
    """Everything that is made, the results last."""
    seeds: int = 3
    steps: int = 160
    batch_size: int = 16
    sequences: int = 1280
    """Sequences of every training set (of the largest domain, of several), and of general text to
    replay.
    """
    response_tokens: int = 64
    """Longest answer in training."""
    prompts: int = 64
    """Prompts a set that alpha is measured on."""
    new_tokens: int = 48
    """Longest continuation that alpha is measured on."""
    bootstrap: int = 2000

    def __post_init__(self) -> None:
        for key in (
            "seeds",
            "steps",
            "batch_size",
            "sequences",
            "response_tokens",
            "prompts",
            "new_tokens",
        ):
            if getattr(self, key) < 1:
                raise InputError(f"--{key}: {getattr(self, key)} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class PairOptions(Size):
    """Which pair."""

    pair: str = "nano"
    """nano or pruned (shipped with the project), or stories (needs --target and --texts)."""
    target: str | None = None
    """stories: a small Llama of children's stories (TinyStories, 260 thousand parameters)."""
    texts: str | None = None
    """A directory with the files of --own; stories: with alpaca.jsonl, c4.jsonl, wiki.jsonl,
    gsm8k_train.jsonl and humaneval.jsonl.
    """
    only: list[str] = field(default_factory=list)
    """What to train; all when empty. What was made before stands in the tables too."""
    own: str = "prose"
    """nano and pruned: the domain in distribution: prose, code, unicode, or NAME with
    NAME_train.jsonl in --texts.
    """
    table: bool = False
    """Only print the tables of OUT/results.json, and draw its pictures."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pair not in PAIRS:
            raise InputError(f"--pair {self.pair}: use {' or '.join(PAIRS)}")
        if self.pair == "stories" and (self.target is None or self.texts is None):
            raise InputError("--pair stories: also needs --target and --texts")


@dataclass(frozen=True)
class Pair:
    """A target, the base draft, and where its prompts are: rows of `text`, cut to `prompt_tokens`.

    `domains[0]` is the one in distribution; OUT/prompts has DOMAIN.jsonl of each to measure on, and
    of other rows id.train.jsonl, id.heldout.jsonl and general.train.jsonl. `replayed` are the
    domains that replay answers prompts of. `has_text`: whether id.train.jsonl is text that somebody
    wrote, long enough to train on.
    """

    target: str
    draft: str
    prompt_tokens: int
    domains: tuple[str, ...]
    replayed: tuple[str, ...]
    has_text: bool


def nano(options: PairOptions) -> Pair:
    """The shipped pair on Python's own text, as the demo has it; general prompts are code, so
    unicode stays new.
    """
    out = Path(options.out) / "prompts"
    own, *others = [options.own, *(domain for domain in corpus.DOMAINS if domain != options.own)]
    if not out.is_dir():
        with atomic_dir(out) as made:
            for domain in (own, *others):
                write_rows(made / f"{domain}.jsonl", _passages(options, domain, heldout=True))
            write_train_rows(made, options, _passages(options, own, heldout=False))
            general = _passages(options, others[0], heldout=False)
            write_rows(made / "general.train.jsonl", general[: options.sequences // 2])
    shipped = ROOT / "draftsmith" / "demo" / "pair"
    return Pair(
        str(shipped / "target"), str(shipped / "base"), 32, (own, *others), (others[0],), True
    )


def _passages(options: PairOptions, domain: str, heldout: bool) -> list[dict[str, str]]:
    """Rows of a domain of the demo, or of DOMAIN_train.jsonl and DOMAIN_test.jsonl in --texts."""
    if domain in corpus.DOMAINS:
        split = corpus.split(domain)
        return list(corpus.passages(domain, split.heldout if heldout else split.train, 400))
    if options.texts is None:
        raise InputError(
            f"--own {domain}: use {', '.join(corpus.DOMAINS)}, or add --texts with "
            f"{domain}_train.jsonl"
        )
    return shuffled(
        pieces(Path(options.texts) / f"{domain}_{'test' if heldout else 'train'}.jsonl")
    )


def pruned(options: PairOptions) -> Pair:
    """The nano target with its own first layer as the draft, as `draftsmith init --method prune`
    cuts it out.
    """
    pair, start = nano(options), str(Path(options.out) / "start")
    if not Path(start).is_dir():
        init(InitConfig(target=pair.target, out=start, method="prune", num_layers=1, keep="first"))
    return replace(pair, draft=start)


STARTS = (
    "Once upon a time",
    "One day, a boy",
    "There was a little",
    "Lily and Tom",
    "The big dog",
    "Mom said",
)
ENDS = ("", " who", " and", " was", " saw")


def stories(options: PairOptions) -> Pair:
    """A model of children's stories, in distribution on its own beginnings; instructions, web text
    and the like are out of distribution.

    The base draft is fresh (one layer of 48) and has seen 600 steps of general text, nothing of
    stories.
    """
    assert options.target is not None and options.texts is not None
    out, texts = Path(options.out), Path(options.texts)
    others = ("alpaca", "c4", "wiki", "gsm8k", "humaneval")
    if not (out / "openings").is_dir():
        with atomic_dir(out / "openings") as made:
            write_rows(
                made / "openings.jsonl",
                ({"prompt": start + end} for start in STARTS for end in ENDS),
            )
    beginnings = DistillConfig(
        target=options.target,
        prompts=str(out / "openings" / "openings.jsonl"),
        out=str(out / "beginnings"),
        num_samples=2 * options.sequences // 30 + options.prompts,
        max_new_tokens=32,
        batch_size=256,
        seed=11,
    )
    if not (out / "beginnings" / "manifest.json").exists():
        distill(beginnings, COMMAND)
    if not (out / "prompts").is_dir():
        tokenizer = load_tokenizer(options.target)
        parts = [
            pq.read_table(path).to_pylist()
            for path in sorted((out / "beginnings").glob("part-*.parquet"))
        ]
        begun = [
            decode_text(tokenizer, row["prompt_ids"] + row["response_ids"])
            for part in parts
            for row in part
        ]
        rows = shuffled({"text": text} for text in dict.fromkeys(begun))
        with atomic_dir(out / "prompts") as made:
            write_rows(made / "stories.jsonl", rows[: 2 * options.prompts])
            write_train_rows(made, options, rows[2 * options.prompts :])
            general: list[dict[str, str]] = []
            for domain in others:
                (source,) = (
                    path
                    for path in sorted(texts.glob(f"{domain}*.jsonl"))
                    if "_test" not in path.name
                )
                rows = shuffled(pieces(source))
                write_rows(made / f"{domain}.jsonl", rows[: 2 * options.prompts])
                general += rows[2 * options.prompts :] if domain == "c4" else []
            write_rows(made / "general.train.jsonl", general[: options.sequences // 2])
            write_rows(made / "base.train.jsonl", general)
    base = TrainConfig(
        out=str(out / "base"),
        data=[str(out / "prompts" / "base.train.jsonl")],
        draft_config=str(out / "base.config.json"),
        tokenizer=options.target,
        objective="ce",
        max_length=128,
        batch_size=16,
        steps=5 * options.steps,
        eval_every=options.steps,
        optim=Optim(name="adamw", lr=4e-3, warmup_steps=20),
        seed=12,
    )
    shape = read_json(Path(options.target) / "config.json", "the config of a model")
    small = {
        "hidden_size": 48,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    write_json_atomic(
        out / "base.config.json", shape | small | {"num_key_value_heads": 4, "head_dim": 12}
    )
    trained(base)
    return Pair(options.target, str(out / "base"), 24, ("stories", *others), ("c4",), False)


PAIRS: dict[str, Callable[[PairOptions], Pair]] = {
    "nano": nano,
    "pruned": pruned,
    "stories": stories,
}


def write_train_rows(made: Path, options: PairOptions, rows: Sequence[dict[str, str]]) -> None:
    """The first go to held-out, as many as are measured on; the others are for training."""
    write_rows(made / "id.heldout.jsonl", rows[: 2 * options.prompts])
    write_rows(made / "id.train.jsonl", rows[2 * options.prompts :])


def shuffled(rows: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    """In an order that depends on each row alone."""
    return sorted(rows, key=lambda row: hashlib.sha256(row["text"].encode()).digest())


def pieces(source: Path, characters: int = 400) -> list[dict[str, str]]:
    """Rows of text: of long ones every `characters`, of chats all turns together."""
    found = []
    for _, row in iterate_rows(str(source)):
        text = (
            row["text"]
            if "text" in row
            else "\n\n".join(turn["content"] for turn in row["messages"])
        )
        found += [
            text[i : i + characters]
            for i in range(0, max(1, len(text) - characters // 2), characters)
        ]
    return [{"text": text} for text in dict.fromkeys(found) if len(text) >= 100]


class Cells:
    """Finished measurements below a directory: JSON files named by the hash of what decides their
    outcome.
    """

    def __init__(self, directory: Path) -> None:
        self.run = Run(directory)

    def get(self, request: dict[str, Any], make: Callable[[], Any]) -> Any:
        """The kept outcome of a request, or that of `make()`, which is then kept."""
        return self.run.step(self._name(request), make)

    def get_all(
        self, requests: Mapping[str, dict[str, Any]], make: Callable[[list[str]], Mapping[str, Any]]
    ) -> dict[str, Any]:
        """The outcomes of requests by name; `make(names)` measures all missing ones at once."""
        missing = [
            key
            for key, asked in requests.items()
            if not (self.run.directory / self._name(asked)).exists()
        ]
        made = make(missing) if missing else {}
        return {key: self.get(asked, partial(made.get, key)) for key, asked in requests.items()}

    def _name(self, request: dict[str, Any]) -> str:
        return f"cells/{hash_json({'version': MEASUREMENT_VERSION, **request})[:32]}.json"


def once(path: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `make` returned when it was first asked, with the seconds it took."""
    if not path.exists():
        started, busy = time.perf_counter(), time.process_time()
        made = make()
        spent = {
            "seconds": time.perf_counter() - started,
            "processor_seconds": time.process_time() - busy,
        }
        write_json_atomic(path, made | {key: round(value, 2) for key, value in spent.items()})
    return read_json(path, "a record of this benchmark")


def distilled(
    options: Size, pair: Pair, prompts: Path | str, name: str, count: int, **more: Any
) -> None:
    """Answers of the pair's target to `count` prompts, in OUT/data/NAME, unless they are there."""
    out = Path(options.out) / "data" / name
    if not (out / "manifest.json").exists():
        sizes: dict[str, Any] = {
            "max_prompts": count,
            "max_new_tokens": options.response_tokens,
            "batch_size": 64,
        }
        given = {
            "target": pair.target,
            "prompts": str(prompts),
            "prompt_tokens": pair.prompt_tokens,
            "seed": 1,
        }
        distill(DistillConfig(out=str(out), **sizes, **given, **more), COMMAND)


def run_of(options: Size, pair: Pair, out: Path, rate: float, seed: int, steps: int) -> TrainConfig:
    """A run of training on OUT/data/id with the objective of `ALIKE`, which `trained` makes."""
    data = Path(options.out) / "data"
    return TrainConfig(
        out=str(out),
        data=[str(data / "id")],
        draft=pair.draft,
        target=pair.target,
        tokenizer=pair.target,
        objective=ALIKE,
        heldout=[str(data / "heldout")],
        max_length=pair.prompt_tokens + options.response_tokens,
        batch_size=options.batch_size,
        steps=steps,
        eval_every=steps,
        save_every=steps,
        keep=1,
        optim=Optim(name="adamw", lr=rate, warmup_steps=steps // 12),
        seed=seed,
    )


def record_of(config: TrainConfig) -> Path:
    """The record of a training run that is over."""
    return Path(f"{config.out}.json")


def trained(config: TrainConfig) -> dict[str, Any]:
    """The summary of a training run, which is made unless it is over."""
    return once(record_of(config), lambda: train(config, COMMAND))


def continued(
    options: Size,
    store: "Cells",
    target: PreTrainedModel,
    prompts: Sequence[Prompt],
    temperature: float,
    seed: int = 0,
) -> tuple[dict[str, Any], list[Continuation]]:
    """What identifies measurements on the target's continuations of prompts, and these, kept in
    `store`.
    """
    asked = {
        "target": fingerprint(target),
        "new_tokens": options.new_tokens,
        "temperature": temperature,
    }
    asked |= {"prompts": [list(prompt.ids) for prompt in prompts], "seed": seed}
    sampling = Sampling(temperature=temperature)
    task = measuring.Task(
        target, prompts, sampling, eos_ids(target), options.new_tokens, seed=seed, batch_size=32
    )
    return asked, measuring.continuations(prompts, store.get(asked, task.baseline))


def make_data(options: PairOptions, pair: Pair) -> None:
    """OUT/data: id (one answer a prompt), x4, heldout, general, and text."""
    out = Path(options.out)
    sets = {
        "id": ("id.train", options.sequences, 1),
        "x4": ("id.train", max(1, options.sequences // 4), 4),
        "heldout": ("id.heldout", 2 * options.prompts, 1),
        "general": ("general.train", options.sequences, 1),
    }
    for name, (prompts, count, samples) in sets.items():
        source = out / "prompts" / f"{prompts}.jsonl"
        distilled(options, pair, source, name, count, num_samples=samples, teacher_top_k=16)
    if pair.has_text and not (out / "data" / "text").is_dir():
        write_text_set(options, pair, out / "data" / "text")


def write_text_set(options: PairOptions, pair: Pair, directory: Path) -> None:
    """The prompts of `id` with the text that follows them in place of the target's answers, of the
    same length.
    """
    tokenizer = load_tokenizer(pair.target)
    rows = []
    source = Path(options.out) / "prompts" / "id.train.jsonl"
    for _, row in islice(iterate_rows(str(source)), options.sequences):
        ids = encode_text(tokenizer, row["text"])
        end = pair.prompt_tokens
        if len(ids) > end:
            rows.append(
                {"prompt_ids": ids[:end], "response_ids": ids[end : end + options.response_tokens]}
            )
    write_set(directory, rows)


def write_set(directory: Path, rows: Sequence[Mapping[str, list[int]]]) -> None:
    """Write `prompt_ids` and `response_ids` as a distilled set that `train` reads."""
    ids_type = pa.list_(pa.int32())
    with atomic_dir(directory) as made:
        part = made / "part-00000.parquet"
        schema = pa.schema([("prompt_ids", ids_type), ("response_ids", ids_type)])
        pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), part)
        listed = [{"file": part.name, "rows": len(rows), "sha256": sha256_file(part)}]
        write_json_atomic(made / "manifest.json", {"complete": True, "parts": listed})
