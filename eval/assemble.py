"""From measurements to results.json: every figure, its interval, and the per-prompt sums behind it."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from draftsmith_core.prompts import prompt_hash
from eval.bootstrap import difference, estimate, quotient, transfer
from eval.definitions import DEFINITIONS
from eval.groups import Group, Measured, Setting, at_depth, ratio
from eval.headroom import RootStep
from eval.measure import DecodingMeasurement, SpeedRun
from eval.prediction_rows import prediction_rows
from eval.remarks import SPREAD, loaded
from eval.request import Method
from eval.schema import (
    SCHEMA_VERSION,
    AlphaRow,
    BaselineRow,
    CostRow,
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
    SuiteRow,
    TransferRow,
)
from eval.suites import Suite

COUNTS = ("target_calls", "emitted", "proposed", "accepted", "depth_sum")
DEPTH_COUNTS = ("accepted_by_depth", "reached_by_depth")


def suite_rows(suites: Sequence[Suite]) -> list[SuiteRow]:
    """By prompt set, how many rows were read, and how many of them were done, skipped and failed."""
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


def alpha_rows(setting: Setting, measured: Measured) -> list[AlphaRow]:
    """alpha of every draft on every suite and on each kind pooled, with its gain over the base."""
    rows = []
    for group in setting.groups():
        base = ratio(group.alphas(measured, setting.base), "sum", "count")
        for draft in setting.drafts:
            parts: list[Any] = list(group.alphas(measured, draft))
            sums, greedy, match, missing = (
                ratio(parts, rule, "count") for rule in ("sum", "greedy", "match", "missing")
            )
            own = {key: parts[0][key] for key in ("sum", "count")}
            row: AlphaRow = {
                **group.of_set(draft),
                "alpha": estimate(sums, group.picks),
                "alpha_greedy_draft": estimate(greedy, group.picks),
                "alpha_match": estimate(match, group.picks),
                "missing_mass": estimate(missing, group.picks),
                "gain": None if draft == setting.base else difference(sums, base, group.picks),
                "per_prompt": None if group.domain is None else own,
            }
            rows.append(row)
    return rows


def transfer_rows(setting: Setting, measured: Measured) -> list[TransferRow]:
    """transfer of every aligned draft to every OOD suite and to all of them pooled."""
    home = {group.temperature: group for group in setting.groups() if group.kind == "id" and group.domain is None}
    rows = []
    for group in setting.groups():
        # A single OOD suite needs no pooled row.
        if group.kind == "id" or (group.domain is None and len(group.suites) == 1):
            continue
        sides = home[group.temperature], group
        base_id, base_ood = (ratio(side.alphas(measured, setting.base), "sum", "count") for side in sides)
        for draft in setting.drafts:
            if draft == setting.base:
                continue
            new_id, new_ood = (ratio(side.alphas(measured, draft), "sum", "count") for side in sides)
            share = transfer(new_id, base_id, sides[0].picks, new_ood, base_ood, group.picks)
            row: TransferRow = {"draft": draft, "domain": group.domain, "temperature": group.temperature, **share}
            rows.append(row)
    return rows


def _headroom(measured: Measured, group: Group, draft: str, method: Method) -> Estimate | None:
    """The bound at the root over what the verifier accepts there; None where no bound was taken."""
    step, alphas = RootStep.of(method), group.alphas(measured, draft)
    if step is None or not all(step.name in alpha["roots"] for alpha in alphas):
        return None
    roots = [alpha["roots"][step.name] for alpha in alphas]
    return quotient(ratio(roots, "bound", "count"), ratio(roots, "reached", "count"), group.picks)


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
            base_tau = ratio(group.decodings(measured, setting.base, method), "emitted", "target_calls")
            for draft in setting.drafts:
                parts: list[Any] = list(group.decodings(measured, draft, method))
                tau = ratio(parts, "emitted", "target_calls")
                deepest = max((len(row) for part in parts for row in part["reached_by_depth"]), default=0)
                own = {key: parts[0][key] for key in COUNTS + DEPTH_COUNTS}
                row: DecodingRow = {
                    **group.of_method(draft, method),
                    "lossless": method.lossless,
                    "tau": estimate(tau, group.picks),
                    "tau_gain": None if draft == setting.base else difference(tau, base_tau, group.picks),
                    "alpha_mcsd": estimate(ratio(parts, "accepted", "depth_sum"), group.picks),
                    "accept_at": [estimate(at_depth(parts, d), group.picks) for d in range(1, deepest + 1)],
                    "headroom": _headroom(measured, group, draft, method),
                    "identical_outputs": _identical(parts),
                    "counts": {key: sum(sum(part[key]) for part in parts) for key in COUNTS},
                    "per_prompt": None if group.domain is None else own,
                }
                rows.append(row)
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
        alone = ratio([each["runs"][0] for each in timed], "emitted", "decode_s")
        for index, first in enumerate(timed[0]["runs"]):
            runs: list[Any] = [each["runs"][index] for each in timed]
            rate = ratio(runs, "emitted", "decode_s")
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


def cost_rows(setting: Setting, measured: Measured) -> list[CostRow]:
    """What drafting and verifying cost, in steps of the target alone, where a tree has several levels to tell them by:
    a step on it takes `calls` forwards of the draft and a verification, one on its nodes as one level a single forward.
    """
    rows: list[CostRow] = []
    for group in setting.groups():
        timed = measured.speeds.get((group.domain or "", group.temperature))
        for level in timed["one_level"] if timed else ():
            assert timed is not None
            count, run = len(level["decode_s"]), next(run for run in timed["runs"] if _same(run, level))
            runs = (timed["runs"][0], run, level)
            steps = [sum(each["target_calls"][:count]) for each in runs]
            calls = sum(run["depth_sum"][:count]) / max(1, steps[1])
            if not all(steps) or calls <= 1:
                continue
            alone, whole, flat = (sum(each["decode_s"][:count]) / n for each, n in zip(runs, steps, strict=True))
            draft_call = max(0.0, (whole - flat) / (calls - 1)) / alone
            of = group.of_method(str(run["draft"]), Method(str(run["tree"]), str(run["verifier"])))
            rows.append(CostRow({**of, "draft_call": draft_call, "verify": max(0.0, flat / alone - draft_call)}))
    return rows


def _same(run: SpeedRun, other: SpeedRun) -> bool:
    return all(run[key] == other[key] for key in ("draft", "tree", "verifier"))


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
            costs=cost_rows(setting, measured),
            conditions=speed_conditions(measured, clock["machine"]["cpus"]),
        ),
        clock=clock,
    )
