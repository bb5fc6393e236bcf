"""The tables of the docs are those of the kept results."""

import shutil

from benchmarks.studies import figures


def test_the_tables_of_the_docs_are_those_of_the_kept_results(tmp_path):
    shutil.copytree(figures.ROOT / "docs", tmp_path / "docs")
    shutil.copy(figures.ROOT / "README.md", tmp_path)
    evidence = {page.name: page.table for page in figures.pages(figures.ROOT)}
    for name, table in evidence.items():
        (tmp_path / "docs" / "results" / f"{name}.md").unlink()
        emptied = "\n".join(table.split("\n")[:2])
        figures.put(tmp_path / "docs" / "evidence" / f"{name}.md", emptied)
    figures.put(tmp_path / "README.md", "| draft | ID |\n| --- | --- |")
    figures.tables(tmp_path)
    pages = [f"docs/{folder}/{name}.md" for folder in ("evidence", "results") for name in evidence]
    for page in ("README.md", "docs/evidence/reproduction.md", *pages):
        assert (tmp_path / page).read_text() == (figures.ROOT / page).read_text(), page


def test_results_are_kept_without_the_paths_of_the_machine(tmp_path):
    (run := tmp_path / "run" / "eval").mkdir(parents=True)
    (run / "results.json").write_text(f'{{"config": {{"out": "{run}"}}}}')
    figures.keep(tmp_path / "docs-root", "demo", run / "results.json")
    assert figures.kept(tmp_path / "docs-root", "demo") == {"config": {"out": "out/demo/eval"}}
