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
from draftsmith.eval.formats import number, percent
from draftsmith.eval.report.findings import lead
from draftsmith.eval.report.page import render_page
from draftsmith.eval.report.tables import tables
from draftsmith.eval.results import Results
from draftsmith.eval.schema import SuiteKind
from draftsmith.eval.summary import headline_and_table
from tests.results_made_up import BASE, BOTH, made_up, view

CHROMIUM = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (path := shutil.which(name))
    ),
    None,
)


@pytest.mark.parametrize(
    ("gain_id", "gain_ood", "says"),
    [
        (
            0.2,
            0.1,
            r"raised acceptance in distribution from 50 % to 70 %; out of distribution it gained "
            r"(9|10)\.\d points",
        ),
        (0.2, 0.0, "raised .*; out of distribution nothing measurable changed"),
        (0.2, -0.1, r"raised .*; out of distribution it cost (9\.\d|10\.\d) points"),
        (
            0.0,
            0.0,
            "made no measurable change in distribution .*; out of distribution nothing "
            "measurable changed",
        ),
        (-0.1, 0.1, "lowered acceptance in distribution .*; out of distribution it gained"),
    ],
)
def test_what_alignment_changed_is_what_the_intervals_allow(gain_id, gain_ood, says):
    head = lead(view({"base": BASE, "mine": {"id": gain_id, "ood": gain_ood}}, BOTH))
    assert len(head.changes) == 2 and head.changes[0].startswith("At T = 0, alignment ")
    assert re.search(says, head.changes[1]), head.changes


def test_the_worst_set_stands_beside_the_pool_and_a_loss_is_no_share():
    document = made_up(
        {"base": BASE, "mine": {"id": 0.2, "ood": -0.1}},
        {"prose": "id", "code": "ood", "talk": "ood"},
    )
    for row in document["rows"]:
        if row["figure"] == "gain" and row["domain"] == "talk":
            row |= {"value": -0.3, "low": -0.31, "high": -0.29}
    results = Results(document, Path())
    assert re.search(
        r"it cost [\d.]+ points \(worst: talk, \N{MINUS SIGN}30.0 points\)\.$",
        lead(results).changes[1],
    )
    drafts, *_ = tables(results)
    assert drafts.rows[0]["worst OOD set"].startswith("talk \N{MINUS SIGN}0.300 [")
    assert re.fullmatch(r"[\d.]+ points lost", drafts.rows[0]["ID gain kept"])


def test_the_best_of_several_drafts_leads():
    head = lead(view({"base": BASE, "a": {"id": 0.1, "ood": 0}, "b": {"id": 0.2, "ood": 0}}, BOTH))
    together = "the best of 2 alignments in and out of distribution together,"
    assert head.changes[1].startswith(f"At T = 1, b, {together} raised")
    # What gains the most in distribution does not lead where it loses more elsewhere.
    head = lead(
        view({"base": BASE, "a": {"id": 0.1, "ood": 0}, "b": {"id": 0.2, "ood": -0.2}}, BOTH)
    )
    assert head.changes[1].startswith(f"At T = 1, a, {together} raised")
    own = {name: kind for name, kind in BOTH.items() if kind == "id"}
    head = lead(view({"base": BASE, "a": {"id": 0.1}, "b": {"id": 0.2}}, own))
    assert head.changes[1].startswith("At T = 1, b, the best of 2 alignments, raised")


def lines(results: Results, title: str) -> list[Any]:
    """The lines of one table of the report."""
    return next(list(table.rows) for table in tables(results) if table.title.startswith(title))


def test_decoding_is_shown_with_headroom_and_nodes_and_a_dash_for_what_is_undefined(tmp_path):
    (file := tmp_path / "wide.json").write_text('{"parents": [-1, -1]}')
    trees = (f"static:{file}", "eagle2:depth=2,beam=3,nodes=6")
    rows = lines(
        view({"base": BASE}, {"prose": "id"}, trees=trees, verifiers=("exact",), offered=False),
        "Decoding",
    )
    # A tree from a file goes by the name of the file.
    assert [row["tree"] for row in rows[:2]] == ["static:wide.json", trees[1]]
    assert [row["nodes"] for row in rows[:2]] == ["2", "6"] and "accept@1" not in rows[0]
    rows = lines(view({"base": BASE}, {"prose": "id"}), "Decoding")
    # The bound is 8/7 of what is reached; at temperature 0 there is none.
    assert [row["headroom [95 %]"] for row in rows] == ["–", "1.14 [1.14, 1.14]"]


def test_one_prompt_or_one_draft_claims_nothing():
    one = lead(view({"base": BASE, "mine": {"id": 0.2, "ood": 0.1}}, BOTH, prompts=1))
    assert (
        one.headline.startswith("Not decided: too few prompts")
        and "on too few prompts to judge" in one.changes[0]
    )
    alone = lead(view({"base": BASE}, {"prose": "id"}))
    assert (
        alone.changes[0] == "At T = 0, the target accepts 50 % of what base drafts in distribution."
    )


def test_outputs_that_differ_are_told_with_how_near_a_tie_they_were():
    drafts: dict[str, dict[SuiteKind, float]] = {"base": BASE}
    assert "Lossless: at temperature 0, 24 of 24" in lead(view(drafts, {"prose": "id"})).lossless
    tie = lead(view(drafts, {"prose": "id"}, same=23, gap=1e-4)).lossless
    assert "23 of 24" in tie and "a tie" in tie
    assert (
        "more than rounding explains"
        in lead(view(drafts, {"prose": "id"}, same=23, gap=0.5)).lossless
    )


def test_everything_from_outside_is_escaped():
    """Law 9."""
    evil = "<script>alert(1)</script>"
    page = render_page(
        view({"base": BASE, evil: {"id": 0.2, "ood": 0.1}}, {"prose": "id", f"x{evil}$y$": "ood"})
    )
    assert "<script" not in page and "&lt;script&gt;" in page
    assert not re.search(r"""(?:src|href)=["'](?!#)|url\((?!#)|@import""", page)


def test_a_lossy_verifier_is_marked_beside_its_figures_and_speaks_for_no_draft():
    drafts: dict[str, dict[SuiteKind, float]] = {"base": BASE, "mine": {"id": 0.2, "ood": 0.1}}
    found = made_up(drafts, BOTH, same=20, gap=3.0, verifiers=("typical", "exact"))
    for row in found["rows"]:
        if row["figure"] == "identical" and row["verifier"] == "exact":
            row["value"] = row["n"]
    results = Results(found, Path())
    rows = lines(results, "Decoding") + [
        row for row in lines(results, "Speed") if row["draft"] != "target alone"
    ]
    assert {row["verifier"] for row in rows} == {"typical, lossless: false", "exact"}
    head = lead(results)
    assert "typical, lossy by design (lossless: false)." in head.lossless
    # Outputs of the lossy rule that differ are no failure of the lossless one.
    assert "The others are lossless: at temperature 0, 96 of 96" in head.lossless


def test_memory_latency_and_quantisation_are_shown():
    found = made_up({"base": BASE}, {"prose": "id"})
    found["models"]["target"]["quantize"] = "nf4"
    results = Results(found, Path())
    page = render_page(results)
    assert (
        "held 1.23 GB, all of the process included" in page
        and "Draft alignment for t in nf4 ·" in page
    )
    assert [lines(results, "Models")[0][key] for key in ("memory", "dtype")] == [
        "4.12 MB",
        "nf4, float32",
    ]
    alone = next(row for row in lines(results, "Speed") if row["draft"] == "target alone")
    assert (alone["tokens/s"], alone["ms/token"]) == ("10.0", "100")
    assert (
        page == render_page(results)
        and "None" not in re.sub(r"<dd>.*?</dd>", "", page)
        and "nan" not in page
    )


def test_zero_has_no_sign():
    zeros = [number(-0.0004), number(-0.04, 1), percent(-0.004), number(-0.0004, sign=True)]
    assert zeros == ["0.000", "0.0", "0 %", "0.000"]
    others = [number(-0.04), percent(-0.04), number(0.04, sign=True)]
    assert others == ["\N{MINUS SIGN}0.040", "\N{MINUS SIGN}4 %", "+0.040"]


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
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_a_phone_and_a_laptop(pages, tmp_path, name, width):
    said = _in_chromium(
        tmp_path,
        (pages / f"{name}.html").read_text(),
        width,
        "const seen=[...d.querySelectorAll('svg')]"
        ".filter(s=>s.getBoundingClientRect().width>0).length;"
        "const cut=[...d.querySelectorAll('.table')]"
        ".filter(t=>t.scrollWidth>t.clientWidth+1).length;"
        "const todo=Math.round(d.querySelector('.todo').getBoundingClientRect().bottom);"
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
    assert "hip" in page[5] or "decided" in page[5]


def _in_chromium(tmp_path: Path, page: str, width: int, script: str) -> str:
    """What `script` returns of the page's document `d` in a frame of that width."""
    frame = tmp_path / "frame.html"
    # Headless Chromium has no window narrower than 500 pixels; a frame has.
    page = page.replace("&", "&amp;").replace('"', "&quot;")
    frame.write_text(
        f'<iframe srcdoc="{page}" style="width:{width}px;height:900px;border:0"></iframe>'
        '<pre id="said"></pre>'
        "<script>onload=()=>{const d=document.querySelector('iframe').contentDocument;"
        f"document.getElementById('said').textContent=(()=>{{{script}}})()}}</script>"
    )
    ran = subprocess.run(
        [
            str(CHROMIUM),
            *(
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-background-networking",
                "--no-first-run",
            ),
            f"--user-data-dir={tmp_path / 'profile'}",
            "--dump-dom",
            frame.as_uri(),
        ],
        capture_output=True,
        text=True,
    )
    said = re.search(r'<pre id="said">(.+?)</pre>', ran.stdout)
    assert said is not None, ran.stderr[-2000:]
    return said[1]


GAINS: dict[str, dict[SuiteKind, float]] = {"base": BASE, "mine": {"id": 0.2, "ood": 0.1}}


@pytest.fixture(scope="module")
def results():
    suites: dict[str, SuiteKind] = {"prose": "id", "code": "ood", "talk": "ood"}
    document = made_up(GAINS, suites, trees=("chain:2", "kary:2,1"), verifiers=("exact",))
    return Results(document, Path())


def test_every_figure_is_the_one_that_was_asked_for(results):
    for row in results.document["rows"]:
        cell = (row["draft"], row["domain"], row["temperature"], row["tree"], row["verifier"])
        assert row in results.series(row["figure"], *cell)
        assert results.beside(row, row["figure"], row["at"]) is row
    alpha = results.alpha("mine", "code", 1.0)
    assert (
        results.beside(alpha, "gain") is results.gain("mine", "code")
        and results.gain("base", "id") is None
    )
    assert [row["at"] for row in results.series("accept", "mine", "code", tree="chain:2")] == [1, 2]
    timed = results.speedup("mine", "ood", 0.0, tree="kary:2,1")
    assert timed is not None and (timed["domain"], timed["tree"]) == ("ood", "kary:2,1")
    alone = results.figure("tokens_per_s", "target", "prose")
    assert alone is not None and alone["tree"] is None and alone["temperature"] == 1.0
    assert (
        results.transfer("mine") is results.figure("transfer", "mine", "ood")
        and results.transfer("base") is None
    )
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
        (
            lambda r: Results.concat({"a": r}, "speedups"),
            "no figure 'speedups'; did you mean speedup?",
        ),
        (
            lambda r: Results.concat([r]),  # type: ignore[arg-type]
            "runs: expected results by name",
        ),
        (lambda r: Results.concat({}), "runs: expected results by name"),
        (lambda r: Results.concat({"a": r, "b": "nosuch"}), "nosuch/results.json: no such file"),
    ],
)
def test_a_name_that_is_not_there_is_answered_with_those_that_are(results, ask, said):
    with pytest.raises(InputError) as caught:
        ask(results)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_figure_of_the_report_is_one_call_and_a_repr_is_a_line(results, tmp_path):
    results.plot("alpha").savefig(tmp_path / "alpha.png")
    assert (tmp_path / "alpha.png").stat().st_size > 5000 and len(repr(results)) < 200
    with pytest.raises(InputError, match="no figure 'alhpa'; did you mean alpha?"):
        results.plot("alhpa")
    with pytest.raises(InputError, match="plot: alpha: too few points were measured; to_frame"):
        view({"base": BASE}, {"prose": "id"}, prompts=2).plot("alpha")


def test_what_eval_prints_is_the_decision_and_a_row_by_draft_and_set(results):
    headline, _, *table = headline_and_table(results)
    assert headline == lead(results).headline
    text = "\n".join(table)
    assert all(heading in text for heading in ("draft", "set", "alpha", "tokens per call", "speed"))
    for draft in results.drafts:
        assert sum(f" {draft} " in line for line in text.splitlines()) == len(results.domains())


def test_the_table_is_a_frame(results):
    everything = results.to_frame()
    assert list(everything.columns)[:5] == ["figure", "draft", "domain", "kind", "temperature"]
    assert len(everything) == len(results.document["rows"])
    alphas = results.to_frame("alpha")
    assert list(alphas.columns) == [
        "draft",
        "domain",
        "kind",
        "temperature",
        "value",
        "low",
        "high",
        "n",
    ]
    # 2 drafts x (3 sets + ID + OOD) x 2 temperatures.
    assert len(alphas) == 20
    found, row = (
        alphas.set_index(["draft", "domain", "temperature"]).loc[("mine", "code", 1.0)],
        results.alpha("mine", "code"),
    )
    assert (found.value, found.low, found.high, found.n) == (
        row["value"],
        row["low"],
        row["high"],
        24,
    )
    depths = results.to_frame("accept").query("domain != kind")
    wide = depths.pivot(
        index=["draft", "domain", "temperature", "tree"], columns="at", values="value"
    )
    assert list(wide.columns) == [1, 2] and len(wide) == 2 * 3 * 2 * 2


def test_results_that_are_joined_say_whose_a_row_is(results, tmp_path):
    other = Results(view(GAINS, BOTH, timed=False).document, tmp_path)
    other.write()
    joined = Results.concat({"many": results, "few": tmp_path})
    assert list(joined.columns)[:3] == ["run", "figure", "draft"]
    for name, alone in (("many", results), ("few", other)):
        rows = joined[joined["run"] == name].drop(columns="run").reset_index(drop=True)
        assert rows.to_json() == alone.to_frame().to_json()
    keys = ["run", "figure", "draft", "domain", "temperature", "tree", "verifier", "at", "part"]
    assert joined.duplicated(keys[1:]).any() and not joined.duplicated(keys).any()
    cell = ["draft", "domain", "temperature"]
    alphas = Results.concat({"a": results, "b": other}, "alpha")
    wide = alphas.pivot(index=cell, columns="run", values="value")
    assert list(wide.columns) == ["a", "b"] and len(wide) == 20
    # A figure of one run only is there; a column goes if it is empty in all.
    assert set(Results.concat({"a": results, "b": other}, "speedup")["run"]) == {"a"}


def test_reading_results_needs_no_torch():
    code = (
        "import sys, draftsmith.eval.results; "
        "print({'torch', 'transformers', 'matplotlib', 'pandas'} & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"
