"""The tables of the docs are those of the kept results."""

import shutil

from benchmarks.studies import figures


def test_the_tables_of_the_real_pair_are_those_of_the_kept_results(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)  # no pictures
    shutil.copytree(figures.ROOT / "docs" / "results", tmp_path / "docs" / "results")
    # By page, how some of its intervals begin, but none of other pairs.
    pages = {"README.md": "[+0.1", "docs/real.md": "[0.2", "docs/blocks.md": "[0.20"}
    before = {page: (figures.ROOT / page).read_text() for page in pages}
    for page, text in before.items():
        assert pages[page] in text
        (tmp_path / page).write_text(text.replace(pages[page], "[?"))
    figures.demo(tmp_path)
    figures.real(tmp_path)
    assert {page: (tmp_path / page).read_text() for page in pages} == before


def test_results_are_kept_without_the_paths_of_the_machine(tmp_path):
    (run := tmp_path / "run" / "eval").mkdir(parents=True)
    (run / "results.json").write_text(f'{{"config": {{"out": "{run}"}}}}')
    figures.keep(tmp_path / "docs-root", "demo", run / "results.json")
    assert figures.kept(tmp_path / "docs-root", "demo") == {"config": {"out": "out/demo/eval"}}
