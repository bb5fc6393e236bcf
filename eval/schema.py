"""The types of results.json, whose JSON Schema is docs/results.schema.json. definitions.yaml says
what figures mean.
"""

from pathlib import Path
from typing import Any, Literal, NamedTuple, NotRequired

# pydantic reads those of `typing` only from Python 3.12 on.
from typing_extensions import TypedDict

from draftsmith.core.io import JsonObject

SCHEMA_VERSION: Literal[6] = 6

SuiteKind = Literal["id", "ood"]
"""A prompt set is in distribution (ID: what the drafts were aligned on) or out of distribution
(OOD).
"""
KINDS: tuple[SuiteKind, ...] = ("id", "ood")

TARGET = "target"
"""Name of the target in the column `draft`, for figures of the target decoding alone."""

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
    """One figure. `domain` is a prompt set, or `id` or `ood` for all sets of the kind pooled.

    `draft` is `target` for the target alone. `tree` and `verifier` are set for figures of decoding.
    `at` is the depth of accept, the number of candidates, or the tenth of the draft's confidence.
    `part` is a kind of position or a token. `n` is the number of groups of equal prompts; of
    outputs for `identical` and `largest_gap`, of tokens for the `lost` figures.
    """

    figure: str
    draft: str
    domain: str
    kind: SuiteKind
    temperature: float
    tree: str | None
    verifier: str | None
    at: int | None
    part: str | None
    value: float | None
    low: float | None
    high: float | None
    n: int


class RowKey(NamedTuple):
    """What a figure is about. `tree` and `verifier` are None unless it is a figure of decoding."""

    draft: str
    domain: str
    temperature: float
    tree: str | None = None
    verifier: str | None = None


class Counts(TypedDict):
    """Per-prompt sums behind the rows of one set, in the order of its prompts; of `target`, its
    continuations.
    """

    draft: str
    domain: str
    temperature: float
    of: Literal["target", "alpha", "decoding", "speed"]
    tree: str | None
    verifier: str | None
    per_prompt: dict[str, list[Any]]


class SuiteRow(TypedDict):
    """One prompt set; done + skipped + failed == read.

    `prompt_hashes`: 16 hex digits per prompt, from its tokens. They pair two evaluations.
    `prompt_groups`: a number per prompt, the same for prompts of one group, also
    in several sets; older results have none.
    """

    name: str
    kind: SuiteKind
    source: str
    read: int
    done: int
    skipped: int
    failed: int
    skipped_rows: list[dict[str, str]]
    prompt_ids: list[str]
    prompt_tokens: list[int]
    prompt_hashes: list[str]
    prompt_groups: NotRequired[list[int]]
    digest: str


class Training(TypedDict):
    """How a draft was aligned, from the `draftsmith.json` beside its weights.

    heldout: steps and held-out alphas, if the metrics of the training are beside the weights.
    """

    objective: str
    response_tokens: int
    epochs: float
    steps: int
    best_step: int
    heldout: NotRequired[list[tuple[int, float]]]


class ModelRow(TypedDict):
    """A model. `kind` is the proposer that drafts with it; "draft" is a language model, the target
    too; with `JOINED` before it, lookup comes first.

    `read_per_token`: those parameters that a token reads; older results have none. `context` is
    None if the config does not say, and for heads. `training` is None unless
    `draftsmith train` made it.
    """

    name: str
    kind: str
    fingerprint: str
    model_type: str
    parameters: int
    read_per_token: NotRequired[int]
    memory_bytes: int
    vocabulary: int
    context: int | None
    dtype: str
    quantize: str
    device: str
    training: Training | None


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


class ResultsDocument(TypedDict):
    """results.json: every figure is a row of `rows`, every sum behind them in `counts`."""

    schema_version: Literal[6]
    definitions: dict[str, str]
    remarks: list[Remark]
    config: JsonObject
    base: str
    drafts: list[str]
    temperatures: list[float]
    methods: list[JsonObject]
    models: dict[str, ModelRow]
    suites: list[SuiteRow]
    rows: list[Row]
    counts: list[Counts]
    conditions: list[Conditions]
    provenance: JsonObject
    clock: JsonObject


def definitions() -> dict[str, str]:
    """Return the meaning of every figure, from definitions.yaml."""
    import yaml

    file = Path(__file__).parent / "definitions.yaml"
    return dict(yaml.safe_load(file.read_text(encoding="utf-8")))
