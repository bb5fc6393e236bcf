"""Make the rows of results.json from the measurements: one row per figure, each with its interval.

A new figure is one `group.row(...)` here, and its meaning in definitions.yaml.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np

from decode import Tree
from decode.stats import independent_tau
from draftsmith_core.errors import without_secrets
from draftsmith_core.prompts import prompt_hash
from draftsmith_core.sampling import row_seed
from eval import measuring
from eval.bootstrap import (
    PromptSums,
    Resamples,
    difference,
    estimate,
    pool_resamples,
    quotient,
    resamples,
    transfer,
)
from eval.diagnosis.diagnose import RootStep
from eval.estimate import AlphaMeasurement
from eval.measuring import BaselineMeasurement, SpeedMeasurement
from eval.method import Method
from eval.predict import predicted_methods, run_interval
from eval.remarks import conditions
from eval.schema import (
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
    SuiteKind,
    SuiteRow,
    definitions,
)
from eval.suites import Suite

# Figures of alpha by the key of their per-prompt sums.
ALPHAS = {"alpha_greedy_draft": "greedy", "alpha_match": "match", "missing_mass": "missing"}
TIMED = ("emitted", "prefill_s", "decode_s")
_How = tuple[str | None, str | None]


@dataclass(frozen=True)
class Measured:
    """All finished measurements. Keys: (suite, temperature), then the draft, then the method."""

    baselines: dict[tuple[str, float], BaselineMeasurement]
    alphas: dict[tuple[str, float, str], AlphaMeasurement]
    decodings: dict[tuple[str, float, str, Method], dict[str, Any]]
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
        value: Estimate | float | None,
        method: _How = (None, None),
        *,
        at: int | None = None,
        part: str | None = None,
        n: int | None = None,
    ) -> Row:
        """One row about this group; a plain number has no interval."""
        if not isinstance(value, dict):
            prompts = self.picks.weights_RP.shape[1] if n is None else n
            value = Estimate(
                value=None if value is None else float(value), low=None, high=None, n=prompts
            )
        place: dict[str, Any] = {
            "domain": self.domain,
            "kind": self.kind,
            "temperature": self.temperature,
        }
        place |= {"tree": method[0], "verifier": method[1], "at": at, "part": part}
        return cast(Row, {"figure": figure, "draft": draft, **place, **value})


@dataclass(frozen=True)
class Setting:
    """Suites, drafts and methods of an evaluation, and how its intervals are drawn."""

    suites: Sequence[Suite]
    drafts: Sequence[str]
    base: str
    temperatures: Sequence[float]
    methods: Sequence[Method]
    bootstrap: int
    seed: int

    def groups(self) -> Iterator[Group]:
        """Every suite by itself, then all of a kind pooled; each at every temperature."""
        members: list[tuple[str, SuiteKind, list[Suite]]] = [
            (s.name, s.kind, [s]) for s in self.suites
        ]
        members += [
            (kind, kind, [suite for suite in self.suites if suite.kind == kind]) for kind in KINDS
        ]
        for domain, kind, suites in members:
            if suites:
                picks = self.picks(suites, [len(suite.prompts) for suite in suites])
                for temperature in self.temperatures:
                    yield Group(domain, kind, suites, temperature, picks)

    def picks(self, suites: Sequence[Suite], counts: Sequence[int]) -> Resamples:
        """Resample the first prompts of some suites; a suite has the same resamples wherever it
        appears.
        """
        return pool_resamples(
            [
                resamples(
                    count, self.bootstrap, row_seed(self.seed, f"bootstrap/{suite.name}/{count}")
                )
                for suite, count in zip(suites, counts, strict=True)
            ]
        )


def ratio(parts: Sequence[Any], above: str, below: str) -> PromptSums:
    """Per-prompt numerators `above` and denominators `below`, pooled over all measurements."""
    return PromptSums.of(joined(parts, above), joined(parts, below))


def joined(parts: Sequence[Any], key: str) -> list[Any]:
    """The per-prompt lists of several measurements, one after another."""
    return [value for part in parts for value in part[key]]


def _at_depth(parts: Sequence[Any], depth: int) -> PromptSums:
    """accept@depth. Prompts that never reached this depth contribute 0/0."""
    accepted, reached = (
        [row[depth - 1] if len(row) >= depth else 0 for row in joined(parts, key)]
        for key in ("accepted_by_depth", "reached_by_depth")
    )
    return PromptSums.of(accepted, reached)


def alpha_rows(setting: Setting, measured: Measured) -> Iterator[Row]:
    """alpha of every draft on every group, its gain over the base, and the transfer of the ID gain
    to OOD groups.
    """

    def sums(group: Group, draft: str) -> PromptSums:
        return ratio(group.parts(measured.alphas, draft), "sum", "count")

    home = {group.temperature: group for group in setting.groups() if group.domain == "id"}
    for group in setting.groups():
        base, at_home = sums(group, setting.base), home[group.temperature]
        for draft in setting.drafts:
            new = sums(group, draft)
            yield group.row("alpha", draft, estimate(new, group.picks))
            yield group.row("alpha_per_prompt", draft, new.mean_per_prompt)
            yield group.row("positions", draft, new.denominator_P.sum())
            for figure, key in ALPHAS.items():
                figures = ratio(group.parts(measured.alphas, draft), key, "count")
                yield group.row(figure, draft, estimate(figures, group.picks))
            if draft != setting.base:
                yield group.row("gain", draft, difference(new, base, group.picks))
            if draft != setting.base and group.kind == "ood":
                gain_id = sums(at_home, draft), sums(at_home, setting.base), at_home.picks
                yield group.row("transfer", draft, transfer(gain_id, (new, base, group.picks)))


def decoding_rows(setting: Setting, measured: Measured) -> Iterator[Row]:
    """tau, accept@d and counts of every draft, group and method."""
    for group in setting.groups():
        for method in setting.methods:
            how = (method.tree, method.verifier)
            base_tau = ratio(
                group.parts(measured.decodings, setting.base, method), "emitted", "target_calls"
            )
            for draft in setting.drafts:
                parts = group.parts(measured.decodings, draft, method)
                tau = ratio(parts, "emitted", "target_calls")
                yield group.row("tau", draft, estimate(tau, group.picks), how)
                yield group.row("tau_per_prompt", draft, tau.mean_per_prompt, how)
                if draft != setting.base:
                    yield group.row("tau_gain", draft, difference(tau, base_tau, group.picks), how)
                mcsd = estimate(ratio(parts, "accepted", "depth_sum"), group.picks)
                yield group.row("alpha_mcsd", draft, mcsd, how)
                for depth in range(
                    1, 1 + max(map(len, joined(parts, "reached_by_depth")), default=0)
                ):
                    yield group.row(
                        "accept",
                        draft,
                        estimate(_at_depth(parts, depth), group.picks),
                        how,
                        at=depth,
                    )
                for key in measuring.COUNTED:
                    yield group.row(key, draft, sum(joined(parts, key)), how)
                step, alphas = RootStep.of(method), group.parts(measured.alphas, draft)
                if step is not None and all(step.name in alpha["roots"] for alpha in alphas):
                    roots = [alpha["roots"][step.name] for alpha in alphas]
                    bound, reached = (
                        ratio(roots, "bound", "count"),
                        ratio(roots, "reached", "count"),
                    )
                    yield group.row("headroom", draft, quotient(bound, reached, group.picks), how)
                if checks := [part["identical"] for part in parts if part["identical"] is not None]:
                    same, outputs = (sum(check[key] for check in checks) for key in ("same", "of"))
                    yield group.row("identical", draft, same, how, n=outputs)
                    if gaps := [
                        check["largest_gap"] for check in checks if check["largest_gap"] is not None
                    ]:
                        yield group.row("largest_gap", draft, max(gaps), how, n=outputs)


def prediction_rows(setting: Setting, measured: Measured) -> Iterator[Row]:
    """tau and accept@d as predicted without decoding, on every group (law 10)."""
    for group in setting.groups():
        for draft in setting.drafts:
            alphas = group.parts(measured.alphas, draft)
            alpha = ratio(alphas, "sum", "count").pooled
            for method in predicted_methods(setting.methods, group.temperature == 0):
                parts = [
                    part["predicted"][method.name]
                    for part in alphas
                    if method.name in part["predicted"]
                ]
                if len(parts) < len(alphas):
                    continue
                how, depths = (method.tree, method.verifier), range(1, 1 + method.shape.depth)
                sums = PromptSums.of(joined(alphas, "count"), joined(parts, "target_calls"))
                tau = estimate(sums, group.picks)
                yield group.row("tau_predicted", draft, tau, how)
                seed = row_seed(
                    setting.seed, f"run/{draft}/{method.name}/{group.domain}/{group.temperature}"
                )
                low, high = run_interval(sums, joined(parts, "variance"), group.picks, seed)
                yield group.row("tau_run", draft, {**tau, "low": low, "high": high}, how)
                chain = (
                    isinstance(method.shape, Tree)
                    and method.shape.is_chain
                    and not method.shape.stop
                )
                if alpha is not None and chain:
                    yield group.row(
                        "tau_independent", draft, independent_tau([alpha] * len(depths)), how
                    )
                for depth in depths:
                    accept = estimate(_at_depth(parts, depth), group.picks)
                    yield group.row("accept_predicted", draft, accept, how, at=depth)


def speed_rows(setting: Setting, measured: Measured) -> Iterator[Row]:
    """Tokens per second and speedup of every method, and of the target alone."""
    for group in setting.groups() if measured.speeds else ():
        timed = group.parts(measured.speeds)
        picks = setting.picks(group.suites, [len(part["prompt_ids"]) for part in timed])
        alone, whole_alone = _rates([part["runs"][0] for part in timed])
        for index, first in enumerate(timed[0]["runs"]):
            runs = [part["runs"][index] for part in timed]
            rate, whole = _rates(runs)
            figures: dict[str, Any] = {
                "tokens_per_s": rate.pooled,
                "latency_s_per_token": 1 / rate.pooled if rate.pooled else None,
                "tokens": sum(joined(runs, "emitted")),
                "prefill_s": sum(joined(runs, "prefill_s")),
                "decode_s": sum(joined(runs, "decode_s")),
            }
            if first["draft"] is not None:
                figures["speedup"] = quotient(rate, alone, picks)
                figures["speedup_with_prompt"] = quotient(whole, whole_alone, picks)
            for figure, value in figures.items():
                how = (first["tree"], first["verifier"])
                yield group.row(
                    figure, first["draft"] or TARGET, value, how, n=len(rate.numerator_P)
                )


def _rates(runs: Sequence[Any]) -> tuple[PromptSums, PromptSums]:
    """Tokens per second of decoding, and with the prompt's forward counted in."""
    rate = ratio(runs, "emitted", "decode_s")
    return rate, PromptSums(
        rate.numerator_P, rate.denominator_P + np.array(joined(runs, "prefill_s"))
    )


def cost_rows(setting: Setting, measured: Measured) -> Iterator[Row]:
    """The cost of a draft call and of verifying, in steps of the target alone, for trees of several
    levels.

    A step takes `calls` forwards of the draft and one verification. The same nodes as one level
    take a single forward of the draft, so the difference separates the two costs.
    """
    for group in setting.groups():
        if (timed := measured.speeds.get((group.domain, group.temperature))) is None:
            continue
        for level in timed["one_level"]:
            how = (level["draft"], level["tree"], level["verifier"])
            run = next(
                run for run in timed["runs"] if (run["draft"], run["tree"], run["verifier"]) == how
            )
            count, runs = len(level["decode_s"]), (timed["runs"][0], run, level)
            steps = [sum(run["target_calls"][:count]) for run in runs]
            calls = sum(run["depth_sum"][:count]) / max(1, steps[1])
            if not all(steps) or calls <= 1:
                continue
            alone, whole, flat = (
                sum(run["decode_s"][:count]) / n for run, n in zip(runs, steps, strict=True)
            )
            draft_call = max(0.0, (whole - flat) / (calls - 1)) / alone
            costs = {"draft_call": draft_call, "verify": max(0.0, flat / alone - draft_call)}
            for figure, cost in costs.items():
                yield group.row(figure, str(run["draft"]), cost, how[1:], n=count)


def counts(setting: Setting, measured: Measured) -> list[Counts]:
    """Per-prompt sums of every suite, from which two evaluations are compared prompt by prompt."""
    rows: list[Counts] = []

    def add(of: str, part: Any, keys: Sequence[str], draft: str, how: _How = (None, None)) -> None:
        place = {"of": of, "draft": draft, "domain": suite, "temperature": temperature}
        place |= dict(zip(("tree", "verifier"), how, strict=True))
        rows.append(cast(Counts, {**place, "per_prompt": {key: part[key] for key in keys}}))

    for (suite, temperature), baseline in measured.baselines.items():
        target = {
            "tokens": [len(ids) for ids in baseline["output_ids"]],
            "stopped": [reason == "stop" for reason in baseline["finish_reason"]],
        }
        add("target", target, list(target), TARGET)
        for draft in setting.drafts:
            add("alpha", measured.alphas[suite, temperature, draft], ("sum", "count"), draft)
            for method in setting.methods:
                decoded = measured.decodings[suite, temperature, draft, method]
                keys = (*measuring.COUNTED, *measuring.COUNTED_BY_DEPTH)
                add("decoding", decoded, keys, draft, (method.tree, method.verifier))
        timed = measured.speeds.get((suite, temperature))
        for run in timed["runs"] if timed else ():
            add("speed", run, TIMED, run["draft"] or TARGET, (run["tree"], run["verifier"]))
    return rows


def suite_rows(suites: Sequence[Suite]) -> list[SuiteRow]:
    """The rows of every prompt set that were read, done, skipped and failed."""
    return [
        SuiteRow(
            name=suite.name,
            kind=suite.kind,
            source=without_secrets(suite.source),
            read=suite.rows,
            done=len(suite.prompts),
            skipped=len(suite.skipped),
            failed=suite.rows - len(suite.prompts) - len(suite.skipped),
            skipped_rows=[{"row": row, "reason": reason} for row, reason in suite.skipped],
            prompt_ids=[prompt.id for prompt in suite.prompts],
            prompt_tokens=[len(prompt.ids) for prompt in suite.prompts],
            prompt_hashes=[f"{prompt_hash(prompt.ids):016x}" for prompt in suite.prompts],
            digest=suite.digest,
        )
        for suite in suites
    ]


def timing_conditions(measured: Measured, cpus: int) -> list[Conditions]:
    """How quiet the machine was during each timing."""
    rows = []
    for (suite, temperature), timed in measured.speeds.items():
        alone, load = timed["runs"][0], timed["load"]
        rates = [s / n for s, n in zip(alone["decode_s"], alone["emitted"], strict=True) if n]
        rows.append(conditions(suite, temperature, load, rates, cpus))
    return rows


def assemble(
    setting: Setting,
    measured: Measured,
    *,
    config: dict[str, Any],
    models: dict[str, ModelRow],
    provenance: dict[str, Any],
    clock: dict[str, Any],
    remarks: Sequence[Remark] = (),
    diagnosis: Sequence[Row] = (),
) -> ResultsDocument:
    """Make results.json. `diagnosis` are the rows of `eval.diagnosis.rows`."""
    makers = (alpha_rows, decoding_rows, prediction_rows, speed_rows, cost_rows)
    return ResultsDocument(
        schema_version=SCHEMA_VERSION,
        definitions=definitions(),
        remarks=list(remarks),
        config=config,
        base=setting.base,
        drafts=list(setting.drafts),
        temperatures=list(setting.temperatures),
        methods=[
            {
                "tree": m.tree,
                "shape": asdict(m.shape),
                "verifier": m.verifier,
                "lossless": m.lossless,
            }
            for m in setting.methods
        ],
        models=models,
        suites=suite_rows(setting.suites),
        rows=[*(row for make in makers for row in make(setting, measured)), *diagnosis],
        counts=counts(setting, measured),
        conditions=timing_conditions(measured, clock["machine"]["cpus"]),
        provenance=provenance,
        clock=clock,
    )
