"""The benchmark of what keeps a base draft's knowledge, on a tiny pair: what it runs, takes, and calls a frontier."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import domains, frontier, objectives_data
from benchmarks.frontier import Options, run
from benchmarks.frontier_tables import Sets, document_of, tables, write_pictures
from draftsmith.demo import corpus
from eval.bootstrap import PromptSums
from tests.test_benchmarks_objectives import noted, texts, tiny_pair

SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {"lr 0.01": {"lr": 0.01}, "lr 0.03, half": {"lr": 0.03, "share": 0.5}},
    "replay": {"share 0.5": {"replay_fraction": 0.5, "replay": ["self"]}},
    "even replay": {"share 0.5": {"replay_fraction": 0.5, "replay": ["token"]}},
    "mixed replay": {"share 0.5": {"replay_fraction": 0.5, "replay": ["self", "token"]}},
    "anchor kl": {"weight 1": {"anchor_kl": 1.0, "times": 2.0}},
}


@pytest.fixture
def options(tmp_path, target_dir, draft_dir, monkeypatch):
    """The tiny pair, few settings, and the least of everything."""
    monkeypatch.setitem(objectives_data.PAIRS, "nano", tiny_pair(target_dir, draft_dir))
    monkeypatch.setitem(frontier.SETS, "nano", Sets("prose", ("other",), ("code",), ("lists",)))
    monkeypatch.setattr(frontier, "METHODS", SETTINGS)
    small = {"seeds": 2, "steps": 4, "batch_size": 2, "sequences": 12, "response_tokens": 8, "prompts": 3}
    return Options(out=str(tmp_path / "out"), new_tokens=6, bootstrap=50, **small)  # type: ignore[arg-type]


trained = pytest.fixture(noted)


@pytest.mark.slow  # every method is trained
def test_nothing_is_trained_twice_and_every_method_starts_alike(options, trained):
    found = run(options)
    assert len(trained) == len({each.out for each in trained})
    trained.clear()
    assert json.dumps(run(options)) == json.dumps(found) and not trained
    # The same base and data, the plain rate, the same steps but where a method says otherwise.
    rate = SETTINGS["plain"][found["taken"]["plain"]]["lr"]
    merged = {"interpolation", *(f"{kind}replay + interpolation" for kind in ("", "even ", "mixed "))}
    assert found["rows"].keys() == SETTINGS.keys() | merged
    assert {row["seeds"] for row in found["rows"].values()} == {2}
    config = frontier.config_of(frontier.prepare(options), "anchor kl", "weight 1", rate, 1)
    assert (config.optim.lr, config.anchor_kl, config.steps, config.seed) == (2 * rate, 1.0, 4, 1)
    text = tables(found)
    assert text.count("\n| ") == 10
    write_pictures(found, Path(options.out))
    assert all((Path(options.out) / f"frontier{suffix}.png").stat().st_size > 10_000 for suffix in ("", "-dark"))


def sums(*values: float) -> PromptSums:
    return PromptSums.of(list(values), [1.0] * len(values))


def draft(own: float, out: float, tuning: float) -> dict[str, PromptSums]:
    """alpha of a draft on four prompts of each set, which differ by prompt as the base's do."""
    values = {"own": own, "heldout": own, "near": out, "far": out, "general": tuning, "even": tuning}
    return {name: sums(*(value + 0.01 * i for i in range(4))) for name, value in values.items()}


def test_what_is_taken_does_not_depend_on_the_sets_that_are_reported():
    sets = Sets("own", (), ("near",), ("far",))
    found = {
        ("plain", "a"): [draft(0.6, 0.2, 0.2)],
        # The first is the better by what is reported, the second by what may be looked at.
        ("replay", "b"): [draft(0.58, 0.9, 0.1)],
        ("replay", "c"): [draft(0.585, 0.3, 0.3), draft(0.605, 0.3, 0.3)],
    }
    document = document_of(sets, draft(0.4, 0.3, 0.3), found, "a", 50)
    assert document["taken"] == {"plain": "a", "replay": "c"}
    plain, kept = document["rows"]["plain"], document["rows"]["replay"]
    assert plain["id"]["change"]["value"] == pytest.approx(0.2) and plain["share"]["value"] == pytest.approx(1)
    # The mean of two seeds; a share is of the seeds that both have.
    assert kept["id"]["change"]["value"] == pytest.approx(0.195) and kept["seeds"] == 2
    assert kept["share"]["value"] == pytest.approx(0.925) and kept["ood"]["change"]["value"] == pytest.approx(0)
    assert kept["met"] and not plain["met"]


def test_the_bar_is_non_inferiority_on_the_worst_set_and_not_an_interval_that_holds_zero():
    sets, even = Sets("own", (), ("near",), ("far",)), draft(0.6, 0.3, 0.3)
    # One set gains what another loses: the pool hides it, the worst set does not.
    near, far = (sums(*(alpha + 0.01 * i for i in range(4))) for alpha in (0.4, 0.22))
    hidden = even | {"near": near, "far": far}
    # So uncertain that the interval holds zero: that is no evidence of no loss.
    noisy = even | {"far": sums(0.1, 0.5, 0.2, 0.4)}
    found = {("plain", "a"): [even], ("replay", "b"): [hidden], ("even replay", "c"): [noisy]}
    rows = document_of(sets, draft(0.4, 0.3, 0.3), found, "a", 200)["rows"]
    assert [rows[method]["met"] for method in ("plain", "replay", "even replay")] == [True, False, False]
    assert rows["replay"]["worst"]["set"] == "far" and rows["replay"]["ood"]["change"]["value"] > 0
    low, high = (rows["even replay"]["worst"]["change"][end] for end in ("low", "high"))
    assert low < -0.01 and high > 0


@pytest.mark.slow
def test_ways_to_mix_domains_differ_in_the_mixture_alone(options, trained, monkeypatch):
    monkeypatch.setattr(domains, "OTHERS", {"code": 0.5, "lists": 0.25})
    monkeypatch.setattr(corpus, "split", lambda domain: corpus.Split((), ()))
    monkeypatch.setattr(corpus, "passages", lambda domain, *_: texts(8, 10 + len(domain)))
    names = [key for key in asdict(options) if key in domains.Options.__dataclass_fields__]
    small = domains.Options(**{key: getattr(options, key) for key in names})
    found = domains.run(small)
    first = trained[: len(domains.WAYS)]
    assert [[Path(each).name for each in config.data] for config in first] == [["id"]] + [["id", "code", "lists"]] * 3
    assert {(config.optim.lr, config.steps, config.seed) for config in first} == {(domains.RATE, 4, 0)}
    mixtures = [(config.mixing_temperature, config.replay_fraction) for config in first]
    assert mixtures == [(1.0, 0.0), (1.0, 0.0), (3.0, 0.0), (3.0, 0.5)]
    assert domains.run(small) == found and len(trained) == len(domains.WAYS) * small.seeds
    assert len(domains.gains(found).splitlines()) == 3 + len(domains.WAYS)
