"""EAGLE-3 with its own norms and with those of EAGLE-3.1, at equal steps: alpha by depth, in
distribution, in other domains and under other chat templates.

    python -m benchmarks.studies.norms --target DIR --data DIR --out out/norms

The target answers Alpaca's prompts if it has a chat template (answers that the repository keeps are
taken), else it writes texts by itself. Writes OUT/norms.json. A killed call goes on where it was.
"""

import json
import sys
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import get_args

import pyarrow.parquet as pq

from benchmarks.lib.sets import pieces, shuffled
from benchmarks.lib.study_command import main
from benchmarks.studies.real_study import KEPT
from draftsmith.core.io import JsonObject, read_json, write_json_atomic, write_rows
from draftsmith.core.models import fingerprint, load_model
from draftsmith.core.options import options
from draftsmith.core.prompt_rows import iterate_rows
from draftsmith.core.tokenization import load_tokenizer
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.generate import distill
from draftsmith.drafts.heads.eagle3 import Norms
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.evaluate import evaluate
from draftsmith.train.config import HeadOptions, TrainConfig
from draftsmith.train.training_run import train

COMMAND = "benchmarks/studies/norms.py"
DEPTHS = 4


@options
class Options:
    """Train both heads with every seed, and compare them."""

    target: str
    """The target: a local directory or hub name."""
    data: str
    """The directory with alpaca.jsonl, gsm8k_test.jsonl, humaneval.jsonl, c4.jsonl, wiki.jsonl."""
    out: str
    """Everything that is made."""
    steps: int = 200
    """Steps of each head, of four rows."""
    seeds: list[int] = field(default_factory=lambda: [1, 2])
    """Of the fresh weights and of the order of rows."""
    prompts: int = 40
    """Most prompts of a set to measure on."""
    draft_vocab: int | None = None
    """Tokens that the heads draft."""
    max_length: int = 160
    """Tokens of a row."""


def answered(config: Options, name: str, prompts: str, seed: int = 0) -> str:
    """OUT/NAME: what the target writes, at temperature 1."""
    out = str(Path(config.out) / name)
    distill(
        DistillConfig(
            target=config.target,
            prompts=prompts,
            out=out,
            max_new_tokens=96,
            temperature=1.0,
            seed=seed,
            device="cpu",
            dtype="float32",
        )
    )
    return out


@dataclass(frozen=True)
class Sets:
    """The set to train on, and prompts in distribution and out of it."""

    training: str
    own: str
    other: list[str]


def texts(config: Options) -> Sets:
    """Of a target without a chat template: what it writes by itself."""
    data, place = Path(config.data), Path(config.out) / "prompts"
    place.mkdir(parents=True, exist_ok=True)
    for name in ("wiki", "c4"):
        write_rows(place / f"{name}.jsonl", shuffled(pieces(data / f"{name}.jsonl"))[:200])
    begun = []
    for part in Path(answered(config, "begun", "token:60", seed=7)).glob("part-*.parquet"):
        for row in pq.read_table(part).to_pylist():
            begun.append({"prompt_ids": row["prompt_ids"] + row["response_ids"][:14]})
    write_rows(place / "own.jsonl", begun)
    other = [f"{name}={place / name}.jsonl" for name in ("wiki", "c4")]
    return Sets(answered(config, "answers", "token:1000"), f"own={place / 'own.jsonl'}", other)


def chats(config: Options) -> Sets:
    """Of a chat model: its answers to chats, and what it is asked of other subjects."""
    data, place = Path(config.data), Path(config.out) / "prompts"
    place.mkdir(parents=True, exist_ok=True)
    rows = list(iterate_rows(str(data / "alpaca.jsonl")))
    heldout = len(rows) // 10
    write_rows(place / "train.jsonl", rows[:-heldout])
    write_rows(place / "chat.jsonl", rows[-heldout:])
    mark = fingerprint(load_model(config.target, device="cpu"))
    kept = read_json(KEPT / "chat" / "manifest.json", "a distilled set")
    if kept["identity"]["target_fingerprint"] == mark:
        training = str(KEPT / "chat")
    else:
        training = answered(config, "answers", str(place / "train.jsonl"))
    elsewhere = [f"maths={data / 'gsm8k_test.jsonl'}", f"code={data / 'humaneval.jsonl'}"]
    asked = str(place / "chat.jsonl")
    return Sets(training, f"chat={asked}", [f"template=template:{asked}", *elsewhere])


def heads(config: Options, data: str, seed: int) -> list[str]:
    """Train both with a seed; NAME=DIRECTORY each."""
    trained = []
    for norms in get_args(Norms):
        out = Path(config.out) / f"{norms}-{seed}"
        head = HeadOptions(
            norms=norms, test_steps=DEPTHS, features=str(Path(config.out) / "features")
        )
        train(
            TrainConfig(
                target=config.target,
                data=[data],
                kind="eagle3",
                out=str(out),
                objective="fkl",
                head=head,
                draft_vocab_size=config.draft_vocab,
                max_length=config.max_length,
                batch_size=4,
                steps=config.steps,
                eval_every=config.steps,
                heldout_fraction=0.03,
                seed=seed,
                device="cpu",
            )
        )
        trained.append(f"{norms}={out}")
    return trained


def measured(config: Options, drafts: list[str], sets: Sets, seed: int) -> JsonObject:
    """Alpha, what every depth accepts, and the gain of the second head, by set and temperature."""
    results = evaluate(
        EvalConfig(
            target=config.target,
            draft=drafts,
            id=[sets.own],
            ood=sets.other,
            out=str(Path(config.out) / f"eval-{seed}"),
            max_prompts=config.prompts,
            max_new_tokens=48,
            tree=[f"chain:{DEPTHS}"],
            temperature=[0.0, 1.0],
            speed_prompts=0,
            batch_size=20,
            dtype="float32",
            device="cpu",
        )
    )
    found: JsonObject = {}
    names = list(get_args(Norms))
    for domain, temperature in product(results.domains(), (0.0, 1.0)):
        key = f"{domain} T{temperature:g}"
        found[key] = {}
        for name in names:
            depths = results.series("accept", name, domain, temperature)
            found[key][name] = {
                "alpha": results.alpha(name, domain, temperature)["value"],
                "tau": results.tau(name, domain, temperature)["value"],
                "accepted by depth": [row["value"] for row in depths],
            }
        found[key]["gain"] = results.gain(names[1], domain, temperature)
    return found


def run(config: Options) -> None:
    """Train, measure and write the table."""
    plain = load_tokenizer(config.target).chat_template is None
    sets = texts(config) if plain else chats(config)
    found: JsonObject = {}
    for seed in config.seeds:
        trained = heads(config, sets.training, seed)
        found[str(seed)] = measured(config, trained, sets, seed)
        write_json_atomic(Path(config.out) / "norms.json", found)
    sys.stdout.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(Options, COMMAND, run)
