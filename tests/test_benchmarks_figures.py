"""The tables of the docs are those of the kept results."""

import shutil

import pytest

from benchmarks.lib.places import ROOT
from benchmarks.studies import figures
from benchmarks.studies.frontier_tables import Sets, document_of
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


def test_gains_and_losses_are_means_over_seeds_and_the_worst_set_is_named():
    sets = Sets("own", ("near",), ("far",))
    found = {
        "plain": [draft(0.6, 0.2, 0.2)],
        # One set gains what another loses: the pool hides it, the worst set does not.
        "balanced": [draft(0.585, 0.4, 0.22), draft(0.605, 0.4, 0.22)],
    }
    rows = document_of(sets, draft(0.4, 0.3, 0.3), found, 50)["rows"]
    plain, balanced = rows["plain"], rows["balanced"]
    assert plain["id"]["change"]["value"] == pytest.approx(0.2)
    assert plain["share"]["value"] == pytest.approx(1)
    # The mean of two seeds; a share is of the seeds that both have.
    assert balanced["id"]["change"]["value"] == pytest.approx(0.195)
    assert balanced["seeds"] == 2
    assert balanced["share"]["value"] == pytest.approx(0.925)
    assert balanced["ood"]["change"]["value"] == pytest.approx(0.01)
    assert balanced["worst"]["set"] == "far"
    assert balanced["worst"]["change"]["value"] == pytest.approx(-0.08)
