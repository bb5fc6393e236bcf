"""Tree specs: what a user writes for a tree, such as `kary:4,2,2`, and the shape that it stands for. Needs no torch."""

import difflib
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from decode.tree import MAX_NODES, DynamicTree, Tree, TreeShape, tree_of_paths


@dataclass(frozen=True)
class TreeKind:
    """One kind of tree, as help texts and tables print it. `example` is a spec that works as it is, given the file
    that it names.
    """

    syntax: str
    title: str
    paper: str
    example: str


# `nodes` are drafted nodes everywhere, without the root; EAGLE's code counts the root in its `total_token`, so its
# default of 60 is nodes=59 here, while its paper speaks of 60 draft tokens.
TREES: dict[str, TreeKind] = {
    "chain": TreeKind("chain:N[,stop=P]", "N tokens, one after another", "arXiv 2211.17192", "chain:4"),
    "kary": TreeKind(
        "kary:K1,K2,...[,stop=P]", "K1 candidates, K2 after each of them, ...", "arXiv 2401.06706", "kary:4,2,2"
    ),
    "static": TreeKind(
        "static:FILE", "a tree from JSON: parents, or paths as Medusa's", "arXiv 2401.10774", "static:tree.json"
    ),
    "sequoia": TreeKind(
        "sequoia:FILE", "the best tree for a measured acceptance", "arXiv 2402.12374", "sequoia:acceptance.json"
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
        "as `draftsmith plan` chose",
        "arXiv 2402.12374",
        "auto:plan.json",
    ),
}

# The keys of the two files, each with a value that works.
_STATIC = {"parents": "[-1, -1, 0]", "paths": "[[0], [1], [0, 0]]", "stop": "0.2"}
_SEQUOIA = {
    "acceptance": "[0.6, 0.15, 0.05]",
    "nodes": "64",
    "depth": "8",
    "verify_s": '{"1": 0.02, "8": 0.021}',
    "draft_s": "0.002",
}


def kary(branching: tuple[int, ...]) -> Tree:
    """The tree in which every node at depth d has `branching[d]` children; `kary((1, 1))` is a
    chain of two.
    """
    parents: list[int] = []
    level = [-1]
    for count in branching:
        first = len(parents)
        parents += [parent for parent in level for _ in range(count)]
        level = list(range(first, len(parents)))
    return Tree(tuple(parents))


def parse_tree(spec: str, read: Callable[[str], object] | None = None) -> TreeShape:
    """The shape that a spec of `TREES` stands for.

    `read(path)` returns the parsed JSON of a file that a spec names; this package opens none itself. Raises ValueError
    in one line, naming the spec, what is wrong and what would work; what `read` raises passes through.

    A static file holds `{"parents": [-1, -1, 0], "stop": 0.2}` (breadth-first, -1 is the root; `stop` may be left out),
    or `paths` of child ranks in any order in place of `parents`, `{"paths": [[0], [1], [0, 0]]}`, or just the list of
    paths, as Medusa and EAGLE write their trees. A sequoia file holds `acceptance`, `nodes` and
    `depth` as in `decode.sequoia.optimal_tree`; with `verify_s` and `draft_s` (`best_size`) too, `nodes` and `depth`
    are bounds and the cheapest size within them is taken.
    """
    kind, colon, body = spec.partition(":")
    where = f"tree '{_shown(spec)}'"
    if kind not in TREES:
        near = difflib.get_close_matches(kind[:40], TREES, 1)
        others = ", ".join(list(TREES)[2:])
        fix = f"write {TREES[near[0]].example}" if near else f"write chain:4 or kary:4,2,2, or one of {others}"
        raise ValueError(f"{where}: unknown kind '{_shown(kind)}'; {fix}")
    content: object = None
    if kind in ("static", "sequoia", "auto"):
        if not body:
            raise ValueError(f"{where}: names no file; write for example {TREES[kind].example}")
        if read is None:
            raise ValueError(f"{where}: a file cannot be read here; pass parse_tree a reader, or write chain:4")
        content = read(body)
    try:
        match kind:
            case "static":
                return _static(content)
            case "sequoia":
                return _sequoia(content)
            case "auto":
                return _planned(content)
            case "eagle2" | "opt":
                return _growth(kind, body.split(",") if colon else [])
            case _:
                return _counted(kind, body)
    except ValueError as error:
        raise ValueError(f"{where}: {str(error).removeprefix('tree: ')}") from None


def _shown(text: str) -> str:
    """Text for an error message: one line, and not a long one."""
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= 120 else text[:117] + "..."


def _counted(kind: str, body: str) -> Tree:
    example = TREES[kind].example
    words = body.split(",")
    first = next((place for place, word in enumerate(words) if "=" in word), len(words))
    numbers = ",".join(words[:first])
    pattern = r"[0-9]+" if kind == "chain" else r"[0-9]+(,[0-9]+)*"
    if not re.fullmatch(pattern, numbers):
        raise ValueError(f"'{_shown(numbers)}' is not what follows '{kind}:'; write for example {example}")
    counts = tuple(_whole(number) for number in words[:first])
    if min(counts) < 1:
        raise ValueError(f"every number must be at least 1; write for example {example}")
    # Counted before it is built, so that `chain:1000000000` or `kary:9,9,9,9,9,9` costs nothing.
    nodes, level = (counts[0], 0) if kind == "chain" else (0, 1)
    for count in counts if kind == "kary" else ():
        level *= count
        nodes += level
        if nodes > MAX_NODES:
            break
    if nodes > MAX_NODES:
        raise ValueError(f"more than {MAX_NODES} nodes; use smaller numbers, for example {example}")
    options = _options(words[first:], ("stop",), f"{example},stop=0.4")
    tree = kary((1,) * counts[0] if kind == "chain" else counts)
    return replace(tree, stop=_decimal(options, "stop", 0.0))


def _growth(kind: str, words: Sequence[str]) -> DynamicTree:
    keys = ("depth", "beam", "nodes") if kind == "eagle2" else ("nodes", "depth", "gain")
    options = _options(words, keys, TREES[kind].example)
    nodes = _count(options, "nodes", 60 if kind == "eagle2" else 50)
    # Defaults are lowered to fit what the user wrote; what the user wrote is never changed.
    depth = _count(options, "depth", min(6 if kind == "eagle2" else 10, nodes))
    if kind == "eagle2":
        beam = _count(options, "beam", min(10, nodes))
        return DynamicTree(depth, beam, nodes if "nodes" in options else min(nodes, beam + (depth - 1) * beam**2))
    # OPT-Tree leaves the beam to the budget, and its threshold is about t_draft / t_target.
    return DynamicTree(depth, nodes, nodes, _decimal(options, "gain", 0.1))


def _options(words: Sequence[str], keys: Sequence[str], example: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"'{_shown(word)}' is not KEY=VALUE; write for example {example}")
        if key not in keys:
            raise ValueError(f"unknown key '{_shown(key)}'; {_nearest(key, keys)}, for example {example}")
        if key in found:
            raise ValueError(f"{key} is given twice; give it once, for example {example}")
        found[key] = value
    return found


def _nearest(key: str, keys: Collection[str]) -> str:
    near = difflib.get_close_matches(key[:40], keys, 1)
    return f"did you mean {near[0]}" if near else f"use {' or '.join(keys)}"


def _whole(digits: str) -> int:
    """A number from ASCII digits, at most 10**9: larger ones exceed every limit here just as well."""
    digits = digits.lstrip("0")
    return int(digits or "0") if len(digits) < 10 else 10**9


def _count(options: dict[str, str], key: str, default: int) -> int:
    if key not in options:
        return default
    if not re.fullmatch(r"[0-9]+", options[key]) or _whole(options[key]) < 1:
        raise ValueError(f"{key}={_shown(options[key])} is not a whole number from 1; write for example {key}=6")
    return _whole(options[key])


def _decimal(options: dict[str, str], key: str, default: float) -> float:
    if key not in options:
        return default
    if not re.fullmatch(r"[0-9]*\.?[0-9]+", options[key]) or not float(options[key]) < 1:
        raise ValueError(f"{key}={_shown(options[key])} is not in [0, 1); write for example {key}=0.2")
    return float(options[key])


def _static(content: object) -> Tree:
    fields = _fields({"paths": content} if isinstance(content, list) else content, _STATIC, ())
    if ("parents" in fields) == ("paths" in fields):
        raise ValueError(f"expected either parents, such as {_STATIC['parents']}, or paths, such as {_STATIC['paths']}")
    key = "parents" if "parents" in fields else "paths"
    entries = fields[key]
    if not isinstance(entries, list) or not 1 <= len(entries) <= MAX_NODES:
        raise ValueError(f"{key}: expected a list of 1 to {MAX_NODES} nodes, such as {_STATIC[key]}")
    if key == "paths":
        return replace(_of_paths(entries), stop=_number(fields.get("stop", 0.0), "stop", _STATIC))
    if not all(_is_whole(parent) for parent in entries):
        raise ValueError(f"parents: expected whole numbers, such as {_STATIC['parents']}")
    return Tree(tuple(entries), _number(fields.get("stop", 0.0), "stop", _STATIC))


def _planned(content: object) -> Tree | DynamicTree:
    """The best tree of a plan: by its spec where it has one, else by its parents."""
    chosen = content.get("tree") if isinstance(content, dict) else None
    if not isinstance(chosen, dict) or not ({"spec", "parents"} & chosen.keys()):
        raise ValueError("the file is not a plan; write one with `draftsmith plan --out FILE`")
    if isinstance(chosen.get("spec"), str):
        return _written(chosen["spec"])
    return _static({"parents": chosen.get("parents")})


def _written(spec: str) -> Tree | DynamicTree:
    """A tree of a plan that has a spec."""
    kind, colon, body = spec.partition(":")
    if kind not in ("chain", "kary", "eagle2", "opt"):
        raise ValueError(f"tree '{_shown(spec)}' of the plan is unknown; write the plan anew with `draftsmith plan`")
    return _growth(kind, body.split(",") if colon else []) if kind in ("eagle2", "opt") else _counted(kind, body)


def _of_paths(paths: Sequence[object]) -> Tree:
    """The tree of paths of child ranks; ValueError where they do not make one."""
    known: set[tuple[int, ...]] = set()
    for path in paths:
        if not isinstance(path, list) or not path or not all(_is_whole(rank) and rank >= 0 for rank in path):
            raise ValueError(f"path {_shown(repr(path))}: expected a list of child ranks from 0, such as [0, 1]")
        if tuple(path) in known:
            raise ValueError(f"path {_shown(repr(path))}: listed twice; list it once")
        known.add(tuple(path))
    for *above, rank in sorted(known, key=lambda path: (len(path), path)):
        parent, path = _shown(repr(above)), _shown(repr([*above, rank]))
        if above and tuple(above) not in known:
            raise ValueError(f"path {path}: its parent {parent} is not listed; list {parent} too")
        if rank and (*above, rank - 1) not in known:
            raise ValueError(f"path {path}: its sibling of rank {rank - 1} is not listed; ranks have no gaps")
    return tree_of_paths(known)


def _sequoia(content: object) -> Tree:
    from decode.sequoia import best_size, optimal_tree  # brings numpy, which no other spec needs

    fields = _fields(content, _SEQUOIA, ("acceptance", "nodes", "depth"))
    acceptance = fields["acceptance"]
    if not isinstance(acceptance, list):
        raise ValueError(f"acceptance: expected a list of numbers, such as {_SEQUOIA['acceptance']}")
    rates = [_number(rate, "acceptance", _SEQUOIA) for rate in acceptance]
    for key in ("nodes", "depth"):
        if not _is_whole(fields[key]):
            raise ValueError(f"{key}: expected a whole number, such as {_SEQUOIA[key]}")
    nodes, depth = int(fields["nodes"]), int(fields["depth"])
    if ("verify_s" in fields) != ("draft_s" in fields):
        missing = "draft_s" if "verify_s" in fields else "verify_s"
        raise ValueError(
            f"key '{missing}' is missing; verify_s and draft_s go together, {missing}: {_SEQUOIA[missing]}"
        )
    if "verify_s" in fields:
        size = best_size(
            rates, nodes, depth, _verify_s(fields["verify_s"]), _number(fields["draft_s"], "draft_s", _SEQUOIA)
        )
        nodes, depth = size.nodes, size.depth
    return optimal_tree(rates, nodes, depth)


def _verify_s(value: object) -> dict[int, float]:
    if not isinstance(value, dict) or not all(re.fullmatch("[0-9]+", str(size)) for size in value):
        raise ValueError(f"verify_s: expected seconds by number of tokens, such as {_SEQUOIA['verify_s']}")
    return {_whole(str(size)): _number(seconds, "verify_s", _SEQUOIA) for size, seconds in value.items()}


def _fields(content: object, examples: dict[str, str], needed: Collection[str]) -> dict[str, Any]:
    """The keys of a file: all known, none of the needed ones missing."""
    if not isinstance(content, dict):
        example = ", ".join(f'"{key}": {examples[key]}' for key in needed or ("parents",))
        raise ValueError(f"the file holds a {type(content).__name__}; expected {{{example}}}")
    for key in content:
        if key not in examples:
            raise ValueError(f"unknown key '{_shown(str(key))}'; {_nearest(str(key), examples)}")
    for key in needed:
        if key not in content:
            raise ValueError(f"key '{key}' is missing; write for example \"{key}\": {examples[key]}")
    return content


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: object, key: str, examples: dict[str, str]) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f'{key}: {_shown(repr(value))} is not a number; write for example "{key}": {examples[key]}')
    # Too large for a float, or NaN: outside every range, so the range checks refuse it.
    return float(value) if abs(value) < 1e300 else float("inf")
