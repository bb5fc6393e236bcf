"""Results and their report: the right row for every name, what is said of which numbers, escaping,
and the layout.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftsmith.core.errors import InputError
from draftsmith.eval.formats import number
from draftsmith.eval.report.page import render_page
from draftsmith.eval.report.tables import tables
from draftsmith.eval.report.theme import LIGHT, Look, roles_of
from draftsmith.eval.results import Results
from draftsmith.eval.schema import SuiteKind
from draftsmith.eval.summary import lead, lines, summary
from tests.results_made_up import BASE, BOTH, made_up, view

CHROMIUM = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (path := shutil.which(name))
    ),
    None,
)


THREE: dict[str, SuiteKind] = {"prose": "id", "code": "ood", "talk": "ood"}


def lines_of(results, title):
    """The lines of one table of the report."""
    return next(list(table.rows) for table in tables(results) if table.title == title)


def test_what_alignment_changed_is_said_with_its_intervals(golden):
    head = lead(view({"base": BASE, "mine": {"id": 0.2, "ood": -0.1}}, THREE))
    title, at_home, elsewhere = head.changes
    golden(title)
    golden(at_home)
    golden(elsewhere)
    alone = lead(view({"base": BASE}, {"prose": "id"}))
    golden(alone.changes[1])


def test_the_best_of_several_drafts_is_told_of(golden):
    # What gains the most in distribution does not lead where it loses more elsewhere.
    drafts: Any = {"base": BASE, "a": {"id": 0.1, "ood": 0}, "b": {"id": 0.2, "ood": -0.2}}
    golden(lead(view(drafts, BOTH, timed=False)).changes[0])


def test_every_tree_is_a_line_by_the_name_of_its_file(tmp_path):
    (file := tmp_path / "wide.json").write_text('{"parents": [-1, -1]}')
    trees = (f"static:{file}", "eagle2:depth=2,beam=3,nodes=6")
    found = view({"base": BASE}, {"prose": "id"}, trees=trees, verifiers=("exact",), offered=False)
    rows = lines_of(found, "Decoding")
    assert [row["tree"] for row in rows[:2]] == ["static:wide.json", trees[1]]
    # A figure that is nowhere defined is no column.
    assert "Acceptance by depth" not in [table.title for table in tables(found)]


def test_outputs_that_differ_are_told(golden):
    drafts: dict[str, dict[SuiteKind, float]] = {"base": BASE}
    same = lead(view(drafts, {"prose": "id"})).lossless
    golden(same)
    other = lead(view(drafts, {"prose": "id"}, same=12, gap=0.5)).lossless
    golden(other)


def test_everything_from_outside_is_escaped():
    """Law 9."""
    evil = "<script>alert(1)</script>"
    page = render_page(
        view({"base": BASE, evil: {"id": 0.2, "ood": 0.1}}, {"prose": "id", f"x{evil}$y$": "ood"})
    )
    assert "<script" not in page and "&lt;script&gt;" in page
    assert not re.search(r"""(?:src|href)=["'](?!#)|url\((?!#)|@import""", page)


def test_a_lossy_verifier_is_marked_beside_its_figures_and_speaks_for_no_draft(golden):
    drafts: dict[str, dict[SuiteKind, float]] = {"base": BASE, "mine": {"id": 0.2, "ood": 0.1}}
    results = view(drafts, BOTH, same=20, verifiers=("typical", "exact"))
    rows = lines_of(results, "Decoding")
    assert {row["verifier"] for row in rows} == {"typical, lossless: false", "exact"}
    said = lead(results).lossless
    golden(said)
    # Outputs of the lossy rule are not counted.
    golden(said)


def test_memory_speed_and_quantisation_are_shown(golden):
    found = made_up({"base": BASE}, {"prose": "id"})
    found["models"]["target"]["quantize"] = "nf4"
    results = Results(found, Path())
    page = render_page(results)
    golden(page, having="1.23 GB")
    model = lines_of(results, "Models")[0]
    assert (model["memory"], model["dtype"]) == ("4.12 MB", "nf4, float32")
    alone = next(row for row in lines_of(results, "Speed") if row["draft"] == "target alone")
    assert alone["tokens_per_s"].startswith("10.0 ")
    text = re.sub(r"<dd>.*?</dd>", "", page)
    assert page == render_page(results) and "None" not in text and "nan" not in text


def test_the_picture_and_its_figures_come_first_and_the_rest_is_folded(golden):
    page = render_page(view({"base": BASE, "mine": {"id": 0.2, "ood": 0.1}}, BOTH))
    places = [page.index(text) for text in ("<svg", "The figures by draft", "What decides")]
    assert places == sorted(places) and places[-1] < page.index("<details")
    assert "<details open" not in page
    # The drawing is told in words, too.
    label = re.search(r'<svg [^>]*aria-label="([^"]*)"', page)
    assert label
    golden(label[1])


def test_no_two_drafts_share_their_mark():
    names = [f"d{index}" for index in range(7)]
    look = Look(LIGHT, roles_of(names, "d0"))
    assert len({look.marker(name) for name in names}) == len(names)


def test_zero_has_no_sign():
    zeros = [number(-0.0004), number(-0.04, 1), number(-0.0004, sign=True)]
    assert zeros == ["0.000", "0.0", "0.000"]
    others = [number(-0.04), number(0.04, sign=True)]
    assert others == ["\N{MINUS SIGN}0.040", "+0.040"]


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A page of one draft on one domain, and one of five long-named drafts on eight domains."""
    root = tmp_path_factory.mktemp("pages")
    (root / "small.html").write_text(render_page(view({"base": BASE}, {"prose": "id"})))
    drafts: dict[str, dict[SuiteKind, float]] = {
        f"draft-{'with-a-long-name-' * 3}{i}": {"id": 0.05 * i, "ood": 0.02 * i} for i in range(5)
    }
    suites: dict[str, SuiteKind] = {
        f"domain-{'of-some-length-' * 3}{i}": "id" if i < 2 else "ood" for i in range(8)
    }
    trees, verifiers = ("eagle2:depth=6,beam=10,nodes=60",), ("exact", "typical")
    (root / "large.html").write_text(
        render_page(view(drafts, suites, prompts=8, trees=trees, verifiers=verifiers))
    )
    return root


@pytest.mark.engines
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("name", ["small", "large"])
@pytest.mark.parametrize("width", [390, 1200])
def test_the_page_fits_a_phone_and_a_laptop(pages, tmp_path, name, width):
    said = _in_chromium(
        tmp_path,
        (pages / f"{name}.html").read_text(),
        width,
        "const todo=Math.round(d.querySelector('.todo').getBoundingClientRect().bottom);"
        "d.querySelectorAll('details').forEach(each=>each.open=true);"
        "const seen=[...d.querySelectorAll('svg')]"
        ".filter(s=>s.getBoundingClientRect().width>0).length;"
        "const cut=[...d.querySelectorAll('.table')]"
        ".filter(t=>t.scrollWidth>t.clientWidth+1).length;"
        "return `scroll=${d.documentElement.scrollWidth} figures=${seen} cut=${cut} todo=${todo} "
        "h1=${d.querySelector('h1').textContent}`",
    )
    page = re.fullmatch(r"scroll=(\d+) figures=(\d+) cut=(\d+) todo=(\d+) h1=(.+)", said)
    assert page is not None
    assert int(page[1]) <= width
    # Panels of two points are rows of tables.
    assert int(page[2]) == {"small": 0, "large": 3}[name]
    # On a phone no table scrolls sideways, and what to do next is on the first screen.
    assert width > 390 or (page[3] == "0" and int(page[4]) < 844)
    assert "Ship" in page[5] or "Cannot tell" in page[5]


@pytest.fixture(scope="module")
def axe(tmp_path_factory):
    """The source of axe-core, which finds what hinders readers."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("no npm on this machine")
    root = tmp_path_factory.mktemp("axe")
    command = [npm, "install", "--prefix", str(root), "axe-core@4.14.1"]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("npm cannot install axe-core here")
    return (root / "node_modules" / "axe-core" / "axe.min.js").read_text()


@pytest.mark.engines
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("name", ["small", "large"])
@pytest.mark.parametrize(("width", "dark"), [(390, False), (1200, False), (1200, True)])
def test_the_page_is_readable_by_everybody(pages, tmp_path, axe, name, width, dark):
    page = (pages / f"{name}.html").read_text()
    said = _in_chromium(
        tmp_path,
        page.replace("</body>", f"<script>{axe}</script></body>"),
        width,
        "d.querySelectorAll('details').forEach(each=>each.open=true);"
        "return frame.contentWindow.axe.run(d).then(found=>`${found.passes.length} passed: `"
        "+found.violations.map(v=>`${v.id} ${v.nodes.map(n=>n.html)}`).join(';'))",
        *["--blink-settings=preferredColorScheme=0"] * dark,
    )
    assert re.fullmatch(r"\d\d passed: ", said), said


def _in_chromium(tmp_path, page, width, script, *options):
    """What `script` returns, or promises, of the page's document `d` in a frame of that width."""
    file = tmp_path / "frame.html"
    # Headless Chromium has no window narrower than 500 pixels; a frame has.
    page = page.replace("&", "&amp;").replace('"', "&quot;")
    file.write_text(
        f'<iframe srcdoc="{page}" style="width:{width}px;height:900px;border:0"></iframe>'
        '<pre id="said"></pre>'
        "<script>onload=()=>{const frame=document.querySelector('iframe');"
        "const d=frame.contentDocument;"
        f"Promise.resolve((()=>{{{script}}})())"
        ".then(said=>document.getElementById('said').textContent=said)}</script>"
    )
    ran = subprocess.run(
        [
            str(CHROMIUM),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--no-first-run",
            "--virtual-time-budget=60000",
            f"--user-data-dir={tmp_path / 'profile'}",
            *options,
            "--dump-dom",
            file.as_uri(),
        ],
        capture_output=True,
        text=True,
    )
    said = re.search(r'<pre id="said">(.+?)</pre>', ran.stdout, flags=re.DOTALL)
    assert said is not None, ran.stderr[-2000:]
    return said[1]


GAINS: dict[str, dict[SuiteKind, float]] = {"base": BASE, "mine": {"id": 0.2, "ood": 0.1}}


@pytest.fixture(scope="module")
def results():
    document = made_up(GAINS, THREE, trees=("chain:2", "kary:2,1"), verifiers=("exact",))
    return Results(document, Path())


def test_every_figure_is_the_one_that_was_asked_for(results):
    for row in results.document["rows"]:
        domain = row["set"] or row["kind"]
        cell = (row["draft"], domain, row["temperature"], row["tree"], row["rule"])
        assert row in results.series(row["figure"], *cell)
    assert results.gain("base", "id") is None
    depths = results.series("accept", "mine", "code", tree="chain:2")
    assert [row["depth"] for row in depths] == [1, 2]
    timed = results.figure("speedup", "mine", "ood", 0.0, tree="kary:2,1")
    assert timed is not None and (timed["set"], timed["tree"]) == (None, "kary:2,1")
    alone = results.figure("tokens_per_s", "target", "prose")
    assert alone is not None and alone["tree"] is None and alone["temperature"] == 1.0
    assert results.figure("transfer", "base", "ood") is None
    # With one method there is nothing to name.
    assert view(GAINS, BOTH).tau("mine", "code")["tree"] == "chain:2"


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda r: r.alpha("other", "code"), "draft 'other': not measured; there are base, mine"),
        (
            lambda r: r.alpha("mine", "poems"),
            "domain 'poems': not measured; there are prose, code, talk, id, ood",
        ),
        (
            lambda r: r.alpha("mine", "code", temperature=0.5),
            "temperature 0.5: not measured; there are 0, 1",
        ),
        (
            lambda r: r.tau("mine", "code"),
            "no tree named: several fit: chain:2 exact, kary:2,1 exact",
        ),
        (
            lambda r: r.tau("mine", "code", tree="chain:9"),
            "chain:9: not measured; there are chain:2 exact",
        ),
        (lambda r: r.to_frame("speedups"), "no figure 'speedups'; did you mean speedup?"),
    ],
)
def test_a_name_that_is_not_there_is_answered_with_those_that_are(results, ask, said):
    with pytest.raises(InputError) as caught:
        ask(results)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_figure_of_the_report_is_one_call_and_a_repr_is_a_line(results, tmp_path, golden):
    results.plot("alpha").savefig(tmp_path / "alpha.png")
    assert (tmp_path / "alpha.png").stat().st_size > 5000 and len(repr(results)) < 200
    with golden.raises():
        results.plot("alhpa")
    with golden.raises():
        view({"base": BASE}, {"prose": "id"}, prompts=2).plot("alpha")


def test_what_eval_prints_is_short_and_json_says_the_same(results):
    said = lines(results)
    head = lead(results)
    assert said[:2] == [head.headline, head.decided]
    text = "\n".join(said)
    assert all(heading in text for heading in ("draft", "set", "alpha", "tokens per call", "speed"))
    for draft in results.drafts:
        assert sum(line.startswith(f" {draft} ") for line in said) == len(results.domains())
    shown = summary(results)
    assert (
        shown["decision"]["headline"] == head.headline and shown["decision"]["row"] in shown["rows"]
    )
    # Of many drafts and sets, the pools; 25 lines with that of the report.
    many: Any = {f"d{index}": {"id": index / 50, "ood": 0.0} for index in range(9)}
    said = lines(view(many, THREE, prompts=8, timed=False))
    assert len(said) <= 24 and any("4 more rows" in line for line in said)


def test_the_table_is_a_frame(results):
    everything = results.to_frame()
    assert list(everything.columns)[:5] == ["figure", "draft", "set", "kind", "temperature"]
    assert len(everything) == len(results.document["rows"])
    alphas = results.to_frame("alpha")
    names = ["draft", "set", "kind", "temperature", "value", "low", "high", "n"]
    assert list(alphas.columns) == names
    # 2 drafts x (3 sets + ID + OOD) x 2 temperatures.
    assert len(alphas) == 20
    found = alphas.set_index(["draft", "set", "temperature"]).loc[("mine", "code", 1.0)]
    row = results.alpha("mine", "code")
    assert (found.value, found.low, found.n) == (row["value"], row["low"], 24)
    depths = results.to_frame("accept").dropna(subset="set")
    wide = depths.pivot(
        index=["draft", "set", "temperature", "tree"], columns="depth", values="value"
    )
    assert list(wide.columns) == [1, 2] and len(wide) == 2 * 3 * 2 * 2


def test_reading_results_needs_no_torch():
    code = (
        "import sys, draftsmith.eval.results; "
        "print({'torch', 'transformers', 'matplotlib', 'pandas'} & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"
