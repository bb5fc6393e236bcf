"""Make the tables and figures of the docs again from kept results.

    python -m benchmarks.studies.figures

docs/results/ holds the results.json files, compressed, and beside them every table that can be made
of them; a page has one. `--keep NAME=FILE` first takes a new one, without the paths of the machine:
`--keep demo=out/demo/eval/results.json demo-large=out/demo/eval-large/results.json`.
"""

import argparse
import json
import lzma
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.places import ROOT
from benchmarks.studies import (
    evidence,
    objectives_figure,
    real_figures,
    real_tables,
)
from benchmarks.studies.evidence import ALIGNED_TO, FRONTIERS, LONGER, Evidence
from draftsmith.demo.demo_run import write_page
from draftsmith.eval.results import Results

# Small pairs of the studies of objectives, optimizers and heads.
PAIRS = ("nano", "stories")


def kept(root: Path, name: str) -> Any:
    """Return a kept document."""
    return json.loads(lzma.decompress(_file(root, name).read_bytes()))


def _file(root: Path, name: str) -> Path:
    return Path(root, "docs", "results", f"{name}.json.xz")


def keep(
    root: Path,
    name: str,
    source: Path,
    public: Mapping[str, str] | None = None,
    rows: Sequence[str] = (),
) -> None:
    """Keep results under a name. public: what paths of this machine become; the run's directory is
    out/demo. rows: figures whose rows are kept; all when empty.
    """
    text = source.read_text(encoding="utf-8")
    whole = source.resolve()
    runs = (str(whole.parents[1]), str(source.parents[1]))
    for path, word in (public or dict.fromkeys(runs, "out/demo")).items():
        text = text.replace(path, word) if len(path) > 1 else text
    if rows:
        document = json.loads(text)
        document["rows"] = [row for row in document["rows"] if row["figure"] in rows]
        text = json.dumps(document)
    file = _file(root, name)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(lzma.compress(text.encode(), preset=9))


def put(page: Path, text: str) -> None:
    """Replace the table of a page whose header begins with the same cell."""
    rows = text.split("\n")
    first = rows[0].split("|")[1]
    lines = page.read_text(encoding="utf-8").split("\n")
    begins = [line.startswith(f"|{first}|") for line in lines]
    start = end = begins.index(True)
    while lines[end].startswith("|"):
        end += 1
    lines[start:end] = rows
    page.write_text("\n".join(lines), encoding="utf-8")


def results_of(root: Path, name: str) -> Results:
    """Return a kept evaluation."""
    return Results(kept(root, name), Path())


def alignments(root: Path) -> dict[str, Results]:
    """Return the drafts of SmolLM2's chats that were aligned to maths, by the kind of draft."""
    return {base: results_of(root, f"real-align-{base}") for base in ("pruned", "eagle")}


def pages(root: Path) -> list[Evidence]:
    """Return the tables of every page of evidence."""
    frontier = {name: kept(root, f"frontier-{name}") for name in FRONTIERS}
    balanced = {name: kept(root, f"frontier-{name}") for name in ALIGNED_TO}
    recipes = {pair: kept(root, f"recipes-{pair}") for pair in PAIRS}
    objectives = {pair: kept(root, f"objectives-{pair}") for pair in PAIRS}
    heads = {pair: results_of(root, f"heads-{pair}") for pair in PAIRS}
    longer = {name: kept(root, file) for name, file in LONGER.items()}
    which = results_of(root, "real-which")
    return [
        evidence.which_draft(
            which, results_of(root, "real-which-2"), kept(root, "real-weightless")
        ),
        evidence.alignment(alignments(root), balanced, frontier, kept(root, "domains")),
        evidence.how_much(results_of(root, "real-amount")),
        evidence.long_texts(results_of(root, "real-long-texts")),
        evidence.recipe(
            [which, results_of(root, "real-recipe"), results_of(root, "real-longer")],
            [kept(root, "real-recipe-speed"), kept(root, "real-longer-speed")],
            recipes,
            longest=results_of(root, "real-gpu"),
            longest_speeds=kept(root, "real-longest-speed"),
            peer=results_of(root, "real-peer"),
        ),
        evidence.how_fast(
            drafts=kept(root, "real-drafts-speed"),
            engines=kept(root, "real-speed"),
            longest=kept(root, "real-longest-engines"),
            command=results_of(root, "real-command"),
        ),
        evidence.objectives(objectives, longer),
        evidence.block_drafters(which, heads),
        evidence.targets(kept(root, "causal-types")),
    ]


def tables(root: Path) -> None:
    """Write the table of every page of evidence, all other tables beside the results, and the
    table of the README.
    """
    shown = root / "docs" / "evidence"
    results = root / "docs" / "results"
    for page in pages(root):
        file = f"{page.name}.md"
        put(shown / file, page.table)
        Path(results, file).write_text(page.details(), encoding="utf-8")
    verdicts = Path(results, "reproduction.md").read_text(encoding="utf-8")
    put(shown / "reproduction.md", evidence.claims(verdicts))
    small = results_of(root, "demo")
    large = results_of(root, "demo-large")
    chat = results_of(root, "real-command")
    put(root / "README.md", evidence.in_one_table(small, large, chat))


def pictures(root: Path) -> None:
    """Write the pictures of the pages of evidence."""
    which = results_of(root, "real-which")
    out = root / "docs" / "figures"
    real_figures.which(which, real_tables.NAMES, out)
    real_figures.command(results_of(root, "real-command"), out)
    real_figures.align(alignments(root), real_tables.NAMES, out)
    real_figures.amount(results_of(root, "real-amount"), out)
    real_figures.lengths(results_of(root, "real-long-texts"), evidence.LENGTHS, out)
    real_figures.depths(which, real_tables.NAMES, out)
    objectives_figure.write_pictures(kept(root, "objectives-nano"), out, "objectives-nano")


def demo_report(root: Path) -> None:
    """Write the first page of the demo's report, light and dark, by Chromium."""
    small = kept(root, "demo")
    large = kept(root, "demo-large")
    if (chromium := shutil.which("chromium") or shutil.which("google-chrome")) is None:
        sys.stderr.write("docs/figures/demo-report*.png: not made again, needs chromium\n")
        return
    with tempfile.TemporaryDirectory() as scratch:
        write_page(
            Results(small, Path(scratch) / "eval"), Results(large, Path(scratch) / "eval-large")
        )
        for suffix, words in (("", []), ("-dark", ["--blink-settings=preferredColorScheme=0"])):
            picture = root / "docs" / "figures" / f"demo-report{suffix}.png"
            words = [
                *words,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                "--window-size=1000,1500",
            ]
            words += [
                f"--user-data-dir={scratch}/profile",
                f"--screenshot={picture}",
                f"file://{scratch}/report.html",
            ]
            subprocess.run([chromium, *words], check=True, capture_output=True)


def main() -> None:
    """Take new results, if any are given, and make everything again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", nargs="*", default=[], metavar="NAME=FILE")
    for name, _, file in (word.partition("=") for word in parser.parse_args().keep):
        rows = ("alpha",) if name.startswith("heads-") else ()
        keep(ROOT, name, Path(file), rows=rows)
    for make in (tables, pictures, demo_report):
        make(ROOT)


if __name__ == "__main__":
    main()
