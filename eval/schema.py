"""What results.json holds: the types of every row, and what every word in it means. Imports nothing heavy."""

from typing import Any, Literal, TypedDict

SCHEMA_VERSION: Literal[5] = 5

SuiteKind = Literal["id", "ood"]
"""Whether a prompt set is in distribution (ID, what the drafts were aligned on) or out of it (OOD)."""

DEFINITIONS: dict[str, str] = {
    "alpha": (
        "Expected acceptance of one draft token: the mean over the positions of the target's own continuations (up to "
        "and including the end token) of sum_x min(p(x), q(x)), where p and q are what target and draft would sample "
        "from at the decoding temperature. Needs no decoding loop; at temperature 0 it is how often the two most "
        "probable tokens agree. Pooled over positions. Of a head it is the first token it drafts, from the target's "
        "own states. A token that the draft does not have counts as q = 0."
    ),
    "alpha_greedy_draft": (
        "The same where the draft takes its most probable token and the target samples: the mean of p(argmax q). What "
        "llama.cpp accepts, and vLLM where it keeps no draft probabilities."
    ),
    "alpha_match": (
        "The same where the draft samples and a token is kept when the target samples the same: the mean of sum_x "
        "p(x) q(x)."
    ),
    "missing_mass": (
        "The target's probability on tokens that the draft cannot draft, the mean over the positions of alpha: those "
        "that it does not share (another tokenizer) or has no output row for (a draft vocabulary). alpha is at most "
        "1 minus it."
    ),
    "alpha_string": (
        "Of a draft of another tokenizer, by string-level match (decode --proposer string_match): the mean of p of the "
        "token that the draft's text begins with in the target's tokens, when the draft takes its most probable "
        "tokens and writes 4 of them; 0 where the text begins with none. At up to 16 positions per prompt, spread "
        "evenly."
    ),
    "round_trip": (
        "Of a draft of another tokenizer: the share of the target's continuations that its tokens can write without "
        "loss."
    ),
    "accept@d": (
        "Measured: how often depth d of the draft was accepted, among the steps in which depth d-1 was accepted and a "
        "token at depth d was on offer and could still be emitted. accept@1 is not alpha: alpha is a mean over all "
        "positions of the text, accept@1 over those at which steps begin, and steps begin more often where the draft "
        "was just refused. Predictions weigh positions as decoding visits them."
    ),
    "tau, predicted": (
        "Without a decoding loop: tokens of the target's own continuations over the target calls that decoding them "
        "would be expected to take, from the acceptance of every token of the text at every depth (eval/predict.py). "
        "low and high: 95 % bootstrap interval of the expectation. run_low and run_high: where tau of one decoding "
        "run over as many prompts falls in at least 95 % of cases; `inside` says whether the measured one does. "
        "`independent`: 1 + alpha + alpha^2 + ..., as if tokens of a chain were accepted independently."
    ),
    "tau": (
        "Block efficiency, measured: tokens emitted per call of the target, the target's own extra token included; 1 "
        "for the target alone. Tokens after the end token or past the length limit do not count."
    ),
    "alpha_mcsd": (
        "Accepted depth over offered depth, summed over steps, as the MCSD paper defines its acceptance rate. It "
        "falls as trees deepen even with an unchanged draft; compare it only between equal trees."
    ),
    "headroom": (
        "How much more often a candidate at the root of the tree could be accepted: the optimal-transport bound on "
        "the acceptance of that many candidates, over how often the verifier accepts one, simulated with the same p "
        "and q at the same positions (up to 16 per prompt, spread evenly over the target's own continuation). 1 is "
        "optimal. About the root only; not given at temperature 0, where every lossless verifier reaches the bound, "
        "for lossy verifiers, and for trees whose shape depends on what was drafted."
    ),
    "speedup": (
        "Tokens per second over those of the target alone, on the same engine, in the same process, at batch 1, on "
        "the same prompts, runs interleaved in rotating order after a warm-up. The prefill is not included."
    ),
    "gain": "A draft's figure minus the base draft's on the same prompts, paired by prompt.",
    "transfer": (
        "Gain in alpha out of distribution over gain in alpha in distribution (all ID sets pooled). Undefined unless "
        "the interval of the gain in distribution lies above zero."
    ),
    "calibration": (
        "Whether a draft is as sure as it should be: of the tokens drafted with one confidence (the draft's "
        "probability; at temperature 0, that at temperature 1), the share that is accepted. ECE is the mean distance "
        "of the two over ten bins. Of a calibrated draft the acceptance equals the confidence, and trees that grow by "
        "it suit. A draft's 64 most probable tokens at each position are counted."
    ),
    "candidates": (
        "Acceptance of the first drafted token when the verifier has k of them: the draft's k most probable (the mass "
        "of p on them, which a lossless rule for a fixed set accepts), or k drawn from q without replacement and "
        "tried in turn (MCSD), at up to 4 positions per prompt."
    ),
    "interval": (
        "95 % percentile bootstrap over prompts: prompts are drawn with replacement and every figure is computed "
        "again from per-prompt sums, divided last. Differences and ratios use the same draw on both sides. Several "
        "sets are each resampled on their own. None when a set has a single prompt."
    ),
    "identical_outputs": (
        "At temperature 0: how many prompts got, token for token, the output of the target decoding alone."
    ),
    "lossless": (
        "The verifier leaves the target's output distribution unchanged. With lossless: false the outputs follow "
        "another distribution, and tokens per call or per second are not comparable as they stand."
    ),
    "tokens/s, latency": (
        "Tokens per second of decoding, and its inverse, seconds per token, at batch 1; the prefill is left out."
    ),
    "memory": (
        "Of a model: its parameters, buffers and quantisation scales as they are loaded. Peak memory: the most that "
        "PyTorch held on the GPU during the run; on a CPU, the most that the whole process held."
    ),
}


class Difference(TypedDict):
    """A paired difference of two pooled ratios over the same prompts, with its 95 % interval."""

    value: float | None
    low: float | None
    high: float | None
    prompts: int


class Estimate(Difference):
    """A figure with its 95 % interval. None means undefined (zero denominator) or not estimable (one prompt)."""

    mean_per_prompt: float | None
    numerator: float
    denominator: float


class Identical(TypedDict):
    """Greedy outputs that equal the target's own, and how near a tie the others were: `largest_gap` is, over those that
    differ, the largest difference of the target's two logits at the first token that differs (None when none does).
    """

    same: int
    of: int
    largest_gap: float | None


class OfDraft(TypedDict):
    """What a row about all sets of a kind is about."""

    draft: str
    kind: SuiteKind
    temperature: float


class OfSet(OfDraft):
    """What a row about one set is about; `domain` None stands for all sets of the kind pooled."""

    domain: str | None


class AlphaRow(OfSet):
    """Expected acceptance of one draft on one suite (`domain`), or on all suites of a kind (`domain` None).

    `missing_mass` is None in results before schema 5; `alpha_string` and `round_trip` are there for drafts of another
    tokenizer.
    """

    alpha: Estimate
    alpha_greedy_draft: Estimate | None
    alpha_match: Estimate | None
    missing_mass: Estimate | None
    alpha_string: Estimate | None
    round_trip: Estimate | None
    gain: Difference | None
    per_prompt: dict[str, list[Any]] | None


class DecodingRow(OfSet):
    """Measured decoding of one draft with one tree and verifier. `counts` are totals over prompts."""

    tree: str
    verifier: str
    lossless: bool
    tau: Estimate
    tau_gain: Difference | None
    alpha_mcsd: Estimate
    accept_at: list[Estimate]
    headroom: Estimate | None
    identical_outputs: Identical | None
    counts: dict[str, int]
    per_prompt: dict[str, list[Any]] | None


class PredictionRow(OfSet):
    """tau of one draft with one tree and verifier as it is predicted without decoding, and `measured` where it was.

    `accept_at`: predicted accept@d by depth. None where something is not known: see DEFINITIONS["tau, predicted"].
    """

    tree: str
    verifier: str
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


class TransferRow(TypedDict):
    """The share of a draft's gain that survives on one OOD suite, or on all of them pooled (`domain` None)."""

    draft: str
    domain: str | None
    temperature: float
    value: float | None
    low: float | None
    high: float | None
    undefined: str | None
    gain_id: Difference
    gain_ood: Difference


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


class Speed(TypedDict):
    """Everything that is clock time: two runs of one configuration differ here, in `clock` and in remarks on it."""

    domains: list[SpeedRow]
    overall: list[SpeedRow]
    conditions: list[SpeedConditions]


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
    """results.json. `migrated_from` is the schema version it was written in, None for the present one."""

    schema_version: Literal[5]
    migrated_from: int | None
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


# Keys whose values are clock time; all others are the same in a run that was killed and one that was not.
CLOCK_KEYS = ("speed", "clock", "remarks")
