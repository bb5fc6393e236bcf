"""From measurements to results.json: every figure, its interval, and the per-prompt sums behind it."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from draftsmith_core.prompts import prompt_hash
from draftsmith_core.sampling import row_seed
from eval.bootstrap import (
    PromptSums,
    Resamples,
    difference,
    estimate,
    pool_resamples,
    pool_sums,
    quotient,
    resamples,
    transfer,
)
from eval.estimate import AlphaMeasurement
from eval.headroom import RootStep
from eval.measure import BaselineMeasurement, DecodingMeasurement, SpeedMeasurement
from eval.prediction_rows import prediction_rows
from eval.remarks import SPREAD, loaded
from eval.request import Method
from eval.results import KINDS
from eval.schema import (
    DEFINITIONS,
    SCHEMA_VERSION,
    AlphaRow,
    BaselineRow,
    DecodingRow,
    DiagnosisRows,
    Estimate,
    Identical,
    ModelRow,
    Remark,
    ResultsDocument,
    Speed,
    SpeedConditions,
    SpeedRow,
    SuiteKind,
    SuiteRow,
    TransferRow,
)
from eval.suites import Suite

COUNTS = ("target_calls", "emitted", "proposed", "accepted", "depth_sum")
DEPTH_COUNTS = ("accepted_by_depth", "reached_by_depth")


@dataclass(frozen=True)
class Measured:
    """All finished measurements. Keys: (suite, temperature), then the draft, then the method."""

    baselines: dict[tuple[str, float], BaselineMeasurement]
    alphas: dict[tuple[str, float, str], AlphaMeasurement]
    decodings: dict[tuple[str, float, str, Method], DecodingMeasurement]
    speeds: dict[tuple[str, float], SpeedMeasurement]


@dataclass(frozen=True)
class Group:
    """What one row of a table is about: a suite (`domain`), or all of a kind pooled (None), at one temperature."""

    domain: str | None
    kind: SuiteKind
    suites: list[Suite]
    temperature: float
    picks: Resamples


@dataclass(frozen=True)
class Setting:
    """What was compared with what, and how the intervals are drawn."""

    suites: Sequence[Suite]
    drafts: Sequence[str]
    base: str
    temperatures: Sequence[float]
    methods: Sequence[Method]
    bootstrap: int
    seed: int

    def kind(self, kind: SuiteKind) -> list[Suite]:
        """The suites of one kind."""
        return [suite for suite in self.suites if suite.kind == kind]

    def groups(self) -> Iterator[Group]:
        """Every suite by itself, then all of a kind pooled; each at every temperature."""
        alone: list[tuple[str | None, SuiteKind, list[Suite]]] = [(s.name, s.kind, [s]) for s in self.suites]
        pooled = [(None, kind, self.kind(kind)) for kind in KINDS if self.kind(kind)]
        for domain, kind, suites in alone + pooled:
            picks = self.prompt_picks(suites)
            for temperature in self.temperatures:
                yield Group(domain, kind, suites, temperature, picks)

    def picks(self, suites: Sequence[Suite], counts: Sequence[int]) -> Resamples:
        """The resamples of some suites; a suite's own are the same wherever it appears."""
        return pool_resamples(
            [
                resamples(count, self.bootstrap, row_seed(self.seed, f"bootstrap/{suite.name}/{count}"))
                for suite, count in zip(suites, counts, strict=True)
            ]
        )

    def prompt_picks(self, suites: Sequence[Suite]) -> Resamples:
        """The resamples over all prompts of some suites."""
        return self.picks(suites, [len(suite.prompts) for suite in suites])


def _ratio(parts: Sequence[Any], above: str, below: str) -> PromptSums:
    """The per-prompt lists `above` and `below` of some measurements, side by side."""
    return pool_sums([PromptSums.of(part[above], part[below]) for part in parts])


def suite_rows(suites: Sequence[Suite]) -> list[SuiteRow]:
    """The account of every row that was read."""
    return [
        SuiteRow(
            name=suite.name,
            kind=suite.kind,
            source=suite.source,
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


def baseline_rows(setting: Setting, measured: Measured) -> list[BaselineRow]:
    """How long the target's own continuations are, and how they ended."""
    rows = []
    for suite in setting.suites:
        for temperature in setting.temperatures:
            baseline = measured.baselines[suite.name, temperature]
            lengths = [len(ids) for ids in baseline["output_ids"]]
            stopped = baseline["finish_reason"].count("stop")
            rows.append(
                BaselineRow(
                    domain=suite.name,
                    kind=suite.kind,
                    temperature=temperature,
                    tokens=sum(lengths),
                    stopped=stopped,
                    cut=len(lengths) - stopped,
                    output_tokens=lengths,
                )
            )
    return rows


def _alpha(
    measured: Measured, suites: Sequence[Suite], temperature: float, draft: str, rule: str = "sum"
) -> PromptSums:
    return _ratio([measured.alphas[suite.name, temperature, draft] for suite in suites], rule, "count")


def alpha_rows(setting: Setting, measured: Measured) -> list[AlphaRow]:
    """alpha of every draft on every suite and on each kind pooled, with its gain over the base."""
    rows = []
    for group in setting.groups():
        base = _alpha(measured, group.suites, group.temperature, setting.base)
        for draft in setting.drafts:
            sums = _alpha(measured, group.suites, group.temperature, draft)
            greedy, match, missing = (
                _alpha(measured, group.suites, group.temperature, draft, rule)
                for rule in ("greedy", "match", "missing")
            )
            own = measured.alphas[group.domain, group.temperature, draft] if group.domain is not None else None
            rows.append(
                AlphaRow(
                    draft=draft,
                    domain=group.domain,
                    kind=group.kind,
                    temperature=group.temperature,
                    alpha=estimate(sums, group.picks),
                    alpha_greedy_draft=estimate(greedy, group.picks),
                    alpha_match=estimate(match, group.picks),
                    missing_mass=estimate(missing, group.picks),
                    alpha_string=_by_text(measured, group, draft, "sum", "count"),
                    round_trip=_by_text(measured, group, draft, "whole"),
                    gain=None if draft == setting.base else difference(sums, base, group.picks),
                    per_prompt=None if own is None else {"sum": own["sum"], "count": own["count"]},
                )
            )
    return rows


def _by_text(measured: Measured, group: Group, draft: str, above: str, below: str | None = None) -> Estimate | None:
    """A figure of a draft of another tokenizer by its text, per text where `below` is None; None for any other."""
    parts: list[Any] = [measured.alphas[suite.name, group.temperature, draft]["string"] for suite in group.suites]
    if None in parts:
        return None
    sums = [PromptSums.of(part[above], part[below] if below else [1] * len(part[above])) for part in parts]
    return estimate(pool_sums(sums), group.picks)


def transfer_rows(setting: Setting, measured: Measured) -> list[TransferRow]:
    """transfer of every aligned draft to every OOD suite and to all of them pooled."""
    id_suites = setting.kind("id")
    picks_id = setting.prompt_picks(id_suites)
    rows = []
    for group in setting.groups():
        # A single OOD suite needs no pooled row.
        if group.kind == "id" or (group.domain is None and len(group.suites) == 1):
            continue

        def sums(suites: Sequence[Suite], draft: str, temperature: float = group.temperature) -> PromptSums:
            return _alpha(measured, suites, temperature, draft)

        base_id, base_ood = sums(id_suites, setting.base), sums(group.suites, setting.base)
        for draft in setting.drafts:
            if draft == setting.base:
                continue
            new_id, new_ood = sums(id_suites, draft), sums(group.suites, draft)
            share = transfer(new_id, base_id, picks_id, new_ood, base_ood, group.picks)
            rows.append(
                TransferRow(
                    draft=draft,
                    domain=group.domain,
                    temperature=group.temperature,
                    value=share["value"],
                    low=share["low"],
                    high=share["high"],
                    undefined=share["undefined"],
                    gain_id=difference(new_id, base_id, picks_id),
                    gain_ood=difference(new_ood, base_ood, group.picks),
                )
            )
    return rows


def _at_depth(parts: Sequence[DecodingMeasurement], depth: int) -> PromptSums:
    """accept@depth; a prompt whose steps never offered that depth counts zero of zero."""

    def column(rows: list[list[int]]) -> list[float]:
        return [row[depth - 1] if len(row) >= depth else 0 for row in rows]

    sums = [PromptSums.of(column(part["accepted_by_depth"]), column(part["reached_by_depth"])) for part in parts]
    return pool_sums(sums)


def _headroom(measured: Measured, group: Group, draft: str, method: Method) -> Estimate | None:
    """The bound at the root over what the verifier accepts there; None where no bound was taken."""
    step = RootStep.of(method)
    alphas = [measured.alphas[suite.name, group.temperature, draft] for suite in group.suites]
    if step is None or not all(step.name in alpha["roots"] for alpha in alphas):
        return None
    roots = [alpha["roots"][step.name] for alpha in alphas]
    return quotient(_ratio(roots, "bound", "count"), _ratio(roots, "reached", "count"), group.picks)


def _identical(parts: Sequence[DecodingMeasurement]) -> Identical | None:
    checks = [part["identical"] for part in parts if part["identical"] is not None]
    if not checks:
        return None
    gaps = [check["largest_gap"] for check in checks if check["largest_gap"] is not None]
    return Identical(
        same=sum(check["same"] for check in checks),
        of=sum(check["of"] for check in checks),
        largest_gap=max(gaps, default=None),
    )


def decoding_rows(setting: Setting, measured: Measured) -> list[DecodingRow]:
    """tau, accept@d and alpha_mcsd of every draft, suite, temperature and method, and on each kind pooled."""
    rows = []
    for group in setting.groups():
        for method in setting.methods:
            by_draft = {
                draft: [measured.decodings[s.name, group.temperature, draft, method] for s in group.suites]
                for draft in setting.drafts
            }
            base_tau = _ratio(by_draft[setting.base], "emitted", "target_calls")
            for draft, parts in by_draft.items():
                untyped: Sequence[Any] = parts
                tau = _ratio(parts, "emitted", "target_calls")
                deepest = max((len(row) for part in parts for row in part["reached_by_depth"]), default=0)
                own = {key: untyped[0][key] for key in COUNTS + DEPTH_COUNTS}
                rows.append(
                    DecodingRow(
                        draft=draft,
                        domain=group.domain,
                        kind=group.kind,
                        temperature=group.temperature,
                        tree=method.tree,
                        verifier=method.verifier,
                        lossless=method.lossless,
                        tau=estimate(tau, group.picks),
                        tau_gain=None if draft == setting.base else difference(tau, base_tau, group.picks),
                        alpha_mcsd=estimate(_ratio(parts, "accepted", "depth_sum"), group.picks),
                        accept_at=[estimate(_at_depth(parts, depth), group.picks) for depth in range(1, deepest + 1)],
                        headroom=_headroom(measured, group, draft, method),
                        identical_outputs=_identical(parts),
                        counts={key: sum(sum(part[key]) for part in untyped) for key in COUNTS},
                        per_prompt=None if group.domain is None else own,
                    )
                )
    return rows


def speed_rows(setting: Setting, measured: Measured) -> list[SpeedRow]:
    """Tokens per second and speedup of every decoding method; empty when nothing was timed."""
    rows: list[SpeedRow] = []
    # The target alone is in no table of methods; its tree and verifier are None.
    lossless: dict[tuple[str | None, str | None], bool] = {(None, None): True}
    lossless |= {(method.tree, method.verifier): method.lossless for method in setting.methods}
    for group in setting.groups() if measured.speeds else ():
        timed = [measured.speeds[suite.name, group.temperature] for suite in group.suites]
        picks = setting.picks(group.suites, [len(each["prompt_ids"]) for each in timed])
        alone = _ratio([each["runs"][0] for each in timed], "emitted", "decode_s")
        for index, first in enumerate(timed[0]["runs"]):
            runs: list[Any] = [each["runs"][index] for each in timed]
            rate = _ratio(runs, "emitted", "decode_s")
            own = {key: runs[0][key] for key in ("emitted", "prefill_s", "decode_s")}
            rows.append(
                SpeedRow(
                    draft=first["draft"],
                    domain=group.domain,
                    kind=group.kind,
                    temperature=group.temperature,
                    tree=first["tree"],
                    verifier=first["verifier"],
                    lossless=lossless[first["tree"], first["verifier"]],
                    tokens_per_s=rate.pooled,
                    latency_s_per_token=1 / rate.pooled if rate.pooled else None,
                    speedup=None if first["draft"] is None else quotient(rate, alone, picks),
                    tokens=sum(sum(run["emitted"]) for run in runs),
                    prefill_s=sum(sum(run["prefill_s"]) for run in runs),
                    decode_s=sum(sum(run["decode_s"]) for run in runs),
                    per_prompt=None if group.domain is None else own,
                )
            )
    return rows


def speed_conditions(measured: Measured, cpus: int) -> list[SpeedConditions]:
    """How quiet the machine was during each timing."""
    rows = []
    for (suite, temperature), timed in measured.speeds.items():
        alone = timed["runs"][0]
        rates = [s / n for s, n in zip(alone["decode_s"], alone["emitted"], strict=True) if n]
        low, middle, high = np.quantile(rates, [0.25, 0.5, 0.75]) if len(rates) >= 4 else (0.0, 0.0, 0.0)
        spread = float((high - low) / middle) if middle else None
        load = timed["load"]
        busy = loaded(load, cpus) or (spread or 0.0) > SPREAD
        rows.append(SpeedConditions(domain=suite, temperature=temperature, load=load, spread=spread, busy=busy))
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
    diagnosis: DiagnosisRows | None = None,
) -> ResultsDocument:
    """results.json. `config`, `models`, `provenance`, `clock`, `remarks` and `diagnosis` are put in as they are."""
    alpha = alpha_rows(setting, measured)
    decoding = decoding_rows(setting, measured)
    speed = speed_rows(setting, measured)
    return ResultsDocument(
        schema_version=SCHEMA_VERSION,
        migrated_from=None,
        definitions=DEFINITIONS,
        remarks=list(remarks),
        config=config,
        base=setting.base,
        drafts=list(setting.drafts),
        temperatures=list(setting.temperatures),
        methods=[
            {
                "tree": method.tree,
                "shape": asdict(method.shape),
                "verifier": method.verifier,
                "lossless": method.lossless,
            }
            for method in setting.methods
        ],
        models=models,
        suites=suite_rows(setting.suites),
        baselines=baseline_rows(setting, measured),
        alpha=[row for row in alpha if row["domain"] is not None],
        decoding=[row for row in decoding if row["domain"] is not None],
        overall_alpha=[row for row in alpha if row["domain"] is None],
        overall_decoding=[row for row in decoding if row["domain"] is None],
        predictions=prediction_rows(setting, measured),
        transfer=transfer_rows(setting, measured),
        diagnosis=diagnosis,
        provenance=provenance,
        speed=Speed(
            domains=[row for row in speed if row["domain"] is not None],
            overall=[row for row in speed if row["domain"] is None],
            conditions=speed_conditions(measured, clock["machine"]["cpus"]),
        ),
        clock=clock,
    )
