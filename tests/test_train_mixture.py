"""Several domains in a run: how often each is drawn, how much each counts; laws 6 and 7."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from distill.config import DistillConfig
from distill.generate import distill
from draftsmith_core.models import load_model
from tests import train_laws
from tests.train_laws import SGD, Words, weights, words_of
from train.data import collate, load_examples, units
from train.mixture import domain_scales, drawn, raised, shares

Door = Callable[..., tuple[int, str, str]]
BOTH = ["--group_dro", "0.5", "--mixing_temperature", "3"]


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
    assert collate(examples, [0, 25, 3]).domains_B is not None


def test_weights_rise_with_the_loss_and_scale_the_mean() -> None:
    losses, tokens = [6.0, 30.0, 0.0], [10.0, 15.0, 0.0]
    scales = domain_scales([0.2, 0.3, 0.5], tokens)
    # The loss per token is the mean of the domains' own, weighted among those that are there.
    total = sum(scale * loss for scale, loss in zip(scales, losses, strict=True)) / sum(tokens)
    assert total == pytest.approx((0.2 * 0.6 + 0.3 * 2.0) / 0.5)
    after = raised([0.5, 0.5], [6.0, 30.0], [10.0, 15.0], 0.1)
    grown = [0.5 * math.exp(0.1 * 0.6), 0.5 * math.exp(0.1 * 2.0)]
    assert after == pytest.approx([each / sum(grown) for each in grown])
    # One without a token keeps its share of the whole when the others agree.
    assert raised([0.25, 0.25, 0.5], [2.0, 4.0, 0.0], [2.0, 4.0, 0.0], 5.0) == pytest.approx([0.25, 0.25, 0.5])
    assert raised([0.5, 0.5], [0.0, 5000.0], [1.0, 1.0], 1.0) == pytest.approx([0.0, 1.0])
    # Whatever the step, a domain that lost nearly all of its weight can come back.
    assert raised(raised([0.5, 0.5], [0.0, 5.0], [1.0, 1.0], 1e9), [1.0, 0.0], [1.0, 0.0], 1e9)[0] > 0


def test_a_step_is_what_is_written_out(
    words: Words, domains: list[str], draft_dir: str, tmp_path: Path, door: Door
) -> None:
    """Two steps of SGD on weighted means of the domains' cross-entropies, by hand."""
    code, _, err = door(*words(tmp_path / "out", 2), *SGD, "--group_dro", 0.5)
    assert code == 0, err
    examples, draft, q = load_examples(domains, None, 40), load_model(draft_dir, device="cpu"), [0.5, 0.5]
    figures = [json.loads(line) for line in (tmp_path / "out" / "run" / "metrics.jsonl").read_text().splitlines()]
    for step in range(2):
        batch = collate(examples, units(examples, step * 8, step * 8 + 8, 0))
        assert batch.domains_B is not None
        losses = torch.nn.functional.cross_entropy(
            draft(batch.ids_BT).logits.flatten(0, 1), batch.labels_BT.flatten(), ignore_index=-100, reduction="none"
        ).view(batch.labels_BT.shape)
        sums, tokens = [], []
        for domain in range(2):
            mine = (batch.labels_BT != -100) & (batch.domains_B == domain)[:, None]
            sums.append(losses[mine].sum())
            tokens.append(int(mine.sum()))
        assert all(tokens)
        draft.zero_grad()
        loss = sum(weight * total / count for weight, total, count in zip(q, sums, tokens, strict=True))
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        (line,) = (each for each in figures if each["step"] == step + 1 and "loss" in each)
        assert line["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert [line[f"domain_weight_{k}"] for k in range(2)] == pytest.approx(q, rel=1e-6)
        with torch.no_grad():
            for parameter in draft.parameters():
                assert parameter.grad is not None
                parameter.sub_(0.5 * parameter.grad)
        q = raised(q, [float(total.detach()) for total in sums], [float(count) for count in tokens], 0.5)
    trained = weights(tmp_path / "out", 2)
    for name, parameter in draft.named_parameters():
        torch.testing.assert_close(trained[name], parameter.detach(), atol=1e-5, rtol=1e-4)


def test_a_step_is_its_rows_however_they_are_divided(words: Words, tmp_path: Path, door: Door) -> None:
    train_laws.a_step_is_its_rows_however_they_are_divided(words, BOTH, tmp_path, door)


def test_a_killed_run_ends_as_one_that_was_not(words: Words, tmp_path: Path, spawn: Callable[..., Any]) -> None:
    """What the domains count goes on too."""
    train_laws.a_killed_run_ends_as_one_that_was_not(words, BOTH, tmp_path, spawn)
    assert b"domain_weight_1" in (tmp_path / "killed" / "run" / "metrics.jsonl").read_bytes()


@pytest.mark.slow
def test_two_processes_are_one(words: Words, tmp_path: Path, door: Door, launch: Callable[..., Any]) -> None:
    train_laws.two_processes_are_one("cpu2", words, BOTH, tmp_path, door, launch)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--data a --group_dro 1", "group_dro: needs several domains"),
        ("--data a --mixing_temperature 2", "mixing_temperature: needs several domains"),
        ("--data a b --mixing_temperature 0", "mixing_temperature: 0.0 must be above 0"),
        ("--data a b --group_dro -1", "group_dro: -1.0 must be at least 0"),
        ("--data a b --group_dro 1 --packing true", "group_dro: rows of several documents"),
        ("--data a b --group_dro 1 --objective tvd@e2e --target t", "group_dro: is for language models, without"),
        ("--data a b --group_dro 1 --kind medusa --target t", "group_dro: is for language models"),
    ],
)
def test_what_cannot_be_is_refused(more: str, message: str, tmp_path: Path, door: Door) -> None:
    draft = "" if "medusa" in more else "--draft d"
    code, _, err = door("train", "--out", tmp_path / "out", *draft.split(), *more.split())
    assert code == 2 and message in err and len(err.strip().splitlines()) == 1
