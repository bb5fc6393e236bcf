"""Compare what a running server accepts with the prediction, and find the likely cause of less.

The prediction replays the draft along the served texts (`eval.predict`), so both sides cover the
same tokens. Two things can differ: the draft's acceptance, or the texts, if the target did not
write them (their likelihood shows it). Then every suspect is replayed. The likely cause is the
suspect whose replay comes closest.

Legend: P prompts, D depths, R resamples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.config import ServedConfig
from draftsmith.core.errors import InputError
from draftsmith.core.hub import quiet
from draftsmith.core.io import JsonObject
from draftsmith.core.options import configured
from draftsmith.core.ranks import say
from draftsmith.core.records import read_record
from draftsmith.core.sampling import Sampling
from draftsmith.core.settings import loading, resolve_sampling, sampling_options
from draftsmith.core.template_date import fix_date
from draftsmith.drafts.load import depth_limit, kind_of, other_targets
from draftsmith.eval.bootstrap import (
    Floats,
    PromptSums,
    Resamples,
    estimate,
    pooled_ratios,
    resampled,
    resamples,
)
from draftsmith.eval.formulas import Continuation
from draftsmith.eval.groups import groups_of
from draftsmith.eval.remarks import of_groups
from draftsmith.eval.schema import Estimate
from draftsmith.pair import Pair, load_pair
from draftsmith.serving.asking import ServedPrompt, ask
from draftsmith.serving.compared import RESAMPLES, Compared, close, counted
from draftsmith.serving.replay import Case, replay
from draftsmith.serving.running_server import NAMES, RunningServer, ServedAnswer
from draftsmith.serving.suspects import OF_THE_DRAFT, OF_THE_TARGET, REMEDIES, Cases, Change

# Ignore smaller differences in the likelihood of the texts.
_TEXT_MARGIN = 0.03
# Temperatures to try if the server does not report its own default.
_TEMPERATURES = (0.0, 0.3, 0.6, 0.7, 0.8, 1.0)


@quiet()
def served(config: ServedConfig | None = None, **options: Any) -> JsonObject:
    """Compare what a running server accepts with the prediction, and find the likely cause of less.

    Return what `doctor --served --json` prints: `served` and `predicted` with `tokens_per_call` and
    `by_depth`, their `difference`, the `likelihood` of the served texts (1: they are the target's
    own), the `verdict`, the `cause` with its `remedy`, and what was `tried`. `other_target` says if
    the draft was trained for another target. Raise InputError for a server that cannot be asked or
    counts no drafts.
    """
    config = configured(ServedConfig, config, options)
    server = RunningServer(config.served)
    pair = _load(config)
    sampling = _sampling(server, pair, config)
    asked = ask(server, pair, config, sampling)
    answers = [each.answer for each in asked]
    tokens = min(server.draft_tokens(answers), depth_limit(pair.drafts["draft"]) or 2**30)
    told = server.facts()
    case = _case(server, pair, asked, sampling, _rule(server, pair, config, told))
    groups = groups_of([each.prompt for each in asked])
    emitted = counted(answers)
    predicted = replay(case, tokens)
    likelihood = estimate(predicted.likelihood, resamples(groups, RESAMPLES, seed=0))
    own_texts = close(likelihood, 1.0, _TEXT_MARGIN)
    own_tokens = predicted.own_tokens
    if not own_texts:
        rows = _own_rows(pair, asked, sampling, config.max_new_tokens)
        predicted = replay(replace(case, rows=rows), tokens)
    counts = Compared(emitted, predicted.tokens, groups)
    judged = _judge(counts, case, tokens, likelihood)
    return {
        "url": server.url,
        "engine": NAMES[server.engine],
        "server": told,
        "draft_tokens": tokens,
        "temperature": sampling.temperature,
        "rule": case.rule,
        "prompts": len(answers),
        "prompt_groups": groups,
        "remarks": [remark["text"] for remark in of_groups({"prompts": groups})],
        "served": {
            "tokens_per_call": estimate(emitted, counts.picks),
            "by_depth": _served_by_depth(answers, tokens, counts.picks),
        },
        "predicted": {
            "tokens_per_call": estimate(predicted.tokens, counts.picks),
            "by_depth": _by_depth(predicted.accepted_PD, predicted.reached_PD, counts.picks),
        },
        "difference": counts.away,
        "by_length": counts.by_length([len(answer.prompt_ids) for answer in answers]),
        "definitions": _definitions(answers, emitted),
        "likelihood": likelihood,
        "own_texts": own_texts,
        "other_texts": _other_texts(asked, own_tokens) if sampling.greedy else [],
        "other_target": next(iter(other_targets([config.draft], pair.target)), None),
        **judged,
    }


def _judge(counts: Compared, case: Case, tokens: int, likelihood: Estimate) -> JsonObject:
    """Return the verdict, the likely cause of less with its remedy, and what was tried."""
    own_texts = close(likelihood, 1.0, _TEXT_MARGIN)
    less = counts.is_less
    if own_texts:  # then require a significant difference, too
        less = less and not close(counts.away, 0.0, 0.0)
    tried = _try(_to_try(own_texts, less), case, tokens, counts)
    tried.sort(key=lambda row: (not row["fits"], row["misfit"]))
    cause = next((row for row in tried if row["fits"]), None)
    return {
        "verdict": "less than predicted" if less else "as predicted",
        "cause": cause and f"{cause['suspect']}: {cause['detail']}",
        "remedy": cause and REMEDIES[cause["suspect"]],
        "tried": tried,
    }


def _definitions(answers: Sequence[ServedAnswer], emitted: PromptSums) -> JsonObject:
    """Return the acceptance as engines and trainers define it (docs/acceptance.md)."""
    calls = emitted.denominator_P.sum()
    tokens = emitted.numerator_P.sum()
    return {
        "mean_acceptance_length": emitted.pooled,
        "mean_of_requests": emitted.mean_per_prompt,
        "accept_length": float((tokens + len(answers)) / calls),
        "draft_acceptance_rate": float((tokens - calls) / sum(each.drafted for each in answers)),
    }


def _load(config: ServedConfig) -> Pair:
    """Load the pair. Its chat template prints the date that the draft was trained with."""
    pair = load_pair(
        config.target,
        draft={"draft": config.draft},
        fast=False,
        chat_template=config.chat_template,
        **loading(config),
    )
    date = fix_date(pair.tokenizer, config.date, read_record(Path(config.draft)).get("date"))
    if date is not None:
        say(f"the chat template prints the date; in these prompts it is {date}")
    return pair


def _sampling(server: RunningServer, pair: Pair, config: ServedConfig) -> Sampling:
    given: dict[str, float | None] = {"temperature": config.temperature}
    if config.temperature is None and server.engine != "llamacpp":
        given["repetition_penalty"] = None  # which these servers read from the target too
    return resolve_sampling(config.target, pair.target, given).sampling


def _rule(
    server: RunningServer, pair: Pair, config: ServedConfig, told: Mapping[str, object]
) -> str:
    """Return our verifier for the server's rule: as it was told, else the one with which it can
    accept most.
    """
    engine = NAMES[server.engine]
    known = {name.rpartition(".")[2]: value for name, value in told.items()}
    for name in ("draft_sample_method", "rejection_sample_method"):
        if given := getattr(config, name):
            known[name] = given
            if engine != "vLLM":
                raise InputError(f"{name}: is vLLM's; this is {engine}")
    # vLLM 0.32 takes the likeliest tokens of Medusa heads whatever its settings say.
    greedy = engine != "vLLM" or kind_of(pair.drafts["draft"]) == "medusa"
    if greedy or known.get("draft_sample_method") == "greedy":
        return "naive"
    return "block" if known.get("rejection_sample_method") == "block" else "speculative"


def _case(
    server: RunningServer,
    pair: Pair,
    asked: Sequence[ServedPrompt],
    sampling: Sampling,
    rule: str,
) -> Case:
    said = [each.answer.sampling for each in asked if each.answer.sampling is not None]
    samplings = [Sampling(temperature=temperature) for temperature in _TEMPERATURES]
    return Case(
        target=pair.target,
        draft=pair.drafts["draft"],
        rows=[each.text(each.answer.output_ids) for each in asked],
        sampling=sampling,
        rule=rule,
        read_ids=[each.answer.prompt_ids for each in asked],
        samplings=list(dict.fromkeys(said)) or samplings,
    )


def _other_texts(asked: Sequence[ServedPrompt], own_tokens: Sequence[float]) -> list[JsonObject]:
    """Return the prompts with another greedy answer than the target's, and its first other token,
    from 1.
    """
    rows = []
    for each, own in zip(asked, own_tokens, strict=True):
        if own < len(each.answer.output_ids) - 1:
            row = {"row": each.prompt.row, "prompt_tokens": len(each.prompt.ids)}
            rows.append(row | {"token": int(own) + 2})
    return rows


def _own_rows(
    pair: Pair, asked: Sequence[ServedPrompt], sampling: Sampling, max_new_tokens: int
) -> list[Continuation]:
    """Generate the texts that this target would have given."""
    prompts = [list(each.prompt.ids) for each in asked]
    options = sampling_options(sampling)
    outputs = pair.generate(prompts, max_new_tokens=max_new_tokens, seed=0, **options)
    rows = []
    for each, output in zip(asked, outputs, strict=True):
        own = output.output_ids if len(output.output_ids) > 1 else each.answer.output_ids
        rows.append(each.text(own))
    return rows


def _by_depth(accepted_PD: Floats, reached_PD: Floats, picks: Resamples) -> list[Estimate]:
    """Return the share of steps that accept each position, a product of conditional shares.

    Skip steps that the text's end cuts off: the server may have accepted tokens past it.
    """
    value = 1.0
    share_R = np.ones(())
    estimates = []
    for accepted_P, reached_P in zip(accepted_PD.T, reached_PD.T, strict=True):
        sums = PromptSums(accepted_P, reached_P)
        value *= sums.pooled or 0.0
        share_R = share_R * np.nan_to_num(pooled_ratios(sums, picks))
        estimates.append(resampled(value, share_R, picks, least=0.0, most=1.0))
    return estimates


def _served_by_depth(
    answers: Sequence[ServedAnswer], tokens: int, picks: Resamples
) -> list[Estimate] | None:
    # llama.cpp lists positions from its first request on.
    accepted_PD = np.zeros((len(answers), tokens))
    reached_PD = np.zeros((len(answers), tokens))
    for row, answer in enumerate(answers):
        accepted = answer.accepted_by_depth
        if accepted is None:
            return None
        accepted_PD[row, : len(accepted)] = accepted
        # What reaches a depth was accepted at the depth before; every call reaches the first.
        reached = answer.reached_by_depth or [answer.calls, *accepted][:tokens]
        reached_PD[row, : len(reached)] = reached
    return _by_depth(accepted_PD, reached_PD, picks)


def _to_try(own_texts: bool, less: bool) -> dict[str, Change]:
    """Return the suspects that can explain what was found.

    Texts that are not the target's own can have any cause. The target's own texts rule out causes
    that change them, and acceptance as predicted needs no cause.
    """
    if not own_texts:
        return OF_THE_DRAFT | OF_THE_TARGET
    return OF_THE_DRAFT if less else {}


def _try(
    suspects: Mapping[str, Change], case: Case, tokens: int, counts: Compared
) -> list[JsonObject]:
    """Replay every suspect that applies.

    misfit: the share of target calls that differ, prompt by prompt, plus how unlikely the texts
    are.
    """
    calls_P = counts.served.denominator_P
    tried = []
    for name, change in suspects.items():
        for detail, changed in _by_rule(change(case)):
            found = replay(changed, tokens)
            likelihood = estimate(found.likelihood, counts.picks)
            differing_P = np.abs(found.tokens.denominator_P - calls_P)
            unlikely = abs(1 - (likelihood["value"] or 0.0))
            misfit = differing_P.sum() / calls_P.sum() + unlikely
            likely = close(likelihood, 1.0, _TEXT_MARGIN)
            row = {
                "suspect": name,
                "detail": detail,
                "tokens_per_call": found.tokens.pooled,
                "likelihood": likelihood["value"],
                "misfit": float(misfit),
                "fits": likely and replace(counts, predicted=found.tokens).as_predicted,
            }
            tried.append(row)
    return tried


def _by_rule(cases: Cases) -> Cases:
    """Yield each case, and the same with a greedy draft, which is vLLM's default."""
    for detail, case in cases:
        yield detail, case
        if case.rule != "naive" and not case.sampling.greedy:
            yield f"{detail}, and a greedy draft", replace(case, rule="naive")
