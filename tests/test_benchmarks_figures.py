"""The tables of the docs are those of the kept results."""

import shutil

import pytest

from benchmarks.lib.places import ROOT
from benchmarks.studies import figures
from draftsmith.eval.bootstrap import PromptSums


@pytest.mark.slow
def test_the_tables_of_the_docs_are_those_of_the_kept_results(tmp_path):
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "README.md", tmp_path)
    evidence = {page.name: page.table for page in figures.pages(ROOT)}
    for name, table in evidence.items():
        (tmp_path / "docs" / "results" / f"{name}.md").unlink()
        emptied = "\n".join(table.split("\n")[:2])
        figures.put(tmp_path / "docs" / "evidence" / f"{name}.md", emptied)
    figures.put(tmp_path / "README.md", "| draft | ID |\n| --- | --- |")
    figures.tables(tmp_path)
    pages = [f"docs/{folder}/{name}.md" for folder in ("evidence", "results") for name in evidence]
    for page in ("README.md", "docs/evidence/reproduction.md", *pages):
        assert (tmp_path / page).read_text() == (ROOT / page).read_text(), page


def test_results_are_kept_without_the_paths_of_the_machine(tmp_path):
    (run := tmp_path / "run" / "eval").mkdir(parents=True)
    (run / "results.json").write_text(f'{{"config": {{"out": "{run}"}}}}')
    figures.keep(tmp_path / "docs-root", "demo", run / "results.json")
    assert figures.kept(tmp_path / "docs-root", "demo") == {"config": {"out": "out/demo/eval"}}


def sums_of(*values):
    return PromptSums.of(list(values), [1.0] * len(values))


def draft(own, near, far):
    """alpha of a draft on four prompts of each set, which differ by prompt as the base's do."""
    values = {"own": own, "near": near, "far": far}
    return {name: sums_of(*(value + 0.01 * i for i in range(4))) for name, value in values.items()}
