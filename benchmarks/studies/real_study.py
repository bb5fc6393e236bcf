"""The study of `real_pair.py`: options, sizes, directories, and the answers it begins with."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.lib.places import ROOT
from benchmarks.lib.sets import pieces, shuffled
from draftsmith.core.io import JsonObject, atomic_dir, read_json, write_rows, write_sealed
from draftsmith.core.models import fingerprint, load_model
from draftsmith.core.options import options
from draftsmith.core.prompt_rows import iterate_rows
from draftsmith.core.tokenization import load_tokenizer
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.generate import distill
from draftsmith.eval.config import EvalConfig
from draftsmith.train.config import DraftKind, HeadOptions, Optim, TrainConfig

COMMAND = "benchmarks/studies/real_pair.py"
KEPT = ROOT / "benchmarks" / "studies" / "real"
PIECE_HOURS = 2.5
# What is measured on; each has prompts of its own.
DOMAINS = ("chat", "maths", "code", "c4", "wiki")


@options
class Options:
    """Run the study, or some of its pieces."""

    target: str
    """The target: a local directory or hub name."""
    data: str
    """The directory with the texts."""
    out: str
    """Everything that is made."""
    only: list[str] = field(default_factory=list)
    """Pieces to run; all when empty."""
    drafts: list[str] = field(default_factory=list)
    """which: drafts to train; all when empty. Those trained before are measured too. The others:
    one language model and one head in place of the best.
    """
    budget: float = PIECE_HOURS
    """Hours that a piece may take on two cores; every 2.5 add as many answers, with other seeds."""
    seeds: int = 3
    """align: training seeds."""
    seed: int = 1
    """which: the training seed. Drafts and results of another than the first have it in their
    names.
    """
    keep: bool = False
    """Copy finished sets and results into the repository."""
    tiny: bool = False
    """Try the script: a few prompts, steps and tokens."""
    device: str = "cpu"
    """Where drafts are trained and measured; the speeds are of a CPU."""


@dataclass(frozen=True)
class Sizes:
    """Prompts of each set, tokens of an answer; rows of a step and passes over the data; prompts
    and tokens of the evaluation; the draft vocabulary, the feed-forward of EAGLE-1 that gives it as
    many parameters as the others.
    """

    answered: Mapping[str, int]
    answer: int = 256
    max_length: int = 448
    step_rows: int = 4
    epochs: float = 2
    prompts: int = 60
    new_tokens: int = 64
    draft_vocab: int = 8192
    eagle_feed_forward: int = 5120


FULL = Sizes({"chat": 899, "own": 500, "maths": 800})
TINY = Sizes({"chat": 12, "own": 4, "maths": 8}, 12, 96, 4, 1, 2, 6, 256, 256)


@dataclass(frozen=True)
class Study:
    """Options and sizes, and where things lie."""

    options: Options
    sizes: Sizes

    @property
    def out(self) -> Path:
        """Where everything lies."""
        return Path(self.options.out)

    @property
    def machine(self) -> JsonObject:
        """Where and in what drafts are trained and measured: in 16 bits, as people serve."""
        return {"device": self.options.device, "dtype": "bfloat16"}

    @property
    def public(self) -> dict[str, str]:
        """What the paths of this machine are called in kept files."""
        target = self.options.target
        return {
            self.options.out: "out/real",
            self.options.data: "data",
            target: Path(target).name,
            f"{ROOT}/": "",
        }

    @property
    def rounds(self) -> int:
        """How often every prompt is answered."""
        return max(1, int(self.options.budget / PIECE_HOURS))

    @cached_property
    def is_chat(self) -> bool:
        """Whether the target has a chat template to write prompts in."""
        return load_tokenizer(self.options.target).chat_template is not None

    def seeded(self, name: str) -> str:
        """The name of what this training seed makes."""
        return name if self.options.seed == 1 else f"{name}-{self.options.seed}"

    def sets(self, names: Sequence[str]) -> list[str]:
        """The directories of distilled sets, all rounds of each."""
        data = self.out / "data"
        return [str(data / _round(name, turn)) for turn, name in product(range(self.rounds), names)]

    def draft(self, name: str) -> str:
        """The directory of a draft."""
        return str(self.out / "drafts" / name)

    def has_draft(self, name: str) -> bool:
        """Whether the draft was trained."""
        return Path(self.draft(name), "config.json").exists()

    def prompts(self, name: str) -> str:
        """The file of the prompts of this name."""
        return str(self.out / "prompts" / f"{name}.jsonl")

    def evaluation(self, name: str, drafts: Mapping[str, str], id_set: str) -> EvalConfig:
        """Compare drafts; the first is the base. Nothing is decoded: tau is predicted."""
        texts = {domain: f"{domain}={self.prompts(domain)}" for domain in DOMAINS}
        own = texts.pop(id_set)
        return EvalConfig(
            target=self.options.target,
            draft=[f"{draft}={drafts[draft]}" for draft in drafts],
            id=[own],
            ood=[texts[domain] for domain in texts],
            out=str(self.out / name),
            max_prompts=self.sizes.prompts,
            max_new_tokens=self.sizes.new_tokens,
            tree=["none"],
            batch_size=32,
            **self.machine,
        )

    def training(self, name: str, kind: DraftKind, **options: Any) -> TrainConfig:
        """Train a draft as OUT/drafts/NAME (`seeded`), on all chats unless `data` names other
        sets.
        """
        head = {**options.pop("head", {}), "features": str(self.out / "features")}
        optim = Optim(name="adamw", lr=options.pop("lr", 1e-3), warmup_steps=10)
        run = self.seeded(name)
        given: JsonObject = {
            "data": self.sets(["chat", "own"]),
            "objective": "fkl",
            "epochs": self.sizes.epochs,
        }
        given |= {"batch_size": min(8, self.sizes.step_rows), "eval_every": 160, "save_every": 80}
        given |= {"seed": self.options.seed, "precision": "bf16", **self.machine}
        given["accumulation"] = self.sizes.step_rows // given["batch_size"]
        return TrainConfig(
            target=self.options.target,
            out=self.draft(run),
            kind=kind,
            max_length=self.sizes.max_length,
            optim=optim,
            head=HeadOptions(**head),
            **given | options,
        )


def _round(name: str, turn: int) -> str:
    return name if turn == 0 else f"{name}.{turn + 1}"


# Piece: data.


def data(study: Study) -> None:
    """Write the prompts; take kept sets, or let the target answer."""
    write_prompts(study)
    configs = []
    for turn in range(study.rounds):
        answered = study.sizes.answered.items()
        configs += [answers(study, name, count, turn) for name, count in answered]
    take_or_make(study, configs)


def take_or_make(study: Study, configs: Sequence[DistillConfig]) -> None:
    """Take the sets that the repository keeps of this target; let it write the others."""
    mark = fingerprint(load_model(study.options.target, device="cpu"))
    for config in configs:
        place = Path(config.out)
        kept = KEPT / place.name
        fits = not study.options.tiny and (kept / "manifest.json").exists()
        if fits and not place.exists():
            manifest = read_json(kept / "manifest.json", "a distilled set")
            if manifest["identity"]["target_fingerprint"] == mark:
                with atomic_dir(place) as made:
                    shutil.copytree(kept, made, dirs_exist_ok=True)
        if not (place / "manifest.json").exists():
            distill(config, COMMAND)
        if study.options.keep:
            keep_set(study, place.name)


def write_prompts(study: Study) -> None:
    """OUT/prompts: DOMAIN.jsonl to measure on, SET.train.jsonl to answer. The last chats are for
    measuring.
    """
    texts = Path(study.options.data)
    place = study.out / "prompts"
    if place.is_dir():
        return

    def rows(name: str) -> list[JsonObject]:
        return list(iterate_rows(str(texts / f"{name}.jsonl")))

    chats = rows("alpaca")
    heldout = max(1, len(chats) // 10)
    with atomic_dir(place) as made:
        write_rows(made / "chat.train.jsonl", chats[:-heldout])
        write_rows(made / "chat.jsonl", chats[-heldout:])
        write_rows(made / "maths.train.jsonl", rows("gsm8k_train"))
        write_rows(made / "maths.jsonl", rows("gsm8k_test"))
        write_rows(made / "code.jsonl", rows("humaneval"))
        for file in ("c4.jsonl", "wiki.jsonl"):
            sampled = shuffled(pieces(texts / file))
            write_rows(made / file, sampled[:200])


def answers(study: Study, name: str, count: int, turn: int) -> DistillConfig:
    """The target's answers to `count` prompts; further rounds draw with other seeds."""
    prompts = study.prompts(f"{name}.train")
    if name == "own":
        prompts = f"magpie:{count}" if study.is_chat else f"self:{count}"
    run = _round(name, turn)
    return _answering(
        study, run, prompts, max_prompts=count, batch_size=96, seed=turn, device="cpu"
    )


def _answering(study: Study, name: str, prompts: str, **options: Any) -> DistillConfig:
    """The target answers prompts, into OUT/data/NAME."""
    place = study.out / "data" / name
    maths = name.startswith("maths")
    return DistillConfig(
        target=study.options.target,
        prompts=prompts,
        out=str(place),
        domain="maths" if maths else "chat",
        max_new_tokens=study.sizes.answer,
        temperature=1.0,
        **options,
    )


def more_answers(study: Study) -> list[DistillConfig]:
    """Sixteen more answers to every chat, eight times as many chats of the target's own, and an
    answer to every question of maths.
    """
    tiny = study.options.tiny
    common = study.machine | {"max_prompts": 4 if tiny else None, "part_rows": 20_000}
    own = f"{'magpie' if study.is_chat else 'self'}:{4 if tiny else 4000}"
    chats = study.prompts("chat.train")
    maths = study.prompts("maths.train")
    sampled = common | {"num_samples": 16}
    return [
        _answering(study, "chat16", chats, batch_size=1200, seed=1000, **sampled),
        _answering(study, "own4", own, batch_size=800, seed=1001, **common),
        _answering(study, "maths1", maths, batch_size=1200, seed=1002, **common),
    ]


def keep_set(study: Study, name: str) -> None:
    """benchmarks/studies/real/NAME: the Parquet files and the manifest, without the paths of the
    machine.
    """
    place = study.out / "data" / name
    manifest = json.dumps(read_json(place / "manifest.json", "a distilled set"))
    for path, word in study.public.items():
        manifest = manifest.replace(path, word)
    shutil.rmtree(KEPT / name, ignore_errors=True)
    with atomic_dir(KEPT / name) as made:
        for part in place.glob("part-*.parquet"):
            shutil.copy(part, made)
        # Its checksum was of the text with the paths.
        write_sealed(made / "manifest.json", json.loads(manifest))
