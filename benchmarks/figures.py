"""Make the tables and figures of the docs again from kept results: `python -m benchmarks.figures`.

docs/results/ holds the results.json files, compressed. `--keep NAME=FILE` first takes a new one, without the paths of
the machine: `--keep demo=out/demo/eval/results.json demo-large=out/demo/eval-large/results.json`.
"""

import argparse
import json
import lzma
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import frontier_tables, objectives_figure, objectives_tables
from benchmarks.pages import table
from draftsmith.demo.demo_run import write_page
from eval.report.formats import number, with_interval
from eval.results import Results

ROOT = Path(__file__).parents[1]
DRAFTS = {"base": "base", "jsd-plain": "plain (`jsd-plain`)", "jsd-balanced": "**balanced** (`jsd-balanced`)"}


def kept(root: Path, name: str) -> Any:
    """A kept document; None if there is none of this name."""
    file = root / "docs" / "results" / f"{name}.json.xz"
    return json.loads(lzma.decompress(file.read_bytes())) if file.is_file() else None


def keep(root: Path, name: str, source: Path, public: Mapping[str, str] | None = None) -> None:
    """Keep results under a name. public: what paths of this machine become; the run's directory is out/demo."""
    text, runs = source.read_text(encoding="utf-8"), (source.resolve().parents[1], source.parents[1])
    for path, word in (public or dict.fromkeys(map(str, runs), "out/demo")).items():
        text = text.replace(path, word) if len(path) > 1 else text
    (folder := root / "docs" / "results").mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json.xz").write_bytes(lzma.compress(text.encode(), preset=9))


def demo_tables(results: Results) -> dict[str, list[str]]:
    """The tables of the README by their first line."""
    sets = [f"{name} (ID)" if results.kind(name) == "id" else f"{name} (OOD)" for name in results.domains()]
    alphas = []
    for draft in results.drafts:
        taus = [results.figure(name, draft, "id", 1.0, "chain:2", "speculative") for name in ("tau_predicted", "tau")]
        cells = [with_interval(results.alpha(draft, domain, 1.0)) for domain in results.domains()]
        cells += [with_interval(taus[0], 2), number(taus[1]["value"] if taus[1] else None, 2)]
        alphas.append([DRAFTS.get(draft, draft), *cells])
    gains = [
        [f"{draft.removeprefix('jsd-')}, temperature {t:g}"]
        + [with_interval(results.gain(draft, domain, t), sign=True) for domain in results.domains()]
        for t in sorted(results.temperatures, reverse=True)
        for draft in reversed(results.aligned)
    ]
    heads = ["draft", *sets, "tokens per target call ID, predicted", "decoded"], ["change of alpha over base", *sets]
    return {head[0]: table(head, rows).split("\n") for head, rows in zip(heads, (alphas, gains), strict=True)}


def put(page: Path, tables: dict[str, list[str]]) -> None:
    """Replace the tables of a page whose header begins with the same cell."""
    lines = page.read_text(encoding="utf-8").split("\n")
    for first, rows in tables.items():
        start = next(index for index, line in enumerate(lines) if line.startswith(f"| {first} |"))
        end = next(index for index in range(start, len(lines)) if not lines[index].startswith("|"))
        lines[start:end] = rows
    page.write_text("\n".join(lines), encoding="utf-8")


def demo(root: Path) -> None:
    """The tables of the README, and the first page of the demo's report, light and dark (by Chromium)."""
    small, large = (kept(root, name) for name in ("demo", "demo-large"))
    put(root / "README.md", demo_tables(Results(small, Path())))
    if (chromium := shutil.which("chromium") or shutil.which("google-chrome")) is None:
        sys.stderr.write("docs/figures/demo-report*.png: not made again, needs chromium\n")
        return
    with tempfile.TemporaryDirectory() as scratch:
        write_page(Results(small, Path(scratch) / "eval"), Results(large, Path(scratch) / "eval-large"))
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
            words += [f"--user-data-dir={scratch}/profile", f"--screenshot={picture}", f"file://{scratch}/report.html"]
            subprocess.run([chromium, *words], check=True, capture_output=True)


def objectives(root: Path) -> None:
    """The pictures and, on standard output, the tables of docs/objectives.md."""
    for pair in ("nano", "stories"):
        if document := kept(root, f"objectives-{pair}"):
            objectives_figure.write_pictures(document, root / "docs" / "figures")
            sys.stdout.write(objectives_tables.tables(document))


def frontier(root: Path) -> None:
    """The pictures of docs/robust.md."""
    if document := kept(root, "frontier-nano"):
        frontier_tables.write_pictures(document, root / "docs" / "figures")


def main() -> None:
    """Take new results, if any are given, and make everything again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", nargs="*", default=[], metavar="NAME=FILE")
    for name, _, file in (word.partition("=") for word in parser.parse_args().keep):
        keep(ROOT, name, Path(file))
    for make in (demo, objectives, frontier):
        make(ROOT)


if __name__ == "__main__":
    main()
