"""The benchmark of objectives and data modes, on a tiny pair: what it trains and keeps, what it calls apart."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import objectives, objectives_data
from benchmarks.objectives import Options, run
from benchmarks.objectives_data import Pair, PairOptions
from benchmarks.objectives_figure import write_pictures
from benchmarks.objectives_tables import above, tables
from draftsmith_core.io import atomic_dir, write_rows
from eval.bootstrap import PromptSums, resamples
from train import training_run as train_run
from train.config import TrainConfig

WORDS = "the quick brown fox jumps over a lazy dog that does not mind numbers such as 12 or 345".split()


def texts(count: int, start: int) -> list[dict[str, str]]:
    return [{"text": " ".join(WORDS[(i * k + start) % len(WORDS)] for k in range(1, 16))} for i in range(count)]


def tiny_pair(target: str, draft: str) -> Callable[[PairOptions], Pair]:
    """A pair `nano` that is made of the tests' tiny models."""

    def tiny(options: PairOptions) -> Pair:
        out = Path(options.out) / "prompts"
        if not out.is_dir():
            with atomic_dir(out) as made:
                objectives_data.write_train_rows(made, options, texts(20, 0))
                write_rows(made / "general.train.jsonl", texts(6, 5))
                for start, domain in enumerate(("prose", "code", "lists", "other")):
                    write_rows(made / f"{domain}.jsonl", texts(8, start + 1))
        return Pair(target, draft, 6, ("prose", "code", "lists"), ("code",), True)

    return tiny


def noted(monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    """The configurations that a benchmark really trains, in order."""
    asked: list[TrainConfig] = []
    real = train_run.train

    def train(config: TrainConfig, command: str) -> dict[str, Any]:
        asked.append(config)
        return real(config, command)

    monkeypatch.setattr(objectives_data, "train", train)
    return asked


@pytest.fixture
def options(tmp_path, target_dir, draft_dir, monkeypatch):
    """The tiny pair, and the least of everything."""
    monkeypatch.setitem(objectives_data.PAIRS, "nano", tiny_pair(target_dir, draft_dir))
    small = {"seeds": 2, "steps": 3, "batch_size": 2, "sequences": 12, "response_tokens": 8, "prompts": 3}
    return Options(out=str(tmp_path / "out"), rates=[1e-2, 3e-3], new_tokens=6, bootstrap=50, **small)  # type: ignore[arg-type]


trained = pytest.fixture(noted)


@pytest.mark.slow
def test_cells_are_trained_alike_and_once(options, trained):
    options = replace(options, only=["ce", "adaspec", "text", "stored"])
    first = run(options)
    # Three objectives at two rates with one seed, and at the better one with another; two modes with both seeds.
    assert len(trained) == 3 * 3 + 2 * 2
    assert {(each.steps, each.batch_size, each.max_length) for each in trained} == {(3, 2, 14)}
    for name, cell in first["cells"].items():
        tried = {rate: each["heldout_alpha"] for rate, each in (cell["by_rate"] or {}).items()}
        assert (set(tried) == {"0.01", "0.003"}) == (name in objectives.OBJECTIVES)
        assert not tried or tried[f"{cell['rate']:g}"] == max(tried.values())
    trained.clear()
    assert json.loads(json.dumps(run(options) | {"seconds": 0})) == json.loads(json.dumps(first | {"seconds": 0}))
    assert trained == []
    text = tables(first)
    value = first["figures"]["1"]["ce"]["prose"]["alpha"]["value"]
    assert f"| ce | {value:.3f} [" in text and "nan" not in text
    write_pictures(first, Path(options.out))
    assert all((Path(options.out) / f"objectives{suffix}.png").stat().st_size > 10_000 for suffix in ("", "-dark"))


def sums_of(*values: float) -> PromptSums:
    return PromptSums.of(list(values), [1.0] * len(values))


def test_apart_means_an_interval_without_zero_and_seeds_that_agree():
    picks = resamples(4, 200, 0)
    low, high = sums_of(0.1, 0.2, 0.3, 0.4), sums_of(0.2, 0.3, 0.4, 0.5)
    clear = above([high, high], [low, low], picks)
    assert clear["told_apart"] and clear["value"] == pytest.approx(0.1) and clear["seeds"] == pytest.approx([0.1, 0.1])
    # The mean is as much higher for every prompt, but one seed is not.
    far = sums_of(0.5, 0.6, 0.7, 0.8)
    assert not above([low, far], [high, low], picks)["told_apart"]
    # Prompts disagree.
    mixed = sums_of(0.4, 0.0, 0.5, 0.2)
    assert not above([mixed, mixed], [low, low], picks)["told_apart"]
    # One draft against several seeds of another, both ways round.
    assert len(above([low], [high, high], picks)["seeds"]) == len(above([high, high], [low], picks)["seeds"]) == 2
