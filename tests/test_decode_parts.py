"""Trees, the cache and the counts, one by one."""

from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaForCausalLM

from decode import DecodeStats, DraftModelProposer, SpeculativeDecoder
from decode.batch_run import BatchRun
from decode.cache import TreeCache
from decode.runner import Runner
from draftsmith_core.sampling import Sampling, generator
from tests.tiny_models import random_llama

GREEDY = Sampling(temperature=0.0)


def tiny_llama(seed: int) -> LlamaForCausalLM:
    return random_llama(seed, 17, layers=3)


# Cache


def keys_of(cache: TreeCache, layer: int) -> Tensor:
    keys = cast(Any, cache.layers[layer]).keys
    assert isinstance(keys, Tensor)
    return keys


def values_of(cache: TreeCache, layer: int) -> Tensor:
    values = cast(Any, cache.layers[layer]).values
    assert isinstance(values, Tensor)
    return values


def filled_cache(rows: int, capacity: int) -> TreeCache:
    cache = TreeCache(layers=2, capacity=capacity)
    for layer in range(2):
        cell = torch.arange(capacity, dtype=torch.float32).view(1, 1, -1, 1)
        row = 1000.0 * torch.arange(rows, dtype=torch.float32).view(-1, 1, 1, 1)
        states = (row + cell + 100.0 * layer).expand(rows, 3, capacity, 2)
        keys, values = cache.update(states, -states, layer)
        assert torch.equal(keys, states) and torch.equal(values, -states)
    return cache


def test_keep_moves_only_the_path_and_reads_before_it_writes() -> None:
    cache = filled_cache(rows=2, capacity=20)
    # Row 0 is 9 long, row 1 is 8; the block starts at 9 and overlaps row 1's targets.
    cache.keep(9, [(0, 0, 9), (0, 2, 10), (1, 0, 8), (1, 1, 9), (1, 4, 10)])
    for layer in range(2):
        keys = keys_of(cache, layer)
        assert keys[0, 0, 8:12, 0].tolist() == [100.0 * layer + x for x in (8, 9, 11, 11)]
        assert keys[1, 2, 7:12, 1].tolist() == [1000 + 100.0 * layer + x for x in (7, 9, 10, 13, 11)]
        assert torch.equal(values_of(cache, layer), -keys)
    # Four cells moved (one was in place) x 2 layers x (keys, values) x 3 heads x 2 x 4 bytes.
    assert cache.bytes_moved == 4 * 2 * 2 * 3 * 2 * 4


def test_select_rows_keeps_the_layers_in_one_store() -> None:
    cache = filled_cache(rows=4, capacity=6)
    cache.select_rows([3, 1], [6, 6])
    for layer in range(2):
        assert keys_of(cache, layer)[:, 0, 2, 0].tolist() == [
            3002.0 + 100 * layer,
            1002 + 100 * layer,
        ]
    cache.keep(4, [(1, 0, 2)])
    assert keys_of(cache, 1)[1, 0, 2, 0] == 1104.0


def test_layers_of_another_shape_get_their_own_store() -> None:
    cache = TreeCache(layers=2, capacity=5)
    cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
    keys, values = cache.update(torch.ones(1, 1, 3, 8), torch.ones(1, 1, 3, 6), 1)
    assert keys.shape == (1, 1, 3, 8) and values.shape == (1, 1, 3, 6)
    keys_of(cache, 1)[:, :, 2] = 7.0
    cache.keep(0, [(0, 2, 0)])
    assert keys_of(cache, 1)[0, 0, 0].tolist() == [7.0] * 8


def watched_run(
    decoder: SpeculativeDecoder, prompts: list[list[int]], eos: frozenset[int]
) -> tuple[list[int], list[set[int]], BatchRun]:
    """Bytes moved by the target's cache in each step, and the storage addresses after each."""
    generators = [generator(row) for row in range(len(prompts))]
    with torch.inference_mode():
        run = BatchRun(decoder, prompts, GREEDY, 40, generators, eos, None, None)
        cache, moved, places = run.runner.cache, [0], []
        while run.batch:
            run.step()
            moved.append(cache.bytes_moved)
            places.append({keys_of(cache, i).data_ptr() for i in range(len(cache.layers))})
    return [b - a for a, b in zip(moved, moved[1:], strict=False)], places, run


def cell_bytes(runner: Runner) -> int:
    keys = [keys_of(runner.cache, i) for i in range(len(runner.cache.layers))]
    return sum(2 * k.shape[1] * k.shape[3] * 4 for k in keys)


@pytest.mark.parametrize(("tree", "bound"), [("chain:3", 0), ("kary:2,2,2", 3), ("kary:3,1", 2)])
def test_no_step_copies_the_cache(tree: str, bound: int) -> None:
    target, draft = tiny_llama(1), tiny_llama(1)
    decoder = SpeculativeDecoder(target, DraftModelProposer(draft), tree, "exact")
    moved, places, run = watched_run(decoder, [[1, 2, 3, 4]], frozenset())
    assert len(moved) >= 10 and max(moved) <= bound * cell_bytes(run.runner)
    assert all(place == places[0] for place in places)
    # Ragged rows: at most the accepted path of each row.
    moved, places, run = watched_run(decoder, [[1, 2, 3, 4], [5, 6]], frozenset())
    depth = decoder.tree.depth
    assert 0 < max(moved) <= 2 * (depth + 1) * cell_bytes(run.runner)
    assert all(place == places[0] for place in places)


def test_a_row_that_ends_leaves_at_once_and_costs_one_row_at_most() -> None:
    target = tiny_llama(1)
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10], [11, 12], [13, 3], [14], [2, 2]]
    lengths: set[int] = set()
    left = 0
    for eos in range(17):
        generators = [generator(0)] * len(prompts)
        with torch.inference_mode():
            run = BatchRun(SpeculativeDecoder(target), prompts, GREEDY, 40, generators, frozenset({eos}), None, None)
        while run.batch:
            rows, moved = len(run.batch), run.runner.cache.bytes_moved
            with torch.inference_mode():
                run.step()
            if not run.batch:
                break
            assert len(run.batch) == len(run.runner.lengths) == keys_of(run.runner.cache, 0).shape[0]
            gone = rows - len(run.batch)
            left += gone
            # Each row that leaves makes room for one other at most, and every row keeps its one new cell.
            cells = gone * max(run.runner.lengths) + rows
            assert run.runner.cache.bytes_moved - moved <= cells * cell_bytes(run.runner)
        lengths |= {len(row.ids) for row in run.rows}
    assert len(lengths) > 5 and left > 30


# Counts


def some_stats(depth: int) -> st.SearchStrategy[DecodeStats]:
    count = st.integers(0, 1000)
    by_depth = st.lists(count, min_size=depth, max_size=depth).map(tuple)
    return st.builds(
        DecodeStats,
        target_calls=count,
        emitted=count,
        proposed=count,
        accepted=count,
        depth_sum=count,
        accepted_by_depth=by_depth,
        reached_by_depth=by_depth,
    )


any_stats = st.integers(0, 4).flatmap(some_stats)


@given(any_stats, any_stats, any_stats)
@settings(max_examples=50, deadline=None)
def test_stats_are_a_commutative_monoid(a: DecodeStats, b: DecodeStats, c: DecodeStats) -> None:
    assert (a + b) + c == a + (b + c)
    assert a + b == b + a
    assert a + DecodeStats() == a
    total = a + b
    assert total.emitted == a.emitted + b.emitted
    assert sum(total.reached_by_depth) == sum(a.reached_by_depth) + sum(b.reached_by_depth)
    assert len(total.accept_at) == max(len(a.accept_at), len(b.accept_at))


def test_a_ratio_over_zero_is_none() -> None:
    """Law 3."""
    empty = DecodeStats(accepted_by_depth=(0, 0), reached_by_depth=(4, 0))
    assert empty.tau is None and empty.alpha_mcsd is None
    assert empty.accept_at == (0.0, None)
    full = DecodeStats(target_calls=4, emitted=10, accepted=6, depth_sum=8)
    assert full.tau == 2.5 and full.alpha_mcsd == 0.75
