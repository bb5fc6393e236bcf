"""Make a head of heads/: EAGLE-3 of SmolLM2-135M-Instruct, small enough to be kept in a repository.

    python -m benchmarks.studies.kept_heads --target HuggingFaceTB/SmolLM2-135M-Instruct \
        --data DIR --out out/heads

It learns from the target's answers to prompts that the target wrote and to those of GSM8K's
training side, which benchmarks/studies/real/ keeps. --data is that of `real_pair.py`. A killed call
goes on where it was.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from benchmarks.lib.places import ROOT
from benchmarks.lib.study_command import main
from benchmarks.studies import figures
from benchmarks.studies.real_study import FULL, KEPT, Options as StudyOptions, Study, write_prompts
from draftsmith.core.distilled_sets import set_rows
from draftsmith.core.hub import PLACEHOLDER
from draftsmith.core.io import atomic_dir, read_json, write_text_atomic
from draftsmith.core.models import load_model
from draftsmith.core.options import options
from draftsmith.core.records import RECORD
from draftsmith.drafts.cards import add_results, write_record
from draftsmith.drafts.draft_vocabulary import token_counts
from draftsmith.drafts.heads import write_head
from draftsmith.drafts.heads.borrowed import start_as
from draftsmith.drafts.heads.eagle import draw
from draftsmith.drafts.heads.eagle3 import Eagle3Head
from draftsmith.eval.run import evaluate
from draftsmith.train.config import HeadOptions, Optim, TrainConfig
from draftsmith.train.training_run import train

COMMAND = "benchmarks/studies/kept_heads.py"
NAME = "smollm2-135m-eagle3"
TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"
# Prompts of these sets may be used for any purpose.
SETS = ("own4", "own", "maths")
# Rows of the card's table.
TEXTS = (
    "| data (ID) | the target's answers to prompts that it wrote (chat) and to questions of GSM8K "
    "(training side, maths, MIT) |\n"
    "| not in it (OOD) | code, web text (C4), encyclopedia (wiki) |\n"
)


@options
class Options:
    """Train the head, measure it, and keep it in heads/."""

    target: str
    """The target: a local directory or hub name."""
    data: str
    """The directory with the texts to measure on."""
    out: str
    """Everything that is made."""
    steps: int = 832
    """Steps of four answers."""


@dataclass(frozen=True)
class Shape:
    """Of a head of at most 12 MB: tokens that it drafts, and width of its feed-forward."""

    draft_vocab: int
    feed_forward: int


SMALL = Shape(draft_vocab=3800, feed_forward=768)


def start(target_name: str, sets: Sequence[str], shape: Shape, place: Path) -> None:
    """Write a fresh head with a narrower feed-forward than the target's."""
    if place.exists():
        return
    rows = chain.from_iterable(set_rows(name, ["response_ids"]) for name in sets)
    counts = token_counts(row["response_ids"] for row in rows)
    ids = sorted(token for token, _ in counts.most_common(shape.draft_vocab))
    target = load_model(target_name, device="cpu", dtype="float32")
    published = Eagle3Head.fresh(target, draft_vocab=ids, norms="eagle3").config
    head = Eagle3Head(replace(published, intermediate_size=shape.feed_forward), target)
    draw(head.fc, nn.ModuleList([head.midlayer]), seed=1)
    start_as(head.lm_head.weight, head.borrowed, torch.tensor(ids))
    head.set_draft_vocab(ids)
    with atomic_dir(place) as made:
        write_head(head.float(), made)


def training(config: Options, sets: Sequence[str], place: Path) -> TrainConfig:
    """How the head learns."""
    return TrainConfig(
        target=config.target,
        data=list(sets),
        kind="eagle3",
        draft=str(place / "start"),
        out=str(place / NAME),
        objective="jsd:beta=0.5",
        head=HeadOptions(test_steps=4),
        max_length=448,
        batch_size=4,
        steps=config.steps,
        heldout_fraction=0.005,
        eval_every=208,
        save_every=104,
        optim=Optim(name="muon", lr=1e-3, warmup_steps=10),
        precision="bf16",
        dtype="bfloat16",
    )


def keep(trained: Path, place: Path, public: Mapping[str, str]) -> None:
    """Write a checkpoint in bf16, its record without the paths of this machine."""
    text = json.dumps(read_json(trained / RECORD, "the record of a draft"))
    for path, word in public.items():
        text = text.replace(path, word)
    tensors = load_file(trained / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            tensors[name] = tensor.bfloat16()
    with atomic_dir(place) as made:
        save_file(tensors, made / "model.safetensors", {"format": "pt"})
        for name in ("config.json", "prompt_hashes.npy"):
            shutil.copy(trained / name, made)
        write_record(made, json.loads(text))


def measure(config: Options, place: Path, public: Mapping[str, str]) -> None:
    """Write acceptance on five sets into the head's card, and keep it."""
    asked = StudyOptions(target=config.target, data=config.data, out=config.out)
    study = Study(asked, FULL)
    write_prompts(study)
    usual = study.evaluation("eval", {NAME: str(place)}, "chat")
    # It learned from maths too.
    maths = [source for source in usual.ood if source.startswith("maths=")]
    others = [source for source in usual.ood if source not in maths]
    evaluate(replace(usual, id=[*usual.id, *maths], ood=others))
    results = study.out / "eval" / "results.json"
    add_results(place, results, NAME)
    complete(place / "README.md")
    figures.keep(ROOT, f"kept-{NAME}", results, public)


def complete(card: Path) -> None:
    """Put into a card what the record does not know: texts, licence, and where the head lies."""
    text = card.read_text(encoding="utf-8").replace(PLACEHOLDER, f"heads/{NAME}")
    text = text.replace("Once upon a time", "Why is the sky blue?")
    text = text.replace("| response tokens", f"{TEXTS}| response tokens")
    if "\nlicense:" not in text:
        text = text.replace(
            "library_name: draftsmith\n", "library_name: draftsmith\nlicense: apache-2.0\n"
        )
    made, title, _ = text.partition("## Licence\n")
    licence = "\nApache-2.0: this project's, and the target's.\n"
    write_text_atomic(card, made + title + licence)


def run(config: Options) -> None:
    """Train, keep and measure."""
    out = Path(config.out)
    sets = [str(KEPT / name) for name in SETS]
    # The order of counting, which the kept head has, decides between equally frequent tokens.
    start(config.target, [*sets[1:], sets[0]], SMALL, out / "start")
    trained = out / NAME
    if not (trained / "config.json").exists():
        train(training(config, sets, out), COMMAND)
    place = ROOT / "heads" / NAME
    public = {config.out: "out/heads", f"{ROOT}/": "", config.data: "data", config.target: TARGET}
    keep(trained, place, public)
    measure(config, place, public)


if __name__ == "__main__":
    main(Options, COMMAND, run)
