"""The corpus that every Python carries: three domains, divided by document, nothing held out is trained on."""

import ast

import pytest

from draftsmith.demo import corpus
from draftsmith.demo.corpus import Split


@pytest.fixture(scope="module")
def splits() -> dict[str, Split]:
    return {domain: corpus.split(domain) for domain in corpus.DOMAINS}


@pytest.mark.slow
def test_three_domains_have_text_on_both_sides(splits: dict[str, Split]) -> None:
    assert list(splits) == ["prose", "code", "unicode"]
    for domain, split in splits.items():
        assert sum(len(d.text) for d in split.train) > 300_000, domain
        assert sum(len(d.text) for d in split.heldout) > 20_000, domain


@pytest.mark.slow
def test_every_document_is_on_one_side_by_its_name(splits: dict[str, Split]) -> None:
    for domain, split in splits.items():
        train, heldout = [d.name for d in split.train], [d.name for d in split.heldout]
        names = train + heldout + list(split.dropped)
        assert len(set(names)) == len(names)
        assert sorted(names) == sorted(d.name for d in corpus.DOMAINS[domain]())
        assert not any(map(corpus.is_heldout, train))
        assert all(map(corpus.is_heldout, [*heldout, *split.dropped]))
        share = (len(heldout) + len(split.dropped)) / len(names)
        assert 0.04 < share < 0.2, (domain, share)


def test_the_side_of_a_name_follows_from_its_hash() -> None:
    heldout = [number for number in range(40) if corpus.is_heldout(f"module m{number}")]
    assert heldout == [6, 10, 13, 24, 38]


@pytest.mark.slow
def test_a_modules_prose_and_code_share_a_side(splits: dict[str, Split]) -> None:
    def modules(domain: str, side: str) -> set[str]:
        return {d.name for d in getattr(splits[domain], side) if d.name.startswith("module ")}

    assert len(modules("prose", "train") & modules("code", "train")) > 100
    for one, other in (("prose", "code"), ("code", "prose")):
        assert modules(one, "train").isdisjoint(modules(other, "heldout"))


@pytest.mark.slow
def test_nothing_held_out_mostly_repeats_training_text(splits: dict[str, Split]) -> None:
    trained: set[int] = set()
    for split in splits.values():
        for document in split.train:
            trained |= corpus.shingles(document.text)
    checked = 0
    for split in splits.values():
        for document in split.heldout:
            own = corpus.shingles(document.text)
            assert len(own & trained) <= corpus.DUPLICATE_SHARE * len(own), document.name
            checked += 1
    assert checked > 50


def test_shingles_see_through_case_and_punctuation() -> None:
    text = "one two three four five six seven eight nine"
    assert len(corpus.shingles(text)) == 2
    assert corpus.shingles(text) == corpus.shingles("One, two; THREE four\nfive six (seven) eight nine.")
    assert not corpus.shingles(text) & corpus.shingles("zero " + " ".join(text.split()[::-1]))


@pytest.mark.slow
def test_code_is_code_without_docstrings(splits: dict[str, Split]) -> None:
    parsed = 0
    for document in splits["code"].heldout:
        try:
            tree = ast.parse(document.text)
        except SyntaxError:
            continue  # a body that was only a docstring is empty now
        parsed += 1
        assert ast.get_docstring(tree) is None
    assert parsed > 10


@pytest.mark.slow
def test_passages_are_pieces_of_their_documents(splits: dict[str, Split]) -> None:
    for domain, split in splits.items():
        rows = corpus.passages(domain, split.heldout)
        assert len({row["id"] for row in rows}) == len(rows)
        assert all(row["text"].strip() and row["domain"] == domain for row in rows)
        texts = {d.name: d.text for d in split.heldout}
        for row in rows:
            assert row["text"] in texts[row["id"].rpartition(" #")[0]]
        assert rows == corpus.passages(domain, split.heldout[::-1])
        kept = sum(len("".join(row["text"].split())) for row in rows)
        assert kept == sum(len("".join(text.split())) for text in texts.values())
