"""The usual recipe of training beside the one before it, on a small pair: alpha against steps and
processor seconds.

    python -m benchmarks.studies.recipes --out DIR [--pair nano] [--seeds 2]
    python -m benchmarks.studies.recipes --out DIR --pair stories --target MODEL --texts TEXTS

Every draft is trained on the same answers by every recipe, at the rate that is usual for its size.
OUT/recipes.json has all figures; a killed run continues. `python -m benchmarks.studies.figures
--keep recipes-PAIR=OUT/recipes.json` keeps it and remakes the tables of docs/results/recipe.md.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.studies import heads
from benchmarks.studies.objectives_data import PAIRS, Pair, distilled, run_of, trained
from draftsmith_core.command_line import parse
from draftsmith_core.errors import InputError, RunError
from draftsmith_core.io import write_json_atomic
from eval.config import EvalConfig
from eval.evaluate import evaluate
from eval.results import Results
from train.config import Optim, TrainConfig

COMMAND = "benchmarks/studies/recipes.py"
# `lm` is the pair's own draft, which goes on from its weights; the others are fresh heads.
KINDS = ("eagle", "eagle3", "dspark", "lm")
LOOKS = 8  # held-out evaluations of a run


@dataclass(frozen=True)
class Recipe:
    """An optimizer and its schedule. share: of the steps."""

    optim: Optim
    share: float = 1.0


RECIPES = {
    "adamw": Recipe(Optim(name="adamw", schedule="cosine")),
    "muon": Recipe(Optim(name="muon", schedule="wsd")),
    "muon-half": Recipe(Optim(name="muon", schedule="wsd"), share=0.5),
}


@dataclass(frozen=True)
class Training:
    """One run of training. curve: (step, held-out alpha)."""

    draft: str
    kind: str
    recipe: str
    seed: int
    steps: int
    processor_seconds: float
    curve: list[tuple[int, float]]


def config_of(
    options: heads.Options, pair: Pair, kind: str, recipe: Recipe, seed: int, name: str
) -> TrainConfig:
    """The training run of a draft, as OUT/drafts/NAME."""
    steps = round(options.steps * recipe.share)
    if kind == "lm":
        place = Path(options.out) / "drafts" / name
        config = run_of(options, pair, place, heads.RATE, seed, steps)
    else:
        config = heads.config_of(options, pair, kind, seed, steps, name)
    optim = replace(recipe.optim, warmup_steps=steps // 12)
    return replace(config, optim=optim, eval_every=max(1, steps // LOOKS))


def trainings(options: heads.Options, pair: Pair) -> Iterator[Training]:
    """Train every draft by every recipe, or read what was trained."""
    for seed in range(1, options.seeds + 1):
        for kind in KINDS:
            for label, recipe in RECIPES.items():
                name = f"{kind}-{label}-{seed}"
                config = config_of(options, pair, kind, recipe, seed, name)
                spent = trained(config)["processor_seconds"]
                yield Training(
                    draft=name,
                    kind=kind,
                    recipe=label,
                    seed=seed,
                    steps=int(config.steps or 0),
                    processor_seconds=spent,
                    curve=_curve(Path(config.out)),
                )


def _curve(draft: Path) -> list[tuple[int, float]]:
    lines = (draft / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [(row["step"], row["heldout_alpha"]) for row in rows if "heldout_alpha" in row]


def measured(options: heads.Options, pair: Pair, drafts: list[str]) -> Results:
    """Alpha of all drafts, in distribution and out of it, without decoding."""
    out = Path(options.out)
    sets = [f"{domain}={out / 'prompts' / domain}.jsonl" for domain in pair.domains]
    return evaluate(
        EvalConfig(
            target=pair.target,
            draft=[f"{name}={out / 'drafts' / name}" for name in drafts],
            id=sets[:1],
            ood=sets[1:3],
            out=str(out / "eval"),
            tree=["none"],
            temperature=[1.0],
            prompt_tokens=pair.prompt_tokens,
            max_prompts=options.prompts,
            max_new_tokens=options.new_tokens,
            batch_size=32,
            device="cpu",
        )
    )


def run(options: heads.Options) -> None:
    """Train and measure all drafts, and write OUT/recipes.json."""
    pair, out = PAIRS[options.pair](options), Path(options.out)
    distilled(options, pair, out / "prompts" / "id.train.jsonl", "id", options.sequences)
    distilled(options, pair, out / "prompts" / "id.heldout.jsonl", "heldout", 2 * options.prompts)
    runs = list(trainings(options, pair))
    results = measured(options, pair, [each.draft for each in runs])
    alphas: dict[str, Any] = {}
    for each in runs:
        alphas[each.draft] = {
            kind: results.figure("alpha", each.draft, kind, 1.0) for kind in ("id", "ood")
        }
    document = {"pair": options.pair, "runs": [asdict(each) for each in runs], "alpha": alphas}
    write_json_atomic(out / "recipes.json", document)


if __name__ == "__main__":
    try:
        run(parse(heads.Options, COMMAND, sys.argv[1:])[0])
    except (InputError, RunError) as error:
        sys.exit(f"{COMMAND}: {error}")
