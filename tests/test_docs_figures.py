"""Figures in the prose of the docs are those of the kept results, and pages say what made them."""

import hashlib
import re
import shutil

import pytest

from benchmarks.studies import prose
from draftsmith.alignment.config import AlignConfig
from draftsmith.train.config import TrainConfig
from draftsmith.train.training_run import _with_name
from tests.conftest import ROOT

PAGES, MADE = prose.read(ROOT)
NAMES = [
    str(page.relative_to(ROOT))
    for page in (
        ROOT / "README.md",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs").glob("evidence/*.md"),
    )
]


def test_figures_yaml_is_of_pages_that_exist():
    assert set(PAGES) <= set(NAMES)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_figure_of_a_page_is_that_of_a_kept_result(name):
    assert prose.problems(ROOT, name, PAGES.get(name, prose.Page())) == []


@pytest.fixture
def copy(tmp_path):
    """A page with one figure, of one kept result."""
    (results := tmp_path / "docs" / "results").mkdir(parents=True)
    shutil.copy(ROOT / "docs" / "results" / "real-recipe.json.xz", results)
    (tmp_path / "page.md").write_text("EAGLE-3 has 0.318 on chat,\nat temperature 1.\n")
    return tmp_path


ROW = "real-recipe/rows/figure=alpha&draft=eagle3&set=chat&temperature=1"
ONE = prose.Page(says=[f"has {{{ROW}/value | .3f}} on chat, at"])


def test_a_digit_that_changes_fails_here_or_in_the_kept_result(copy, monkeypatch, golden):
    rows = [{"figure": "alpha", "draft": "eagle3", "set": "chat", "temperature": 1.0}]
    with monkeypatch.context() as patch:
        patch.setattr(prose, "_kept", lambda root, name: {"rows": [rows[0] | {"value": 0.3186}]})
        golden(prose.problems(copy, "page.md", ONE)[0])
    (copy / "page.md").write_text("EAGLE-3 has 0.319 on chat, at temperature 1.\n")
    assert len(prose.problems(copy, "page.md", ONE)) == 2


def test_a_name_that_fits_several_rows_is_refused(copy, golden):
    with golden.raises(KeyError):
        prose.value(copy, "real-recipe/rows/figure=alpha&draft=eagle3/value")


def test_verdicts_of_claims_and_types_are_counted_as_their_tables_have_them():
    page = (ROOT / "docs" / "evidence" / "reproduction.md").read_text(encoding="utf-8")
    found = [len(re.findall(rf" {word} (?=\|)", page)) for word in ("agrees", "open", "disagrees")]
    agrees, unclear, disagrees = found
    claim = (
        f"{agrees} of {sum(found)} comparisons agree, {unclear} are open and {disagrees} disagree"
    )
    assert claim in page
    page = (ROOT / "docs" / "evidence" / "targets.md").read_text(encoding="utf-8")
    (trees,) = re.findall(r"^\| tree \|.*\| (.*) \|$", page, flags=re.MULTILINE)
    assert f"{trees} decode with trees" in page.replace("\n", " ")


def defaults():
    """What makes a draft and times it today, as figures.yaml writes it."""
    optimizer = _with_name(
        TrainConfig(data=["x"], out="y", kind="eagle3", target="z"), zero=False
    ).name
    code = sorted((ROOT / "decode" / "native").glob("*.[ch]"))
    kernel = hashlib.sha256(b"".join(file.read_bytes() for file in code)).hexdigest()
    (objective,) = AlignConfig(target="x", prompts="y", out="z").objective
    names = {"adamw": "AdamW", "muon": "Muon", "sgd": "SGD"}
    return {"optimizer": names[str(optimizer)], "objective": objective, "kernel": kernel[:12]}


def unsaid(text, made, now):
    """What made a result otherwise than today's defaults do, and no sentence of its page says."""
    line = re.sub(r"\s+", " ", text)
    said = " ".join(re.findall(r"made with (.*?[.;])(?= |$)", line, flags=re.IGNORECASE))
    other = [made[what] for what in made if made[what] != now[what]]
    words = ["an earlier kernel" if value == made.get("kernel") else value for value in other]
    return [word for word in words if word not in said]


@pytest.mark.parametrize("name", sorted(PAGES))
def test_a_page_says_what_made_its_figures_where_the_defaults_are_others_now(name):
    text, now = (ROOT / name).read_text(encoding="utf-8"), defaults()
    for result in PAGES[name].results():
        assert unsaid(text, MADE.get(result, {}), now) == [], result


@pytest.mark.parametrize("name", sorted(MADE))
def test_what_is_said_to_have_made_a_result_is_what_it_records(name):
    document = prose.value(ROOT, f"{name}/")
    models = document.get("models", {}) if isinstance(document, dict) else {}
    trained = [model["training"] for model in models.values() if model.get("training")]
    recorded = {training["objective"] for training in trained}
    assert not recorded or MADE[name].get("objective", "jsd:beta=0.5") in recorded
