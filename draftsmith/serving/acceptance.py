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
from itertools import zip_longest
from pathlib import Path
from typing import Any

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
from draftsmith.eval.text_figures import Texts, judge_texts
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
# In halves of an interval, which are two standard errors: several loads are compared, and a
# lossless server hardly accepts four standard errors more.
_LESS = 1.3
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
    answers = alone.answers
    tokens = min(server.draft_tokens(answers), depth_limit(pair.drafts["draft"]) or 2**30)
    settings = measure_settings(server, pair, config, sampling, alone)
    case = Case(pair.target, pair.drafts["draft"], alone.texts, sampling)
    texts = [_texts(case, load) for load in loads]
    judged = [] if settings.rules else [("cannot tell", "its rule of rejection is not known here")]
    for load, written in zip(loads, texts, strict=True):
        if written.finding:
            judged.append((_NOT_OWN, f"{written.finding} ({load.name})"))
    acceptance: list[JsonObject] = []
    replays: list[JsonObject] = []
    # Of the rules that the server may follow, take the one that predicts its counts best.
    replayed = {rule: replay(replace(case, rule=rule), tokens) for rule in settings.rules}
    away = {
        rule: abs(_Compared.of(alone, of).away["value"] or 0.0) for rule, of in replayed.items()
    }
    for load in loads if away else ():
        case = replace(case, rows=load.texts, rule=min(away, key=away.__getitem__))
        predicted = replayed[case.rule] if load is alone else replay(case, tokens)
        counts = _Compared.of(load, predicted)
        row = counts.row(f"tokens per call, {load.name}")
        acceptance.append(row | {"tokens/s": load.tokens_per_s})
        if load is alone:
            acceptance += _by_position(answers, predicted, counts.picks) + counts.by_length(answers)
            if counts.judgement == "less" and not judged and not settings.differing:
                replays = _replays(case, tokens, load)
        judged.append((counts.judgement, row["of"]))
    judgement, because = _judgement(settings, judged, replays)
    remarks = [remark["text"] for remark in of_groups({"prompts": alone.groups})]
    return {
        "url": server.url,
        "engine": NAMES[server.engine],
        "server": server.facts,
        "draft_tokens": tokens,
        "temperature": sampling.temperature,
        "prompts": len(alone.prompts),
        "remarks": [*texts[0].remarks, *remarks],
        "settings": settings.rows,
        "texts": texts[0].rows,
        "acceptance": acceptance,
        "replays": replays,
        "judgement": judgement,
        "because": because,
    }


def _texts(case: Case, load: Load) -> Texts:
    """Judge the texts of a load. Greedy ones are read with the laws of temperature 1."""
    sampling = replace(case.sampling, temperature=case.sampling.temperature or 1.0)
    picks = resamples(load.groups, _RESAMPLES, seed=0)
    traces = trace(replace(case, rows=load.texts, sampling=sampling))
    return judge_texts(traces, case.sampling.greedy, picks)


def _judgement(
    settings: Settings, judged: list[tuple[str, str]], replays: list[JsonObject]
) -> tuple[str, list[str]]:
    """Return the judgement, and what speaks for it."""
    judgement = min((name for name, _ in judged), key=_ORDER.index)
    because = list(settings.differing)
    if judgement != "as predicted":
        because += [words for name, words in judged if name == judgement]
    if replays:
        fitting = " or ".join(row["of"] for row in replays if row["fits"])
        because.append(f"replays that fit: {fitting or 'none'}; not told: {settings.untold}")
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
        emitted = [len(answer.output_ids) - 1 for answer in load.answers]
        calls = [answer.calls for answer in load.answers]
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
        value = self.away["value"]
        low = self.away["low"]
        high = self.away["high"]
        if value is None or low is None or high is None:
            return "cannot tell"
        accepted = (self.predicted.pooled or 1.0) - 1
        margin = _MARGIN * accepted
        half = (high - low) / 2
        if value < -max(margin, _LESS * half):
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

    def by_length(self, answers: Sequence[ServedAnswer]) -> list[JsonObject]:
        """Return a row for each doubling of the prompt's length, in tokens."""
        doubled = [1 << (len(answer.prompt_ids) - 1).bit_length() for answer in answers]
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
    ours = (predicted["accepted_by_depth"], predicted["reached_by_depth"])
    none = [0] * len(ours[0][0])
    accepted = [answer.accepted_by_depth or none for answer in answers]
    reached = []
    for answer in answers:
        # What reaches a depth was accepted at the depth before; every call reaches the first.
        every = [answer.calls, *answer.accepted_by_depth]
        reached.append(answer.reached_by_depth or every[:-1] or none)
    rows: list[JsonObject] = []
    # llama.cpp lists positions from its first request on.
    columns = [zip_longest(*lists, fillvalue=0) for lists in (accepted, reached, *ours)]
    for at, (above, below, our_above, our_below) in enumerate(zip(*columns, strict=False), 1):
        rows.append(
            {
                "of": f"position {at}, if reached",
                "served": estimate(PromptSums.of(above, below), picks),
                "predicted": estimate(PromptSums.of(our_above, our_below), picks),
            }
        )
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
