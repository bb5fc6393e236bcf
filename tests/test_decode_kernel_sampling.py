"""The kernel chooses the tokens of `draftsmith.core.sampling`, for every width and count."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from draftsmith.core import sampling
from draftsmith.decode.kernel_sampling import draw, draw_without_replacement, largest, try_siblings
from draftsmith.decode.native import kernel
from draftsmith.decode.verify.siblings import _try_in_turn
from draftsmith.decode.verify.tree_walk import Node

built = pytest.mark.skipif(kernel() is None, reason="the kernel is not built here")


@built
@given(
    rows=st.integers(1, 5),
    width=st.integers(1, 700),
    count=st.integers(1, 9),
    levels=st.integers(1, 400),
    nothing=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=200, deadline=None)
def test_gives_the_largest_and_of_equal_ones_the_first(rows, width, count, levels, nothing, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-levels, levels, (rows, width), generator=generator).float()
    if nothing:
        values[values < levels // 2] = -torch.inf
    count = min(count, width)
    found = largest(values, count)
    order = values.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(found.values, order.values[:, :count])
    assert torch.equal(found.indices, order.indices[:, :count])
    if count == 1:
        plain = sampling.largest(values, 1)
        assert torch.equal(found.indices, plain.indices)


@built
@pytest.mark.parametrize("width", [1, 127, 128, 129, 49152, 49153])
def test_a_row_with_nan_says_so_and_the_others_do_not(width):
    values = torch.randn(3, width, generator=torch.Generator().manual_seed(width))
    for place in (0, width // 2, width - 1):
        damaged = values.clone()
        damaged[1, place] = -torch.tensor(float("nan"))
        found = largest(damaged, 1)
        assert found.values.isnan().flatten().tolist() == [False, True, False]
        assert found.indices[1].item() == 0
        assert torch.equal(found.indices[::2], values[::2].argmax(-1, keepdim=True))


def test_what_the_kernel_does_not_take_goes_to_torch():
    values = torch.randn(2, 3, 200, generator=torch.Generator().manual_seed(0))
    wanted = values.max(-1, keepdim=True)
    # Another dtype, rows that are not side by side, and no rows at all.
    assert torch.equal(largest(values.double(), 1).indices, wanted.indices)
    assert torch.equal(largest(values[:, ::2], 1).indices, wanted.indices[:, ::2])
    assert largest(values[:, :0], 1).indices.shape == (2, 0, 1)
    assert torch.equal(largest(values, 100).values, values.topk(100).values)


@built
@given(
    rows=st.integers(1, 4),
    width=st.integers(1, 600),
    count=st.integers(1, 6),
    share=st.floats(0.02, 1),
    sharpness=st.floats(0.1, 40),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=200, deadline=None)
def test_draws_what_the_reference_draws(rows, width, count, share, sharpness, seed):
    generator = torch.Generator().manual_seed(seed)
    p = (torch.randn(rows, width, generator=generator) * sharpness).softmax(-1)
    p[torch.rand(rows, width, generator=generator) > share] = 0.0
    u = torch.rand(rows, count, generator=generator, dtype=torch.double)
    drawn = draw_without_replacement(p, u)
    wanted = sampling.draw_without_replacement(p, u)
    # Sums in another order may fall on the other side of a uniform: hardly ever.
    assert torch.equal(drawn, wanted)
    massed = p.sum(-1) > 0
    assert torch.equal(draw(p, u[:, 0])[massed], sampling.draw(p, u[:, 0])[massed])


@built
def test_no_token_without_mass_is_drawn_and_small_masses_keep_their_shares():
    p = torch.zeros(1, 1000)
    p[0, [3, 400, 401, 999]] = torch.tensor([1.0, 1e-30, 3e-30, 4e-30])
    counts = {400: 0, 401: 0, 999: 0}
    for step in range(800):
        edge = torch.tensor([[step / 800, (step + 0.5) / 800, 0.0, 1 - 2**-53, 0.5]])
        first, second, *others, none = draw_without_replacement(p, edge.double())[0].tolist()
        assert first == 3 and none == -1
        assert sorted([second, *others]) == [400, 401, 999]
        counts[second] += 1
    assert counts == {400: 100, 401: 300, 999: 400}
    assert draw_without_replacement(torch.zeros(2, 300), torch.zeros(2, 1)).tolist() == [[-1], [-1]]
    top = torch.tensor(1 - 2**-53, dtype=torch.double)
    assert draw(p[0], top).item() == 3


@built
@given(
    rows=st.integers(1, 4),
    width=st.integers(2, 300),
    count=st.integers(1, 5),
    sharpness=st.floats(0.1, 12),
    alike=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=200, deadline=None)
def test_siblings_are_tried_as_by_torch(rows, width, count, sharpness, alike, seed):
    generator = torch.Generator().manual_seed(seed)
    count = min(count, width)
    q = (torch.randn(rows, width, generator=generator) * sharpness).softmax(-1)
    p = (torch.randn(rows, width, generator=generator) * sharpness).softmax(-1)
    if alike:
        p[0] = q[0]
    u = torch.rand(2, rows, count, generator=generator, dtype=torch.double)
    offer = sampling.draw_without_replacement(q, u[0])
    offer[rows - 1, count // 2 :] = -1
    node = Node(p, offer, u[1], lambda rank: q.clone())
    wanted_ranks, wanted = _try_in_turn(node, replacement=False)
    found = try_siblings(p.clone(), q.clone(), offer, u[1])
    assert found is not None
    ranks, left = found
    assert torch.equal(ranks, wanted_ranks)
    for row in (ranks < 0).nonzero().flatten().tolist():
        mine, theirs = (each[row] / each[row].sum() for each in (left, wanted))
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-3)
