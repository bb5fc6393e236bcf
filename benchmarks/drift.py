"""Traffic whose domain moves twice: what a draft is worth that stays, one that follows, and one that is adapted.

    python -m benchmarks.drift --out DIR [--windows 3 --requests 160]
    python -m benchmarks.drift --out DIR --table

The shipped pair serves a stream of prompts: windows of prose, then of code, then of unicode names. The target's answers
are what a server would have logged. In each window alpha is that of the draft that is served then, over the window's
own answers, which no draft has seen; after it,

* `base` stays as it is;
* `naive` is trained on the window's answers, and served whatever it is worth;
* `adapted` makes one round of `draftsmith align --from_log`: replay, a point between old and new, and a gate;
* `specialist` (one a phase) is the base trained on that phase's earlier windows alone, for as many steps in all.

A phase is recovered to (adapted - base) / (specialist - base) in its last window. Everything is a file below OUT and is
not made again.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from shutil import copytree
from typing import Any

from matplotlib.figure import Figure
from transformers import PreTrainedModel

from benchmarks.objectives_data import once
from benchmarks.objectives_tables import row_of
from draftsmith.alignment.config import DistillChoices, EvalChoices, TrainChoices
from draftsmith.alignment.rounds import adapt
from draftsmith.alignment.rounds_config import AdaptConfig
from draftsmith.alignment.traffic import Logged, write_traffic
from draftsmith.demo import corpus, demo_run
from draftsmith_core.errors import InputError, RunError
from draftsmith_core.io import atomic_dir, read_json, write_json_atomic, write_rows
from draftsmith_core.models import eos_ids, load_model
from draftsmith_core.options import parse
from draftsmith_core.prompts import read_prompts
from draftsmith_core.sampling import Sampling
from draftsmith_core.tokenization import load_tokenizer
from eval import measure
from eval.acceptance import Continuation
from eval.bootstrap import PromptSums, difference, estimate, resamples
from eval.config import EvalConfig
from eval.estimate import measure_alphas
from eval.evaluate import evaluate
from eval.report.theme import DARK, LIGHT, drawing, write_png
from train.config import Optim, TrainConfig
from train.training_run import train

COMMAND = "benchmarks/drift.py"
PHASES = ("prose", "code", "unicode")
ARMS = {"base": "base", "naive": "d2", "adapted": "d1", "specialist": "d3"}
OBJECTIVE = "jsd:beta=0.5"


@dataclass(frozen=True, kw_only=True)
class Options:
    """How long the stream is."""

    out: str
    """Everything that is made, results.json last."""
    windows: int = 3
    """Windows a phase, at least 2."""
    requests: int = 160
    """Requests a window."""
    new_tokens: int = 48
    """Longest answer."""
    steps: int = 60
    """Optimizer steps a round, of 16 sequences."""
    lr: float = 3e-3
    rounds: int | None = None
    """Stop after so many more rounds of adaptation; the same command continues."""
    bootstrap: int = 2000
    table: bool = False
    """Only print the table of OUT/results.json, and draw its picture."""

    def __post_init__(self) -> None:
        if self.windows < 2:
            raise InputError(f"--windows: {self.windows} must be at least 2")


def stream(options: Options, target: PreTrainedModel) -> list[list[Continuation]]:
    """The target's answers of every window, phase after phase."""
    out, tokenizer = Path(options.out), load_tokenizer(str(demo_run.PAIR / "target"))
    found: list[list[Continuation]] = []
    for phase in PHASES:
        file = out / "stream" / f"{phase}.jsonl"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_rows(file, corpus.passages(phase, corpus.split(phase).train, 300))
        prompts = read_prompts(str(file), tokenizer).prompts[: options.windows * options.requests]
        if len(prompts) < options.windows * options.requests:
            raise InputError(f"--requests {options.requests}: {phase} has {len(prompts)} prompts for all its windows")
        drawn: dict[str, Any] = {"max_new_tokens": options.new_tokens, "batch_size": 32, "seed": 7}
        task = measure.Task(target, prompts, Sampling(temperature=1.0), eos_ids(target), **drawn)
        answers = once(out / "stream" / f"{phase}.answers.json", lambda task=task: dict(task.baseline()))  # type: ignore[misc]
        rows = [row for row in measure.continuations(prompts, answers) if row.output_ids]  # type: ignore[arg-type]
        found += [rows[i * options.requests : (i + 1) * options.requests] for i in range(options.windows)]
    return found


def fine_tune(options: Options, draft: str, answers: Sequence[Continuation], steps: int, out: Path) -> str:
    """A draft trained on these answers and nothing else."""
    rows = [Logged({}, tuple(each.prompt_ids), tuple(each.output_ids), None) for each in answers]
    write_traffic(rows, [], out.with_name(f"{out.name}-data"))
    config = TrainConfig(
        out=str(out),
        data=[str(out.with_name(f"{out.name}-data") / "distilled")],
        draft=draft,
        target=str(demo_run.PAIR / "target"),
        objective=OBJECTIVE,
        max_length=32 + options.new_tokens,
        batch_size=16,
        steps=steps,
        eval_every=steps,
        save_every=steps,
        optim=Optim(lr=options.lr, warmup_steps=max(1, steps // 12)),
    )
    train(config, COMMAND)
    return str(out)


def baseline_of(options: Options) -> str:
    """results.json of the base draft: what must be kept is prose, and what the target writes by itself."""
    out = Path(options.out)
    if not (out / "baseline" / "results.json").exists():
        heldout = out / "baseline.jsonl"
        write_rows(heldout, corpus.passages("prose", corpus.split("prose").heldout, 400))
        config = EvalConfig(
            target=str(demo_run.PAIR / "target"),
            draft=[f"base={demo_run.PAIR / 'base'}"],
            id=[f"prose={heldout}"],
            ood=["general=self:32"],
            out=str(out / "baseline"),
            temperature=[1.0],
            tree=["chain:1"],
            max_prompts=32,
            max_new_tokens=32,
            speed_prompts=0,
        )
        evaluate(config)
    return str(out / "baseline" / "results.json")


def one_round(options: Options, index: int, answers: Sequence[Continuation], baseline: str) -> dict[str, Any]:
    """`align --from_log` on a window's answers, for the draft in OUT/served."""
    out = Path(options.out)
    log = out / "logs" / f"window-{index}.jsonl"
    log.parent.mkdir(exist_ok=True)
    rows = [
        {"prompt_ids": list(row.prompt_ids), "output_ids": list(row.output_ids), "time": index * options.requests + i}
        for i, row in enumerate(answers)
    ]
    write_rows(log, rows)
    config = AdaptConfig(
        draft=str(out / "served"),
        from_log=str(log),
        baseline=baseline,
        out=str(out / "rounds"),
        distill=DistillChoices(general_texts=options.requests, max_new_tokens=options.new_tokens),
        train=TrainChoices(steps=options.steps, lr=[options.lr], rows_per_step=16, batch_size=16, heldout_fraction=0.2),
        eval=EvalChoices(tree=["chain:1"], max_prompts=32, max_new_tokens=32, speed_prompts=0),
    )
    return adapt(config)


def run(options: Options) -> dict[str, Any]:
    """The whole stream, to OUT/results.json."""
    out, base = Path(options.out), str(demo_run.PAIR / "base")
    target = load_model(str(demo_run.PAIR / "target"))
    windows = stream(options, target)
    baseline = baseline_of(options)
    if not (out / "served").is_dir():
        with atomic_dir(out / "served") as made:
            copytree(base, made, dirs_exist_ok=True)
    served, naive, measured, rounds = str(out / "served"), base, [], []
    left = float("inf") if options.rounds is None else options.rounds
    for index, answers in enumerate(windows):
        phase, place = divmod(index, options.windows)
        drafts = {"base": base, "naive": naive, "adapted": served}
        if place == options.windows - 1:
            earlier = [row for window in windows[phase * options.windows : index] for row in window]
            alone = partial(fine_tune, options, base, earlier, place * options.steps, out / f"specialist-{phase}")
            drafts["specialist"] = once(
                out / f"specialist-{phase}.json",
                lambda alone=alone: {"draft": alone()},  # type: ignore[misc]
            )["draft"]

        def look(drafts: dict[str, str] = drafts, answers: list[Continuation] = answers) -> dict[str, Any]:
            models = {name: load_model(directory) for name, directory in drafts.items()}
            read = measure_alphas(target, models, answers, Sampling(temperature=1.0), batch_size=32)
            return {name: {key: each[key] for key in ("sum", "count")} for name, each in read.items()}

        # Before the round that follows it: afterwards another draft is served.
        measured.append(once(out / f"window-{index}.json", look))
        if index == len(windows) - 1:
            break
        if not (out / f"round-{index}.json").exists():
            if left < 1:
                sys.stderr.write(f"{COMMAND}: {options.rounds} rounds made; the same command continues\n")
                break
            left -= 1
        rounds.append(once(out / f"round-{index}.json", partial(one_round, options, index, answers, baseline)))
        naive = fine_tune(options, naive, answers, options.steps, out / f"naive-{index}")
    document = {
        "options": {key: value for key, value in asdict(options).items() if key not in ("out", "rounds", "table")},
        "windows": [_figures(each, options.bootstrap) for each in measured],
        "promoted": [each["promoted"] for each in rounds],
        "because": [each["because"] for each in rounds],
    }
    write_json_atomic(out / "results.json", document)
    return document


def _figures(measured: dict[str, Any], count: int) -> dict[str, Any]:
    """alpha of every draft in a window, and its difference to the base, paired by request."""
    sums = {name: PromptSums.of(measured[name]["sum"], measured[name]["count"]) for name in ARMS if name in measured}
    picks = resamples(len(sums["base"].numerator_P), count, 0)
    return {
        name: {"alpha": estimate(each, picks), "over_base": difference(each, sums["base"], picks)}
        for name, each in sums.items()
    }


def recovered(results: dict[str, Any]) -> list[float | None]:
    """Per phase that is whole: the adapted draft's gain over the specialist's, in the last window."""
    ends = [each for each in results["windows"] if "specialist" in each]
    gains = [[each[name]["over_base"]["value"] for name in ("adapted", "specialist")] for each in ends]
    return [adapted / alone if alone > 0 else None for adapted, alone in gains]


def below(results: dict[str, Any], arm: str) -> int:
    """The most windows in a row in which an arm was below the base draft, by the upper bound of the difference."""
    longest = row = 0
    for each in results["windows"]:
        row = row + 1 if (each[arm]["over_base"]["high"] or 0) < 0 else 0
        longest = max(longest, row)
    return longest


def table(results: dict[str, Any]) -> str:
    """The table of docs/robust.md, in Markdown."""
    count = results["options"]["windows"]
    lines = [row_of(["window", *ARMS, "round after it"]), row_of(["---"] * (len(ARMS) + 2))]
    for index, each in enumerate(results["windows"]):
        words = [f"{PHASES[index // count]} {index % count + 1}"]
        for arm in ARMS:
            words.append(f"{each[arm]['alpha']['value']:.3f}" if arm in each else "")
        done = results["promoted"][index : index + 1]
        lines.append(row_of([*words, *(["promoted" if done[0] else "not promoted"] if done else [""])]))
    shares = ", ".join("-" if share is None else f"{share:.0%}" for share in recovered(results))
    said = ", ".join(f"{arm} {below(results, arm)}" for arm in ("naive", "adapted"))
    return (
        "\n".join([*lines, "", f"Recovered, phase by phase: {shares}. Windows in a row below the base: {said}."]) + "\n"
    )


def picture(results: dict[str, Any], colours: dict[str, str]) -> Figure:
    """alpha (y) by window (x), one line per arm; the specialists as marks in the windows that they are measured in."""
    count, windows = results["options"]["windows"], results["windows"]
    with drawing(colours):
        figure = Figure(figsize=(9.0, 4.2))
        ax = figure.subplots()
        for arm, role in ARMS.items():
            x = [index for index, each in enumerate(windows) if arm in each]
            y = [windows[index][arm]["alpha"]["value"] for index in x]
            line = "none" if arm == "specialist" else "-"
            ax.plot(x, y, ls=line, marker="D" if arm == "specialist" else "o", color=colours[role], label=arm, lw=2)
        for index in range(count, len(windows), count):
            ax.axvline(index - 0.5, color=colours["soft"], lw=1, ls=(0, (2, 2)))
        names = [f"{PHASES[index // count]} {index % count + 1}" for index in range(len(windows))]
        ax.set_xticks(range(len(windows)), names)
        ax.set_ylabel("α of the draft that is served, T = 1")
        ax.legend(loc="best")
        return figure


def main() -> None:
    """Run, draw, and print the table."""
    options, _ = parse(Options, COMMAND, sys.argv[1:])
    out = Path(options.out)
    results = read_json(out / "results.json", "the results of this benchmark") if options.table else run(options)
    for suffix, colours in (("", LIGHT), ("-dark", DARK)):
        write_png(picture(results, colours), out / f"drift{suffix}.png")
    sys.stdout.write(table(results))


if __name__ == "__main__":
    try:
        main()
    except (InputError, RunError) as error:
        sys.exit(f"{COMMAND}: {error}")
