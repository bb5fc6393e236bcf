"""Optimizers beside each other on a small pair: AdamW at its usual rate, and Muon, the default for
drafts that were never trained.

    python -m benchmarks.studies.recipes --out DIR [--pair nano] [--seeds 2]
    python -m benchmarks.studies.recipes --out DIR --pair stories --target MODEL --texts TEXTS

Every draft is trained on the same answers for as many steps; nothing is chosen by a figure. Half
runs end after half of the steps. `lm` goes on from the pair's draft, the heads are fresh.
OUT/results.json has held-out alpha by step, processor seconds, and alpha on every set of the pair.
A killed run continues. `python -m benchmarks.studies.figures --keep recipes-PAIR=OUT/results.json`
keeps it and remakes the tables of docs/results/recipe.md.
"""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.studies.heads import config_of, evaluation
from benchmarks.studies.objectives_data import PAIRS, Pair, PairOptions, distilled, run_of, trained
from draftsmith.core.command_line import parse
from draftsmith.core.errors import InputError, RunError
from draftsmith.core.io import write_json_atomic
from draftsmith.eval.evaluate import evaluate
from draftsmith.train.config import Optim, TrainConfig

COMMAND = "benchmarks/studies/recipes.py"
KINDS = ("lm", "eagle", "eagle3", "dspark")
RECIPES = {"AdamW": Optim(name="adamw"), "Muon": Optim(name="muon")}
# Of the steps of a run: how often it is measured, how long it warms up.
MEASUREMENTS, WARM_UP = 8, 12


@dataclass(frozen=True, kw_only=True)
class Options(PairOptions):
    """Run the study. steps: of a whole run."""

    seeds: int = 2
    """Training seeds."""


def run_config(
    options: Options, pair: Pair, kind: str, recipe: str, seed: int, *, half: bool
) -> TrainConfig:
    """The training run of a draft, as OUT/drafts/KIND-RECIPE-SEED."""
    steps = options.steps // 2 if half else options.steps
    name = f"{kind}-{recipe}-{seed}" + ("-half" if half else "")
    if kind == "lm":
        plain = run_of(options, pair, Path(options.out) / "drafts" / name, 1e-3, seed, steps)
    else:
        plain = config_of(options, pair, kind, seed, steps, name)
    optim = replace(RECIPES[recipe], warmup_steps=steps // WARM_UP)
    return replace(plain, optim=optim, eval_every=max(1, steps // MEASUREMENTS))


def curve(place: Path) -> list[tuple[int, float]]:
    """Steps, and held-out alpha after them."""
    found = []
    for line in (place / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "heldout_alpha" in row:
            found.append((row["step"], row["heldout_alpha"]))
    return found


def run(options: Options) -> None:
    """Train all drafts, measure them, write OUT/results.json."""
    pair = PAIRS[options.pair](options)
    out = Path(options.out)
    distilled(options, pair, out / "prompts" / "id.train.jsonl", "id", options.sequences)
    distilled(options, pair, out / "prompts" / "id.heldout.jsonl", "heldout", 2 * options.prompts)
    rows: list[dict[str, Any]] = []
    for seed in range(1, options.seeds + 1):
        for kind in KINDS:
            for recipe, half in (("AdamW", False), ("Muon", False), ("Muon", True)):
                made = run_config(options, pair, kind, recipe, seed, half=half)
                seconds = trained(made)["processor_seconds"]
                rows.append(
                    {
                        "draft": Path(made.out).name,
                        "kind": kind,
                        "recipe": recipe,
                        "seed": seed,
                        "steps": made.steps,
                        "seconds": seconds,
                        "curve": curve(Path(made.out)),
                    }
                )
    # Without a decoding loop.
    config = evaluation(options, pair, [row["draft"] for row in rows], ["none"])
    results = evaluate(replace(config, temperature=[1.0]))
    for row in rows:
        for place in ("id", "ood"):
            row[place] = results.figure("alpha", row["draft"], place, 1.0)
    write_json_atomic(out / "results.json", rows)


if __name__ == "__main__":
    try:
        run(parse(Options, COMMAND, sys.argv[1:])[0])
    except (InputError, RunError) as error:
        sys.exit(f"{COMMAND}: {error}")
