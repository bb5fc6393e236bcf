"""Several domains in a run: how often each is drawn; laws 6 and 7."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from distill.config import DistillConfig
from distill.generate import distill
from tests import train_laws
from tests.train_laws import Words, words_of
from train.data import load_examples, units
from train.mixture import drawn, shares

Door = Callable[..., tuple[int, str, str]]
MIXED = ["--mixing_temperature", "3"]


@pytest.fixture(scope="module")
def domains(target_dir: str, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Distilled sets of 24 and of 6 answers."""
    there = tmp_path_factory.mktemp("domains")
    options: dict[str, Any] = {"target": target_dir, "num_samples": 2, "max_new_tokens": 12, "device": "cpu"}
    for name, count in (("large", 12), ("small", 3)):
        texts = [f"{name} numbers such as {i} are split into pieces"[: 9 + i] for i in range(count)]
        (there / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        distill(DistillConfig(prompts=str(there / f"{name}.jsonl"), out=str(there / name), **options), "d")
    return [str(there / "large"), str(there / "small")]


@pytest.fixture
def words(domains: list[str], draft_dir: str) -> Words:
    return words_of(domains, draft_dir, "--objective", "ce")


def test_shares_go_from_sizes_to_alike() -> None:
    assert shares([30, 10], 1.0) == pytest.approx([0.75, 0.25])
    assert shares([30, 10], 2.0) == pytest.approx([math.sqrt(3) / (1 + math.sqrt(3)), 1 / (1 + math.sqrt(3))])
    assert shares([30, 10, 5], 1e9) == pytest.approx([1 / 3] * 3)
    assert shares([10**9, 1], 1e-3) == [1.0, 0.0]


def test_every_place_is_one_domains_wherever_the_stream_is_cut() -> None:
    wanted = [0.5, 0.3, 0.2]
    whole = drawn(wanted, 0, 1000)
    assert sorted(place for places, _, _ in whole for place in places.tolist()) == list(range(1000))
    assert [last - first for _, first, last in whole] == pytest.approx([500, 300, 200], abs=1)
    of_place = {place: k for k, (places, _, _) in enumerate(whole) for place in places.tolist()}
    for start, stop in ((0, 1), (3, 3), (17, 40), (999, 1000)):
        for k, (places, first, last) in enumerate(drawn(wanted, start, stop)):
            assert places.tolist() == [place - start for place in range(start, stop) if of_place[place] == k]
            assert first == sum(of_place[place] == k for place in range(start)) and last - first == len(places)
    # Evenly spread: no ten places in a row are without the commonest domain.
    assert all(any(of_place[place + i] == 0 for i in range(10)) for place in range(990))


def test_a_small_domain_is_drawn_more_often_and_each_of_its_rows_as_often(domains: list[str]) -> None:
    examples = load_examples(domains, None, 40)
    assert examples.domains is not None and examples.domains.tolist() == [0] * 24 + [1] * 6
    stream = units(examples, 0, 480, seed=3, temperature=1e9)
    counts = torch.bincount(torch.from_numpy(stream), minlength=30).tolist()
    assert counts[:24] == [10] * 24 and counts[24:] == [40] * 6
    for start, stop in ((0, 7), (7, 8), (100, 333)):
        assert units(examples, start, stop, 3, temperature=1e9).tolist() == stream[start:stop].tolist()


def test_a_step_is_its_rows_however_they_are_divided(words: Words, tmp_path: Path, door: Door) -> None:
    train_laws.a_step_is_its_rows_however_they_are_divided(words, MIXED, tmp_path, door)


def test_a_killed_run_ends_as_one_that_was_not(words: Words, tmp_path: Path, spawn: Callable[..., Any]) -> None:
    train_laws.a_killed_run_ends_as_one_that_was_not(words, MIXED, tmp_path, spawn)


@pytest.mark.slow
def test_two_processes_are_one(words: Words, tmp_path: Path, door: Door, launch: Callable[..., Any]) -> None:
    train_laws.two_processes_are_one("cpu2", words, MIXED, tmp_path, door, launch)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--data a --mixing_temperature 2", "mixing_temperature: needs several domains"),
        ("--data a b --mixing_temperature 0", "mixing_temperature: 0.0 must be above 0"),
        ("--data a b --mixing_temperature 2 --packing true", "mixing_temperature: rows of several documents"),
    ],
)
def test_what_cannot_be_is_refused(more: str, message: str, tmp_path: Path, door: Door) -> None:
    draft = "" if "medusa" in more else "--draft d"
    code, _, err = door("train", "--out", tmp_path / "out", *draft.split(), *more.split())
    assert code == 2 and message in err and len(err.strip().splitlines()) == 1
