"""Heads of equal parameters beside each other on a small pair: equal tokens, two seeds, and once
equal seconds.

    python -m benchmarks.studies.heads --out DIR [--pair nano] [--seeds 2]
    python -m benchmarks.studies.heads --out DIR --pair stories --target MODEL --texts TEXTS

Every head is trained with one objective on the same answers, for as many steps of as many
sequences, at one learning rate; nothing is chosen by a figure. With equal seconds, a head makes as
many steps as fit into the processor time of EAGLE-3's. OUT/eval has the evaluation; a killed run
continues. `python -m benchmarks.studies.figures --keep heads-PAIR=OUT/eval/results.json` keeps it
and remakes the tables of docs/results/block-drafters.md.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.studies.objectives_data import PAIRS, Pair, PairOptions, distilled, run_of, trained
from draftsmith.core.command_line import parse
from draftsmith.core.errors import InputError, RunError
from draftsmith.core.io import atomic_dir
from draftsmith.core.models import load_model
from draftsmith.drafts.heads import write_head
from draftsmith.drafts.heads.eagle import EagleConfig, EagleHead, draw
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.evaluate import evaluate
from draftsmith.train.config import HeadOptions, TrainConfig

COMMAND = "benchmarks/studies/heads.py"
RATE = 2e-3
DEPTH = 4  # of the drafted chain; a block has this many tokens to draft
# Shapes by pair that give every head about the parameters of EAGLE-3: 1.4 and 0.1 million. Medusa
# is left out: each of its heads has an output projection, so that four have more than twice as many
# on the nano pair.
SHAPES: dict[str, dict[str, dict[str, Any]]] = {
    "nano": {
        "eagle3": {"test_steps": DEPTH},
        "eagle": {"feed_forward": 2048},
        "hydra": {"num_layers": 4},
        "dflash": {"num_layers": 3, "block_size": DEPTH + 1, "anchors": 32},
        "jetspec": {"num_layers": 3, "block_size": DEPTH + 1, "anchors": 32},
        "dspark": {"num_layers": 2, "block_size": DEPTH, "anchors": 32},
    },
    "stories": {
        "eagle3": {"test_steps": DEPTH},
        "eagle": {"feed_forward": 416},
        "hydra": {},
        "dflash": {"num_layers": 2, "block_size": DEPTH + 1, "anchors": 32},
        "jetspec": {"num_layers": 2, "block_size": DEPTH + 1, "anchors": 32},
        "dspark": {"num_layers": 2, "block_size": DEPTH, "anchors": 32},
    },
}
TREES = [f"chain:{DEPTH}", f"eagle2:depth={DEPTH},beam=4,nodes=12"]
SECONDS = "seconds"
PROMPTS = {"nano": 32, "stories": 64}  # of each set that is measured


@dataclass(frozen=True, kw_only=True)
class Options(PairOptions):
    """Which pair, and at what size."""

    seeds: int = 2


def config_of(
    options: Options, pair: Pair, kind: str, seed: int, steps: int, name: str
) -> TrainConfig:
    """The training run of a head, as OUT/drafts/NAME."""
    shape, start = dict(SHAPES[options.pair][kind]), None
    if feed_forward := shape.pop("feed_forward", None):
        start = Path(options.out) / "starts" / f"{kind}-{seed}"
        if not start.exists():
            target = load_model(pair.target, device="cpu", dtype="float32")
            head = EagleHead(
                replace(EagleConfig.like(target), intermediate_size=feed_forward), target
            )
            draw(head.fc, head.layers, seed)
            with atomic_dir(start) as made:
                write_head(head, made)
    plain = run_of(options, pair, Path(options.out) / "drafts" / name, RATE, seed, steps)
    draft = None if start is None else str(start)
    return replace(plain, kind=kind, draft=draft, head=HeadOptions(**shape), tokenizer=None)


def run(options: Options) -> None:
    """Train all heads, and measure them in one evaluation."""
    pair, out = PAIRS[options.pair](options), Path(options.out)
    distilled(options, pair, out / "prompts" / "id.train.jsonl", "id", options.sequences)
    distilled(options, pair, out / "prompts" / "id.heldout.jsonl", "heldout", 2 * options.prompts)
    seconds: dict[str, float] = {}
    drafts = []
    for seed in range(1, options.seeds + 1):
        for kind in SHAPES[options.pair]:
            config = config_of(options, pair, kind, seed, options.steps, f"{kind}-{seed}")
            spent = trained(config)["processor_seconds"]
            seconds.setdefault(kind, spent)
            drafts.append(config.out)
    for kind in SHAPES[options.pair]:
        if kind != "eagle3":
            steps = max(1, round(options.steps * seconds["eagle3"] / seconds[kind]))
            config = config_of(options, pair, kind, 1, steps, f"{kind}-{SECONDS}")
            trained(config)
            drafts.append(config.out)
    evaluate(evaluation(options, pair, [Path(place).name for place in drafts], TREES))


def evaluation(
    options: PairOptions, pair: Pair, drafts: Sequence[str], trees: list[str]
) -> EvalConfig:
    """Measure the drafts OUT/drafts/NAME on the sets of their pair, without speeds."""
    out = Path(options.out)
    sets = [f"{domain}={out / 'prompts' / domain}.jsonl" for domain in pair.domains]
    return EvalConfig(
        target=pair.target,
        draft=[f"{name}={out / 'drafts' / name}" for name in drafts],
        id=sets[:1],
        ood=sets[1:3],
        out=str(out / "eval"),
        tree=trees,
        prompt_tokens=pair.prompt_tokens,
        max_prompts=min(options.prompts, PROMPTS[options.pair]),
        max_new_tokens=options.new_tokens,
        speed_prompts=0,
        batch_size=32,
        device="cpu",
    )


if __name__ == "__main__":
    try:
        run(parse(Options, COMMAND, sys.argv[1:])[0])
    except (InputError, RunError) as error:
        sys.exit(f"{COMMAND}: {error}")
