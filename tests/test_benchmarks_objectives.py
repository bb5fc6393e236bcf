"""Benchmarks of objectives, of what keeps a draft's knowledge, and of mixtures: run tiny, and what
they conclude.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.studies import domains, frontier, frontier_tables, objectives, objectives_data
from benchmarks.studies.frontier_tables import Sets, document_of
from benchmarks.studies.objectives_data import Pair, PairOptions
from benchmarks.studies.objectives_figure import write_pictures
from benchmarks.studies.objectives_tables import above, tables
from draftsmith.core.io import atomic_dir, write_rows
from draftsmith.demo import corpus
from draftsmith.eval.bootstrap import PromptSums, resamples
from draftsmith.train import training_run as train_run
from draftsmith.train.config import TrainConfig

WORDS = (
    "the quick brown fox jumps over a lazy dog that does not mind numbers such as 12 or 345".split()
)


def texts(count: int, start: int) -> list[dict[str, str]]:
    return [
        {"text": " ".join(WORDS[(i * k + start) % len(WORDS)] for k in range(1, 16))}
        for i in range(count)
    ]


SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {"lr 0.01": {"lr": 0.01}, "lr 0.03, half": {"lr": 0.03, "share": 0.5}},
    "replay": {"share 0.5": {"replay_fraction": 0.5, "replay": ["self"]}},
    "even replay": {"share 0.5": {"replay_fraction": 0.5, "replay": ["token"]}},
    "mixed replay": {"share 0.5": {"replay_fraction": 0.5, "replay": ["self", "token"]}},
    "longer even replay": {
        "twice": {"replay_fraction": 0.5, "replay": ["token"], "share": 2.0, "times": 2.0}
    },
}


@pytest.fixture
def small(tmp_path, target_dir, draft_dir, monkeypatch):
    """A pair `nano` that is made of the tests' tiny models, and the least of everything."""

    def tiny(options: PairOptions) -> Pair:
        out = Path(options.out) / "prompts"
        if not out.is_dir():
            with atomic_dir(out) as made:
                objectives_data.write_train_rows(made, options, texts(20, 0))
                write_rows(made / "general.train.jsonl", texts(6, 5))
                for start, domain in enumerate(("prose", "code", "lists", "other")):
                    write_rows(made / f"{domain}.jsonl", texts(8, start + 1))
        return Pair(target_dir, draft_dir, 6, ("prose", "code", "lists"), ("code",), True)

    monkeypatch.setitem(objectives_data.PAIRS, "nano", tiny)
    monkeypatch.setitem(frontier.SETS, "nano", Sets("prose", ("other",), ("code",), ("lists",)))
    sizes: dict[str, Any] = {
        "seeds": 2,
        "steps": 3,
        "batch_size": 2,
        "sequences": 12,
        "response_tokens": 8,
    }
    return sizes | {"prompts": 3, "new_tokens": 6, "bootstrap": 50, "out": str(tmp_path / "out")}


@pytest.fixture
def trained(monkeypatch):
    """The configurations that a benchmark really trains, in order."""
    asked: list[TrainConfig] = []
    real = train_run.train

    def train(config: TrainConfig, command: str) -> dict[str, Any]:
        asked.append(config)
        return real(config, command)

    monkeypatch.setattr(objectives_data, "train", train)
    return asked


@pytest.mark.slow
def test_objectives_are_trained_alike_and_once(small, trained):
    options = objectives.Options(**small, rates=[1e-2, 3e-3], only=["ce", "jsd", "text", "stored"])
    first = objectives.run(options)
    # Three objectives at two rates with one seed, and at the better one with another; two modes
    # with both seeds.
    assert len(trained) == 3 * 3 + 2 * 2
    assert {(each.steps, each.batch_size, each.max_length) for each in trained} == {(3, 2, 14)}
    for name, cell in first["cells"].items():
        tried = {rate: each["heldout_alpha"] for rate, each in (cell["by_rate"] or {}).items()}
        assert (set(tried) == {"0.01", "0.003"}) == (name in objectives.OBJECTIVES)
        assert not tried or tried[f"{cell['rate']:g}"] == max(tried.values())
    trained.clear()
    again = objectives.run(options)
    assert trained == [] and json.dumps(again["figures"]) == json.dumps(first["figures"])
    value = first["figures"]["1"]["ce"]["prose"]["alpha"]["value"]
    assert f"| ce | {value:.3f} [" in tables(first) and "nan" not in tables(first)
    write_pictures(first, Path(options.out))


@pytest.mark.slow
def test_every_method_of_the_frontier_starts_alike_and_is_trained_once(small, trained, monkeypatch):
    monkeypatch.setattr(frontier, "METHODS", SETTINGS)
    options = frontier.Options(**small)
    found = frontier.run(options)
    assert len(trained) == len({each.out for each in trained})
    trained.clear()
    assert json.dumps(frontier.run(options)) == json.dumps(found) and not trained
    # The same base and data, the plain rate, the same steps but where a method says otherwise.
    rate = SETTINGS["plain"][found["taken"]["plain"]]["lr"]
    kinds = ("", "even ", "longer even ", "mixed ")
    merged = {"interpolation", *(f"{kind}replay + interpolation" for kind in kinds)}
    assert found["rows"].keys() == SETTINGS.keys() | merged
    config = frontier.config_of(frontier.prepare(options), "longer even replay", "twice", rate, 1)
    assert (config.optim.lr, config.replay_fraction, config.steps, config.seed) == (
        2 * rate,
        0.5,
        6,
        1,
    )
    assert frontier_tables.tables(found).count("\n| ") == 11
    frontier_tables.write_pictures(found, Path(options.out))


@pytest.mark.slow
def test_ways_to_mix_domains_differ_in_the_mixture_alone(small, trained, monkeypatch):
    monkeypatch.setattr(domains, "OTHERS", {"code": 0.5, "lists": 0.25})
    monkeypatch.setattr(corpus, "split", lambda domain: corpus.Split((), ()))
    monkeypatch.setattr(corpus, "passages", lambda domain, *_: texts(8, 10 + len(domain)))
    options = domains.Options(**small)
    found = domains.run(options)
    first = trained[: len(domains.WAYS)]
    assert [[Path(each).name for each in config.data] for config in first] == [["id"]] + [
        ["id", "code", "lists"]
    ] * 3
    assert {(config.optim.lr, config.steps, config.seed) for config in first} == {
        (domains.RATE, 3, 0)
    }
    mixtures = [(config.mixing_temperature, config.replay_fraction) for config in first]
    assert mixtures == [(1.0, 0.0), (1.0, 0.0), (3.0, 0.0), (3.0, 0.5)]
    assert domains.run(options) == found and len(trained) == len(domains.WAYS) * options.seeds
    assert len(domains.gains(found).splitlines()) == 3 + len(domains.WAYS)


def sums_of(*values: float) -> PromptSums:
    return PromptSums.of(list(values), [1.0] * len(values))


def test_apart_means_an_interval_without_zero_and_seeds_that_agree():
    picks = resamples(4, 200, 0)
    low, high = sums_of(0.1, 0.2, 0.3, 0.4), sums_of(0.2, 0.3, 0.4, 0.5)
    clear = above([high, high], [low, low], picks)
    assert (
        clear["told_apart"]
        and clear["value"] == pytest.approx(0.1)
        and clear["seeds"] == pytest.approx([0.1, 0.1])
    )
    # The mean is as much higher for every prompt, but one seed is not.
    far = sums_of(0.5, 0.6, 0.7, 0.8)
    assert not above([low, far], [high, low], picks)["told_apart"]
    # Prompts disagree.
    mixed = sums_of(0.4, 0.0, 0.5, 0.2)
    assert not above([mixed, mixed], [low, low], picks)["told_apart"]
    # One draft against several seeds of another, both ways round.
    assert (
        len(above([low], [high, high], picks)["seeds"])
        == len(above([high, high], [low], picks)["seeds"])
        == 2
    )


def draft(own: float, out: float, tuning: float) -> dict[str, PromptSums]:
    """alpha of a draft on four prompts of each set, which differ by prompt as the base's do."""
    values = {
        "own": own,
        "heldout": own,
        "near": out,
        "far": out,
        "general": tuning,
        "even": tuning,
    }
    return {name: sums_of(*(value + 0.01 * i for i in range(4))) for name, value in values.items()}


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
    assert plain["id"]["change"]["value"] == pytest.approx(0.2) and plain["share"][
        "value"
    ] == pytest.approx(1)
    # The mean of two seeds; a share is of the seeds that both have.
    assert kept["id"]["change"]["value"] == pytest.approx(0.195) and kept["seeds"] == 2
    assert kept["share"]["value"] == pytest.approx(0.925) and kept["ood"]["change"][
        "value"
    ] == pytest.approx(0)
    assert kept["met"] and not plain["met"]


def test_the_bar_is_non_inferiority_on_the_worst_set_and_not_an_interval_that_holds_zero():
    sets, even = Sets("own", (), ("near",), ("far",)), draft(0.6, 0.3, 0.3)
    # One set gains what another loses: the pool hides it, the worst set does not.
    near, far = (sums_of(*(alpha + 0.01 * i for i in range(4))) for alpha in (0.4, 0.22))
    hidden = even | {"near": near, "far": far}
    # So uncertain that the interval holds zero: that is no evidence of no loss.
    noisy = even | {"far": sums_of(0.1, 0.5, 0.2, 0.4)}
    found = {("plain", "a"): [even], ("replay", "b"): [hidden], ("even replay", "c"): [noisy]}
    rows = document_of(sets, draft(0.4, 0.3, 0.3), found, "a", 200)["rows"]
    assert [rows[method]["met"] for method in ("plain", "replay", "even replay")] == [
        True,
        False,
        False,
    ]
    assert rows["replay"]["worst"]["set"] == "far" and rows["replay"]["ood"]["change"]["value"] > 0
    low, high = (rows["even replay"]["worst"]["change"][end] for end in ("low", "high"))
    assert low < -0.01 and high > 0
