"""The tables of what works with each causal architecture of transformers, from the results of
`causal_types`.
"""

from collections.abc import Mapping
from itertools import chain

from benchmarks.lib.pages import table
from draftsmith.core.io import JsonObject

# Columns of the table, and the checks of `causal_types` that all must hold.
COLUMNS = {
    "distil": ("distil", "score"),
    "train": ("train", "be trained"),
    "MTP head": ("teach MTP",),
    "measure": ("measure",),
    "chain": ("chain",),
    "tree": ("tree",),
    "draft": ("draft chains",),
}
MEANING = {
    "distil": "write answers in batches, and teacher rows",
    "train": "teach a language model and every kind of head; be trained as a draft",
    "MTP head": "teach an MTP head, a layer of its own kind",
    "measure": "alpha of three drafts, without a tree",
    "chain": "decode with chains of drafts",
    "tree": "decode with trees of drafts",
    "draft": "draft chains for another target",
}
# What must hold for anything else to be tried.
_FIRST = ("tiny", "runs alike", "load")

Checks = Mapping[str, str]


def reasons(checks: Checks, column: str) -> list[str]:
    """Return why a type lacks a column; empty if it has it."""
    needed = [*_FIRST, *COLUMNS[column]]
    found = [checks[check] for check in needed if checks.get(check)]
    if not found and any(check not in checks for check in needed):
        return ["not tried"]
    return found


def every_type(document: JsonObject) -> str:
    """Return the table with a row for each type."""
    rows = []
    for name, checks in document["types"].items():
        by_column = {column: reasons(checks, column) for column in COLUMNS}
        why = dict.fromkeys(chain.from_iterable(by_column.values()))
        text = "; ".join(map(_in_short, why))
        cells = ["no" if found else "yes" for found in by_column.values()]
        rows.append([f"`{name}`", *cells, text.replace("|", "\\|")])
    return table(["type", *COLUMNS, "why not"], rows)


def _in_short(reason: str) -> str:
    """A reason without the advice of a refusal, which is the same for all."""
    told = reason.rpartition("tree: ")[2]
    return told.partition("; use chain")[0]


def totals(document: JsonObject) -> str:
    """Return the table with a row for each thing that a type may do."""
    types: Mapping[str, Checks] = document["types"]
    running = [checks for checks in types.values() if _runs(checks)]
    count = len(running)
    rows = []
    for column, meaning in MEANING.items():
        able = sum(not reasons(checks, column) for checks in running)
        rows.append([column, meaning, f"{able} of {count}"])
    return table(["works", "what was tried", "types"], rows)


def _runs(checks: Checks) -> bool:
    return all(checks.get(check) == "" for check in _FIRST)


def not_run(document: JsonObject) -> str:
    """Return the table of types that transformers does not run as causal models, with reasons."""
    rows = []
    for name, checks in document["types"].items():
        if not _runs(checks):
            why = [checks[check] for check in _FIRST if checks.get(check)]
            rows.append([f"`{name}`", why[0]])
    return table(["type", "why"], rows)
