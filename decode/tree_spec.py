"""Tree specs: what a user writes for a tree, such as `kary:4,2,2`, and the shape that it stands
for. Needs no torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from draftsmith.core.errors import nearest
from draftsmith.decode.tree import (
    CHAIN,
    MAX_NODES,
    DynamicTree,
    Tree,
    TreeShape,
    chain,
    tree_of_paths,
)

# A tree as a user writes it: see `tree_spec`.
Written = str | int | Sequence[int]


@dataclass(frozen=True)
class TreeKind:
    """One kind of tree, as help texts and tables print it. `example` is a spec that works as it is,
    given the file that it names.
    """

    syntax: str
    title: str
    paper: str
    example: str


# `nodes` are drafted nodes everywhere, without the root; EAGLE's code counts the root in its
# `total_token`, so its default of 60 is nodes=59 here, while its paper speaks of 60 draft tokens.
TREES: dict[str, TreeKind] = {
    "chain": TreeKind(
        "chain[:N[,stop=P]]",
        "N tokens, one after another",
        "arXiv 2211.17192",
        "chain:4",
    ),
    "kary": TreeKind(
        "kary:K1,K2,...[,stop=P]",
        "K1 candidates, K2 after each of them, ...",
        "arXiv 2401.06706",
        "kary:4,2,2",
    ),
    "static": TreeKind(
        "static:FILE",
        "a tree from JSON: parents, or paths as Medusa's",
        "arXiv 2401.10774",
        "static:tree.json",
    ),
    "eagle2": TreeKind(
        "eagle2[:depth=6,beam=10,nodes=60]",
        "grown anew at each step from a beam, then re-ranked",
        "arXiv 2406.16858",
        "eagle2:depth=6,beam=10,nodes=60",
    ),
    "opt": TreeKind(
        "opt[:nodes=50,depth=10,gain=0.1]",
        "grown anew until a level gains too little",
        "arXiv 2406.17276",
        "opt:nodes=50,depth=10,gain=0.1",
    ),
    "auto": TreeKind(
        "auto, auto:FILE",
        "the best at every step; or as `draftsmith plan` chose",
        "arXiv 2510.20064",
        "auto:plan.json",
    ),
}

_FILES = {
    "static": '{"parents": [-1, -1, 0], "stop": 0.2} or paths such as [[0], [1], [0, 0]]',
    "auto": "a plan; write one with `draftsmith plan --out FILE`",
}


def kary(branching: Sequence[int]) -> Tree:
    """The tree in which every node at depth d has `branching[d]` children; `kary((1, 1))` is a
    chain of two.
    """
    parents: list[int] = []
    level = [-1]
    for count in branching:
        first = len(parents)
        for parent in level:
            # `Tree` refuses more than MAX_NODES, so no more of it is built.
            parents += [parent] * min(count, MAX_NODES + 1)
        level = list(range(first, len(parents)))
        if len(parents) > MAX_NODES:
            break
    return Tree(tuple(parents))


def tree_spec(tree: Written, deepest: int | None = None) -> str:
    """The spec for a tree written short: 4 is `chain:4`, `(3, 2)` is `kary:3,2`, and `chain` is a
    chain of `deepest` tokens, or of four. Specs stay as they are.
    """
    if isinstance(tree, str):
        if tree == "chain":
            return f"chain:{deepest or CHAIN}"
        return f"chain:{tree}" if tree.isdecimal() else tree
    if isinstance(tree, int):
        return f"chain:{tree}"
    if isinstance(tree, Sequence):
        return "kary:" + ",".join(map(str, tree))
    raise ValueError(f"tree: {tree!r} is no tree; write for example chain:4, 4 or (3, 2)")


def parse_tree(
    tree: Written,
    read: Callable[[str], object] | None = None,
    deepest: int | None = None,
) -> TreeShape:
    """The shape that a spec of `TREES`, or a short form of `tree_spec`, stands for.

    `read(path)` returns the parsed JSON of a file that a spec names; what it raises passes through.
    Raises ValueError, one line that names the spec, what is wrong and what would work.

    A static file holds `parents` (breadth-first, -1 is the root) or `paths` of child ranks, and
    perhaps `stop`; or just the list of paths, as Medusa and EAGLE write their trees.
    """
    spec = tree_spec(tree, deepest)
    kind, colon, body = spec.partition(":")
    if kind not in TREES:
        raise ValueError(f"tree {spec!r}: unknown kind {kind!r}; {nearest(kind, TREES)}")
    content: Any = None
    if kind in _FILES:
        if not body:
            fix = f"name one, such as {TREES[kind].example}"
            raise ValueError(f"tree {spec!r}: needs a file; {fix}")
        if read is None:
            raise ValueError(f"tree {spec!r}: needs a file; pass parse_tree a reader of files")
        content = read(body)
    try:
        if kind == "static":
            return _static(content)
        if kind == "auto":
            plan = content["tree"]
            return parse_tree(plan["spec"]) if plan.get("spec") else Tree(tuple(plan["parents"]))
        if kind in _GROWING:
            return _growing(kind, body.split(",") if colon else [])
        return _counted(kind, body.split(",") if body else [])
    except (TypeError, AttributeError, KeyError) as error:
        missing = f"key {error} is missing; " if isinstance(error, KeyError) else ""
        raise ValueError(f"tree {spec!r}: {missing}expected {_FILES[kind]}") from None
    except ValueError as error:
        fix = "" if kind in _FILES else f"; write for example {TREES[kind].example}"
        raise ValueError(f"tree {spec!r}: {str(error).removeprefix('tree: ')}{fix}") from None


_GROWING: dict[str, dict[str, Any]] = {
    "eagle2": {"nodes": 60, "depth": 6, "beam": 10},
    "opt": {"nodes": 50, "depth": 10, "gain": 0.1},
}


def _counted(kind: str, words: Sequence[str]) -> Tree:
    counts = [_number(word, int) for word in words if "=" not in word]
    if not counts:
        raise ValueError("has no number")
    if min(counts) < 1:
        raise ValueError("every number must be at least 1")
    if kind == "chain" and len(counts) > 1:
        raise ValueError("a chain has one number")
    options = _options([word for word in words if "=" in word], {"stop": 0.0})
    tree = chain(min(counts[0], MAX_NODES + 1)) if kind == "chain" else kary(counts)
    return replace(tree, stop=options["stop"])


def _growing(kind: str, words: Sequence[str]) -> DynamicTree:
    defaults = _GROWING[kind]
    options = _options(words, defaults)
    written = {word.partition("=")[0] for word in words}
    # Defaults are lowered to fit what the user wrote; what the user wrote is never changed.
    for key in ("depth", "beam"):
        if key in defaults.keys() - written:
            options[key] = min(options[key], options["nodes"])
    nodes = options["nodes"]
    depth = options["depth"]
    if kind == "opt":
        # OPT-Tree leaves the beam to the budget, and its threshold is about t_draft / t_target.
        return DynamicTree(depth, beam=nodes, nodes=nodes, gain=options["gain"])
    beam = options["beam"]
    if "nodes" not in written:
        nodes = min(nodes, beam + (depth - 1) * beam**2)
    return DynamicTree(depth, beam, nodes)


def _options(words: Sequence[str], defaults: dict[str, Any]) -> dict[str, Any]:
    options = dict(defaults)
    for word in words:
        key, _, value = word.partition("=")
        if key not in defaults:
            raise ValueError(f"unknown key {key!r}, not one of {', '.join(defaults)}")
        options[key] = _number(value, type(defaults[key]))
    return options


def _number(text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a {'whole ' if kind is int else ''}number") from None


def _static(content: Any) -> Tree:
    content = {"paths": content} if isinstance(content, list) else content
    known = ("parents", "paths", "stop")
    for key in content.keys() - set(known):
        raise ValueError(f"unknown key {key!r}; {nearest(key, known)}")
    tree = _tree_of(content["paths"]) if "paths" in content else Tree(tuple(content["parents"]))
    return replace(tree, stop=content.get("stop", 0.0))


def _tree_of(paths: Sequence[Sequence[int]]) -> Tree:
    known = {tuple(path) for path in paths}
    for *above, rank in known:
        if (above and tuple(above) not in known) or (rank and (*above, rank - 1) not in known):
            raise ValueError(
                f"path {[*above, rank]}: list its parent and its siblings of lower rank too"
            )
    return tree_of_paths(known)
