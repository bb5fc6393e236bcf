"""The tables of the docs are those of the kept results."""

import re
import shutil
from pathlib import Path

from benchmarks import figures
from eval.results import Results


def test_the_tables_of_the_readme_are_made_again_from_the_kept_run(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)  # no pictures
    shutil.copytree(figures.ROOT / "docs" / "results", tmp_path / "docs" / "results")
    shutil.copy(figures.ROOT / "README.md", tmp_path)
    before = (tmp_path / "README.md").read_text()
    (tmp_path / "README.md").write_text(before.replace("| 0.4", "| ?"))
    figures.demo(tmp_path)
    after = (tmp_path / "README.md").read_text()
    results = Results(figures.kept(tmp_path, "demo"), Path())
    assert all(f"{results.alpha(draft, 'prose', 1.0)['value']:.3f} [" in after for draft in results.drafts)

    def values(text: str) -> set[str]:
        plain = text.replace("\N{MINUS SIGN}", "-").replace("+", "")
        return set(re.findall(r"0\.\d\d\d \[[^|]*\]", plain))

    # What stood there is what was kept; the rest of the page is as it was.
    assert values(before) and values(before) <= values(after)
    assert len(after.splitlines()) == len(before.splitlines())


def test_the_tables_of_the_real_pair_are_those_of_the_kept_results(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)  # no pictures
    shutil.copytree(figures.ROOT / "docs" / "results", tmp_path / "docs" / "results")
    # By page, how some of its intervals begin, but none of other pairs.
    pages = {"README.md": "[0.2", "docs/real.md": "[0.2", "docs/blocks.md": "[0.20"}
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
