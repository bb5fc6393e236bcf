"""Types of what results.json holds."""

from typing import Literal, NotRequired

# pydantic reads those of `typing` only from Python 3.12 on.
from typing_extensions import TypedDict

from draftsmith.eval.counts import TARGET as TARGET

SuiteKind = Literal["id", "ood"]
"""A prompt set is in distribution (ID: what the drafts were aligned on) or out of distribution
(OOD).
"""
KINDS: tuple[SuiteKind, ...] = ("id", "ood")

How = tuple[str, str]
"""Tree and verifier of a decoding method."""

BUSY = "busy_machine"
"""Subject of the remark on a busy machine."""


class Estimate(TypedDict):
    """A figure with its 95 % interval over `n` groups of equal prompts. None: divided by zero, or
    no interval (one group).
    """

    value: float | None
    low: float | None
    high: float | None
    n: int


class Row(TypedDict):
    """One figure. `set` is None for all sets of a kind pooled.

    `draft` is `target` for the target alone. `tree` and `rule` are set for figures of decoding,
    `depth` for those by depth, `part` for those of a part of the answers. `n` is the number of
    groups of equal prompts. `seed_low` and `seed_high` are those of the lowest and highest of
    several training seeds.
    """

    figure: str
    draft: str
    set: str | None
    kind: SuiteKind
    temperature: float
    tree: str | None
    rule: str | None
    depth: int | None
    part: str | None
    value: float | None
    low: float | None
    high: float | None
    n: int
    seed_low: float | None
    seed_high: float | None
    seeds: int | None


class Training(TypedDict):
    """How a draft was aligned, from the `draftsmith.json` beside its weights."""

    objective: str
    response_tokens: int
    steps: int


class ModelRow(TypedDict):
    """A model. `kind` is the proposer that drafts with it; "draft" is a language model, the target
    too; with `JOINED` before it, lookup comes first.

    `read_per_token`: those parameters that a token reads; older results have none. `training` is
    None unless `draftsmith train` made it. `engine`: of a draft, the first engine that serves it.
    """

    name: str
    kind: str
    fingerprint: str
    model_type: str
    parameters: int
    read_per_token: NotRequired[int]
    memory_bytes: int
    vocabulary: int
    dtype: str
    quantize: str
    device: str
    training: Training | None
    engine: NotRequired[str | None]


def read_of(row: ModelRow) -> int:
    """Parameters that a token reads; all of them where results do not say."""
    return row.get("read_per_token", row["parameters"])


class Conditions(TypedDict):
    """How quiet the machine was while one set was timed at one temperature.

    `load`: load average before and after. `spread`: interquartile range over median of the target's
    seconds per token, None for fewer than four prompts. `busy`: one of the two is too large to rely
    on the timings (`eval.remarks`).
    """

    domain: str
    temperature: float
    load: list[float]
    spread: float | None
    busy: bool


class Remark(TypedDict):
    """A reason to trust the figures less; `eval.remarks` makes them."""

    about: str
    text: str
