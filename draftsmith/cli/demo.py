"""`draftsmith demo`: the main job on the shipped nano pair. The real commands, in order, through their files."""

import importlib
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from draftsmith.cli.output import finish
from draftsmith.demo import corpus
from draftsmith.demo.nano_pair import write_rows
from draftsmith_core.errors import InputError
from draftsmith_core.io import atomic_dir
from draftsmith_core.options import parse
from draftsmith_core.processes import require_single_process
from eval.results import Results

ROOT = Path(__file__).resolve().parents[2]
# Relative where that is possible: the paths end up in records and in the report.
DEMO = (Path() if Path.cwd() == ROOT else ROOT) / "draftsmith" / "demo"
RECIPES, PAIR = DEMO / "recipes", DEMO / "pair"
HOME = "prose"
# Alignment prompts are cut short, so that there are thousands of different ones; evaluation prompts come from
# documents that neither the pair nor the drafts have seen.
TRAIN_CHARACTERS = 300
EVAL_CHARACTERS = 400


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Align the shipped base draft with the shipped target in two ways, and measure what that buys where."""

    out: str = "out/demo"
    """Everything the demo makes."""
    rebuild_pair: str | None = None
    """Instead: train the shipped pair from nothing in this directory (about an hour on two cores)."""
    device: str = "auto"
    dtype: str = "auto"


def run(argv: list[str]) -> None:
    """Run the demo, or rebuild its pair."""
    config, as_json = parse(DemoConfig, "demo", argv)
    require_single_process("demo")
    if not (RECIPES / "target.yaml").is_file():
        raise InputError(f"{RECIPES}: the demo's recipes are not here; run it from a clone of the project")
    if config.rebuild_pair is not None:
        from draftsmith.demo.rebuild_pair import rebuild

        pair = rebuild(RECIPES, Path(config.rebuild_pair), config.device)
        finish({"pair": str(pair)}, [f"{pair}: target/ and base/, as in {PAIR}"], as_json)
        return
    started = time.monotonic()
    out = Path(config.out)
    _write_prompts(out / "prompts")
    for name, words in steps(out):
        words = [*words, "--device", config.device, "--dtype", config.dtype]
        sys.stderr.write(f"\n$ draftsmith {name} {shlex.join(words)}\n")
        importlib.import_module(f"draftsmith.cli.{name}").run(words)
    _print_table(Results.load(out / "eval"))
    report = out / "eval" / "report.html"
    seconds = time.monotonic() - started
    lines = [f"The report: {report.resolve()}   ({seconds:.0f} s; open it in a browser)"]
    finish({"report": str(report), "results": str(out / "eval" / "results.json")}, lines, as_json)


def steps(out: Path) -> list[tuple[str, list[str]]]:
    """The commands of the demo and their options, in order."""
    target, base = str(PAIR / "target"), str(PAIR / "base")
    distilled = str(out / "distilled")
    train = ["--target", target, "--draft", base, "--data", distilled]
    prompts = {domain: f"{domain}={out / 'prompts' / domain}.jsonl" for domain in corpus.DOMAINS}
    away = [prompts[domain] for domain in corpus.DOMAINS if domain != HOME]
    return [
        (
            "distill",
            ["--config", str(RECIPES / "distill.yaml"), "--target", target]
            + ["--prompts", str(out / "prompts" / f"{HOME}.train.jsonl"), "--out", distilled],
        ),
        ("train", ["--config", str(RECIPES / "seqkd.yaml"), *train, "--out", str(out / "seqkd")]),
        ("train", ["--config", str(RECIPES / "jsd.yaml"), *train, "--out", str(out / "jsd")]),
        (
            "eval",
            ["--config", str(RECIPES / "eval.yaml"), "--target", target, "--out", str(out / "eval")]
            + ["--draft", f"base={base}", f"seqkd={out / 'seqkd'}", f"jsd={out / 'jsd'}"]
            + ["--id", prompts[HOME], "--ood", *away],
        ),
    ]


def _write_prompts(directory: Path) -> None:
    if directory.is_dir():
        return
    sys.stderr.write("reading text from this Python's standard library\n")
    with atomic_dir(directory) as made:
        home = corpus.split(HOME).train
        write_rows(made / f"{HOME}.train.jsonl", corpus.passages(HOME, home, TRAIN_CHARACTERS))
        for domain in corpus.DOMAINS:
            heldout = corpus.split(domain).heldout
            write_rows(made / f"{domain}.jsonl", corpus.passages(domain, heldout, EVAL_CHARACTERS))


def _print_table(results: Results) -> None:
    """alpha of every draft on every domain at the highest temperature, with its interval."""
    table = Table(title=f"alpha at temperature {results.top_temperature:g}, 95 % interval")
    for heading in ("draft", *results.domains()):
        table.add_column(heading)
    for draft in results.drafts:
        figures = [results.alpha(draft, domain) for domain in results.domains()]
        table.add_row(draft, *(f"{e['value']:.3f} [{e['low']:.3f}, {e['high']:.3f}]" for e in figures))
    Console().print(table)
