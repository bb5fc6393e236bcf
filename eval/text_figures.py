"""Did the target write these texts? Two figures, from one forward of target and draft over them.

Both are sums over the tokens of f(token) - E_p f, which are 0 on average for texts of the target,
whatever drafted them:

* likelihood: f = log p, per token. Another temperature, target or prompt moves it.
* the draft's share: f = (q - p) / (q + p), over the sum of E_q f - E_p f. It estimates which share
  of the tokens the draft wrote beyond what the target would have written: 0 for every lossless
  verifier, 1 if nothing is verified. Rounding hardly moves it.

A greedy text is the target's own token by token, up to ties that rounding decides. There the share
is that of the draft's own tokens, at places where it and the target would write different ones.

Legend: P texts, N positions, V vocabulary.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.core.io import JsonObject
from draftsmith.core.sampling import Sampling
from draftsmith.drafts.load import Draft
from draftsmith.eval.alpha import Reader
from draftsmith.eval.bootstrap import PromptSums, Resamples, estimate, pooled_ratios, resampled
from draftsmith.eval.formulas import Continuation, Positions
from draftsmith.eval.schema import Estimate

# A token without probability counts as one of this.
_LEAST = 1e-9
# Rounding decides between tokens whose logits are closer than this (bf16 near 20: 0.125).
_ROUNDING = 0.5

# Smaller figures are rounding: in nats a token, as a share of tokens.
_NATS = 0.03
_SHARE = 0.015
_OTHER_TOKENS = 0.03
# A figure counts beyond so many standard errors of the target's own law.
_Z = 3.0
# The share of unverified tokens that a check should be able to see.
_SEEN = 0.05


@dataclass(frozen=True)
class TextFigure:
    """A figure with its interval over prompts, and its standard error by the target's own law."""

    estimate: Estimate
    error: float

    @property
    def z(self) -> float:
        """The figure in standard errors."""
        return (self.estimate["value"] or 0.0) / self.error if self.error else 0.0


def text_sums(at: Positions) -> dict[str, list[float]]:
    """Return the sums of each text that `sampled_figures` reads. An observer of `eval.alpha`."""
    x_N = _tokens(at)
    p_NV = at.p_NV
    q_NV = at.q_NV
    both_NV = (q_NV + p_NV).clamp(min=torch.finfo(p_NV.dtype).tiny)
    lean_NV = (q_NV - p_NV) / both_NV
    sums: dict[str, list[float]] = {}
    for name, f_NV in {"likelihood": p_NV.clamp(min=_LEAST).log(), "share": lean_NV}.items():
        mean_N = (p_NV * f_NV).sum(1)
        own_N = f_NV.gather(1, x_N[:, None])[:, 0]
        square_N = (p_NV * f_NV.square()).sum(1)
        sums[name] = at.sums(own_N - mean_N)
        sums[f"{name}_variance"] = at.sums(square_N - mean_N.square())
    sums["apart"] = at.sums(((q_NV - p_NV) * lean_NV).sum(1))
    sums["tokens"] = [float(length) for length in at.lengths]
    return sums


def sampled_figures(
    sums: Mapping[str, Sequence[float]], picks: Resamples
) -> tuple[TextFigure, TextFigure]:
    """Return the likelihood per token and the draft's share."""
    likelihood = _figure(sums, "likelihood", "tokens", picks)
    return likelihood, _figure(sums, "share", "apart", picks)


def _figure(
    sums: Mapping[str, Sequence[float]], name: str, below: str, picks: Resamples
) -> TextFigure:
    ratio = PromptSums.of(sums[name], sums[below])
    found = resampled(ratio.pooled, pooled_ratios(ratio, picks), picks)
    total = sum(sums[below])
    return TextFigure(found, math.sqrt(sum(sums[f"{name}_variance"])) / total if total else 0.0)


def greedy_sums(at: Positions) -> dict[str, list[float]]:
    """Return by text what a greedy server's tokens say. An observer; p is at temperature 1.

    A token's gap is how much likelier, in logits, the target's own choice is. `tokens`; `parted`
    with a gap; of those `of_draft` are the draft's choice, `wide_of_draft` by a gap that rounding
    does not explain. `apart`: places where the draft's choice has such a gap. `first` parted token,
    from 0, with its `gap`; -1 and 0 if none is.
    """
    x_N = _tokens(at)
    log_NV = at.p_NV.clamp(min=_LEAST).log()
    gap_NV = log_NV.amax(1, keepdim=True) - log_NV
    choice_N = at.logits_NV.argmax(1)
    gap_N = gap_NV.gather(1, x_N[:, None])[:, 0]
    parted_N = gap_N > 0
    of_draft_N = parted_N & (choice_N == x_N)
    wide_N = gap_N > _ROUNDING
    places = {
        "parted": parted_N,
        "of_draft": of_draft_N,
        "wide_of_draft": of_draft_N & wide_N,
        "apart": gap_NV.gather(1, choice_N[:, None])[:, 0] > _ROUNDING,
    }
    sums = {name: at.sums(place_N.double()) for name, place_N in places.items()}
    sums["tokens"] = [float(length) for length in at.lengths]
    sums |= {"first": [], "gap": []}
    for gaps in gap_N.split(at.lengths):
        parted = gaps.nonzero()
        sums["first"].append(float(parted[0]) if len(parted) else -1.0)
        sums["gap"].append(float(gaps[parted[0]]) if len(parted) else 0.0)
    return sums


def _tokens(at: Positions) -> Tensor:
    tokens = list(chain.from_iterable(text.output_ids for text in at.texts))
    return torch.tensor(tokens, device=at.p_NV.device)


@dataclass(frozen=True)
class Texts:
    """The table's rows, and what they say of the texts: a finding, if they are not the target's
    own; remarks, if there are too few to say it.
    """

    rows: list[JsonObject]
    finding: str | None
    remarks: Sequence[str] = ()


def measure_texts(
    target: PreTrainedModel,
    draft: Draft,
    texts: Sequence[Continuation],
    sampling: Sampling,
    picks: Resamples,
) -> Texts:
    """Read texts, said to be of the target at this sampling, once with target and draft."""
    greedy = sampling.greedy
    reader = Reader(
        target,
        {"draft": draft},
        replace(sampling, temperature=1.0) if greedy else sampling,
        [],
        batch_size=8,
        observer=greedy_sums if greedy else text_sums,
        drafts_see_penalties=False,
    )
    sums = reader.read(texts).observed["draft"]
    return _greedy(sums, texts, picks) if greedy else _sampled(sums, picks)


def _sampled(sums: Mapping[str, Sequence[float]], picks: Resamples) -> Texts:
    likelihood, share = sampled_figures(sums, picks)
    rows = [_row("draft's share", share), _row("likelihood", likelihood)]
    remarks = []
    if _Z * share.error > _SEEN:
        remarks.append(
            f"{sum(sums['tokens']):.0f} tokens show no share of the draft's own below "
            f"{_Z * share.error:.0%}; ask more prompts or longer answers"
        )
    if _beyond(share, _SHARE):
        percent = [f"{100 * (share.estimate[key] or 0):.0f}" for key in ("value", "low", "high")]
        words = f"{percent[0]} % [{percent[1]}, {percent[2]}] of the tokens are the draft's own"
        if (share.estimate["value"] or 0) < 0:
            words = f"the tokens avoid the draft's (a share of {percent[0]} %)"
        return Texts(rows, f"{words}: not every drafted token is verified by the target's law")
    if _beyond(likelihood, _NATS):
        nats = f"{likelihood.estimate['value']:+.2f}"
        words = f"their tokens have {nats} nats each beside the target's own: another target"
        return Texts(rows, f"{words}, prompt, temperature, top-p or penalty")
    return Texts(rows, None, remarks)


def _row(name: str, figure: TextFigure) -> JsonObject:
    return {"text": name, "value": figure.estimate, "z": figure.z}


def _beyond(figure: TextFigure, margin: float) -> bool:
    """Whether a figure is significant by both errors, and more than rounding."""
    found = figure.estimate
    if found["value"] is None or found["low"] is None or found["high"] is None:
        return False
    away = found["low"] > 0 or found["high"] < 0
    return away and abs(figure.z) > _Z and abs(found["value"]) > margin


def _greedy(
    sums: Mapping[str, Sequence[float]], texts: Sequence[Continuation], picks: Resamples
) -> Texts:
    def row(name: str, above: str, below: str) -> JsonObject:
        found = estimate(PromptSums.of(sums[above], sums[below]), picks)
        return {"text": name, "value": found}

    rows = [
        row("draft's share", "wide_of_draft", "apart"),
        row("tokens that are not the target's choice", "parted", "tokens"),
        row("of them the draft's choice", "of_draft", "parted"),
    ]
    parted = [index for index, first in enumerate(sums["first"]) if first >= 0]
    if parted:
        first = min(parted, key=lambda index: sums["first"][index])
        # The answer's first token is not among the tokens read.
        place = f"token {sums['first'][first] + 2:.0f} of {texts[first].id}"
        gap = sums["gap"][first]
        words = {"first": f"{place}, by {gap:.3f}", "gap": gap}
        rows.append({"text": "answers that are not its own", "value": len(parted), **words})
    share, other = rows[0]["value"], rows[1]["value"]
    if (share["low"] or 0) > 0 and share["value"] > _SHARE:
        words_of = f"{share['value']:.0%} of the tokens are the draft's own"
        return Texts(rows, f"{words_of}: not every drafted token is verified by the target")
    if (other["low"] or 0) > 0 and other["value"] > _OTHER_TOKENS:
        words_of = f"{other['value']:.0%} of the tokens are not the target's choice"
        return Texts(rows, f"{words_of}: another target, prompt, temperature or penalty")
    return Texts(rows, None)
