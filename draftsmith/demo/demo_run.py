"""What the demo gives to `align`: text that every Python carries, the shipped pair, and a recipe."""

import shutil
from pathlib import Path
from typing import Any

import yaml

from draftsmith.alignment.config import AlignConfig, DistillChoices, EvalChoices, TrainChoices
from draftsmith.alignment.stages import say
from draftsmith.demo import corpus
from draftsmith.jsonl import write_rows
from draftsmith_core.io import atomic_dir, make_dir
from draftsmith_core.processes import join_processes, on_main

RECIPES, PAIR = Path(__file__).parent / "recipes", Path(__file__).parent / "pair"
# The domain that the draft is aligned on; the others are out of distribution.
ID_DOMAIN = "prose"
# Alignment prompts are cut short, so that there are thousands of different ones; evaluation prompts come from
# documents that neither the pair nor the drafts have seen.
TRAIN_CHARACTERS = 300
EVAL_CHARACTERS = 400


def prepare(out: Path, short: bool, device: str, dtype: str) -> AlignConfig:
    """Write the prompts and a copy of the pair under `out`; returns the options of the alignment."""
    join_processes(device)
    on_main(lambda: _write(out))
    prompts = {domain: f"{domain}={out / 'prompts' / domain}.jsonl" for domain in corpus.DOMAINS}
    return AlignConfig(
        **recipe(short),
        target=str(out / "pair" / "target"),
        draft=str(out / "pair" / "base"),
        prompts=str(out / "prompts" / f"{ID_DOMAIN}.train.jsonl"),
        id=[prompts.pop(ID_DOMAIN)],
        ood=list(prompts.values()),
        out=str(out),
        device=device,
        dtype=dtype,
    )


def recipe(short: bool) -> dict[str, Any]:
    """The demo's choices as `AlignConfig` takes them."""
    values = yaml.safe_load((RECIPES / "demo.yaml").read_text(encoding="utf-8"))
    if short:
        for key, changed in yaml.safe_load((RECIPES / "demo_short.yaml").read_text(encoding="utf-8")).items():
            values[key] = values[key] | changed
    parts: tuple[tuple[str, type], ...] = (("distill", DistillChoices), ("train", TrainChoices), ("eval", EvalChoices))
    return {**values, **{key: part(**values[key]) for key, part in parts}}


def _write(out: Path) -> None:
    make_dir(out, "--out")
    if not (out / "pair").is_dir():
        # A copy has a path that works in commands typed from here, wherever the package is installed.
        with atomic_dir(out / "pair") as made:
            shutil.copytree(PAIR, made, dirs_exist_ok=True)
    if not (out / "prompts").is_dir():
        say("reading text from this Python's standard library")
        with atomic_dir(out / "prompts") as made:
            train = corpus.split(ID_DOMAIN).train
            write_rows(made / f"{ID_DOMAIN}.train.jsonl", corpus.passages(ID_DOMAIN, train, TRAIN_CHARACTERS))
            for domain in corpus.DOMAINS:
                heldout = corpus.split(domain).heldout
                write_rows(made / f"{domain}.jsonl", corpus.passages(domain, heldout, EVAL_CHARACTERS))
