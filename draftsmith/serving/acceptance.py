"""`draftsmith doctor --served`: four measurements of a running server, and one judgement.

1. settings: what the server says of itself, beside what the prediction assumes;
2. texts: whether the target wrote them (`eval.text_figures`);
3. acceptance: tokens per call, alone and at load, beside the prediction along the same texts;
4. replays: if it accepts less and nothing above says why, the pair changed as an engine may
   change it.

Legend: P prompts, D depths.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.config import ServedConfig
from draftsmith.core.hub import quiet
from draftsmith.core.io import JsonObject
from draftsmith.core.options import configured
from draftsmith.core.ranks import say
from draftsmith.core.records import read_record
from draftsmith.core.sampling import Sampling
from draftsmith.core.settings import loading, resolve_sampling
from draftsmith.core.template_date import fix_date
from draftsmith.drafts.load import depth_limit
from draftsmith.eval.bootstrap import PromptSums, Resamples, difference, estimate, resamples
from draftsmith.eval.predict import PredictedCounts
from draftsmith.eval.remarks import of_groups
from draftsmith.eval.schema import Estimate
from draftsmith.eval.text_figures import judge_texts
from draftsmith.pair import Pair, load_pair
from draftsmith.serving.asking import Load, ask
from draftsmith.serving.replays import CHANGES, Case, replay, trace
from draftsmith.serving.running_server import NAMES, RunningServer, ServedAnswer
from draftsmith.serving.settings import Settings, measure_settings

_NOT_OWN = "not this target's texts"
# Of several findings, the first of these is the judgement.
_ORDER = (_NOT_OWN, "less", "more", "cannot tell", "as predicted")
# Ignore smaller differences in accepted tokens per call.
_MARGIN = 0.05
# Half an interval is two standard errors. A lossless server hardly accepts four more.
_MORE = 2.0
_RESAMPLES = 2000


@quiet()
def served(config: ServedConfig | None = None, **options: Any) -> JsonObject:
    """Measure a running server, and judge whether it does what was predicted.

    Return what `doctor --served --json` prints: the tables `settings`, `texts`, `acceptance` and
    `replays`, lists of rows; the `judgement`: `as predicted`, `less`, `more`, `not this target's
    texts` or `cannot tell`; and `because`, what speaks for it, in words, the most certain first.
    Raise InputError for a server that cannot be asked or counts no drafts.
    """
    config = configured(ServedConfig, config, options)
    server = RunningServer(config.served)
    pair = _load(config)
    sampling = _sampling(server, pair, config)
    loads = ask(server, pair, config, sampling)
    alone = loads[0]
    answers = [each.answer for each in alone.asked]
    tokens = min(server.draft_tokens(answers), depth_limit(pair.drafts["draft"]) or 2**30)
    settings = measure_settings(server, pair, config, sampling, alone.asked)
    rows = [each.text for each in alone.asked]
    case = Case(pair.target, pair.drafts["draft"], rows, sampling, settings.rule or "")
    picks = resamples(alone.groups, _RESAMPLES, seed=0)
    drawn = replace(sampling, temperature=sampling.temperature or 1.0)
    texts = judge_texts(trace(replace(case, sampling=drawn)), sampling.greedy, picks)
    judged = [(_NOT_OWN, texts.finding)] if texts.finding else []
    acceptance: list[JsonObject] = []
    replays: list[JsonObject] = []
    if settings.rule is None:
        judged.append(("cannot tell", "its rule of rejection is not known here"))
    else:
        for load in loads:
            predicted = replay(replace(case, rows=[each.text for each in load.asked]), tokens)
            counts = _Compared.of(load, predicted)
            row = counts.row(f"tokens per call, {load.name}")
            judged.append((counts.judgement, row["of"]))
            acceptance.append(row | {"tokens/s": load.tokens_per_s})
            if load is alone:
                acceptance += _by_position(answers, predicted, picks)
                acceptance += counts.by_length([len(answer.prompt_ids) for answer in answers])
                explained = texts.finding or settings.differing
                if counts.judgement == "less" and not explained:
                    replays = _replays(case, tokens, load)
    judgement, because = _judgement(settings, judged, replays)
    remarks = [remark["text"] for remark in of_groups({"prompts": alone.groups})]
    return {
        "url": server.url,
        "engine": NAMES[server.engine],
        "server": server.facts,
        "draft_tokens": tokens,
        "temperature": sampling.temperature,
        "prompts": len(rows),
        "remarks": [*texts.remarks, *remarks],
        "settings": settings.rows,
        "texts": texts.rows,
        "acceptance": acceptance,
        "replays": replays,
        "judgement": judgement,
        "because": because,
    }


def _judgement(
    settings: Settings, judged: list[tuple[str, str]], replays: list[JsonObject]
) -> tuple[str, list[str]]:
    """Return the judgement, and what speaks for it."""
    judgement = min((name for name, _ in judged), key=_ORDER.index)
    if judgement == "as predicted":
        return judgement, []
    because = [*settings.differing, *(words for name, words in judged if name == judgement)]
    if fitting := [row["of"] for row in replays if row["fits"]]:
        because.append(f"replays that fit: {' or '.join(fitting)}")
    return judgement, because


def _replays(case: Case, tokens: int, load: Load) -> list[JsonObject]:
    """Replay every change that applies; none fits where nothing is accepted."""
    rows: list[JsonObject] = []
    for name, change in CHANGES.items():
        for detail, changed in change(case):
            found = _Compared.of(load, replay(changed, tokens))
            fits = (found.served.pooled or 1.0) > 1.0 and found.judgement == "as predicted"
            rows.append(found.row(f"{name}: {detail}") | {"fits": fits})
    return rows


@dataclass(frozen=True)
class _Compared:
    """Tokens over target calls of the same prompts, served and predicted. groups: of prompts that
    are resampled together.
    """

    served: PromptSums
    predicted: PromptSums
    groups: Sequence[int]

    @classmethod
    def of(cls, load: Load, predicted: PredictedCounts) -> "_Compared":
        """Compare what was asked; the first token of an answer comes without a call."""
        answers = [each.answer for each in load.asked]
        emitted = [len(answer.output_ids) - 1 for answer in answers]
        calls = [answer.calls for answer in answers]
        ours = PromptSums.of(emitted, predicted["target_calls"])
        return cls(PromptSums.of(emitted, calls), ours, load.groups)

    @cached_property
    def picks(self) -> Resamples:
        return resamples(self.groups, _RESAMPLES, seed=0)

    @cached_property
    def away(self) -> Estimate:
        return difference(self.served, self.predicted, self.picks)

    @property
    def judgement(self) -> str:
        """`as predicted`, `less` or `more`; `cannot tell` if half of the accepted tokens could be
        missing unseen.
        """
        value = self.away["value"] or 0.0
        accepted = (self.predicted.pooled or 1.0) - 1
        margin = _MARGIN * accepted
        if self.away["low"] is None or self.away["high"] is None:
            return "as predicted" if abs(value) <= margin else "cannot tell"
        half = (self.away["high"] - self.away["low"]) / 2
        if value < -max(margin, half):
            return "less"
        if value > max(margin, _MORE * half):
            return "more"
        return "cannot tell" if half > max(accepted / 2, _MARGIN) else "as predicted"

    def row(self, name: str) -> JsonObject:
        return {
            "of": name,
            "served": estimate(self.served, self.picks),
            "predicted": estimate(self.predicted, self.picks),
            "difference": self.away,
        }

    def by_length(self, lengths: Sequence[int]) -> list[JsonObject]:
        """Return a row for each doubling of the prompt's length, in tokens."""
        doubled = [1 << (length - 1).bit_length() for length in lengths]
        rows: list[JsonObject] = []
        for up_to in sorted(set(doubled)):
            chosen = [index for index, length in enumerate(doubled) if length == up_to]
            served, predicted = (
                PromptSums(sums.numerator_P[chosen], sums.denominator_P[chosen])
                for sums in (self.served, self.predicted)
            )
            part = _Compared(served, predicted, [self.groups[index] for index in chosen])
            rows.append(part.row(f"prompts of up to {up_to} tokens"))
        return rows


def _by_position(
    answers: Sequence[ServedAnswer], predicted: PredictedCounts, picks: Resamples
) -> list[JsonObject]:
    """Return a row for each drafted position: of the steps that accept the one before, how many
    accept it. Steps that the text's end cuts off are left out.
    """
    ours_PD = np.array(predicted["accepted_by_depth"])
    of_ours_PD = np.array(predicted["reached_by_depth"])
    accepted_PD = np.zeros(ours_PD.shape)
    reached_PD = np.zeros(ours_PD.shape)
    for index, answer in enumerate(answers):
        # llama.cpp lists positions from its first request on.
        accepted = answer.accepted_by_depth or []
        accepted_PD[index, : len(accepted)] = accepted
        # What reaches a depth was accepted at the depth before; every call reaches the first.
        reached = answer.reached_by_depth or [answer.calls, *accepted][: len(accepted)]
        reached_PD[index, : len(reached)] = reached
    rows: list[JsonObject] = []
    for at in range(len(ours_PD[0])):
        served = PromptSums(accepted_PD[:, at], reached_PD[:, at])
        ours = PromptSums(ours_PD[:, at], of_ours_PD[:, at])
        row: JsonObject = {"served": estimate(served, picks), "predicted": estimate(ours, picks)}
        rows.append(row | {"of": f"position {at + 1}, if reached"})
    return rows


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
