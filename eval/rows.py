"""Make the rows of results.json from the measurements: one row per figure, each with its interval.

A new figure is one `group.row(...)` here, and its meaning in definitions.yaml.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Literal

import numpy as np

from draftsmith.core.asked_hash import Groups
from draftsmith.core.errors import without_secrets
from draftsmith.core.io import JsonObject, read_tree_file
from draftsmith.core.prompts import prompt_hash
from draftsmith.core.sampling import row_seed
from draftsmith.decode.stats import independent_tau
from draftsmith.eval.bootstrap import (
    Gain,
    PromptSums,
    Resamples,
    difference,
    estimate,
    joined,
    quotient,
    ratio,
    resamples,
    transfer,
)
from draftsmith.eval.decoding import (
    BY_SOURCE,
    COUNTED,
    COUNTED_BY_DEPTH,
    BaselineMeasurement,
    Identity,
    SpeedMeasurement,
)
from draftsmith.eval.diagnosis.root_step import RootStep
from draftsmith.eval.method import Method
from draftsmith.eval.predict import predicted_methods, run_interval
from draftsmith.eval.reading import AlphaMeasurement
from draftsmith.eval.remarks import conditions
from draftsmith.eval.schema import (
    KINDS,
    SCHEMA_VERSION,
    TARGET,
    Conditions,
    Counts,
    Estimate,
    ModelRow,
    Remark,
    ResultsDocument,
    Row,
    RowKey,
    SuiteKind,
    SuiteRow,
    definitions,
)
from draftsmith.eval.suites import Suite, prompt_groups

# Figures of alpha by the keys of their per-prompt sums, numerator and denominator.
ALPHAS = {
    "alpha_greedy_draft": ("greedy", "count"),
    "alpha_match": ("match", "count"),
    "missing_mass": ("missing", "count"),
    # Of a draft that copies.
    "offered": ("copied", "count"),
    "alpha_offered": ("copied_sum", "copied"),
    "alpha_drafted": ("drafted_sum", "drafted"),
}
# Of a joined draft, per target call: figures by the key of their counts.
SOURCES = dict(zip(("lookup_calls", "lookup_accepted", "draft_accepted"), BY_SOURCE, strict=True))
TIMED = ("emitted", "prefill_s", "decode_s")


@dataclass(frozen=True)
class Measured:
    """All finished measurements. Keys: (suite, temperature), then the draft, then the method."""

    baselines: dict[tuple[str, float], BaselineMeasurement]
    alphas: dict[tuple[str, float, str], AlphaMeasurement]
    decodings: dict[tuple[str, float, str, Method], JsonObject]
    speeds: dict[tuple[str, float], SpeedMeasurement]


@dataclass(frozen=True)
class Group:
    """One suite (`domain` is its name) or all of a kind pooled (`domain` is the kind) at one
    temperature.
    """

    domain: str
    kind: SuiteKind
    suites: list[Suite]
    temperature: float
    picks: Resamples

    def parts(self, measurements: Mapping[Any, Any], *key: Any) -> list[Any]:
        """The measurement of every suite under a key: nothing, a draft, or a draft and a method."""
        return [measurements[suite.name, self.temperature, *key] for suite in self.suites]

    def row(
        self,
        figure: str,
        draft: str,
        value: PromptSums | Estimate | float | None,
        method: Method | None = None,
        *,
        at: int | None = None,
        part: str | None = None,
        n: int | None = None,
    ) -> Row:
        """One row about this group. Sums get their interval; a plain number has none."""
        if isinstance(value, PromptSums):
            value = estimate(value, self.picks)
        elif not isinstance(value, dict):
            known = None if value is None else float(value)
            count = self.picks.groups if n is None else n
            value = Estimate(value=known, low=None, high=None, n=count)
        return Row(
            figure=figure,
            draft=draft,
            domain=self.domain,
            kind=self.kind,
            temperature=self.temperature,
            tree=method.tree if method else None,
            verifier=method.verifier if method else None,
            at=at,
            part=part,
            **value,
        )


@dataclass(frozen=True)
class Setting:
    """Suites of an evaluation, methods by draft, and how its intervals are drawn."""

    suites: Sequence[Suite]
    base: str
    temperatures: Sequence[float]
    methods: Mapping[str, Sequence[Method]]
    bootstrap: int
    seed: int

    @cached_property
    def prompt_groups(self) -> dict[str, list[int]]:
        """By suite, the group of each prompt."""
        return prompt_groups(self.suites)

    @property
    def all_methods(self) -> list[Method]:
        """The methods of all drafts, the base's first."""
        of_drafts = [self.methods[self.base], *self.methods.values()]
        return list(dict.fromkeys(chain.from_iterable(of_drafts)))

    def drafts_of(self, method: Method) -> list[str]:
        """The drafts that are decoded with a method."""
        return [draft for draft in self.methods if method in self.methods[draft]]

    def groups(self) -> Iterator[Group]:
        """Every suite by itself, then all of a kind pooled; each at every temperature."""
        for suite in self.suites:
            yield from self._groups(suite.name, suite.kind, [suite])
        for kind in KINDS:
            if suites := [suite for suite in self.suites if suite.kind == kind]:
                yield from self._groups(kind, kind, suites)

    def _groups(self, domain: str, kind: SuiteKind, suites: list[Suite]) -> Iterator[Group]:
        picks = self.picks(suites, [len(suite.prompts) for suite in suites])
        for temperature in self.temperatures:
            yield Group(domain, kind, suites, temperature, picks)

    def picks(self, suites: Sequence[Suite], counts: Sequence[int]) -> Resamples:
        """Resample the first prompts of some suites by their groups. A suite has the same
        resamples wherever it appears, but that suites that share a group are resampled as one.
        """
        groups = []
        for suite, count in zip(suites, counts, strict=True):
            groups.append(self.prompt_groups[suite.name][:count])
        strata = Groups(groups).numbers()
        stratum_P = np.repeat(strata, [len(each) for each in groups])
        # In the order of memory that `resamples` gives, so that sums round alike.
        weights_RP = np.empty((self.bootstrap, len(stratum_P)), order="F")
        sizes: list[int] = []
        for stratum in dict.fromkeys(strata):
            members = [index for index, each in enumerate(strata) if each == stratum]
            names = "+".join(suites[index].name for index in members)
            of_prompts = list(chain.from_iterable(groups[index] for index in members))
            seed = row_seed(self.seed, f"bootstrap/{names}/{len(set(of_prompts))}")
            drawn = resamples(of_prompts, self.bootstrap, seed)
            weights_RP[:, stratum_P == stratum] = drawn.weights_RP
            sizes += drawn.sizes
        return Resamples(weights_RP, tuple(sizes))


def _at_depth(parts: Sequence[Any], depth: int) -> PromptSums:
    """accept@depth. Prompts that never reached this depth contribute 0/0."""

    def counts(key: str) -> list[float]:
        return [row[depth - 1] if len(row) >= depth else 0 for row in joined(parts, key)]

    return PromptSums.of(counts("accepted_by_depth"), counts("reached_by_depth"))


def alpha_rows(setting: Setting, measured: Measured) -> Iterator[Row]:
    """alpha of every draft on every group, its gain over the base, and the transfer of the ID gain
    to OOD groups.
    """

    def gain(group: Group, draft: str) -> Gain:
        new = group.parts(measured.alphas, draft)
        base = group.parts(measured.alphas, setting.base)
        return Gain(ratio(new, "sum", "count"), ratio(base, "sum", "count"), group.picks)

    home = {group.temperature: group for group in setting.groups() if group.domain == "id"}
    for group in setting.groups():
        for draft in setting.methods:
            here = gain(group, draft)
            parts = group.parts(measured.alphas, draft)
            positions = here.new.denominator_P.sum()
            yield group.row("alpha", draft, here.new)
            yield group.row("alpha_per_prompt", draft, here.new.mean_per_prompt)
            yield group.row("positions", draft, positions)
            for figure, (above, below) in ALPHAS.items():
                if above in parts[0]:
                    yield group.row(figure, draft, ratio(parts, above, below))
            if draft == setting.base:
                continue
            yield group.row("gain", draft, difference(here.new, here.base, group.picks))
            # What was not aligned transfers nothing.
            if group.kind == "ood" and positions and "copied" not in parts[0]:
                gain_id = gain(home[group.temperature], draft)
                yield group.row("transfer", draft, transfer(gain_id, here))


def decoding_rows(setting: Setting, measured: Measured) -> Iterator[Row]:
    """tau, accept@d and counts of every draft, group and method."""
    for group in setting.groups():
        for method in setting.all_methods:
            drafts = setting.drafts_of(method)
            for draft in drafts:
                parts = group.parts(measured.decodings, draft, method)
                tau = ratio(parts, "emitted", "target_calls")
                found = estimate(tau, group.picks, method.most_tokens)
                yield group.row("tau", draft, found, method)
                yield group.row("tau_per_prompt", draft, tau.mean_per_prompt, method)
                if draft != setting.base and setting.base in drafts:
                    base = group.parts(measured.decodings, setting.base, method)
                    base_tau = ratio(base, "emitted", "target_calls")
                    gain = difference(tau, base_tau, group.picks)
                    yield group.row("tau_gain", draft, gain, method)
                mcsd = ratio(parts, "accepted", "depth_sum")
                yield group.row("alpha_mcsd", draft, mcsd, method)
                deepest = max(map(len, joined(parts, "reached_by_depth")), default=0)
                for depth in range(1, 1 + deepest):
                    yield group.row("accept", draft, _at_depth(parts, depth), method, at=depth)
                for key in COUNTED:
                    yield group.row(key, draft, sum(joined(parts, key)), method)
                if "copied_calls" in parts[0]:
                    for figure, count in SOURCES.items():
                        share = ratio(parts, count, "target_calls")
                        yield group.row(figure, draft, share, method)
                yield from _headroom(group, measured, draft, method)
                yield from _identical(group, parts, draft, method)


def _headroom(group: Group, measured: Measured, draft: str, method: Method) -> Iterator[Row]:
    step = RootStep.of(method)
    roots = [alpha["roots"] for alpha in group.parts(measured.alphas, draft)]
    if step is not None and all(step.name in by_step for by_step in roots):
        parts = [by_step[step.name] for by_step in roots]
        bound = ratio(parts, "bound", "count")
        headroom = quotient(bound, ratio(parts, "reached", "count"), group.picks)
        yield group.row("headroom", draft, headroom, method)


def _identical(group: Group, parts: Sequence[Any], draft: str, method: Method) -> Iterator[Row]:
    checks: list[Identity] = [part["identical"] for part in parts if part["identical"] is not None]
    if checks:
        outputs = sum(check["of"] for check in checks)
        same = sum(check["same"] for check in checks)
        yield group.row("identical", draft, same, method, n=outputs)
        gaps = [check["largest_gap"] for check in checks if check["largest_gap"] is not None]
        if gaps:
            yield group.row("largest_gap", draft, max(gaps), method, n=outputs)


def prediction_rows(setting: Setting, measured: Measured) -> Iterator[Row]:
    """tau and accept@d as predicted without decoding, on every group (law 10)."""
    for group in setting.groups():
        for draft in setting.methods:
            alphas = group.parts(measured.alphas, draft)
            alpha = ratio(alphas, "sum", "count").pooled
            for method in predicted_methods(setting.methods[draft], group.temperature == 0):
                if any(method.name not in part["predicted"] for part in alphas):
                    continue
                parts = [part["predicted"][method.name] for part in alphas]
                sums = PromptSums.of(joined(alphas, "count"), joined(parts, "target_calls"))
                tau = estimate(sums, group.picks, method.most_tokens)
                yield group.row("tau_predicted", draft, tau, method)
                name = f"run/{draft}/{method.name}/{group.domain}/{group.temperature}"
                variance = joined(parts, "variance")
                seed = row_seed(setting.seed, name)
                run = run_interval(sums, variance, group.picks, seed, method.most_tokens)
                yield group.row("tau_run", draft, {**tau, "low": run[0], "high": run[1]}, method)
                deepest = method.shape.depth
                if alpha is not None and method.is_chain:
                    independent = independent_tau([alpha] * deepest)
                    yield group.row("tau_independent", draft, independent, method)
                for depth in range(1, 1 + deepest):
                    accept = _at_depth(parts, depth)
                    yield group.row("accept_predicted", draft, accept, method, at=depth)


def speed_rows(setting: Setting, measured: Measured) -> Iterator[Row]:
    """Tokens per second and speedup of every method, and of the target alone."""
    for group in setting.groups() if measured.speeds else ():
        timed = group.parts(measured.speeds)
        picks = setting.picks(group.suites, [len(part["prompt_ids"]) for part in timed])
        alone = [part["runs"][0] for part in timed]
        alone_rate = ratio(alone, "emitted", "decode_s")
        for index, first in enumerate(timed[0]["runs"]):
            runs = [part["runs"][index] for part in timed]
            rate = ratio(runs, "emitted", "decode_s")
            figures: dict[str, Estimate | float | None] = {
                "tokens_per_s": rate.pooled,
                "latency_s_per_token": 1 / rate.pooled if rate.pooled else None,
                "tokens": sum(joined(runs, "emitted")),
                "prefill_s": sum(joined(runs, "prefill_s")),
                "decode_s": sum(joined(runs, "decode_s")),
            }
            method = None
            if first["draft"] is not None:
                method = Method.of(first["tree"], first["verifier"], read_tree_file)
                step = ratio(runs, "decode_s", "target_calls")
                alone_step = ratio(alone, "decode_s", "target_calls")
                whole = quotient(_with_prompt(runs), _with_prompt(alone), picks)
                figures["speedup"] = quotient(rate, alone_rate, picks)
                figures["tau_needed"] = quotient(step, alone_step, picks)
                figures["speedup_with_prompt"] = whole
            draft = first["draft"] or TARGET
            for figure, value in figures.items():
                yield group.row(figure, draft, value, method, n=picks.groups)


def _with_prompt(runs: Sequence[Any]) -> PromptSums:
    """Tokens per second with the prompt's forward counted in."""
    rate = ratio(runs, "emitted", "decode_s")
    prefill_P = np.array(joined(runs, "prefill_s"))
    return PromptSums(rate.numerator_P, rate.denominator_P + prefill_P)


def counts(setting: Setting, measured: Measured) -> Iterator[Counts]:
    """Per-prompt sums of every suite, from which two evaluations are compared prompt by prompt."""
    for (suite, temperature), baseline in measured.baselines.items():
        target = {
            "tokens": [len(ids) for ids in baseline["output_ids"]],
            "stopped": [reason == "stop" for reason in baseline["finish_reason"]],
        }
        yield _counts("target", RowKey(TARGET, suite, temperature), target, tuple(target))
        for draft in setting.methods:
            alphas = measured.alphas[suite, temperature, draft]
            yield _counts("alpha", RowKey(draft, suite, temperature), alphas, ("sum", "count"))
            for method in setting.methods[draft]:
                decoded = measured.decodings[suite, temperature, draft, method]
                key = RowKey(draft, suite, temperature, method.tree, method.verifier)
                names = [*COUNTED, *COUNTED_BY_DEPTH, *BY_SOURCE]
                kept = [name for name in names if name in decoded]
                yield _counts("decoding", key, decoded, kept)
        timed = measured.speeds.get((suite, temperature))
        for run in timed["runs"] if timed else ():
            key = RowKey(run["draft"] or TARGET, suite, temperature, run["tree"], run["verifier"])
            yield _counts("speed", key, run, TIMED)


def _counts(
    of: Literal["target", "alpha", "decoding", "speed"],
    key: RowKey,
    sums: Mapping[str, Any],
    kept: Sequence[str],
) -> Counts:
    return Counts(
        of=of,
        draft=key.draft,
        domain=key.domain,
        temperature=key.temperature,
        tree=key.tree,
        verifier=key.verifier,
        per_prompt={name: sums[name] for name in kept},
    )


def suite_rows(setting: Setting) -> Iterator[SuiteRow]:
    """The rows of every prompt set that were read, done, skipped and failed."""
    for suite in setting.suites:
        prompts = suite.prompts
        yield SuiteRow(
            name=suite.name,
            kind=suite.kind,
            source=without_secrets(suite.source),
            read=suite.rows,
            done=len(prompts),
            skipped=len(suite.skipped),
            failed=suite.rows - len(prompts) - len(suite.skipped),
            skipped_rows=[{"row": row, "reason": reason} for row, reason in suite.skipped],
            prompt_ids=[prompt.id for prompt in prompts],
            prompt_tokens=[len(prompt.ids) for prompt in prompts],
            prompt_hashes=[f"{prompt_hash(prompt.ids):016x}" for prompt in prompts],
            prompt_groups=setting.prompt_groups[suite.name],
            digest=suite.digest,
        )


def timing_conditions(measured: Measured, cpus: int) -> list[Conditions]:
    """How quiet the machine was during each timing."""
    rows = []
    for (suite, temperature), timed in measured.speeds.items():
        alone = timed["runs"][0]
        rates = [s / n for s, n in zip(alone["decode_s"], alone["emitted"], strict=True) if n]
        rows.append(conditions(suite, temperature, timed["load"], rates, cpus))
    return rows


def assemble(
    setting: Setting,
    measured: Measured,
    *,
    config: JsonObject,
    models: dict[str, ModelRow],
    provenance: JsonObject,
    clock: JsonObject,
    remarks: Sequence[Remark] = (),
    diagnosis: Iterable[Row] = (),
) -> ResultsDocument:
    """Make results.json. `diagnosis` are the rows of `eval.diagnosis.rows`."""
    rows: list[Row] = []
    for make in (alpha_rows, decoding_rows, prediction_rows, speed_rows):
        rows += make(setting, measured)
    methods = setting.all_methods
    return ResultsDocument(
        schema_version=SCHEMA_VERSION,
        definitions=definitions(),
        remarks=list(remarks),
        config=config,
        base=setting.base,
        drafts=[name for name in models if name != TARGET],
        temperatures=list(setting.temperatures),
        methods=[{**method.facts, "lossless": method.lossless} for method in methods],
        models=models,
        suites=list(suite_rows(setting)),
        rows=[*rows, *diagnosis],
        counts=list(counts(setting, measured)),
        conditions=timing_conditions(measured, clock["machine"]["cpus"]),
        provenance=provenance,
        clock=clock,
    )
