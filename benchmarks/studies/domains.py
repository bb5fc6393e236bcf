"""Aligning to several domains at once: what each of them gains, by how its data are mixed.

    python -m benchmarks.studies.domains --out DIR [--seeds 2]

The nano pair learns from answers to prompts of three domains of very unequal size (16 : 4 : 1). All
ways start from one base draft and make the same number of steps on the same number of sequences at
the same learning rate. Nothing is chosen by a figure. alpha is as in `frontier.py`, on
documents that neither pair nor draft has seen; OUT may be that benchmark's of the nano pair, whose
prompts, continuations and data serve here too. Everything is a file below OUT and is not made
again: killed and called again, it continues.
"""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.lib.pages import gap, table
from benchmarks.lib.seeds import difference_over_seeds
from benchmarks.studies import frontier
from benchmarks.studies.frontier import Bench
from benchmarks.studies.frontier_tables import Alphas, picks_of
from benchmarks.studies.objectives_data import Size, distilled, trained
from draftsmith.core.command_line import parse
from draftsmith.core.errors import InputError, RunError
from draftsmith.core.io import atomic_dir, write_json_atomic, write_rows
from draftsmith.core.models import fingerprint
from draftsmith.demo import corpus
from draftsmith.train.config import TrainConfig

COMMAND = "benchmarks/studies/domains.py"
RATE = 3e-3
# Sequences of the other domains, as shares of the first one's.
OTHERS = {"code": 1 / 4, "unicode": 1 / 16}
# By name: whether the other domains are trained on too, and what else is changed.
WAYS: dict[str, tuple[bool, dict[str, Any]]] = {
    "the largest alone": (False, {}),
    "by size": (True, {}),
    "temperature 3": (True, {"mixing_temperature": 3.0}),
    "temperature 3, half of it even replay": (
        True,
        {"mixing_temperature": 3.0, "replay_fraction": 0.5},
    ),
}


@dataclass(frozen=True, kw_only=True)
class Options(Size):
    """At what size."""

    seeds: int = 2


def prepare(options: Options) -> Bench:
    """What frontier.py prepares for the nano pair, and answers to training prompts of the other
    domains.
    """
    bench = frontier.prepare(frontier.Options(**asdict(options)))
    for domain, share in OTHERS.items():
        made_in = bench.out / "domains" / domain
        if not made_in.is_dir():
            with atomic_dir(made_in) as made:
                write_rows(
                    made / f"{domain}.jsonl",
                    corpus.passages(domain, corpus.split(domain).train, 400),
                )
        count = max(1, round(share * options.sequences))
        distilled(options, bench.pair, made_in / f"{domain}.jsonl", domain, count)
    return bench


def config_of(bench: Bench, way: str, seed: int) -> TrainConfig:
    """The training run of a way."""
    others, changes = WAYS[way]
    data = bench.out / "data"
    name = f"{way}-seed{seed}".replace(" ", "_").replace(",", "")
    plain = frontier.config_of(bench, "plain", next(iter(frontier.METHODS["plain"])), RATE, seed)
    return replace(
        plain,
        out=str(bench.out / "domains" / "drafts" / name),
        data=[str(data / name) for name in ("id", *(OTHERS if others else ()))],
        replay=[str(data / "token")] if "replay_fraction" in changes else [],
        optim=replace(plain.optim, lr=RATE),
        **changes,
    )


def run(options: Options) -> dict[str, Any]:
    """Everything, to OUT/domains.json: by way and set the change in alpha over the base, paired by
    prompt.

    Intervals are over seeds and prompts.
    """
    bench = prepare(options)
    base = frontier.alphas_of(bench, Path(bench.pair.draft), fingerprint(bench.base), (0.0,))[0.0]
    found: dict[str, list[Alphas]] = {way: [] for way in WAYS}
    for seed in range(options.seeds):
        for way, alphas in found.items():
            config = config_of(bench, way, seed)
            mark = trained(config)["fingerprint"]
            alphas.append(frontier.alphas_of(bench, Path(config.out), mark, (1.0,))[1.0])
    own, other = (bench.sets.own, *OTHERS), bench.sets.tuning
    picks = {name: picks_of(base[name], name, options.bootstrap) for name in own + other}
    results = {
        "options": {key: value for key, value in asdict(options).items() if key != "out"},
        "domains": own,
        "other": other,
        "base": {name: base[name].pooled for name in own + other},
        "rows": {
            way: {
                name: difference_over_seeds(
                    [alphas[name] for alphas in seeds], base[name], picks[name]
                )
                for name in picks
            }
            for way, seeds in found.items()
        },
    }
    write_json_atomic(bench.out / "domains.json", results)
    return results


def gains(results: Mapping[str, Any]) -> str:
    """In Markdown; the last column says whether every domain gained, by the lower bounds."""
    names = [*results["domains"], *results["other"]]
    rows = [["base, alpha", *(f"{results['base'][name]:.3f}" for name in names), ""]]
    for way, row in results["rows"].items():
        every = all(row[name]["low"] > 0 for name in results["domains"])
        rows.append([way, *(gap(row[name]) for name in names), "yes" if every else "no"])
    return table(["way", *names, "a gain in every domain"], rows) + "\n"


def main() -> None:
    """Run, and print the table."""
    options, _ = parse(Options, COMMAND, sys.argv[1:])
    sys.stdout.write(gains(run(options)))


if __name__ == "__main__":
    try:
        main()
    except (InputError, RunError) as error:
        sys.exit(f"{COMMAND}: {error}")
