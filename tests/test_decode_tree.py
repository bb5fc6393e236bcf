"""Tree specs and their errors, trees that grow, a batch of trees against single ones, and Sequoia's programme."""

import json
import time
from collections.abc import Sequence
from itertools import pairwise
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.sequoia import TreeBudget, best_size, optimal_tree
from decode.tree import MAX_CANDIDATES, MAX_NODES, DynamicTree, Tree, TreeShape
from decode.tree_batch import TreeBatch, grow_batch
from decode.tree_spec import TREES, parse_tree

CPU = torch.device("cpu")


def expected_length(tree: Tree, acceptance: Sequence[float]) -> float:
    """Expected emitted tokens per step on this tree, the target's own token included: 1 plus, for every node, the
    product of the acceptances on its path.
    """
    rates = (*acceptance, *([0.0] * tree.size))
    reach: list[float] = []
    for parent, rank in zip(tree.parents, tree.ranks, strict=True):
        reach.append(rates[rank] * (1.0 if parent < 0 else reach[parent]))
    return 1.0 + sum(reach)


@st.composite
def trees(draw: st.DrawFn, most: int = 12) -> Tree:
    """Any breadth-first tree of 1 to `most` nodes."""
    parents = [-1]
    for node in range(1, draw(st.integers(1, most))):
        parents.append(draw(st.integers(parents[-1], node - 1)))
    return Tree(tuple(parents))


def paths_of(tree: Tree) -> list[list[int]]:
    paths: list[list[int]] = []
    for parent, rank in zip(tree.parents, tree.ranks, strict=True):
        paths.append(([] if parent < 0 else paths[parent]) + [rank])
    return paths


def parse_file(kind: str, content: object) -> TreeShape:
    """Parse `KIND:file.json` whose file holds `content`, through JSON as a real reader would."""
    return parse_tree(f"{kind}:file.json", {"file.json": json.loads(json.dumps(content))}.__getitem__)


def error_of(spec: str, content: object = None) -> str:
    with pytest.raises(ValueError) as caught:
        parse_tree(spec, lambda path: content)
    message = str(caught.value)
    assert message.isprintable() and len(message) < 400, message
    return message


# Specs


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        ("chain:3,stop=0.4", Tree((-1, 0, 1), 0.4)),
        ("chain:2,stop=0", Tree((-1, 0))),
        ("kary:2,1,stop=.25", Tree((-1, -1, 0, 1), 0.25)),
        ("eagle2", DynamicTree(6, 10, 60)),
        ("eagle2:depth=3,beam=4,nodes=20", DynamicTree(3, 4, 20)),
        ("eagle2:nodes=59", DynamicTree(6, 10, 59)),
        ("eagle2:nodes=4", DynamicTree(4, 4, 4)),
        ("eagle2:depth=2,beam=3", DynamicTree(2, 3, 12)),
        ("eagle2:beam=1", DynamicTree(6, 1, 6)),
        ("opt", DynamicTree(10, 50, 50, 0.1)),
        ("opt:gain=0.3,nodes=8", DynamicTree(8, 8, 8, 0.3)),
        ("opt:nodes=7,depth=2,gain=0", DynamicTree(2, 7, 7)),
    ],
)
def test_a_spec_is_the_shape_it_says(spec: str, shape: TreeShape) -> None:
    assert parse_tree(spec) == shape


def test_the_defaults_that_the_table_prints_are_the_defaults() -> None:
    for kind in ("eagle2", "opt"):
        assert TREES[kind].syntax == f"{kind}[{TREES[kind].example.removeprefix(kind)}]"
        assert parse_tree(kind) == parse_tree(TREES[kind].example)


def test_the_table_is_complete_and_its_examples_work() -> None:
    files = {
        "tree.json": {"parents": [-1, -1, 0]},
        "acceptance.json": {"acceptance": [0.6, 0.15], "nodes": 6, "depth": 4},
        "plan.json": {"tree": {"parents": [-1, 0]}},
    }
    for name, kind in TREES.items():
        assert kind.syntax.startswith(name) and 0 < len(kind.title) <= 60 and kind.paper
        assert parse_tree(kind.example, files.__getitem__).size > 0


@pytest.mark.parametrize(
    ("spec", "wrong", "fix"),
    [
        ("egale2", "unknown kind 'egale2'", "write eagle2:depth=6,beam=10,nodes=60"),
        ("tree", "unknown kind 'tree'", "static, sequoia, eagle2, opt"),
        ("chain:4,stp=0.2", "unknown key 'stp'", "did you mean stop"),
        ("chain:4,zzz=0.2", "unknown key 'zzz'", "use stop"),
        ("kary:4,2,stop", "'4,2,stop' is not what follows", "kary:4,2,2"),
        ("chain:4,stop=0.1,stop=0.2", "stop is given twice", "chain:4,stop=0.4"),
        ("chain:4,stop=0.1,3", "'3' is not KEY=VALUE", "chain:4,stop=0.4"),
        ("chain:4,stop=", "stop= is not in [0, 1)", "stop=0.2"),
        ("chain:4,stop=1", "stop=1 is not in [0, 1)", "stop=0.2"),
        ("chain:4,stop=-0.5", "stop=-0.5 is not", "stop=0.2"),
        ("chain:4,stop=1e-3", "stop=1e-3 is not", "stop=0.2"),
        ("chain:4,stop=nan", "stop=nan is not", "stop=0.2"),
        ("chain:4,stop=٠.٣", "stop=٠.٣ is not", "stop=0.2"),
        ("chain:4\n", r"'4\n' is not what follows", "chain:4"),
        ("eagle2:", "'' is not KEY=VALUE", "eagle2:depth=6,beam=10,nodes=60"),
        ("eagle2:8", "'8' is not KEY=VALUE", "eagle2:depth=6,beam=10,nodes=60"),
        ("eagle2:dept=3", "unknown key 'dept'", "did you mean depth"),
        ("eagle2:gain=0.1", "unknown key 'gain'", "use depth or beam or nodes"),
        ("eagle2:depth=0", "depth=0 is not a whole number from 1", "depth=6"),
        ("eagle2:depth=1.5", "depth=1.5 is not a whole number", "depth=6"),
        ("eagle2:depth=6,", "'' is not KEY=VALUE", "eagle2:"),
        ("eagle2:nodes=61,depth=2,beam=5", "reach only 30", "use nodes=30"),
        ("eagle2:nodes=5,beam=6,depth=2", "beam=6 is more than nodes=5", "use beam=5"),
        ("eagle2:nodes=1025", "more than 1024 nodes", "nodes=60"),
        ("opt:depth=51", "depth=51 is more than nodes=50", "use depth=50"),
        ("opt:nodes=1024,depth=8", "candidates", "smaller beam"),
        ("opt:gain=1", "gain=1 is not in [0, 1)", "gain=0.2"),
        ("static:", "names no file", "static:tree.json"),
        ("static", "names no file", "static:tree.json"),
        ("sequoia:", "names no file", "sequoia:acceptance.json"),
    ],
)
def test_a_bad_spec_says_what_is_wrong_and_what_works(spec: str, wrong: str, fix: str) -> None:
    message = error_of(spec)
    assert wrong in message and fix in message, message
    assert message.startswith(f"tree '{spec.strip()}")


@pytest.mark.parametrize("kind", ["static", "sequoia"])
def test_a_file_without_a_reader_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=f"^tree '{kind}:a.json': a file cannot be read here"):
        parse_tree(f"{kind}:a.json")


def test_what_the_reader_raises_passes_through() -> None:
    def read(path: str) -> object:
        raise OSError(f"{path} is on fire")

    with pytest.raises(OSError, match="^a:b.json is on fire$"):
        parse_tree("static:a:b.json", read)


@pytest.mark.parametrize(
    "spec",
    [
        "chain:" + "9" * 10_000,
        "chain:" + "0" * 10_000,
        "kary:" + "1," * 100_000 + "1",
        "kary:" + "9" * 10_000 + ",2",
        "chain:3,stop=" + "9" * 10_000,
        "eagle2:depth=" + "9" * 10_000,
        "eagle2:nodes=1024,beam=1024,depth=1024",
        "opt:nodes=999999999999",
        "x" * 100_000,
        "chain:4," + "k" * 100_000 + "=1",
    ],
)
def test_absurd_specs_cost_nothing(spec: str) -> None:
    began = time.process_time()
    error_of(spec)
    assert time.process_time() - began < 1


@pytest.mark.parametrize("spec", ["chain:" + "9" * 10_000, "kary:2," + "9" * 10_000, "eagle2:nodes=" + "9" * 10_000])
def test_a_number_of_any_length_is_just_too_large(spec: str) -> None:
    assert f"more than {MAX_NODES} nodes; use" in error_of(spec)


@given(st.text(max_size=30) | st.from_regex(r"(chain|kary|eagle2|opt)(:[a-z0-9=.,]*)?", fullmatch=True))
def test_any_text_is_a_shape_or_one_line(spec: str) -> None:
    try:
        assert parse_tree(spec, lambda path: None).size <= MAX_NODES
    except ValueError as error:
        assert "\n" not in str(error) and str(error).startswith("tree '")


# Static files


@given(trees(), st.sampled_from([0.0, 0.5]))
def test_a_static_file_of_parents_round_trips(tree: Tree, stop: float) -> None:
    assert parse_file("static", {"parents": list(tree.parents), "stop": stop}) == Tree(tree.parents, stop)
    assert parse_file("static", {"parents": list(tree.parents)}) == tree


@given(trees(), st.randoms(use_true_random=False), st.booleans())
def test_paths_in_any_order_are_the_tree_they_were_read_from(tree: Tree, random: Random, bare: bool) -> None:
    paths = paths_of(tree)
    random.shuffle(paths)
    assert parse_file("static", paths if bare else {"paths": paths}) == tree


def test_paths_as_medusa_writes_them() -> None:
    tree = parse_file("static", [[0], [0, 0], [1], [0, 1], [2], [0, 0, 0], [1, 0]])
    assert tree == Tree((-1, -1, -1, 0, 0, 1, 3))


@pytest.mark.parametrize(
    ("content", "wrong", "fix"),
    [
        (None, "holds a NoneType", '{"parents": [-1, -1, 0]}'),
        ({}, "either parents", "[[0], [1], [0, 0]]"),
        ({"parents": [-1], "paths": [[0]]}, "either parents", "or paths"),
        ({"parent": [-1]}, "unknown key 'parent'", "did you mean parents"),
        ({"parents": 4}, "parents: expected a list", "[-1, -1, 0]"),
        ({"parents": []}, "parents: expected a list of 1 to 1024", "[-1, -1, 0]"),
        ({"parents": [-1] * 1025}, "parents: expected a list of 1 to 1024", "[-1, -1, 0]"),
        ({"parents": [-1, "0"]}, "parents: expected whole numbers", "[-1, -1, 0]"),
        ({"parents": [-1, True]}, "parents: expected whole numbers", "[-1, -1, 0]"),
        ({"parents": [-1, 5]}, "a parent must be listed before its children", "(-1, -1, 0)"),
        ({"parents": [-1, 0, -1]}, "breadth-first order", "(-1, -1, 0, 1)"),
        ({"parents": [-1], "stop": "0.5"}, "stop: '0.5' is not a number", '"stop": 0.2'),
        ({"parents": [-1], "stop": float("nan")}, "is not in [0, 1)", "0 never stops"),
        ({"parents": [-1], "stop": 10**400}, "is not in [0, 1)", "0 never stops"),
        ([], "paths: expected a list", "[[0], [1], [0, 0]]"),
        ([[0], [1, 0]], "path [1, 0]: its parent [1] is not listed", "list [1] too"),
        ([[0], [2]], "path [2]: its sibling of rank 1 is not listed", "no gaps"),
        ([[0], [0]], "path [0]: listed twice", "list it once"),
        ([[0], []], "path []: expected a list of child ranks", "[0, 1]"),
        ([[0], 1], "path 1: expected a list of child ranks", "[0, 1]"),
        ([[-1]], "path [-1]: expected a list of child ranks", "[0, 1]"),
        ([[0]] * 1025, "paths: expected a list of 1 to 1024", "[[0], [1], [0, 0]]"),
    ],
)
def test_a_bad_static_file_names_the_file_and_the_key(content: object, wrong: str, fix: str) -> None:
    message = error_of("static:trees/mine.json", content)
    assert message.startswith("tree 'static:trees/mine.json': ") and wrong in message and fix in message, message


# Trees that grow


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 200))
def test_a_growth_is_valid_exactly_when_its_nodes_can_be_reached(depth: int, beam: int, nodes: int) -> None:
    level, reached = 1, 0
    for _ in range(depth):
        reached += min(level, beam) * beam
        level *= beam
    if beam <= nodes and depth <= nodes <= reached:
        growth = DynamicTree(depth, beam, nodes)
        assert growth.candidates == reached and growth.is_chain == (beam == 1)
    else:
        with pytest.raises(ValueError, match="^tree: .*use "):
            DynamicTree(depth, beam, nodes)


def test_the_fix_that_an_error_names_works() -> None:
    with pytest.raises(ValueError, match="use nodes=30, or more depth or beam"):
        DynamicTree(2, 5, 31)
    assert DynamicTree(2, 5, 30).candidates == 30
    with pytest.raises(ValueError, match=f"more than {MAX_CANDIDATES}; use fewer levels"):
        DynamicTree(2, 1024, 1024)
    with pytest.raises(ValueError, match=r"gain=1.0 is not in \[0, 1\)"):
        DynamicTree(2, 5, 30, 1.0)
    for depth, beam, nodes in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            DynamicTree(depth, beam, nodes)


# A batch of trees against single ones


@given(st.lists(trees(), min_size=1, max_size=4), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_a_batch_of_trees_holds_what_each_holds_alone(several: list[Tree], random: Random) -> None:
    """Nodes that do not exist are strewn among those that do, with parents that must not matter."""
    size = max(tree.size for tree in several) + 2
    places = [sorted(random.sample(range(size), tree.size)) for tree in several]
    parents_BN = torch.tensor([[random.randint(-1, size - 1) for _ in range(size)] for _ in several])
    exists_BN = torch.zeros(len(several), size, dtype=torch.bool)
    for row, tree in enumerate(several):
        for node, place in enumerate(places[row]):
            exists_BN[row, place] = True
            parents_BN[row, place] = -1 if tree.parents[node] < 0 else places[row][tree.parents[node]]
    depth = max(tree.depth for tree in several)
    most = max(len(below) for tree in several for below in tree.children)
    batch = grow_batch(parents_BN, exists_BN, depth, most)
    assert (batch.rows, batch.depth, batch.widths) == (len(several), depth, (most,) * depth)
    for row, tree in enumerate(several):
        alone = TreeBatch.build(tree, CPU)
        # Where the M nodes of the single tree lie among the M of the batch; the root stays the root.
        at_M = torch.tensor([0, *(place + 1 for place in places[row])])
        assert batch.depths_RN[row, at_M[1:] - 1].tolist() == alone.depths_RN[0].tolist()
        assert (batch.parents_RN[row, at_M[1:] - 1] + 1).tolist() == at_M[alone.parents_RN[0] + 1].tolist()
        assert torch.equal(batch.sees_RMM[row][at_M][:, at_M], alone.sees_RMM[0])
        children_MK = torch.nn.functional.pad(at_M[alone.children_RMK[0]], (0, most - alone.children_RMK.shape[2]))
        assert torch.equal(batch.children_RMK[row, at_M], children_MK)
        inner_M = (alone.children_RMK[0] > 0).any(1)
        assert torch.equal(batch.groups_RM[row, at_M][inner_M], alone.groups_RM[0][inner_M])
        gone_M = torch.ones(size + 1, dtype=torch.bool)
        gone_M[at_M] = False
        assert not batch.sees_RMM[row][at_M][:, gone_M].any(), "a node sees one that does not exist"
        assert not batch.children_RMK[row, gone_M].any(), "a node that does not exist has children"
        assert (batch.parents_RN[row, gone_M[1:]] == -1).all(), "a node that does not exist belongs to a parent"
        assert (batch.sees_RMM[row, gone_M].sum(1) == 2).all(), "it sees more than the root and itself"


@given(trees())
@settings(deadline=None)
def test_a_whole_tree_is_the_same_both_ways(tree: Tree) -> None:
    alone = TreeBatch.build(tree, CPU)
    most = alone.children_RMK.shape[2]
    batch = grow_batch(alone.parents_RN, torch.ones_like(alone.parents_RN, dtype=torch.bool), tree.depth, most)
    for name in ("parents_RN", "depths_RN", "children_RMK", "groups_RM", "sees_RMM"):
        assert torch.equal(getattr(batch, name), getattr(alone, name)), name


# Sequoia


def all_trees(most: int) -> list[Tree]:
    """Every breadth-first tree of up to `most` nodes."""
    found: list[tuple[int, ...]] = []
    level: list[tuple[int, ...]] = [()]
    for node in range(most):
        level = [(*tree, parent) for tree in level for parent in range(tree[-1] if tree else -1, node)]
        found += level
    return [Tree(parents) for parents in found]


ALL = all_trees(7)
rates = (
    st.lists(st.floats(0, 1), min_size=1, max_size=8)
    .filter(any)
    .map(lambda weights: [weight / max(sum(weights), 1.0) for weight in weights])
)


def test_every_tree_is_tried() -> None:
    assert len(ALL) == 1 + 2 + 5 + 14 + 42 + 132 + 429  # the Catalan numbers


@given(rates, st.integers(1, 7), st.integers(1, 7))
@settings(deadline=None, max_examples=80)
def test_no_tree_within_the_budget_is_longer_than_the_optimal_one(
    acceptance: list[float], nodes: int, depth: int
) -> None:
    tree = optimal_tree(acceptance, nodes, depth)
    assert tree.size <= nodes and tree.depth <= depth
    best = max(expected_length(other, acceptance) for other in ALL if other.size <= nodes and other.depth <= depth)
    assert expected_length(tree, acceptance) == pytest.approx(best, rel=1e-12)


def test_rising_acceptance_needs_the_siblings_before_it() -> None:
    """A greedy choice of the likeliest nodes would stop at rank 0."""
    assert optimal_tree([0.0, 0.0, 0.9], 3, 1) == Tree((-1, -1, -1))
    assert optimal_tree([0.1, 0.9], 4, 2) == Tree((-1, -1, 1, 1))


def test_a_node_that_adds_nothing_is_left_out() -> None:
    assert optimal_tree([0.5, 0.0, 0.1], 3, 2) == Tree((-1, 0))
    assert optimal_tree([0.5, 0.2], 256, 2) == Tree((-1, -1, 0, 0, 1, 1))


def test_a_chain_where_only_the_first_is_accepted() -> None:
    tree = optimal_tree([0.5, 0.0, 0.0], 6, 4)
    assert tree == Tree((-1, 0, 1, 2))
    assert expected_length(tree, [0.5]) == 1 + 0.5 + 0.25 + 0.125 + 0.0625


def test_the_expected_length_is_what_a_simulation_emits() -> None:
    acceptance, tree = [0.5, 0.25, 0.1], optimal_tree([0.5, 0.25, 0.1], 20, 5)
    draws = torch.multinomial(
        torch.tensor([*acceptance, 1 - sum(acceptance)]), 40_000 * 6, True, generator=torch.Generator().manual_seed(1)
    ).view(-1, 6)
    lengths = []
    for row in draws.tolist():
        node = length = 0
        while row[length] < len(tree.children[node]):
            node, length = tree.children[node][row[length]], length + 1
        lengths.append(length + 1)
    assert sum(lengths) / len(lengths) == pytest.approx(expected_length(tree, acceptance), abs=0.03)


def test_the_largest_programme_is_fast() -> None:
    acceptance = [0.5 / 2**rank for rank in range(64)]
    began = time.process_time()
    tree = optimal_tree(acceptance, 256, 32)
    assert time.process_time() - began < 3
    assert tree.size == 256
    larger = [expected_length(optimal_tree(acceptance, nodes, 32), acceptance) for nodes in (1, 8, 32)]
    assert all(a < b for a, b in pairwise([*larger, expected_length(tree, acceptance)]))


@given(rates, st.lists(st.floats(0.01, 1), min_size=7, max_size=7), st.floats(0, 0.5), st.integers(1, 7))
@settings(deadline=None, max_examples=40)
def test_the_best_size_is_the_cheapest_of_all_trees(
    acceptance: list[float], costs: list[float], draft_s: float, depth: int
) -> None:
    """Against every tree of up to 6 nodes, at the running maximum of the measured costs."""
    verify_s = dict(enumerate(costs, start=1))
    size = best_size(acceptance, 6, depth, verify_s, draft_s)
    best = min(
        (other.depth * draft_s + max(costs[: other.size + 1])) / expected_length(other, acceptance)
        for other in ALL
        if other.size <= 6 and other.depth <= depth
    )
    assert size.token_s == pytest.approx(best, rel=1e-12)
    tree = optimal_tree(acceptance, size.nodes, size.depth)
    assert expected_length(tree, acceptance) == pytest.approx(size.length, rel=1e-12)


def test_the_cost_curve_sets_the_size() -> None:
    acceptance = [0.7, 0.1]
    flat, steep = {1: 1.0, 2: 1.0, 16: 1.0}, {1: 1.0, 2: 1.2, 16: 9.0}
    assert best_size(acceptance, 64, 8, flat, 0.001).nodes == 15
    # One node of acceptance 0.7: 1.7 tokens for 1.2 + 0.1 seconds.
    assert best_size(acceptance, 64, 8, steep, 0.1) == TreeBudget(1, 1, 1.7, (0.1 + 1.2) / 1.7)
    # A dear draft makes the tree shallow, whatever the target costs.
    assert best_size(acceptance, 64, 8, flat, 5.0).depth == 1
    # A measurement that dips is no reason to draft more.
    assert best_size(acceptance, 64, 8, {2: 1.0, 4: 9.0, 8: 0.5}, 0.1).nodes == 1


def test_a_sequoia_file_is_the_optimal_tree() -> None:
    acceptance = [0.6, 0.2, 0.05]
    content: dict[str, object] = {"acceptance": acceptance, "nodes": 20, "depth": 6}
    assert parse_file("sequoia", content) == optimal_tree(acceptance, 20, 6)
    verify_s = {1: 0.02, 4: 0.021, 8: 0.04, 16: 0.3}
    content |= {"verify_s": {str(size): seconds for size, seconds in verify_s.items()}, "draft_s": 0.002}
    size = best_size(acceptance, 20, 6, verify_s, 0.002)
    assert size.nodes < 15
    assert parse_file("sequoia", content) == optimal_tree(acceptance, size.nodes, size.depth)


GOOD: dict[str, object] = {"acceptance": [0.6, 0.2], "nodes": 8, "depth": 4}


@pytest.mark.parametrize(
    ("change", "wrong", "fix"),
    [
        ({"acceptence": [0.6]}, "unknown key 'acceptence'", "did you mean acceptance"),
        ({"acceptance": 0.6}, "acceptance: expected a list", "[0.6, 0.15, 0.05]"),
        ({"acceptance": [0.6, "x"]}, "acceptance: 'x' is not a number", "[0.6, 0.15, 0.05]"),
        ({"acceptance": [0.6, 1.5]}, "probability in [0, 1]", "[0.6, 0.15, 0.05]"),
        ({"acceptance": [0.6, float("nan")]}, "probability in [0, 1]", "[0.6, 0.15, 0.05]"),
        ({"acceptance": [0.6, 0.6]}, "adds up to 1.2", "[0.6, 0.15, 0.05]"),
        ({"acceptance": [0, 0]}, "0 at every rank", "measure"),
        ({"acceptance": []}, "0 at every rank", "measure"),
        ({"nodes": 0}, "nodes=0 is not in 1..256", "nodes=64"),
        ({"nodes": 10**30}, "is not in 1..256", "nodes=64"),
        ({"nodes": 8.0}, "nodes: expected a whole number", "64"),
        ({"depth": 33}, "depth=33 is not in 1..32", "depth=8"),
        ({"draft_s": 0.1}, "key 'verify_s' is missing", '{"1": 0.02'),
        ({"verify_s": {"2": 0.1}}, "key 'draft_s' is missing", "0.002"),
        ({"verify_s": {"x": 0.1}, "draft_s": 0.1}, "verify_s: expected seconds by number of tokens", '{"1": 0.02'),
        ({"verify_s": {"2": -1}, "draft_s": 0.1}, "verify_s: tokens from 1 and positive seconds", '{"1": 0.02'),
        ({"verify_s": {"0": 1}, "draft_s": 0.1}, "verify_s: tokens from 1 and positive seconds", '{"1": 0.02'),
        ({"verify_s": {"64": 1}, "draft_s": 0.1}, "verify_s: no size from 2 to 9 tokens", "raise nodes"),
        ({"verify_s": {"1": 1}, "draft_s": 0.1}, "verify_s: no size from 2 to 9 tokens", "measure one"),
        ({"verify_s": {"2": 1}, "draft_s": -1}, "draft_s=-1.0 is not a time", "0.002"),
        ({"verify_s": {"2": 1}, "draft_s": 10**400}, "draft_s=inf is not a time", "0.002"),
    ],
)
def test_a_bad_sequoia_file_names_the_file_and_the_key(change: dict[str, object], wrong: str, fix: str) -> None:
    message = error_of("sequoia:a.json", GOOD | change)
    assert message.startswith("tree 'sequoia:a.json': ") and wrong in message and fix in message, message


@pytest.mark.parametrize("key", GOOD)
def test_a_missing_key_of_a_sequoia_file_is_named(key: str) -> None:
    message = error_of("sequoia:a.json", {name: value for name, value in GOOD.items() if name != key})
    assert f"key '{key}' is missing" in message
