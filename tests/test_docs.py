"""What the documentation says is so: its commands are run, its tables, links and names compared,
its site built.
"""

import ast
import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import draftsmith as ds
from draftsmith.__main__ import main
from draftsmith.core.suites import expand, suite_names
from draftsmith.train.losses import LOSSES
from draftsmith.train.trainees import TRAINEES
from tests.method_page import markdown

ROOT = Path(__file__).parents[1]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
TRAINING = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
LAUNCHING = (ROOT / "docs" / "several-processes.md").read_text(encoding="utf-8")
# The pages whose blocks are run, in the order in which a reader meets them.
RUN = [
    "README.md",
    "docs/tutorial.md",
    "docs/training.md",
    "docs/several-processes.md",
    "docs/robust.md",
    "docs/decoding.md",
    "docs/blocks.md",
    "docs/evaluation.md",
    "docs/read-results.md",
    "docs/planning.md",
    "docs/publishing.md",
    "docs/in-a-service.md",
    "docs/reference-python.md",
]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
# Stand-ins for the prompts that the demo writes.
ROWS = {
    "prose.train.jsonl": "If the file {} is not found, an error is raised and the caller must "
    "decide what to do. ",
    "prose.jsonl": "The value {} of an expression is returned when the lookup of a name fails in "
    "the inner scope. ",
    "code.jsonl": "def close{}(self):\n    self.file.close()\n    for line in self.lines:\n      "
    "  yield line\n",
    "unicode.jsonl": "LATIN SMALL LETTER {} WITH DIAERESIS, GREEK CAPITAL LETTER OMEGA WITH "
    "PSILI, ",
}
# Words behind a page's own that keep its trial shorter still.
SHORTER = {
    "align": "--train.steps 6 --eval.max_prompts 4 --eval.max_new_tokens 16 --eval.speed_prompts 1",
    "eval": "--max_prompts 4 --max_new_tokens 16 --speed_prompts 1",
}
TOUR = ROOT / "docs" / "tour.ipynb"
EXTENDING = sorted((ROOT / "docs" / "extend").glob("*.md"))


def blocks(text):
    """(language, content) of a page's shell and Python blocks; a shell block as one line per
    command.
    """
    for language, content in re.findall(
        r"^```(bash|python)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL
    ):
        if language == "python":
            yield language, content
            continue
        for line in content.replace("\\\n", " ").splitlines():
            if line.strip() and not line.startswith("#"):
                yield language, re.split(r"\s+#", line)[0].strip()


def commands(text):
    return [content for language, content in blocks(text) if language == "bash"]


def run_line(line):
    """A `draftsmith` command runs in this process: a new interpreter would spend seconds on imports
    alone.
    """
    if line.startswith("draftsmith "):
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = main(shlex.split(line)[1:])
        return code, said.getvalue()
    # PET_STANDALONE: accelerate finds a port itself; that of the launch file may be taken.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PET_STANDALONE": "1", "PATH": path}
    done = subprocess.run(line, shell=True, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow(150)
def test_commands_and_programs_of_all_pages_work_in_order(short_demo, tmp_path, monkeypatch):
    """`draftsmith demo --short` stands for `make demo`: it leaves the same files. Plans try one
    tree.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("draftsmith.eval.plan.Planner.tried", lambda _: ["chain:2"])
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    shutil.copytree(short_demo / "out", tmp_path / "out")
    prompts = tmp_path / "out" / "demo" / "prompts"
    for name, text in ROWS.items():
        rows = [json.dumps({"id": f"{name} {i}", "text": text.format(i) * 6}) for i in range(24)]
        (prompts / name).write_text("\n".join(rows) + "\n")
    tried = 0
    for page in RUN:
        for language, content in blocks((ROOT / page).read_text(encoding="utf-8")):
            if language == "python":
                exec(compile(content, page, "exec"), {})  # noqa: S102
            elif not content.startswith(("make ", "pip ", "export PATH", "python -m venv")):
                code, said = run_line(f"{content} {SHORTER.get(content.split()[1], '')}")
                assert code == 0, f"{page}: {content}\n{said}"
            tried += 1
    assert tried >= 12
    assert (tmp_path / "out" / "mine" / "eval" / "report.html").stat().st_size > 10_000


@pytest.mark.slow
def test_the_tour_runs():
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(TOUR, as_version=4)
    # A busy machine may take longer than a minute, the default, to start a kernel.
    options: dict[str, Any] = {"timeout": None, "startup_timeout": 900, "kernel_name": "python3"}
    NotebookClient(notebook, **options, resources={"metadata": {"path": str(ROOT)}}).execute()
    outputs = [
        output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    ]
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert {"image/png", "text/html"} <= kinds, "a plot, and a picture of the tokens"


def test_the_python_page_names_all_there_is_and_its_parts_of_ones_own_work(
    tmp_path, monkeypatch, capsys
):
    page = (ROOT / "docs" / "reference-python.md").read_text(encoding="utf-8")
    missing = {
        name
        for name in ds.__all__
        if name != "__version__" and not re.search(rf"\bds\.{name}\b", page)
    }
    assert not missing
    (tmp_path / "out" / "demo").mkdir(parents=True)
    (tmp_path / "out" / "demo" / "pair").symlink_to(ROOT / "draftsmith" / "demo" / "pair")
    monkeypatch.chdir(tmp_path)
    programs = [content for language, content in blocks(page) if language == "python"]
    exec(compile(programs[0], "reference-python.md", "exec"), {})  # noqa: S102
    free, one = map(ast.literal_eval, capsys.readouterr().out.splitlines())
    assert sum(free) > 0 and one[0] > 0 and not any(one[1:])


def test_docs_examples_and_tour_import_from_the_front_door_alone():
    """`draftsmith` and `draftsmith.decoding`; nothing that lies behind them."""
    door = r"^\s*(?:from|import) (?!draftsmith(?:\.decoding)? import |draftsmith as ds$)"
    behind = re.compile(door + r"(?:draftsmith|decode|distill|train|eval)\b.*", re.MULTILINE)
    cells = json.loads(TOUR.read_text(encoding="utf-8"))["cells"]
    texts = {"docs/tour.ipynb": "\n".join("".join(cell["source"]) for cell in cells)}
    for page in (*PAGES, *(ROOT / "examples").glob("*.py")):
        text = page.read_text(encoding="utf-8")
        texts[page.name] = re.sub(r"^```diff\n.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    found = {name: behind.findall(text) for name, text in texts.items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_training_page_names_what_there_is():
    """Every kind and objective stands in a table of it, every launcher file in that of launching,
    and nothing that is not there.
    """
    assert len(TRAINING.split()) <= 1200
    first = [
        match.split(":")[0]
        for match in re.findall(r"^\| `([^`]+)` \|", TRAINING, flags=re.MULTILINE)
    ]
    launchers = {path.name for path in (ROOT / "configs" / "accelerate").glob("*.yaml")}
    assert len(first) == len(set(first))
    assert {name for name in first if not name.endswith(".yaml")} - {"kind", "objective"} == {
        *TRAINEES,
        *LOSSES,
    }
    assert {name for name in re.findall(r"`(\w+\.yaml)`", LAUNCHING)} == launchers


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_pictures_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)\s]+)[^)]*\)|src(?:set)?=\"([^\"]+)\"", text)
    for target in (a or b for a, b in targets):
        path, _, anchor = target.partition("#")
        if target.startswith("http"):
            continue
        there = page.parent / path if path else page
        assert there.exists(), f"{page.name}: {target}"
        if anchor:
            headings = re.findall(
                r"^#+ (.+)$", there.read_text(encoding="utf-8"), flags=re.MULTILINE
            )
            slugs = {
                re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
                for heading in headings
            }
            assert anchor in slugs, f"{page.name}: {target}"


def test_the_page_of_methods_holds_the_table_of_what_decode_can_do():
    page = (ROOT / "docs" / "reference-methods.md").read_text(encoding="utf-8")
    between = re.findall(
        r"<!-- methods: begin -->\n(.*?)\n<!-- methods: end -->", page, flags=re.DOTALL
    )
    assert between == [markdown()], (
        "put `python -c 'from tests.method_page import *; print(markdown())'` there"
    )


def test_contributing_names_files_and_tables_that_exist():
    """Every path in it and in the pages of extensions is there, and every `TABLE in file` is
    assigned in that file.
    """
    pages = [CONTRIBUTING, *(path.read_text() for path in EXTENDING)]
    text = re.sub(r"^```diff\n.*?^```", "", "\n".join(pages), flags=re.MULTILINE | re.DOTALL)
    assert len(re.findall(r"[^\s|]*\w[^\s|]*", CONTRIBUTING)) <= 900, "words"
    paths = re.findall(r"`([\w.]+(?:/[\w.]+)*/?)`", text)
    paths = [
        path
        for path in paths
        if "/" in path or path.endswith((".py", ".md", ".toml", ".txt", ".yml"))
    ]
    assert len(paths) > 40
    # A bare name is that of an artifact or stands for one file among many.
    known = {"manifest.json", "results.json", "config.py"}
    missing = {
        path
        for path in paths
        if path not in known and not (ROOT / path).exists() and not _in_a_room(path)
    }
    assert not missing
    tables = re.findall(r"`(_?[A-Z_]{3,})`[^`|]*? (?:in|of) `([\w/.]+\.py)`", text)
    assert len(tables) >= 8
    for name, path in tables:
        assert name in _assigned(ROOT / path), f"{path} has no {name}"


def diff_of(page):
    found = re.findall(r"^```diff\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return "".join(found)


@pytest.mark.parametrize("page", [path for path in EXTENDING if path.stem != "index"])
def test_the_diff_of_an_extension_applies_to_the_code_of_today(page):
    apply = ["git", "apply", "--check", "--unidiff-zero", "-"]
    done = subprocess.run(apply, cwd=ROOT, input=diff_of(page), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_verifier_a_loss_and_a_suite_are_added_by_their_pages_alone(tmp_path):
    rooms = ("draftsmith", "decode", "distill", "train", "eval", "configs", "tests", "benchmarks")
    for room in rooms:
        skipped = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / room, tmp_path / room, symlinks=True, ignore=skipped)
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("results"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name in ("verifier", "loss", "suite", "figure"):
        diff = diff_of(ROOT / "docs" / "extend" / f"{name}.md")
        subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=diff, text=True, check=True)
    files = [
        f"tests/test_{name}.py"
        for name in ("decode_verify", "train_objectives", "core_suites", "eval_counts")
    ]
    trial = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    trial += ["-k", "mirrored or hellinger or definitions or dolly or meaning"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(trial, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and re.search(
        r"^[2-9]\d passed", done.stdout, flags=re.MULTILINE
    ), done.stdout


def _in_a_room(path):
    return any(
        (ROOT / room / path).exists() for room in ("decode", "distill", "train", "draftsmith")
    )


def _assigned(file):
    found = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign)
            else []
        )
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def test_every_law_is_named_by_a_test_and_no_other_is_cited():
    laws = {
        int(number) for number in re.findall(r"^(\d+)\. \*\*", CONTRIBUTING, flags=re.MULTILINE)
    }
    assert laws == set(range(1, 14))
    rooms = ("draftsmith", "decode", "distill", "train", "eval", "tests", "benchmarks")
    cited = {room: set().union(*map(_laws, (ROOT / room).rglob("*.py"))) for room in rooms}
    assert cited["tests"] == laws == set().union(*cited.values())


def _laws(file):
    found = re.findall(r"\b[Ll]aws? (\d+(?:(?:, | and )\d+)*)", file.read_text(encoding="utf-8"))
    return {int(number) for each in found for number in re.findall(r"\d+", each)}


def test_the_page_of_evaluation_names_every_suite():
    page = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    found: set[str] = set()
    for name in re.findall(r"`@([a-z0-9-]+)`", page):
        found |= {f"{name}-{part}" for part in expand(f"@{name}")} or {name}
    assert found == set(suite_names())


def test_the_glossary_is_sorted_and_says_each_word_once():
    section = (ROOT / "docs" / "words.md").read_text(encoding="utf-8")
    words = [
        word.lower() for word in re.findall(r"^\| \*\*([^*]+)\*\*", section, flags=re.MULTILINE)
    ]
    assert (
        len(words) > 50 and words == sorted(words, key=str.lower) and len(words) == len(set(words))
    )


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs" / "evidence").glob("*.md")), ids=lambda page: page.stem
)
def test_a_page_of_evidence_has_at_most_600_words_beside_its_tables(page):
    text = page.read_text(encoding="utf-8")
    prose = re.sub(r"^(?:\||    ).*$|<picture>.*?</picture>", "", text, flags=re.MULTILINE)
    assert len(prose.split()) <= 600


def test_trust_names_tests_that_exist():
    page = (ROOT / "docs" / "trust.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/\w+\.py)::(\w+)`", page)
    assert len(named) > 30
    assert len(re.findall(r"`tests/", page)) == len(named), "a test is named with its function"
    for file, function in named:
        text = (ROOT / file).read_text(encoding="utf-8")
        assert f"\ndef {function}(" in text, f"{file} has no {function}"


# What a page loads when it is opened: scripts, styles, pictures, frames; not where its links lead.
LOADED = r'<(?:script|img|iframe|source)\b[^>]*?\bsrc(?:set)?="[^"]+"'
LOADED += r'|<link\b[^>]*\brel="(?:stylesheet|[\w ]*icon|pre\w+)"[^>]*'


@pytest.mark.slow
def test_the_site_builds_strictly_and_needs_no_network(tmp_path):
    site = tmp_path / "site"
    build = f"{sys.executable} -m mkdocs build --strict --quiet --site-dir {site}"
    done = subprocess.run(build.split(), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list(site.rglob("*.html"))
    assert len(pages) >= 16
    for page in pages:
        loads = list(re.finditer(LOADED, page.read_text(encoding="utf-8")))
        assert loads
        for load in loads:
            assert not re.search(r'="(http|//)', load[0]), f"{page.name}: {load[0]}"
    for style in site.rglob("*.css"):
        assert "url(http" not in style.read_text(encoding="utf-8")
    # Links to what a page is made from lead to the page.
    index = (site / "index.html").read_text(encoding="utf-8")
    for page in ("tour.html", "contributing.html", "reference-figures.html"):
        assert f'href="{page}"' in index.partition("<article")[2]
    commands_page = (site / "reference-commands.html").read_text(encoding="utf-8")
    assert "--push_to_hub" in commands_page
    assert "load_pair" in (site / "reference-python.html").read_text(encoding="utf-8")
