"""Compare what a running server accepts with the prediction, and find the likely cause of less.

The prediction replays the draft along the served texts (`eval.predict`), so both sides cover the
same tokens. Two things can differ: the draft's acceptance, or the texts, if the target did not
write them (their likelihood shows it). Then every suspect is replayed. The likely cause is the
suspect whose replay comes closest.

Legend: P prompts, D depths, N positions, V vocabulary, R resamples.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from distill.engines.server import Completion
from drafts.load import depth_limit
from draftsmith.config import ServedConfig
from draftsmith.pair import Pair, load_pair
from draftsmith.served.running_server import NAMES, RunningServer, ServedAnswer
from draftsmith.served.suspects import SUSPECTS, Case
from draftsmith_core.errors import InputError, RequirementError
from draftsmith_core.models import eos_ids
from draftsmith_core.options import configured
from draftsmith_core.progress import track
from draftsmith_core.prompts import Prompt, read_prompts, room_for_prompts
from draftsmith_core.sampling import Sampling
from draftsmith_core.settings import loading, resolve_sampling
from eval.acceptance import Continuation, Positions
from eval.bootstrap import (
    Floats,
    PromptSums,
    Resamples,
    difference,
    estimate,
    interval,
    pooled_ratios,
    resamples,
)
from eval.estimate import read_traces
from eval.method import Method
from eval.predict import predict
from eval.report.formats import with_interval
from eval.schema import Estimate

# Ignore smaller differences: in accepted tokens per call, and in the likelihood of the texts.
_ACCEPTED_MARGIN, _TEXT_MARGIN = 0.05, 0.03
# Temperatures to try if the server does not report its own default.
_TEMPERATURES = (0.0, 0.3, 0.6, 0.7, 0.8, 1.0)
_RESAMPLES = 2000
_BATCH = 8
# Suspects that are printed; --json has all.
_SHOWN = 6


@dataclass(frozen=True)
class Replay:
    """A prediction. likelihood: per prompt, the sum of the tokens' probabilities, over the sum
    expected if the target wrote them; about 1 if it did.
    """

    tokens: PromptSums
    accepted_PD: Floats
    reached_PD: Floats
    likelihood: PromptSums


def _likelihood(at: Positions) -> dict[str, list[float]]:
    """Sums over each text of p(x), and of its expectation under p, sum_x p(x)^2."""
    x_N1 = torch.tensor([[at.texts[b].output_ids[n]] for b, n in at.places], device=at.p_NV.device)
    sums_B2 = torch.zeros(len(at.texts), 2, dtype=torch.double)
    own_N2 = (
        torch.stack([at.p_NV.gather(1, x_N1)[:, 0], at.p_NV.square().sum(1)], dim=1).double().cpu()
    )
    sums_B2.index_add_(0, torch.tensor([b for b, _ in at.places]), own_N2)
    return {"own": sums_B2[:, 0].tolist(), "expected": sums_B2[:, 1].tolist()}


def _replay(case: Case, tokens: int) -> Replay:
    """Predict drafting `tokens` at a time along the case's texts."""
    method = Method(f"chain:{tokens}", case.rule)
    models, observers = (case.target, {"draft": case.draft}), {"likelihood": _likelihood}
    traces, found = read_traces(
        *models, case.rows, case.sampling, [method], batch_size=_BATCH, observers=observers
    )
    likelihood = found["draft"]["likelihood"]
    counts = predict(method.shape, method.verifier, case.sampling, traces["draft"])
    assert counts is not None
    return Replay(
        PromptSums.of([len(row.output_ids) for row in case.rows], counts["target_calls"]),
        np.array(counts["accepted_by_depth"]),
        np.array(counts["reached_by_depth"]),
        PromptSums.of(likelihood["own"], likelihood["expected"]),
    )


def _by_depth(accepted_PD: Floats, reached_PD: Floats, picks: Resamples) -> list[Estimate]:
    """Share of the steps that accept each position, as a product of conditional shares.

    Steps cut off by the text's end are left out, because the server may have accepted tokens past
    it.
    """
    parts = [PromptSums(a, r) for a, r in zip(accepted_PD.T, reached_PD.T, strict=True)]
    values = np.cumprod([part.pooled or 0.0 for part in parts])
    shares_DR = np.cumprod([np.nan_to_num(pooled_ratios(part, picks)) for part in parts], axis=0)
    ends = [interval(share_R, picks, least=0.0, most=1.0) for share_R in shares_DR]
    return [
        Estimate(value=float(value), low=low, high=high, n=len(accepted_PD))
        for value, (low, high) in zip(values, ends, strict=True)
    ]


def _close(value: Estimate, to: float, margin: float) -> bool:
    """Whether an estimate is within the margin, or its interval holds the value."""
    low, high = (to if end is None else end for end in (value["low"], value["high"]))
    return abs((value["value"] or 0.0) - to) <= margin or (
        value["low"] is not None and low <= to <= high
    )


def served(config: ServedConfig | None = None, **options: Any) -> dict[str, Any]:
    """Compare what a running server accepts with the prediction, and find the likely cause if it is
    less.

    Return what `doctor --served --json` prints: `served` and `predicted` with `tokens_per_call` and
    `by_depth`, their `difference`, the `likelihood` of the served texts (1: they are the target's
    own), the `verdict`, the `cause` with its `remedy`, and what was `tried`. Raise InputError for a
    server that cannot be asked or counts no drafts.
    """
    config = configured(ServedConfig, config, options)
    server = RunningServer(config.served)
    pair = load_pair(
        config.target,
        draft={"draft": config.draft},
        fast=False,
        chat_template=config.chat_template,
        **loading(config),
    )
    draft = pair.drafts["draft"]
    sampling = resolve_sampling(config.target, pair.target, temperature=config.temperature).sampling
    prompts, answers = _ask(server, pair, config, sampling)
    tokens = min(server.draft_tokens(answers), depth_limit(draft) or 2**30)
    # The rule with which the engine can accept most; vLLM drafts greedily unless it is told to
    # sample.
    rule = "speculative" if server.engine == "vllm" and depth_limit(draft) is None else "naive"
    rows = [_continuation(p, answer.output_ids) for p, answer in zip(prompts, answers, strict=True)]
    samplings = list(
        dict.fromkeys(answer.sampling for answer in answers if answer.sampling is not None)
    )
    samplings = samplings or [Sampling(temperature=temperature) for temperature in _TEMPERATURES]
    case = Case(
        pair.target,
        draft,
        rows,
        sampling,
        rule,
        [answer.prompt_ids for answer in answers],
        samplings,
    )
    picks = resamples(len(answers), _RESAMPLES, seed=0)
    counted = PromptSums.of([len(a.output_ids) - 1 for a in answers], [a.calls for a in answers])
    predicted = _replay(case, tokens)
    likelihood = estimate(predicted.likelihood, picks)
    own_texts = _close(likelihood, 1.0, _TEXT_MARGIN)
    if not own_texts:  # so predict the texts that this target would have given
        how = {"max_new_tokens": config.max_new_tokens, **dataclasses.asdict(sampling)}
        outs = zip(prompts, pair.generate([list(p.ids) for p in prompts], **how), rows, strict=True)
        rows = [
            _continuation(p, out.output_ids) if len(out.output_ids) > 1 else row
            for p, out, row in outs
        ]
        predicted = _replay(replace(case, rows=rows), tokens)
    away = difference(counted, predicted.tokens, picks)
    # If the target wrote the texts, require a significant difference; otherwise the margin alone.
    less = (away["value"] or 0.0) < -_margin(predicted) and (
        not own_texts or not _close(away, 0.0, 0.0)
    )
    names = [
        name
        for name, suspect in SUSPECTS.items()
        if not own_texts or (less and not suspect.of_text)
    ]
    tried = _try(names, case, tokens, counted, picks)
    cause = next((suspect for suspect in tried if suspect["fits"]), None)
    return {
        "url": server.url,
        "engine": NAMES[server.engine],
        "draft_tokens": tokens,
        "temperature": sampling.temperature,
        "prompts": len(answers),
        "served": {
            "tokens_per_call": estimate(counted, picks),
            "by_depth": _served_by_depth(answers, tokens, picks),
        },
        "predicted": {
            "tokens_per_call": estimate(predicted.tokens, picks),
            "by_depth": _by_depth(predicted.accepted_PD, predicted.reached_PD, picks),
        },
        "difference": away,
        "likelihood": likelihood,
        "verdict": "less than predicted" if less else "as predicted",
        "own_texts": own_texts,
        "cause": cause and f"{cause['suspect']}: {cause['detail']}",
        "remedy": cause and SUSPECTS[cause["suspect"]].remedy,
        "tried": tried,
    }


def _ask(
    server: RunningServer, pair: Pair, config: ServedConfig, sampling: Sampling
) -> tuple[list[Prompt], list[ServedAnswer]]:
    """The prompts that have an answer of at least two tokens, and the answers."""
    room = room_for_prompts(pair.context, config.max_new_tokens)
    options: Any = {
        "prompt_tokens": config.prompt_tokens,
        "max_tokens": room,
        "limit": config.max_prompts,
    }
    prompts = read_prompts(config.prompts, pair.tokenizer, **options).prompts
    completion = Completion(
        *(
            server.model,
            pair.tokenizer,
            sampling,
            config.max_new_tokens,
            eos_ids(pair.target),
            False,
        ),
        len(pair.tokenizer),
    )
    asked = track(prompts, "prompts served", len(prompts))
    answers = [
        (prompt, server.answer(prompt, completion, config.temperature is not None))
        for prompt in asked
    ]
    kept = [(prompt, answer) for prompt, answer in answers if len(answer.output_ids) > 1]
    if not kept:
        raise InputError(
            f"--prompts {config.prompts}: every answer ends with its first token; nothing can be "
            "drafted"
        )
    return [prompt for prompt, _ in kept], [answer for _, answer in kept]


def _continuation(prompt: Prompt, output_ids: Sequence[int]) -> Continuation:
    """The answer after its first token, which engines take from the prompt's forward."""
    return Continuation(prompt.id, [*prompt.ids, output_ids[0]], output_ids[1:])


def _margin(replay: Replay) -> float:
    return _ACCEPTED_MARGIN * ((replay.tokens.pooled or 1.0) - 1)


def _served_by_depth(
    answers: Sequence[ServedAnswer], tokens: int, picks: Resamples
) -> list[Estimate] | None:
    accepted = [
        answer.accepted_by_depth for answer in answers if answer.accepted_by_depth is not None
    ]
    if len(accepted) < len(answers):
        return None
    # llama.cpp lists positions from its first request on.
    accepted_PD = np.array(
        [[*row, *[0] * (tokens - len(row))] for row in accepted], dtype=np.float64
    )
    calls_P1 = np.array([[answer.calls] for answer in answers], dtype=np.float64)
    return _by_depth(accepted_PD, np.hstack([calls_P1, accepted_PD[:, :-1]]), picks)


def _try(
    names: Sequence[str], case: Case, tokens: int, counted: PromptSums, picks: Resamples
) -> list[dict[str, Any]]:
    """Replays under the suspects that apply, the best fit first.

    misfit: the share of target calls that differ, prompt by prompt, plus how unlikely the texts
    are.
    """
    tried = []
    for name in names:
        for detail, changed in _by_rule(SUSPECTS[name].change(case)):
            replay = _replay(changed, tokens)
            likelihood, away = (
                estimate(replay.likelihood, picks),
                difference(counted, replay.tokens, picks),
            )
            calls_P = counted.denominator_P
            misfit = np.abs(replay.tokens.denominator_P - calls_P).sum() / calls_P.sum()
            tried.append(
                {
                    "suspect": name,
                    "detail": detail,
                    "tokens_per_call": replay.tokens.pooled,
                    "likelihood": likelihood["value"],
                    "misfit": float(misfit) + abs(1 - (likelihood["value"] or 0.0)),
                    "fits": _close(likelihood, 1.0, _TEXT_MARGIN)
                    and _close(away, 0.0, _margin(replay)),
                }
            )
    return sorted(tried, key=lambda row: (not row["fits"], row["misfit"]))


def _by_rule(cases: Iterable[tuple[str, Case]]) -> Iterator[tuple[str, Case]]:
    """Each case, and the same with a greedy draft, which is vLLM's default."""
    for detail, case in cases:
        yield detail, case
        if case.rule != "naive" and not case.sampling.greedy:
            yield f"{detail}, and a greedy draft", replace(case, rule="naive")


def in_words(found: dict[str, Any]) -> tuple[list[str], RequirementError | None]:
    """The lines of `doctor --served`, and the error of exit code 3 if less was served than
    predicted.
    """
    sides = [found["served"], found["predicted"]]
    rows = [("tokens per call", [side["tokens_per_call"] for side in sides])]
    rows += [
        (f"position {depth + 1}", [side["by_depth"] and side["by_depth"][depth] for side in sides])
        for depth in range(found["draft_tokens"])
    ]
    lines = [
        f"{found['engine']} at {found['url']} drafts {found['draft_tokens']} tokens; "
        f"{found['prompts']} prompts, "
        f"temperature {found['temperature']:g}",
        f"{'':<18}{'served':<24}predicted",
        *(
            f"{name:<18}{with_interval(one):<24}{with_interval(other)}"
            for name, (one, other) in rows
        ),
    ]
    shown = found["tried"][:_SHOWN]
    if shown:
        width = 4 + max(len(f"{row['suspect']}: {row['detail']}") for row in shown)
        lines.append(f"{'tried':<{width}}tokens per call  texts  misfit")
    for row in shown:
        name = f"{'*' if row['fits'] else ' '} {row['suspect']}: {row['detail']}"
        lines.append(
            f"{name:<{width}}{row['tokens_per_call']:>15.3f}{row['likelihood']:>7.0%}{row['misfit']:>8.3f}"
        )
    what = found["verdict"]
    if not found["own_texts"]:
        what += (
            ", but not this target's texts (their tokens have "
            f"{found['likelihood']['value']:.0%} of the probability "
            f"expected of its own)"
        )
    if shown:
        closest = f"no suspect fits, the closest is '{shown[0]['suspect']}'"
        what += (
            f"; likely cause: {found['cause']}; {found['remedy']}"
            if found["cause"]
            else f"; {closest}"
        )
    if found["verdict"] == "as predicted":
        return [*lines, what], None
    return lines, RequirementError([what])
