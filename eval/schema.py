"""What results.json holds: the types of every row. What the words mean is in `eval.definitions`."""

from typing import Any, Literal, TypedDict

SCHEMA_VERSION: Literal[5] = 5

SuiteKind = Literal["id", "ood"]
"""Whether a prompt set is in distribution (ID, what the drafts were aligned on) or out of it (OOD)."""


class Interval(TypedDict):
    """A figure with its 95 % interval."""

    value: float | None
    low: float | None
    high: float | None


class Difference(Interval):
    """A paired difference of two pooled ratios over the same prompts, with its 95 % interval."""

    prompts: int


class Estimate(Difference):
    """A figure with its 95 % interval. None means undefined (zero denominator) or not estimable (one prompt)."""

    mean_per_prompt: float | None
    numerator: float
    denominator: float


class Transfer(Interval):
    """Gain OOD over gain ID. `undefined` says in words why `value` is None."""

    undefined: str | None
    gain_id: Difference
    gain_ood: Difference


class Identical(TypedDict):
    """Greedy outputs that equal the target's own, and how near a tie the others were: `largest_gap` is, over those that
    differ, the largest difference of the target's two logits at the first token that differs (None when none does).
    """

    same: int
    of: int
    largest_gap: float | None


class OfDraft(TypedDict):
    """The keys that name a row about all sets of a kind."""

    draft: str
    kind: SuiteKind
    temperature: float


class OfSet(OfDraft):
    """The keys that name a row about one set; `domain` None stands for all sets of the kind pooled."""

    domain: str | None


class OfMethod(OfSet):
    """The keys that name a row about one way of decoding."""

    tree: str
    verifier: str


class AlphaRow(OfSet):
    """Expected acceptance of one draft on one suite (`domain`), or on all suites of a kind (`domain` None).

    `missing_mass` is None in results before schema 5.
    """

    alpha: Estimate
    alpha_greedy_draft: Estimate | None
    alpha_match: Estimate | None
    missing_mass: Estimate | None
    gain: Difference | None
    per_prompt: dict[str, list[Any]] | None


class DecodingRow(OfMethod):
    """Measured decoding of one draft with one tree and verifier. `counts` are totals over prompts."""

    lossless: bool
    tau: Estimate
    tau_gain: Difference | None
    alpha_mcsd: Estimate
    accept_at: list[Estimate]
    headroom: Estimate | None
    identical_outputs: Identical | None
    counts: dict[str, int]
    per_prompt: dict[str, list[Any]] | None


class PredictionRow(OfMethod):
    """tau of one draft with one tree and verifier as it is predicted without decoding, and `measured` where it was.

    `accept_at`: predicted accept@d by depth. None where something is not known. "tau, predicted" in `eval.definitions`
    says what the figures are.
    """

    tau: Estimate
    run_low: float | None
    run_high: float | None
    accept_at: list[Estimate]
    independent: float | None
    measured: float | None
    inside: bool | None


class SpeedRow(TypedDict):
    """Clock times of one decoding method at batch 1; `draft` None is the target alone."""

    draft: str | None
    domain: str | None
    kind: SuiteKind
    temperature: float
    tree: str | None
    verifier: str | None
    lossless: bool
    tokens_per_s: float | None
    latency_s_per_token: float | None
    speedup: Estimate | None
    tokens: int
    prefill_s: float
    decode_s: float
    per_prompt: dict[str, list[Any]] | None


class TransferRow(Transfer):
    """The share of a draft's gain that survives on one OOD suite, or on all of them pooled (`domain` None)."""

    draft: str
    domain: str | None
    temperature: float


class SuiteRow(TypedDict):
    """One prompt set; done + skipped + failed == read.

    `prompt_hashes`: 16 hex digits of every prompt's tokens, by which two evaluations are paired and a draft's training
    prompts are found again; empty in results before schema 4.
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
    digest: str


class BaselineRow(TypedDict):
    """The target's own continuations of one suite."""

    domain: str
    kind: SuiteKind
    temperature: float
    tokens: int
    stopped: int
    cut: int
    output_tokens: list[int]


class Training(TypedDict):
    """How a draft was aligned, from the `draftsmith.json` beside its weights."""

    objective: str
    response_tokens: int
    epochs: float
    steps: int
    best_step: int


class ModelRow(TypedDict):
    """What a model is, beyond its name.

    `kind` is the proposer that drafts with it, "draft" for a language model, the target too. `context` is None where
    the config does not say and for heads, which reach as far as their target. `quantize` is "nf4" or "none".
    `training` is None for a model that `draftsmith train` did not align.
    """

    name: str
    kind: str
    fingerprint: str
    model_type: str
    parameters: int
    memory_bytes: int
    vocabulary: int
    context: int | None
    dtype: str
    quantize: str
    device: str
    training: Training | None


class SpeedConditions(TypedDict):
    """How quiet the machine was while one set was timed at one temperature.

    `load`: its load average over one minute, before and after. `spread`: the distance of the quartiles of the target's
    own seconds per token over prompts, as a share of their median; None for fewer than four prompts. `busy`: one of
    them was too large for these clock times to be relied on (`eval.remarks` says from where on).
    """

    domain: str
    temperature: float
    load: list[float]
    spread: float | None
    busy: bool


class CostRow(OfMethod):
    """What a step on one tree cost on this machine, in steps of the target alone, by the clock over
    the first prompts. `draft_call`: one forward of the draft. `verify`: the target's forward over the tree and
    the choice among its tokens.
    """

    draft_call: float
    verify: float


class Speed(TypedDict):
    """Everything that is clock time: two runs of one configuration differ here, in `clock` and in remarks on it."""

    domains: list[SpeedRow]
    overall: list[SpeedRow]
    conditions: list[SpeedConditions]
    costs: list[CostRow]


class WhyRow(OfDraft):
    """alpha at the positions of one bin, all sets of a kind pooled. `sign`: 1 or -1 where the gain over the base is not
    zero, Holm's correction over the bins of the draft; None for the base.
    """

    by: str
    bin: str
    alpha: Estimate
    gain: Difference | None
    sign: int | None


class LostToken(OfDraft):
    """A token of the text at which a draft lost acceptance to the base: alpha of both, and the change in all."""

    token: str
    count: int
    alpha: float
    base_alpha: float
    change: float


class CalibrationRow(OfDraft):
    """By tenths of the draft's confidence: the mass drafted, its mean confidence and how much of it was accepted.
    `ece`: the mean distance of the two over the mass drafted, with its interval.
    """

    ece: float
    low: float | None
    high: float | None
    bins: list[dict[str, float | None]]


class CandidatesRow(OfDraft):
    """Acceptance of the first token with `k` candidates: drawn in turn, or the draft's most probable (`way`)."""

    way: str
    k: list[int]
    acceptance: list[Estimate]


class ViewedText(TypedDict):
    """A continuation of the target token by token: text, alpha, p and q of it, and the draft's first guesses."""

    draft: str
    domain: str
    temperature: float
    prompt_id: str
    tokens: list[dict[str, Any]]


class DiagnosisRows(TypedDict):
    """Why a draft is accepted or not."""

    why: list[WhyRow]
    lost: list[LostToken]
    calibration: list[CalibrationRow]
    candidates: list[CandidatesRow]
    viewed: list[ViewedText]


class Remark(TypedDict):
    """Something that makes figures mean less than they seem to; `eval.remarks` says when."""

    about: Literal[
        "trained_on",
        "same_prompts",
        "near_duplicates",
        "large_draft",
        "same_draft",
        "widened_target",
        "options",
        "busy_machine",
    ]
    text: str


class ResultsDocument(TypedDict):
    """results.json."""

    schema_version: Literal[5]
    definitions: dict[str, str]
    remarks: list[Remark]
    config: dict[str, Any]
    base: str
    drafts: list[str]
    temperatures: list[float]
    methods: list[dict[str, Any]]
    models: dict[str, ModelRow]
    suites: list[SuiteRow]
    baselines: list[BaselineRow]
    alpha: list[AlphaRow]
    decoding: list[DecodingRow]
    overall_alpha: list[AlphaRow]
    overall_decoding: list[DecodingRow]
    predictions: list[PredictionRow]
    transfer: list[TransferRow]
    diagnosis: DiagnosisRows | None
    provenance: dict[str, Any]
    speed: Speed
    clock: dict[str, Any]
