"""Aligning to several domains, on a tiny pair: what differs between the ways, and what the table says."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import domains, frontier
from draftsmith.demo import corpus
from tests.test_benchmarks_frontier import options  # noqa: F401
from tests.test_benchmarks_objectives import texts
from train import training_run as train_run
from train.config import TrainConfig


@pytest.mark.slow
def test_ways_differ_in_the_mixture_alone_and_nothing_is_trained_twice(
    options: frontier.Options,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[TrainConfig] = []

    def train(config: TrainConfig, command: str) -> dict[str, Any]:
        asked.append(config)
        return train_run.train(config, command)

    monkeypatch.setattr(domains, "train", train)
    monkeypatch.setattr(domains, "OTHERS", {"code": 0.5, "lists": 0.25})
    monkeypatch.setattr(corpus, "split", lambda domain: corpus.Split((), (), ()))
    monkeypatch.setattr(corpus, "passages", lambda domain, *_: texts(8, 10 + len(domain)))
    names = [key for key in asdict(options) if key in domains.Options.__dataclass_fields__]
    small = domains.Options(**{key: getattr(options, key) for key in names})
    found = domains.run(small)
    assert len(asked) == len(domains.WAYS) * small.seeds
    first = asked[: len(domains.WAYS)]
    assert [[Path(each).name for each in config.data] for config in first] == [["id"]] + [["id", "code", "lists"]] * 3
    assert {(config.optim.lr, config.steps, config.seed) for config in first} == {(domains.RATE, 4, 0)}
    assert [(c.mixing_temperature, c.replay_fraction) for c in first] == [
        (1.0, 0.0),
        (1.0, 0.0),
        (3.0, 0.0),
        (3.0, 0.5),
    ]
    assert domains.run(small) == found and len(asked) == len(domains.WAYS) * small.seeds
    for row in found["rows"].values():
        for name in ("prose", "code", "lists", "other"):
            row[name] |= {"value": 0.02, "low": 0.01, "high": 0.03}
    found["rows"]["by size"]["lists"]["low"] = -0.01
    found["rows"]["by size"]["other"]["low"] = -0.01
    found["rows"]["temperature 3"]["other"]["low"] = -0.01
    lines = domains.table(found).splitlines()
    assert lines[0] == "| way | prose | code | lists | other | a gain in every domain |"
    assert [line.rsplit("| ", 1)[1] for line in lines[3:]] == ["yes |", "no |", "yes |", "yes |"]
