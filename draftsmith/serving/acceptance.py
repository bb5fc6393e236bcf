"""Compare what a running server accepts with the prediction, and find the likely cause of less.

The prediction replays the draft along the served texts (`eval.predict`), so both sides cover the
same tokens. Two things can differ: the draft's acceptance, or the texts, if the target did not
write them (their likelihood shows it). Then every suspect is replayed. The likely cause is the
suspect whose replay comes closest.

Legend: P prompts, D depths, R resamples.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.config import ServedConfig
from draftsmith.core.errors import InputError
from draftsmith.core.hub import quiet
from draftsmith.core.io import JsonObject
from draftsmith.core.models import eos_ids
from draftsmith.core.options import configured
from draftsmith.core.progress import track
from draftsmith.core.prompts import Prompt, read_prompts, room_for_prompts
from draftsmith.core.ranks import say
from draftsmith.core.record import read_record
from draftsmith.core.sampling import Sampling
from draftsmith.core.settings import loading, resolve_sampling, sampling_options
from draftsmith.core.template_date import fix_date
from draftsmith.distill.engines.server import Completion
from draftsmith.drafts.load import depth_limit, other_targets
from draftsmith.eval.acceptance import Continuation
from draftsmith.eval.bootstrap import (
    Floats,
    PromptSums,
    Resamples,
    difference,
    estimate,
    interval,
    pooled_ratios,
    resamples,
)
from draftsmith.eval.groups import groups_of
from draftsmith.eval.remarks import of_groups
from draftsmith.eval.schema import Estimate
from draftsmith.pair import Pair, load_pair
from draftsmith.serving.replay import Case, Replay, replay
from draftsmith.serving.running_server import NAMES, RunningServer, ServedAnswer
from draftsmith.serving.suspects import OF_THE_DRAFT, OF_THE_TARGET, REMEDIES, Change

# Ignore smaller differences: in accepted tokens per call, and in the likelihood of the texts.
_ACCEPTED_MARGIN = 0.05
_TEXT_MARGIN = 0.03
# Temperatures to try if the server does not report its own default.
_TEMPERATURES = (0.0, 0.3, 0.6, 0.7, 0.8, 1.0)
_RESAMPLES = 2000


@dataclass(frozen=True)
class ServedPrompt:
    """A prompt with the server's answer."""

    prompt: Prompt
    answer: ServedAnswer

    def text(self, output_ids: Sequence[int]) -> Continuation:
        """Return an answer after its first token, which engines take from the prompt's forward."""
        prompt_ids = [*self.prompt.ids, output_ids[0]]
        return Continuation(self.prompt.id, prompt_ids, output_ids[1:])


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
    given = {"temperature": config.temperature}
    sampling = resolve_sampling(config.target, pair.target, given).sampling
    asked = _ask(server, pair, config, sampling)
    answers = [each.answer for each in asked]
    tokens = min(server.draft_tokens(answers), depth_limit(pair.drafts["draft"]) or 2**30)
    case = _case(server, pair, asked, sampling)
    groups = groups_of([each.prompt for each in asked])
    picks = resamples(groups, _RESAMPLES, seed=0)
    counted = _counted(answers)
    predicted = replay(case, tokens)
    likelihood = estimate(predicted.likelihood, picks)
    own_texts = _close(likelihood, 1.0, _TEXT_MARGIN)
    if not own_texts:
        rows = _own_rows(pair, asked, sampling, config.max_new_tokens)
        predicted = replay(replace(case, rows=rows), tokens)
    away = difference(counted, predicted.tokens, picks)
    less = (away["value"] or 0.0) < -_margin(predicted)
    if own_texts:  # then require a significant difference, too
        less = less and not _close(away, 0.0, 0.0)
    tried = _try(_to_try(own_texts, less), case, tokens, counted, picks)
    cause = next((row for row in tried if row["fits"]), None)
    return {
        "url": server.url,
        "engine": NAMES[server.engine],
        "draft_tokens": tokens,
        "temperature": sampling.temperature,
        "prompts": len(answers),
        "prompt_groups": groups,
        "remarks": [remark["text"] for remark in of_groups({"prompts": groups})],
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
        "other_target": next(iter(other_targets([config.draft], pair.target)), None),
        "cause": cause and f"{cause['suspect']}: {cause['detail']}",
        "remedy": cause and REMEDIES[cause["suspect"]],
        "tried": tried,
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


def _ask(
    server: RunningServer, pair: Pair, config: ServedConfig, sampling: Sampling
) -> list[ServedPrompt]:
    """Ask every prompt. Return those whose answer has at least two tokens."""
    read = read_prompts(
        config.prompts,
        pair.tokenizer,
        prompt_tokens=config.prompt_tokens,
        max_tokens=room_for_prompts(pair.context, config.max_new_tokens),
        limit=config.max_prompts,
    )
    read.say_skipped()
    completion = Completion(
        model=server.model,
        tokenizer=pair.tokenizer,
        sampling=sampling,
        max_new_tokens=config.max_new_tokens,
        eos_ids=eos_ids(pair.target),
        ignore_eos=False,
        vocabulary=len(pair.tokenizer),
    )
    kept = []
    for prompt in track(read.prompts, "prompts served", len(read.prompts)):
        answer = server.answer(prompt, completion, config.temperature is not None)
        if len(answer.output_ids) > 1:
            kept.append(ServedPrompt(prompt, answer))
    if not kept:
        raise InputError(
            f"--prompts {config.prompts}: every answer ends with its first token; nothing can be "
            "drafted"
        )
    return kept


def _case(
    server: RunningServer, pair: Pair, asked: Sequence[ServedPrompt], sampling: Sampling
) -> Case:
    draft = pair.drafts["draft"]
    said = [each.answer.sampling for each in asked if each.answer.sampling is not None]
    samplings = [Sampling(temperature=temperature) for temperature in _TEMPERATURES]
    # The rule with which the engine can accept most: vLLM can sample drafts, other engines cannot.
    samples = server.engine == "vllm" and depth_limit(draft) is None
    return Case(
        target=pair.target,
        draft=draft,
        rows=[each.text(each.answer.output_ids) for each in asked],
        sampling=sampling,
        rule="speculative" if samples else "naive",
        read_ids=[each.answer.prompt_ids for each in asked],
        samplings=list(dict.fromkeys(said)) or samplings,
    )


def _own_rows(
    pair: Pair, asked: Sequence[ServedPrompt], sampling: Sampling, max_new_tokens: int
) -> list[Continuation]:
    """Generate the texts that this target would have given."""
    prompts = [list(each.prompt.ids) for each in asked]
    outputs = pair.generate(prompts, max_new_tokens=max_new_tokens, **sampling_options(sampling))
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
        low, high = interval(share_R, picks, least=0.0, most=1.0)
        estimates.append(Estimate(value=value, low=low, high=high, n=picks.groups))
    return estimates


def _close(value: Estimate, to: float, margin: float) -> bool:
    """Return whether an estimate is within the margin, or its interval holds the value."""
    if abs((value["value"] or 0.0) - to) <= margin:
        return True
    low = value["low"]
    high = value["high"]
    return low is not None and low <= to and (high is None or to <= high)


def _margin(predicted: Replay) -> float:
    return _ACCEPTED_MARGIN * ((predicted.tokens.pooled or 1.0) - 1)


def _counted(answers: Sequence[ServedAnswer]) -> PromptSums:
    """Return the emitted tokens over the target calls; the first token comes without a call."""
    emitted = [len(answer.output_ids) - 1 for answer in answers]
    return PromptSums.of(emitted, [answer.calls for answer in answers])


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
    suspects: Mapping[str, Change],
    case: Case,
    tokens: int,
    counted: PromptSums,
    picks: Resamples,
) -> list[JsonObject]:
    """Replay every suspect that applies; return the best fit first.

    misfit: the share of target calls that differ, prompt by prompt, plus how unlikely the texts
    are.
    """
    tried = []
    calls_P = counted.denominator_P
    for name, change in suspects.items():
        for detail, changed in _by_rule(change(case)):
            found = replay(changed, tokens)
            likelihood = estimate(found.likelihood, picks)
            away = difference(counted, found.tokens, picks)
            differing_P = np.abs(found.tokens.denominator_P - calls_P)
            unlikely = abs(1 - (likelihood["value"] or 0.0))
            misfit = differing_P.sum() / calls_P.sum() + unlikely
            likely = _close(likelihood, 1.0, _TEXT_MARGIN)
            row = {
                "suspect": name,
                "detail": detail,
                "tokens_per_call": found.tokens.pooled,
                "likelihood": likelihood["value"],
                "misfit": float(misfit),
                "fits": likely and _close(away, 0.0, _margin(found)),
            }
            tried.append(row)
    return sorted(tried, key=lambda row: (not row["fits"], row["misfit"]))


def _by_rule(cases: Iterable[tuple[str, Case]]) -> Iterator[tuple[str, Case]]:
    """Yield each case, and the same with a greedy draft, which is vLLM's default."""
    for detail, case in cases:
        yield detail, case
        if case.rule != "naive" and not case.sampling.greedy:
            yield f"{detail}, and a greedy draft", replace(case, rule="naive")
