"""Tree specs and their errors, and trees that grow."""

import json
import time

import pytest
from hypothesis import given, strategies as st

from draftsmith.decode.tree import DynamicTree, Tree
from draftsmith.decode.tree_spec import TREES, Written, parse_tree, tree_spec


@st.composite
def trees(draw, most=12):
    """Any breadth-first tree of 1 to `most` nodes."""
    parents = [-1]
    for node in range(1, draw(st.integers(1, most))):
        parents.append(draw(st.integers(parents[-1], node - 1)))
    return Tree(tuple(parents))


def paths_of(tree):
    paths: list[list[int]] = []
    for parent, rank in zip(tree.parents, tree.ranks, strict=True):
        paths.append(([] if parent < 0 else paths[parent]) + [rank])
    return paths


def parse_file(kind, content):
    """Parse `KIND:file.json` whose file holds `content`, through JSON as a real reader would."""
    return parse_tree(
        f"{kind}:file.json", {"file.json": json.loads(json.dumps(content))}.__getitem__
    )


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
def test_a_spec_is_the_shape_it_says(spec, shape):
    assert parse_tree(spec) == shape


def test_a_tree_may_be_written_short():
    short: list[Written] = [4, "4", (3, 2), "chain", "eagle2"]
    assert [tree_spec(tree) for tree in short] == [
        "chain:4",
        "chain:4",
        "kary:3,2",
        "chain:4",
        "eagle2",
    ]
    assert tree_spec("chain", deepest=7) == "chain:7"
    assert parse_tree((3, 2)) == parse_tree("kary:3,2")
    assert parse_tree("chain", deepest=2) == parse_tree(2) == Tree((-1, 0))


@pytest.mark.parametrize("tree", [0, -3, "0", (), (3, "x"), 4.5, {"chain": 4}], ids=str)
def test_a_bad_short_form_is_refused_in_one_line(tree, golden):
    with golden.raises(ValueError):
        parse_tree(tree)


def test_the_defaults_that_the_table_prints_are_the_defaults():
    for kind in ("eagle2", "opt"):
        assert TREES[kind].syntax == f"{kind}[{TREES[kind].example.removeprefix(kind)}]"
        assert parse_tree(kind) == parse_tree(TREES[kind].example)


def test_the_table_is_complete_and_its_examples_work():
    files = {
        "tree.json": {"parents": [-1, -1, 0]},
        "plan.json": {"tree": {"parents": [-1, 0]}},
    }
    for name, kind in TREES.items():
        assert kind.syntax.startswith(name) and 0 < len(kind.title) <= 60 and kind.paper
        assert parse_tree(kind.example, files.__getitem__).size > 0


WRONG_SPECS = """
egale2 none chain2 4.5 chain: chain:x chain:3,2 chain:4,stp=0.2 chain:4,stop=1 kary:3,x kary:3,0
eagle2:6,10 eagle2:nodes=61,depth=2,beam=5 opt:depth=51 opt:gain=1 static:
"""


@pytest.mark.parametrize(
    ("spec", "content"),
    [
        *((spec, None) for spec in WRONG_SPECS.split()),
        ("static:a", {"parents": 4}),
        ("static:a", {"parents": [-1, 0, -1]}),
        ("static:a", {"parent": [-1]}),
        ("static:a", [[0], [2]]),
        ("auto:a", {"trees": []}),
    ],
)
def test_a_bad_spec_or_file_is_refused_in_one_line(spec, content, golden):
    with golden.raises(ValueError):
        parse_tree(spec, lambda path: content)


@pytest.mark.parametrize(
    "spec", ["chain:" + "9" * 4_000, "kary:2," + "9" * 9, "kary:" + "9," * 90 + "9"]
)
def test_a_tree_that_is_too_large_is_never_built(spec, golden):
    began = time.process_time()
    with golden.raises(ValueError):
        parse_tree(spec)
    assert time.process_time() - began < 1


@given(trees(), st.sampled_from([0.0, 0.5]))
def test_a_static_file_of_parents_round_trips(tree, stop):
    assert parse_file("static", {"parents": list(tree.parents), "stop": stop}) == Tree(
        tree.parents, stop
    )
    assert parse_file("static", {"parents": list(tree.parents)}) == tree


@given(trees(), st.randoms(use_true_random=False), st.booleans())
def test_paths_in_any_order_are_the_tree_they_were_read_from(tree, random, bare):
    paths = paths_of(tree)
    random.shuffle(paths)
    assert parse_file("static", paths if bare else {"paths": paths}) == tree


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 200))
def test_a_growth_is_valid_exactly_when_its_nodes_can_be_reached(depth, beam, nodes):
    level, reached = 1, 0
    for _ in range(depth):
        reached += min(level, beam) * beam
        level *= beam
    if beam <= nodes and depth <= nodes <= reached:
        assert DynamicTree(depth, beam, nodes).is_chain == (beam == 1)
    else:
        with pytest.raises(ValueError, match="^tree: "):
            DynamicTree(depth, beam, nodes)
