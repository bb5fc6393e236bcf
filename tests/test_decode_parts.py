"""The cache and the counts; batches in which prompts join and leave; steps of static shapes."""

import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from draftsmith.core.sampling import Sampling, generator
from draftsmith.decode import DecodeStats, DraftModelProposer, SpeculativeDecoder
from draftsmith.decode.batch_run import BatchRun, Options
from tests.tiny_models import random_llama

GREEDY = Sampling(temperature=0.0)


def keys_of(cache, layer):
    return cast(Tensor, cast(Any, cache.layers[layer]).keys)


def watched_run(decoder, prompts, eos):
    """Bytes moved by the target's cache in each step, and the storage addresses after each."""
    generators = [generator(row) for row in range(len(prompts))]
    with torch.inference_mode():
        options = Options(GREEDY, 40, eos)
        run = BatchRun(decoder, decoder._new_runner(), options, prompts, generators)
        cache, moved, places = run.runner.cache, [0], []
        while run.batch:
            run.step()
            moved.append(cache.bytes_moved)
            places.append({keys_of(cache, i).data_ptr() for i in range(len(cache.layers))})
    return [b - a for a, b in zip(moved, moved[1:], strict=False)], places, run


def cell_bytes(runner):
    keys = [keys_of(runner.cache, i) for i in range(len(runner.cache.layers))]
    return sum(2 * k.shape[1] * k.shape[3] * 4 for k in keys)


@pytest.mark.parametrize(("tree", "bound"), [("chain:3", 0), ("kary:2,2,2", 3), ("kary:3,1", 2)])
def test_no_step_copies_the_cache(tree, bound):
    target = random_llama(1, 17, layers=3)
    decoder = SpeculativeDecoder(
        target, DraftModelProposer(random_llama(1, 17, layers=3)), tree, "exact"
    )
    moved, places, run = watched_run(decoder, [[1, 2, 3, 4]], frozenset())
    assert len(moved) >= 10 and max(moved) <= bound * cell_bytes(run.runner)
    assert all(place == places[0] for place in places)
    # Ragged rows: at most the accepted path of each row.
    moved, places, run = watched_run(decoder, [[1, 2, 3, 4], [5, 6]], frozenset())
    depth = decoder.tree.depth
    assert 0 < max(moved) <= 2 * (depth + 1) * cell_bytes(run.runner)
    assert all(place == places[0] for place in places)


def some_stats(depth):
    count = st.integers(0, 1000)
    by_depth = st.lists(count, min_size=depth, max_size=depth).map(tuple)
    return st.builds(DecodeStats, *[count] * 5, by_depth, by_depth)


any_stats = st.integers(0, 4).flatmap(some_stats)


@given(any_stats, any_stats, any_stats)
@settings(max_examples=50, deadline=None)
def test_stats_are_a_commutative_monoid(a, b, c):
    assert (a + b) + c == a + (b + c)
    assert a + b == b + a
    assert a + DecodeStats() == a
    total = a + b
    assert total.emitted == a.emitted + b.emitted
    assert sum(total.reached_by_depth) == sum(a.reached_by_depth) + sum(b.reached_by_depth)
    assert len(total.accept_at) == max(len(a.accept_at), len(b.accept_at))


def test_a_ratio_over_zero_is_none():
    """Law 3."""
    empty = DecodeStats(accepted_by_depth=(0, 0), reached_by_depth=(4, 0))
    assert empty.tau is None and empty.alpha_mcsd is None
    assert empty.accept_at == (0.0, None)
    full = DecodeStats(target_calls=4, emitted=10, accepted=6, depth_sum=8)
    assert full.tau == 2.5 and full.alpha_mcsd == 0.75


def queue(prompts):
    waiting = deque(range(len(prompts)))

    def source(free):
        return [
            (row, prompts[row], generator(row))
            for row in [waiting.popleft() for _ in range(min(free, len(waiting)))]
        ]

    return waiting, source


@pytest.mark.parametrize("rows", [8, 64])
def test_places_are_filled_until_nothing_waits(rows, monkeypatch):
    """Answers of 1 to 40 tokens: at least 95 of 100 rows are busy for as long as a prompt waits."""
    decoder = SpeculativeDecoder(random_llama(1, 17))
    prompts = [[1 + row % 7] * (1 + row * 5 % 11) for row in range(200 + 2 * rows)]
    waiting, source = queue(prompts)
    busy: list[int] = []
    step = BatchRun.step

    def counted(run):
        if waiting:
            busy.append(len(run.batch))
        return step(run)

    monkeypatch.setattr(BatchRun, "step", counted)
    found = dict(decoder.continuous(source, rows, Sampling(), 40, range(3)))
    assert sorted(found) == list(range(len(prompts)))
    lengths = [len(each.output_ids) for each in found.values()]
    assert min(lengths) < 4 and max(lengths) > 20
    assert len(busy) > 15 and sum(busy) >= 0.95 * rows * len(busy)


def test_what_cannot_join_is_refused(golden):
    decoder = SpeculativeDecoder(random_llama(1, 17))
    _, source = queue([[1], [2], []])
    with golden.raises(ValueError):
        list(decoder.continuous(source, 1, Sampling(), 3))
    compiled = SpeculativeDecoder(random_llama(1, 17), compile="eager")
    drafting = SpeculativeDecoder(random_llama(1, 17), DraftModelProposer(random_llama(2, 17)))
    for refused in (compiled, drafting):
        with golden.raises(ValueError):
            list(refused.continuous(source, 1))


@pytest.fixture
def model():
    return random_llama(1, 40)


@pytest.mark.usefixtures("replayed")
def test_replaced_weights_are_noticed(model):
    def greedy(decoder):
        return decoder.generate([[1, 2, 3]], GREEDY, 8).generations[0].output_ids

    decoder = SpeculativeDecoder(model, compile="inductor")
    before = greedy(decoder)
    model.lm_head.weight = torch.nn.Parameter(-model.lm_head.weight.detach())
    assert greedy(decoder) == greedy(SpeculativeDecoder(model, fast=False)) != before


def test_graphs_without_a_gpu_are_refused(model, golden):
    with golden.raises(ValueError):
        SpeculativeDecoder(model, compile=True)


@pytest.mark.usefixtures("replayed")
@pytest.mark.parametrize("drafting", [False, True])
def test_threads_take_turns(model, drafting):
    """Every call writes the same buffers, so that two at once would each read what the other has
    cached.
    """
    proposer = DraftModelProposer([model]) if drafting else None
    decoder = SpeculativeDecoder(
        model, proposer, "chain:2" if drafting else None, compile="inductor"
    )

    def greedy(prompt):
        return decoder.generate([prompt], GREEDY, 24, eos_ids=()).generations[0].output_ids

    prompts = [[1, 2, 3], [7], [5, 30, 2, 9]]
    alone = [greedy(prompt) for prompt in prompts]
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(len(prompts)) as threads:
            assert list(threads.map(greedy, prompts * 3)) == alone * 3
    finally:
        sys.setswitchinterval(switch)
