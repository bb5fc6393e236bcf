"""From the kept measurements to results.json: every figure, its interval, and the per-prompt sums
behind it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

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
from eval.measure import BaselineMeasurement, DecodingMeasurement, SpeedMeasurement, SpeedRun
from eval.request import Method
from eval.schema import (
    DEFINITIONS,
    SCHEMA_VERSION,
    AlphaRow,
    BaselineRow,
    DecodingRow,
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
    """All finished cells. Keys: (suite, temperature), then the draft, then the method."""

    baselines: dict[tuple[str, float], BaselineMeasurement]
    alphas: dict[tuple[str, float, str], AlphaMeasurement]
    decodings: dict[tuple[str, float, str, Method], DecodingMeasurement]
    speeds: dict[tuple[str, float], SpeedMeasurement]


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

    def groups(self) -> list[tuple[str | None, SuiteKind, list[Suite]]]:
        """Every suite by itself, then all of a kind pooled (domain None)."""
        pooled: list[tuple[str | None, SuiteKind, list[Suite]]] = [
            (None, kind, self.kind(kind)) for kind in ("id", "ood") if self.kind(kind)
        ]
        return [(suite.name, suite.kind, [suite]) for suite in self.suites] + pooled

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
            digest=suite.digest,
        )
        for suite in suites
    ]


def baseline_rows(setting: Setting, measured: Measured) -> list[BaselineRow]:
    """How long the target's own continuations are, and how they ended."""
    rows = []
    for suite in setting.suites:
        for temperature in setting.temperatures:
            cell = measured.baselines[suite.name, temperature]
            lengths = [len(ids) for ids in cell["output_ids"]]
            stopped = cell["finish_reason"].count("stop")
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


def _alpha(measured: Measured, suites: Sequence[Suite], temperature: float, draft: str) -> PromptSums:
    cells = [measured.alphas[suite.name, temperature, draft] for suite in suites]
    return pool_sums([PromptSums.of(cell["sum"], cell["count"]) for cell in cells])


def _per_prompt(cell: AlphaMeasurement) -> dict[str, list[Any]]:
    return {"sum": cell["sum"], "count": cell["count"]}


def alpha_rows(setting: Setting, measured: Measured) -> list[AlphaRow]:
    """alpha of every draft on every suite and on each kind pooled, with its gain over the base."""
    rows = []
    for domain, kind, suites in setting.groups():
        picks = setting.prompt_picks(suites)
        for temperature in setting.temperatures:
            base = _alpha(measured, suites, temperature, setting.base)
            for draft in setting.drafts:
                sums = _alpha(measured, suites, temperature, draft)
                rows.append(
                    AlphaRow(
                        draft=draft,
                        domain=domain,
                        kind=kind,
                        temperature=temperature,
                        alpha=estimate(sums, picks),
                        gain=None if draft == setting.base else difference(sums, base, picks),
                        per_prompt=(
                            _per_prompt(measured.alphas[domain, temperature, draft]) if domain is not None else None
                        ),
                    )
                )
    return rows


def transfer_rows(setting: Setting, measured: Measured) -> list[TransferRow]:
    """transfer of every aligned draft to every OOD suite and to all of them pooled."""
    home, away = setting.kind("id"), setting.kind("ood")
    picks_id = setting.prompt_picks(home)
    rows = []
    for domain, kind, suites in setting.groups():
        if kind == "id" or (domain is None and len(away) == 1):
            continue
        picks_ood = setting.prompt_picks(suites)
        for temperature in setting.temperatures:
            base_id = _alpha(measured, home, temperature, setting.base)
            base_ood = _alpha(measured, suites, temperature, setting.base)
            for draft in setting.drafts:
                if draft == setting.base:
                    continue
                new_id = _alpha(measured, home, temperature, draft)
                new_ood = _alpha(measured, suites, temperature, draft)
                share = transfer(new_id, base_id, picks_id, new_ood, base_ood, picks_ood)
                rows.append(
                    TransferRow(
                        draft=draft,
                        domain=domain,
                        temperature=temperature,
                        value=share["value"],
                        low=share["low"],
                        high=share["high"],
                        undefined=share["undefined"],
                        gain_id=difference(new_id, base_id, picks_id),
                        gain_ood=difference(new_ood, base_ood, picks_ood),
                    )
                )
    return rows


def _ratio(cells: Sequence[DecodingMeasurement], above: str, below: str) -> PromptSums:
    untyped: Sequence[Any] = cells
    return pool_sums([PromptSums.of(cell[above], cell[below]) for cell in untyped])


def _at_depth(cells: Sequence[DecodingMeasurement], depth: int) -> PromptSums:
    """accept@depth; a prompt whose steps never offered that depth counts zero of zero."""

    def column(rows: list[list[int]]) -> list[float]:
        return [row[depth - 1] if len(row) >= depth else 0 for row in rows]

    return pool_sums(
        [PromptSums.of(column(cell["accepted_by_depth"]), column(cell["reached_by_depth"])) for cell in cells]
    )


def _headroom(
    measured: Measured, suites: Sequence[Suite], temperature: float, draft: str, method: Method, picks: Resamples
) -> Estimate | None:
    """The bound at the root over what the verifier accepts there; None where no bound was taken."""
    step = RootStep.of(method)
    alphas = [measured.alphas[suite.name, temperature, draft] for suite in suites]
    if step is None or not all(step.name in alpha["roots"] for alpha in alphas):
        return None
    roots = [alpha["roots"][step.name] for alpha in alphas]
    bound, reached = (
        pool_sums([PromptSums.of(root[key], root["count"]) for root in roots]) for key in ("bound", "reached")
    )
    return quotient(bound, reached, picks)


def _identical(cells: Sequence[DecodingMeasurement]) -> Identical | None:
    parts = [cell["identical"] for cell in cells if cell["identical"] is not None]
    if not parts:
        return None
    gaps = [part["largest_gap"] for part in parts if part["largest_gap"] is not None]
    return Identical(
        same=sum(part["same"] for part in parts),
        of=sum(part["of"] for part in parts),
        largest_gap=max(gaps, default=None),
    )


def decoding_rows(setting: Setting, measured: Measured) -> list[DecodingRow]:
    """tau, accept@d and alpha_mcsd of every draft, suite, temperature and method, and on each kind pooled."""
    rows = []
    for domain, kind, suites in setting.groups():
        picks = setting.prompt_picks(suites)
        for temperature in setting.temperatures:
            for method in setting.methods:
                cells = {
                    draft: [measured.decodings[s.name, temperature, draft, method] for s in suites]
                    for draft in setting.drafts
                }
                base_tau = _ratio(cells[setting.base], "emitted", "target_calls")
                for draft, own in cells.items():
                    untyped: Sequence[Any] = own
                    tau = _ratio(own, "emitted", "target_calls")
                    depths = max((len(r) for cell in own for r in cell["reached_by_depth"]), default=0)
                    rows.append(
                        DecodingRow(
                            draft=draft,
                            domain=domain,
                            kind=kind,
                            temperature=temperature,
                            tree=method.tree,
                            verifier=method.verifier,
                            lossless=method.lossless,
                            tau=estimate(tau, picks),
                            tau_gain=None if draft == setting.base else difference(tau, base_tau, picks),
                            alpha_mcsd=estimate(_ratio(own, "accepted", "depth_sum"), picks),
                            accept_at=[estimate(_at_depth(own, depth), picks) for depth in range(1, depths + 1)],
                            headroom=_headroom(measured, suites, temperature, draft, method, picks),
                            identical_outputs=_identical(own),
                            counts={key: sum(sum(cell[key]) for cell in untyped) for key in COUNTS},
                            per_prompt=(
                                {key: untyped[0][key] for key in COUNTS + DEPTH_COUNTS} if domain is not None else None
                            ),
                        )
                    )
    return rows


def _rate(runs: Sequence[SpeedRun]) -> PromptSums:
    return pool_sums([PromptSums.of(run["emitted"], run["decode_s"]) for run in runs])


def speed_rows(setting: Setting, measured: Measured) -> list[SpeedRow]:
    """Tokens per second and speedup of every way of decoding; empty when nothing was timed."""
    rows: list[SpeedRow] = []
    lossless = {(way.tree, way.verifier): way.lossless for way in setting.methods}
    for domain, kind, suites in setting.groups() if measured.speeds else []:
        for temperature in setting.temperatures:
            cells = [measured.speeds[suite.name, temperature] for suite in suites]
            picks = setting.picks(suites, [len(cell["prompt_ids"]) for cell in cells])
            alone = _rate([cell["runs"][0] for cell in cells])
            for way, first in enumerate(cells[0]["runs"]):
                runs = [cell["runs"][way] for cell in cells]
                rate = _rate(runs)
                rows.append(
                    SpeedRow(
                        draft=first["draft"],
                        domain=domain,
                        kind=kind,
                        temperature=temperature,
                        tree=first["tree"],
                        verifier=first["verifier"],
                        # The target alone is in no table of methods.
                        lossless=lossless.get((first["tree"] or "", first["verifier"] or ""), True),
                        tokens_per_s=rate.pooled,
                        latency_s_per_token=1 / rate.pooled if rate.pooled else None,
                        speedup=None if first["draft"] is None else quotient(rate, alone, picks),
                        tokens=sum(sum(run["emitted"]) for run in runs),
                        prefill_s=sum(sum(run["prefill_s"]) for run in runs),
                        decode_s=sum(sum(run["decode_s"]) for run in runs),
                        per_prompt=(
                            {
                                "emitted": first["emitted"],
                                "prefill_s": first["prefill_s"],
                                "decode_s": first["decode_s"],
                            }
                            if domain is not None
                            else None
                        ),
                    )
                )
    return rows


def speed_conditions(measured: Measured) -> list[SpeedConditions]:
    """How quiet the machine was during each timing."""
    rows = []
    for (suite, temperature), timed in measured.speeds.items():
        alone = timed["runs"][0]
        rates = [s / n for s, n in zip(alone["decode_s"], alone["emitted"], strict=True) if n]
        low, middle, high = np.quantile(rates, [0.25, 0.5, 0.75]) if len(rates) >= 4 else (0.0, 0.0, 0.0)
        spread = float((high - low) / middle) if middle else None
        rows.append(SpeedConditions(domain=suite, temperature=temperature, load=timed["load"], spread=spread))
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
) -> ResultsDocument:
    """results.json. `config`, `models`, `provenance`, `clock` and `remarks` are put in as they are."""
    alpha = alpha_rows(setting, measured)
    decoding = decoding_rows(setting, measured)
    speed = speed_rows(setting, measured)
    return ResultsDocument(
        schema_version=SCHEMA_VERSION,
        definitions=DEFINITIONS,
        remarks=list(remarks),
        config=config,
        base=setting.base,
        drafts=list(setting.drafts),
        temperatures=list(setting.temperatures),
        methods=[
            {"tree": way.tree, "shape": asdict(way.shape), "verifier": way.verifier, "lossless": way.lossless}
            for way in setting.methods
        ],
        models=models,
        suites=suite_rows(setting.suites),
        baselines=baseline_rows(setting, measured),
        alpha=[row for row in alpha if row["domain"] is not None],
        decoding=[row for row in decoding if row["domain"] is not None],
        overall_alpha=[row for row in alpha if row["domain"] is None],
        overall_decoding=[row for row in decoding if row["domain"] is None],
        transfer=transfer_rows(setting, measured),
        provenance=provenance,
        speed=Speed(
            domains=[row for row in speed if row["domain"] is not None],
            overall=[row for row in speed if row["domain"] is None],
            conditions=speed_conditions(measured),
        ),
        clock=clock,
    )
