"""The demo in its short form, from prompts to report, in any directory; and the corpus that every
Python carries.
"""

import html
import json
import shlex
from pathlib import Path

import pytest

from draftsmith.cli.examples import EXAMPLES
from draftsmith.demo import corpus, demo_run
from draftsmith.eval.results import Results
from draftsmith.eval.summary import lead


@pytest.mark.slow(60)
def test_demo_from_prompts_to_report(short_demo, monkeypatch):
    monkeypatch.chdir(short_demo)
    out, demo = Path("said").read_text(), short_demo / "out" / "demo"
    results = Results.load(demo / "eval")
    assert results.drafts == ["base", "jsd-plain", "jsd-balanced", "lookup"]
    assert {suite["name"]: suite["kind"] for suite in results.document["suites"]} == {
        "prose": "id",
        "code": "ood",
        "unicode": "ood",
    }
    assert results.temperatures == [0.0, 1.0]
    # No draft is asked about what it was trained on.
    assert not {"trained_on", "same_prompts"} & {
        remark["about"] for remark in results.document["remarks"]
    }
    assert all(0 < (row["value"] or 0) < 1 for row in results.select("alpha"))
    assert [tree for tree, _ in results.methods] == ["chain:2"]
    assert [row["value"] for row in results.select("identical")] == [1.0] * 4 * 5
    # One verdict, from the target beside which a draft can pay: the small one is not timed.
    assert not results.select("speedup")
    assert all(name in out for name in (*results.drafts, "prose", "code", "unicode"))
    # Nothing points into the installed package.
    summary = json.loads(out.splitlines()[-1])
    assert str(demo_run.PAIR) not in (demo / "eval" / "results.json").read_text()
    assert (demo / "jsd-balanced" / "model.safetensors").is_file()
    # The second pair: the drafts beside the padded target, which writes what the small one writes.
    large = Results.load(demo / "eval-large")
    assert large.drafts == ["base", "jsd-plain", "jsd-balanced"]
    assert large.domains() == ["prose", "code"]
    assert (
        large.document["models"]["target"]["parameters"]
        > 4 * results.document["models"]["target"]["parameters"]
    )
    speedups = [row["value"] for row in summary["large"]["rows"] if row["figure"] == "speedup"]
    assert len(speedups) == 3 * 4 and min(speedups) > 0
    assert "padded with zeros" in Path(summary["large"]["report"]).read_text()
    page = (demo / "report.html").read_text()
    assert "padded with zeros" in page and "<svg" in page
    assert lead(large).headline in html.unescape(page) and 'href="eval/report.html"' in page
    assert out.splitlines()[:-1].count(lead(large).headline) == 1
    for example in EXAMPLES.values():
        files = [word.partition("=")[0] for word in shlex.split(example)]
        assert all(Path(file).exists() for file in files if file.startswith("out/demo")), example


def test_the_side_of_a_name_follows_from_its_hash():
    heldout = [number for number in range(40) if corpus.is_heldout(f"module m{number}")]
    assert heldout == [6, 10, 13, 24, 38]


@pytest.mark.slow
def test_every_document_is_on_one_side_by_its_name_and_passages_are_its_pieces():
    splits = {domain: corpus.split(domain) for domain in corpus.DOMAINS}
    assert list(splits) == ["prose", "code", "unicode"]
    trained = set[int]().union(
        *(corpus.shingles(d.text) for split in splits.values() for d in split.train)
    )
    for domain, (train, heldout) in splits.items():
        assert (
            sum(len(d.text) for d in train) > 300_000 and sum(len(d.text) for d in heldout) > 20_000
        ), domain
        assert not any(corpus.is_heldout(d.name) for d in train)
        texts = {d.name: d.text for d in heldout}
        assert all(map(corpus.is_heldout, texts))
        names = [*(d.name for d in train), *(d.name for d in heldout)]
        assert len(set(names)) == len(names)
        assert 0.04 < len(heldout) / len(names) < 0.2, domain
        for name, text in texts.items():
            own = corpus.shingles(text)
            assert len(own & trained) <= corpus.DUPLICATE_SHARE * len(own), name
        rows = corpus.passages(domain, heldout)
        assert len({row["id"] for row in rows}) == len(rows)
        assert all(row["text"].strip() and row["domain"] == domain for row in rows)
        for row in rows:
            assert row["text"] in texts[row["id"].rpartition(" #")[0]]
        assert rows == corpus.passages(domain, heldout[::-1])
        kept = sum(len("".join(row["text"].split())) for row in rows)
        assert kept == sum(len("".join(text.split())) for text in texts.values())
