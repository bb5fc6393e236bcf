r"""What each way of keeping the base draft's knowledge buys: alpha ID against alpha OOD.

    python -m benchmarks.studies.frontier --out DIR [--pair nano | pruned] [--own prose] \
        [--seeds 5] [--runs 4]
    python -m benchmarks.studies.frontier --out DIR --pair stories --target MODEL --texts TEXTS
    python -m benchmarks.studies.frontier --out HELD_BACK --own unicode --settings_of DIR [DIR ...]
    python -m benchmarks.studies.frontier --out DIR --table

Every run starts from one base draft and makes the same number of optimizer steps on the same number
of sequences (early stopping alone: fewer). `plain` is alignment with nothing else; its learning
rate is the one with the highest alpha on held-out prompts in distribution, and all other methods
are trained at that rate unless their setting says otherwise. With seed 0 every setting of every
method is run. Of each method the setting is taken that has the greatest sum of two changes in alpha
over the base: on held-out prompts in distribution, and on the sets for tuning. The sets `near` and
`far` that are reported have no say. The other seeds, which change the order of the data, run what
was taken. With --settings_of nothing is chosen here: the settings are those with the greatest sum
over the results in these other directories, so that this domain was held back from every choice.
--settings names them instead.

alpha is what `draftsmith eval` measures, at temperature 1: the mean of sum_x min(p, q) over
positions of continuations that the target drew itself. Drafts between the base and a trained one
cost no training and share the target's forward with it. Everything is a file below OUT and is not
made again; --runs N stops after N more training runs.
"""

import copy
import encodings
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.studies.frontier_tables import (
    Alphas,
    Sets,
    chosen_settings,
    document_of,
    tables,
    write_pictures,
)
from benchmarks.studies.objectives import claim
from benchmarks.studies.objectives_data import (
    PAIRS,
    Cells,
    Pair,
    PairOptions,
    continued,
    distilled,
    pieces,
    record_of,
    run_of,
    shuffled,
    trained,
)
from draftsmith.core.command_line import parse
from draftsmith.core.errors import InputError, RunError
from draftsmith.core.io import atomic_dir, read_json, write_json_atomic, write_rows
from draftsmith.core.models import fingerprint, load_model
from draftsmith.core.prompts import read_prompts
from draftsmith.core.sampling import Sampling
from draftsmith.core.tokenization import load_tokenizer
from draftsmith.eval.acceptance import Continuation
from draftsmith.eval.bootstrap import PromptSums
from draftsmith.eval.estimate import measure_alphas
from draftsmith.train.config import TrainConfig

COMMAND = "benchmarks/studies/frontier.py"
OBJECTIVE = "jsd:beta=0.5"
# By method and setting, what is changed in a plain run: options of training, `lr`, `times` (of the
# plain rate) and `share` (of the steps).
METHODS: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {
        "lr 0.001": {"lr": 0.001},
        "lr 0.003": {"lr": 0.003},
        "lr 0.006": {"lr": 0.006},
        "lr 0.006, a quarter of the steps": {"lr": 0.006, "share": 0.25},
    },
    # Of texts that the target begins by itself, of texts that begin with any token of the
    # vocabulary, and half of each.
    "replay": {
        f"share {share:g}": {"replay_fraction": share, "replay": ["self"]}
        for share in (0.3, 0.5, 0.7)
    },
    "even replay": {
        **{
            f"share {share:g}": {"replay_fraction": share, "replay": ["token"]}
            for share in (0.3, 0.5, 0.7)
        },
        "share 0.7, half the lr": {"replay_fraction": 0.7, "replay": ["token"], "times": 0.5},
    },
    # As many sequences of answers as the plain method has, beside the replayed ones.
    "longer even replay": {
        f"share {share:g}, {rate}": {
            "replay_fraction": share,
            "replay": ["token"],
            "share": 1 / (1 - share),
            **times,
        }
        for share in (0.5, 0.7)
        for rate, times in (("the lr", {}), ("half the lr", {"times": 0.5}))
    },
    "mixed replay": {
        **{
            f"share {share:g}": {"replay_fraction": share, "replay": ["self", "token"]}
            for share in (0.3, 0.5, 0.7)
        },
        "share 0.7, half the lr": {
            "replay_fraction": 0.7,
            "replay": ["self", "token"],
            "times": 0.5,
        },
    },
}
# Drafts between the base and those of another method, at these shares of the way.
MERGED = {
    "interpolation": "plain",
    "replay + interpolation": "replay",
    "even replay + interpolation": "even replay",
    "longer even replay + interpolation": "longer even replay",
    "mixed replay + interpolation": "mixed replay",
}
WEIGHTS = (0.25, 0.5, 0.75)


@dataclass(frozen=True, kw_only=True)
class Options(PairOptions):
    """Which pair and methods, and at what size; `plain` is always among the methods."""

    settings_of: list[str] = field(default_factory=list)
    """Directories of other runs of this benchmark, by which every setting is chosen; none is chosen
    here.
    """
    settings: list[str] = field(default_factory=list)
    """METHOD=SETTING of what to run, the plain one among them; nothing else is run and none is
    chosen.
    """
    seeds: int = 5
    runs: int | None = None
    """Stop after so many more training runs; the same command continues."""


SETS = {
    "nano": Sets("prose", ("tables",), ("code",), ("unicode",)),
    "pruned": Sets("prose", ("tables",), ("code",), ("unicode",)),
    "stories": Sets("stories", ("c4",), ("alpaca", "wiki"), ("gsm8k", "humaneval")),
}


def sets_of(options: Options) -> Sets:
    """The sets of the pair; with another domain in distribution, the others are out of it."""
    sets = SETS[options.pair]
    others = [name for name in (sets.own, *sets.near, *sets.far) if name != options.own]
    if options.pair == "stories" or options.own == sets.own:
        return sets
    return Sets(options.own, sets.tuning, tuple(others[:-1]), tuple(others[-1:]))


class EnoughError(Exception):
    """As many training runs as were asked for have been made."""


@dataclass
class Bench:
    """What everything is measured with. rows: of each set what identifies it, and the target's
    continuations.
    """

    options: Options
    pair: Pair
    sets: Sets
    target: PreTrainedModel
    base: PreTrainedModel
    rows: dict[str, tuple[dict[str, Any], list[Continuation]]]
    store: Cells
    left: float

    @property
    def out(self) -> Path:
        """Where everything lies."""
        return Path(self.options.out)


def prepare(options: Options) -> Bench:
    """Prompts, training sets and continuations; what is there is not made again."""
    claim(options)
    out = Path(options.out)
    pair, sets = PAIRS[options.pair](options), sets_of(options)
    if "tables" in sets.tuning and not (out / "tables").is_dir():
        # Character tables: neither the pair nor any domain of the demo has seen them.
        sources = sorted(Path(next(iter(encodings.__path__))).glob("*.py"))
        found = {"text": "\n".join(path.read_text(encoding="utf-8") for path in sources)}
        with atomic_dir(out / "tables") as made:
            write_rows(made / "whole.jsonl", [found])
            write_rows(
                made / "tables.jsonl", shuffled(pieces(made / "whole.jsonl"))[: 2 * options.prompts]
            )
    for name, prompts, count in (
        ("id", out / "prompts" / "id.train.jsonl", options.sequences),
        ("heldout", out / "prompts" / "id.heldout.jsonl", options.prompts),
        ("self", f"self:{options.sequences}", options.sequences),
        ("token", f"token:{options.sequences}", options.sequences),
    ):
        distilled(options, pair, prompts, name, count)
    store = Cells(out / "alpha")
    target, tokenizer = load_model(pair.target), load_tokenizer(pair.target)
    rows = {}
    for name in sets.all:
        files = {"heldout": "prompts/id.heldout.jsonl", "tables": "tables/tables.jsonl"}
        source = str(out / files.get(name, f"prompts/{name}.jsonl"))
        if name in ("general", "even"):
            # Not one that is replayed: those of `self` are drawn anew, those of `token` begin with
            # other tokens.
            count = options.prompts + (options.sequences if name == "even" else 0)
            source = f"token:{count}" if name == "even" else f"self:{count}"
        prompts_read = read_prompts(source, tokenizer, prompt_tokens=pair.prompt_tokens).prompts
        prompts_read = (
            prompts_read[-options.prompts :] if name == "even" else prompts_read[: options.prompts]
        )
        asked, texts = continued(options, store, target, prompts_read, 1.0, seed=99)
        rows[name] = (asked, [row for row in texts if row.output_ids])
    left = float("inf") if options.runs is None else options.runs
    return Bench(options, pair, sets, target, load_model(pair.draft), rows, store, left)


def config_of(bench: Bench, method: str, setting: str, rate: float, seed: int) -> TrainConfig:
    """The training run of a setting; `rate` is the plain method's."""
    options, out, changes = bench.options, bench.out, dict(METHODS[method][setting])
    steps = round(changes.pop("share", 1.0) * options.steps)
    lr = changes.pop("lr", rate) * changes.pop("times", 1.0)
    name = f"{method}-{setting}-seed{seed}".replace(" ", "_").replace(",", "")
    if "replay" in changes:
        changes["replay"] = [str(out / "data" / name) for name in changes["replay"]]
    plain = run_of(options, bench.pair, out / "drafts" / name, lr, seed, steps)
    return replace(plain, objective=OBJECTIVE, **changes)


def measured(
    bench: Bench, method: str, setting: str, rate: float, seed: int
) -> dict[float, Alphas]:
    """alpha on every set of a setting's draft (under 1), and of those between it and the base where
    they are wanted.
    """
    config = config_of(bench, method, setting, rate, seed)
    if not record_of(config).exists():
        if bench.left < 1:
            raise EnoughError
        bench.left -= 1
    mark = trained(config)["fingerprint"]
    weights = (*WEIGHTS, 1.0) if method in MERGED.values() else (1.0,)
    return alphas_of(bench, Path(config.out), mark, weights)


def alphas_of(
    bench: Bench, draft: Path, mark: str, weights: tuple[float, ...]
) -> dict[float, Alphas]:
    """Per set, sums and counts by prompt of the drafts at these shares of the way; all on one
    target forward.
    """
    found: dict[float, Alphas] = {weight: {} for weight in weights}
    for name, (asked, rows) in bench.rows.items():
        between_these = {"base": fingerprint(bench.base), "draft": mark}
        requests = {f"{weight:g}": asked | between_these | {"weight": weight} for weight in weights}
        for weight, each in bench.store.get_all(
            requests, partial(_measure, bench, draft, rows)
        ).items():
            found[float(weight)][name] = PromptSums.of(each["sum"], each["count"])
    return found


@torch.no_grad()
def between(base: PreTrainedModel, aligned: PreTrainedModel, weight: float) -> PreTrainedModel:
    """Return the draft at interpolation weight `weight`; the ends are the drafts themselves."""
    if weight in (0.0, 1.0):
        return aligned if weight else base
    draft = copy.deepcopy(base)
    for tensor, end in zip(draft.parameters(), aligned.parameters(), strict=True):
        tensor.lerp_(end, weight)
    return draft


def _measure(
    bench: Bench, draft: Path, rows: list[Continuation], weights: list[str]
) -> dict[str, dict[str, Any]]:
    aligned = load_model(str(draft))
    drafts = {weight: between(bench.base, aligned, float(weight)) for weight in weights}
    read = measure_alphas(bench.target, drafts, rows, Sampling(temperature=1.0), batch_size=32)
    return {weight: {key: each[key] for key in ("sum", "count")} for weight, each in read.items()}


def points(
    bench: Bench, seed: int, rate: float, wanted: dict[str, set[str]]
) -> Iterator[tuple[str, str, Alphas]]:
    """(method, setting, alphas) of the settings wanted of each method that is trained, and of what
    is merged of it.
    """
    only = bench.options.only
    for method, settings in wanted.items():
        for setting in METHODS[method]:
            made = record_of(config_of(bench, method, setting, rate, seed)).exists()
            if setting not in settings or not (made or not only or method in ("plain", *only)):
                continue
            for weight, alphas in measured(bench, method, setting, rate, seed).items():
                if weight == 1:
                    yield method, setting, alphas
                else:
                    (merged,) = (name for name, of in MERGED.items() if of == method)
                    yield merged, f"{setting}, {weight:g} of the way", alphas


def run(options: Options) -> dict[str, Any]:
    """Everything that `options.runs` leaves time for, to OUT/results.json. EnoughError when there
    is more to do.
    """
    bench = prepare(options)
    base = alphas_of(bench, Path(bench.pair.draft), fingerprint(bench.base), (0.0,))[0.0]
    rates = {setting: changes["lr"] for setting, changes in METHODS["plain"].items()}
    others = [
        read_json(Path(path) / "results.json", "the results of this benchmark")
        for path in options.settings_of
    ]
    given = (
        chosen_settings(others)
        if others
        else dict(text.split("=", 1) for text in options.settings) or None
    )
    if given is None:
        plain = {
            setting: measured(bench, "plain", setting, rates[setting], 0)[1.0] for setting in rates
        }
        best = max(plain, key=lambda setting: plain[setting]["heldout"].pooled or 0.0)
    else:
        best = given["plain"]
    rate = rates[best]
    found: dict[tuple[str, str], list[Alphas]] = {}

    def write() -> dict[str, Any]:
        apart = ("out", "target", "texts", "only", "runs", "table", "settings_of", "settings")
        sizes = {key: value for key, value in asdict(options).items() if key not in apart}
        document = document_of(bench.sets, base, found, best, options.bootstrap, given) | {
            "options": sizes
        }
        write_json_atomic(bench.out / "results.json", document)
        return document

    try:
        for method, setting, alphas in points(
            bench, 0, rate, _trained(given) or {m: set(METHODS[m]) for m in METHODS}
        ):
            found[method, setting] = [alphas]
        document = write()
        wanted = _trained(document["taken"])
        for seed in range(1, options.seeds):
            for method, setting, alphas in list(points(bench, seed, rate, wanted)):
                found[method, setting].append(alphas)
            document = write()
    except EnoughError:
        write()
        raise
    return document


def _trained(taken: dict[str, str] | None) -> dict[str, set[str]]:
    """By method the settings to train for what is taken: its own, and the one of the drafts merged
    from it.
    """
    wanted = {method: {taken[method]} for method in METHODS if method in taken} if taken else {}
    for merged, of in MERGED.items():
        if taken and of in wanted and merged in taken:
            wanted[of].add(taken[merged].rpartition(", ")[0])
    return wanted


def main() -> None:
    """Run, draw, and print the tables."""
    options, _ = parse(Options, COMMAND, sys.argv[1:])
    if options.pair not in SETS:
        raise InputError(f"--pair {options.pair}: use {', '.join(SETS)}")
    if unknown := sorted(set(options.only) - set(METHODS)):
        raise InputError(f"--only {unknown[0]!r}: use any of {', '.join(map(repr, METHODS))}")
    out = Path(options.out)
    if not options.table:
        try:
            run(options)
        except EnoughError:
            sys.stderr.write(f"{COMMAND}: {options.runs} runs made; the same command continues\n")
    if (out / "results.json").exists():
        results = read_json(out / "results.json", "the results of this benchmark")
        write_pictures(results, out)
        sys.stdout.write(tables(results))


if __name__ == "__main__":
    try:
        main()
    except (InputError, RunError) as error:
        sys.exit(f"{COMMAND}: {error}")
