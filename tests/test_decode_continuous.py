"""Continuous batches: the next prompt takes the place of one that has ended, at once, and in bounded memory."""

from collections import deque
from collections.abc import Callable

import pytest
import torch
from transformers import LlamaForCausalLM

from decode import DraftModelProposer, SpeculativeDecoder
from decode.batch_run import BatchRun
from draftsmith_core.sampling import Sampling, generator
from tests.tiny_models import random_llama

Prompts = list[tuple[int, list[int], torch.Generator]]


def tiny_llama(seed: int) -> LlamaForCausalLM:
    return random_llama(seed, 17)


def queue(prompts: list[list[int]]) -> tuple[deque[int], Callable[[int], Prompts]]:
    waiting = deque(range(len(prompts)))

    def source(free: int) -> Prompts:
        return [
            (row, prompts[row], generator(row)) for row in [waiting.popleft() for _ in range(min(free, len(waiting)))]
        ]

    return waiting, source


@pytest.mark.parametrize("rows", [8, 64])
@pytest.mark.parametrize("drafting", [False, True])
def test_places_are_filled_until_nothing_waits(rows: int, drafting: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of 1 to 40 tokens: at least 95 of 100 rows are busy for as long as a prompt waits."""
    decoder = SpeculativeDecoder(tiny_llama(1), DraftModelProposer(tiny_llama(2)) if drafting else None)
    prompts = [[1 + row % 7] * (1 + row * 5 % 11) for row in range(200 + 2 * rows)]
    waiting, source = queue(prompts)
    busy: list[int] = []
    step = BatchRun.step

    def counted(run: BatchRun) -> object:
        if waiting:
            busy.append(len(run.batch))
        return step(run)

    monkeypatch.setattr(BatchRun, "step", counted)
    found = dict(decoder.continuous(source, rows, Sampling(), 40, range(3)))
    assert sorted(found) == list(range(len(prompts)))
    lengths = [len(each.output_ids) for each in found.values()]
    assert min(lengths) < 4 and max(lengths) > 20
    assert len(busy) > 15 and sum(busy) >= 0.95 * rows * len(busy)


def test_memory_is_that_of_the_rows_of_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = SpeculativeDecoder(tiny_llama(1))
    prompts = [[1] * (1 + row % 9) for row in range(100)]
    sizes: set[tuple[int, int]] = set()
    step = BatchRun.step

    def measured(run: BatchRun) -> object:
        ended = step(run)
        sizes.update((s.all_keys.shape[1], s.all_keys.shape[3]) for s in run.runner.cache._stores)
        return ended

    monkeypatch.setattr(BatchRun, "step", measured)
    _, source = queue(prompts)
    assert len(list(decoder.continuous(source, 5, Sampling(), 12, range(3)))) == 100
    assert max(rows for rows, _ in sizes) <= 5
    assert max(slots for _, slots in sizes) <= 9 + 12 + 1


def test_an_answer_can_lead_to_another_prompt() -> None:
    decoder = SpeculativeDecoder(tiny_llama(1))
    waiting: list[tuple[tuple[int, int], list[int]]] = [((row, 0), [1 + row]) for row in range(4)]
    answers: dict[tuple[int, int], list[int]] = {}

    def source(free: int) -> list[tuple[tuple[int, int], list[int], torch.Generator]]:
        taken, waiting[:] = waiting[:free], waiting[free:]
        return [(key, prompt, generator(hash(key) % 97)) for key, prompt in taken]

    for key, made in decoder.continuous(source, 2, Sampling(), 9, range(3)):
        answers[key] = made.output_ids
        if key[1] < 3:
            waiting.append(((key[0], key[1] + 1), [1 + key[0], *made.output_ids]))
    assert sorted(answers) == [(row, turn) for row in range(4) for turn in range(4)]
    for (row, turn), ids in answers.items():
        prompt = [1 + row, *answers[row, turn - 1]] if turn else [1 + row]
        alone = decoder.generate([prompt], Sampling(), 9, [generator(hash((row, turn)) % 97)], range(3))
        assert alone.generations[0].output_ids == ids


def test_what_cannot_join_is_refused() -> None:
    decoder = SpeculativeDecoder(tiny_llama(1))
    _, source = queue([[1], [2], []])
    with pytest.raises(ValueError, match="expected at least one token id"):
        list(decoder.continuous(source, 1, Sampling(), 3))
    compiled = SpeculativeDecoder(tiny_llama(1), compile="eager")
    with pytest.raises(ValueError, match="leave compile out"):
        list(compiled.continuous(source, 1))
