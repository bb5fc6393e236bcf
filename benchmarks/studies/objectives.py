r"""What a draft is trained on and for, set side by side: alpha in and out of distribution by
objective and data mode.

    python benchmarks/studies/objectives.py --out DIR [--pair nano] \
        [--seeds 3 --steps 160 --only fkl tvd]
    python benchmarks/studies/objectives.py --out DIR --pair stories --target MODEL --texts TEXTS
    python benchmarks/studies/objectives.py --out DIR --table

Every variant starts from the same base draft and makes the same number of optimizer steps on the
same number of sequences. The learning rate of an objective is the one of `rates` that gives the
highest alpha on held-out prompts of the in-distribution domain with seed 0 (figures out of
distribution have no say); data modes are all trained with fkl, at its rate. A seed changes the
order of the data.

alpha is what `draftsmith eval` measures: the mean of sum_x min(p, q) over positions of
continuations that the target drew itself, once for all drafts. A figure is over the draft's seeds
(per prompt, their mean); its interval resamples prompts, a difference is of the same prompts, and
how far the seeds lie apart is given beside it.

Everything is a file below OUT, and what is there is not made again: a run that was killed, or that
asks for more variants, continues.
"""

# ruff: noqa: E402
import sys
from pathlib import Path

if __name__ == "__main__":
    # Python puts this directory first, where train.py beside this file would hide the package
    # `train`.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import time
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch

from benchmarks.studies.objectives_data import (
    ALIKE,
    COMMAND,
    PAIRS,
    Cells,
    Pair,
    PairOptions,
    continued,
    make_data,
    run_of,
    trained,
)
from benchmarks.studies.objectives_figure import write_pictures
from benchmarks.studies.objectives_tables import Alphas, figures, places, tables
from draftsmith.core.command_line import parse
from draftsmith.core.errors import InputError, RunError
from draftsmith.core.io import read_json, write_json_atomic
from draftsmith.core.models import fingerprint, load_model
from draftsmith.core.prompts import read_prompts
from draftsmith.core.provenance import versions
from draftsmith.core.runs import difference
from draftsmith.core.sampling import Sampling
from draftsmith.core.tokenization import load_tokenizer
from draftsmith.eval.bootstrap import PromptSums
from draftsmith.eval.estimate import alpha_sums

TEMPERATURES = (1.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class Options(PairOptions):
    """Which variants to run, and at what size."""

    rates: list[float] = field(default_factory=lambda: [1e-3, 3e-3, 6e-3])
    """Learning rates to choose from."""


OBJECTIVES = {
    "ce": "ce",
    "fkl": "fkl",
    "rkl": "rkl",
    "jsd": "jsd:beta=0.5",
    "tvd": "tvd",
    "tvd_pp": "tvd_pp",
    "lk_alpha": "lk_alpha",
    "lk_hybrid": "lk_hybrid",
    "fkl+ce": "0.9*fkl+0.1*ce",
}
# What each data mode changes in the options of training; directories are below OUT/data.
MODES: dict[str, dict[str, Any]] = {
    "text": {"data": ["text"]},
    "x4": {"data": ["x4"]},
    "stored": {"target": None},
    "replay": {"replay": ["general"], "replay_fraction": 0.3},
}


def train_cell(options: Options, pair: Pair, name: str, rate: float, seed: int) -> dict[str, Any]:
    """Train one variant; its summary, and the seconds."""
    out = Path(options.out)
    changes = dict(MODES.get(name, {}))
    for key in ("data", "replay"):
        if key in changes:
            changes[key] = [str(out / "data" / each) for each in changes[key]]
    config = run_of(
        options, pair, out / "drafts" / f"{name}-lr{rate:g}-seed{seed}", rate, seed, options.steps
    )
    return trained(replace(config, objective=OBJECTIVES.get(name, ALIKE), **changes))


def chosen_rate(options: Options, pair: Pair, name: str) -> float:
    """The rate with the highest held-out alpha in distribution with seed 0; of a data mode, that of
    fkl.
    """
    objective = name if name in OBJECTIVES else ALIKE
    return max(
        options.rates,
        key=lambda rate: train_cell(options, pair, objective, rate, 0)["heldout_alpha"],
    )


def train_variants(options: Options, pair: Pair) -> dict[str, dict[str, Any]]:
    """Every variant: its rate, what the other rates gave, and a summary a seed."""
    variants: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys([ALIKE, *(options.only or [*OBJECTIVES, *MODES])]):
        if name == "text" and not pair.has_text:
            continue
        rate = chosen_rate(options, pair, name)
        tried = None
        if name in OBJECTIVES:
            tried = {
                f"{each:g}": train_cell(options, pair, name, each, 0) for each in options.rates
            }
        runs = [train_cell(options, pair, name, rate, seed) for seed in range(options.seeds)]
        variants[name] = {"rate": rate, "by_rate": tried, "runs": runs}
        for alike, run in zip(variants[ALIKE]["runs"], runs, strict=True):
            if name != ALIKE and run["best_step"] and alike["fingerprint"] == run["fingerprint"]:
                raise RunError(
                    f"{name}: gave the very weights of {ALIKE}; what sets it apart had no effect"
                )
    return variants


def measure_alphas(options: Options, pair: Pair, drafts: dict[str, str]) -> dict[str, Alphas]:
    """alpha of every draft (name: directory) at every temperature and domain, as `draftsmith eval`
    measures it.
    """
    store = Cells(Path(options.out) / "alpha")
    target, tokenizer = load_model(pair.target), load_tokenizer(pair.target)
    rows = {}
    for domain in pair.domains:
        source = Path(options.out) / "prompts" / f"{domain}.jsonl"
        read = read_prompts(str(source), tokenizer, domain=domain, prompt_tokens=pair.prompt_tokens)
        for temperature in TEMPERATURES:
            prompts = read.prompts[: options.prompts]
            rows[domain, temperature] = continued(options, store, target, prompts, temperature)
    found: dict[str, Alphas] = {}
    for name, directory in drafts.items():
        draft = load_model(directory)
        found[name] = {f"{temperature:g}": {} for temperature in TEMPERATURES}
        for (domain, temperature), (asked, continuations) in rows.items():
            sampling = Sampling(temperature=temperature)
            variant = store.get(
                asked | {"draft": fingerprint(draft)},
                partial(alpha_sums, target, draft, continuations, sampling, batch_size=32),
            )
            found[name][f"{temperature:g}"][domain] = PromptSums.of(
                variant["sum"], variant["count"]
            )
    return found


def claim(options: PairOptions) -> None:
    """InputError when OUT was begun at another size; more variants, seeds and rates are welcome
    there.
    """
    path = Path(options.out) / "options.json"
    fixed = ("pair", "steps", "batch_size", "sequences", "response_tokens", "prompts")
    asked = {key: value for key, value in asdict(options).items() if key in fixed}
    if not path.exists():
        write_json_atomic(path, asked)
    differs = difference(read_json(path, "the size of this benchmark"), asked)
    if differs is not None:
        raise InputError(
            f"--out {options.out}: was begun with other options: its {differs}; choose another "
            "--out"
        )


def run(options: Options) -> dict[str, Any]:
    """Everything, to OUT/results.json."""
    if unknown := sorted(set(options.only) - set(OBJECTIVES) - set(MODES)):
        raise InputError(f"--only {unknown[0]}: use any of {', '.join([*OBJECTIVES, *MODES])}")
    started = time.time()
    claim(options)
    pair = PAIRS[options.pair](options)
    make_data(options, pair)
    variants = train_variants(options, pair)
    drafts = {
        f"{name} {seed}": each["checkpoint"]
        for name, variant in variants.items()
        for seed, each in enumerate(variant["runs"])
    }
    tried = {
        f"{name} lr{rate}": each["checkpoint"]
        for name, variant in variants.items()
        for rate, each in (variant["by_rate"] or {}).items()
    }
    measured = measure_alphas(options, pair, {"base": pair.draft, **drafts, **tried})
    alphas = {"base": [measured["base"]]}
    alphas |= {
        name: [measured[f"{name} {seed}"] for seed in range(options.seeds)] for name in variants
    }
    names = ("id", "x4", "general", "heldout")
    manifests = {
        name: read_json(Path(options.out) / "data" / name / "manifest.json", "a manifest")
        for name in names
    }
    document = {
        "options": {
            key: value
            for key, value in asdict(options).items()
            if key not in ("out", "target", "texts", "table")
        },
        "domains": pair.domains,
        "replayed": pair.replayed,
        "prompt_tokens": pair.prompt_tokens,
        "prompts_measured": {
            domain: len(alphas["base"][0]["1"][domain].numerator_P) for domain in pair.domains
        },
        "data": {
            name: {"counts": manifest["counts"], "response_tokens": manifest["response_tokens"]}
            for name, manifest in manifests.items()
        },
        "cells": variants,
        "by_rate": {
            name: {
                rate: places(pair.domains, measured[f"{name} lr{rate}"])
                for rate in variant["by_rate"]
            }
            for name, variant in variants.items()
            if variant["by_rate"]
        },
        "figures": figures(pair.domains, alphas, options.bootstrap),
        "definitions": {
            "alpha": (__doc__ or "").split("\n\n")[3],
            "told_apart": "the interval of a difference has no zero in it, and all seeds agree "
            "on the sign",
        },
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "seconds": round(time.time() - started, 1),
    }
    write_json_atomic(Path(options.out) / "results.json", document)
    return document


def main() -> None:
    """Run, draw, and print the tables."""
    options, _ = parse(Options, COMMAND, sys.argv[1:])
    out = Path(options.out)
    results = (
        read_json(out / "results.json", "the results of this benchmark")
        if options.table
        else run(options)
    )
    write_pictures(results, out)
    sys.stdout.write(tables(results))


if __name__ == "__main__":
    try:
        main()
    except (InputError, RunError) as error:
        sys.exit(f"{COMMAND}: {error}")
