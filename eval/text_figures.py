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

import numpy as np
import torch
from torch import Tensor

from draftsmith.core.io import JsonObject
from draftsmith.eval.bootstrap import PromptSums, Resamples, estimate
from draftsmith.eval.formats import with_interval
from draftsmith.eval.predict import Traces
from draftsmith.eval.schema import Estimate

# A token without probability counts as one of this.
_LEAST = 1e-9
# Names of the values: of drawn texts, and of greedy ones.
TEXT_VALUES = (
    *("likelihood", "likelihood_variance", "share", "share_variance", "apart"),
    *("gap", "drafts", "differs"),
)
# Rounding decides between tokens whose logits are closer than this (bf16 near 20: 0.125).
_ROUNDING = 0.5

# Smaller figures are rounding: in nats a token, as a share of tokens. 4 bits of a target: 0.011.
_NATS = 0.03
_SHARE = 0.012
_OTHER_TOKENS = 0.03
# A figure counts beyond so many standard errors of the target's own law.
_Z = 3.0
# The share of unverified tokens that a check should be able to see.
_SEEN = 0.05
_UNVERIFIED = "not every drafted token is verified by the target's law"
_OTHER = "another target, prompt, temperature, top-p or penalty"


@dataclass(frozen=True)
class TextFigure:
    """A figure with its interval over prompts, and its standard error by the target's own law."""

    estimate: Estimate
    error: float

    @property
    def z(self) -> float:
        """The figure in standard errors."""
        return (self.estimate["value"] or 0.0) / self.error if self.error else 0.0

    def row(self, name: str, margin: float) -> JsonObject:
        """Return the figure and the least size that its tokens can show."""
        shown = max(margin, _Z * self.error)
        return {"text": name, "value": self.estimate, "z": self.z, "seen from": shown}


def text_values(p_NV: Tensor, q_NV: Tensor, x_N1: Tensor) -> dict[str, Tensor]:
    """Return what the figures sum over the tokens x of texts, each `[N, 1]`."""
    log_NV = p_NV.clamp(min=_LEAST).log()
    sampled = _sampled_values(p_NV, q_NV, x_N1, log_NV)
    return sampled | _greedy_values(log_NV, q_NV.argmax(1, keepdim=True), x_N1)


def _sampled_values(p_NV: Tensor, q_NV: Tensor, x_N1: Tensor, log_NV: Tensor) -> dict[str, Tensor]:
    both_NV = (q_NV + p_NV).clamp(min=torch.finfo(p_NV.dtype).tiny)
    lean_NV = (q_NV - p_NV) / both_NV
    values = {"apart": ((q_NV - p_NV) * lean_NV).sum(1, keepdim=True)}
    for name, f_NV in {"likelihood": log_NV, "share": lean_NV}.items():
        mean_N1 = (p_NV * f_NV).sum(1, keepdim=True)
        square_N1 = (p_NV * f_NV.square()).sum(1, keepdim=True)
        values[name] = f_NV.gather(1, x_N1) - mean_N1
        values[f"{name}_variance"] = square_N1 - mean_N1.square()
    return values


def _greedy_values(log_NV: Tensor, choice_N1: Tensor, x_N1: Tensor) -> dict[str, Tensor]:
    """Return what a greedy server's tokens say: log p at temperature 1, and the draft's choices.

    gap: how much likelier, in logits, the target's own choice is. drafts: x is the draft's choice.
    differs: that has a gap which rounding does not explain.
    """
    gap_NV = log_NV.amax(1, keepdim=True) - log_NV
    return {
        "gap": gap_NV.gather(1, x_N1),
        "drafts": choice_N1 == x_N1,
        "differs": gap_NV.gather(1, choice_N1) > _ROUNDING,
    }


def sampled_figures(
    sums: Mapping[str, Sequence[float]], picks: Resamples
) -> tuple[TextFigure, TextFigure]:
    """Return the likelihood per token and the draft's share, from sums by text of values, and of
    `tokens`.
    """
    likelihood = _figure(sums, "likelihood", "tokens", picks)
    return likelihood, _figure(sums, "share", "apart", picks)


def _figure(
    sums: Mapping[str, Sequence[float]], name: str, below: str, picks: Resamples
) -> TextFigure:
    ratio = PromptSums.of(sums[name], sums[below])
    # Neither is bounded: they may be below zero.
    sampled = ratio.sampled(picks)._replace(least=-math.inf, most=math.inf)
    total = sum(sums[below])
    return TextFigure(
        sampled.estimate(picks), math.sqrt(sum(sums[f"{name}_variance"])) / total if total else 0.0
    )


@dataclass(frozen=True)
class Texts:
    """The table's rows, and what they say of the texts: a finding, if they are not the target's
    own; remarks, if there are too few to say it.
    """

    rows: list[JsonObject]
    finding: str | None
    remarks: Sequence[str] = ()


def judge_texts(traces: Traces, greedy: bool, picks: Resamples) -> Texts:
    """Judge texts, said to be of the target, from traces with the values above."""
    found = _greedy(traces, picks) if greedy else _sampled(traces, picks)
    if picks.groups > 1:
        return found
    return replace(found, remarks=["one prompt gives no interval, so its texts are not judged"])


def _sampled(traces: Traces, picks: Resamples) -> Texts:
    sums = {name: traces.sums(name) for name in TEXT_VALUES}
    sums["tokens"] = traces.lengths_P.tolist()
    likelihood, share = sampled_figures(sums, picks)
    rows = [share.row("draft's share", _SHARE), likelihood.row("likelihood", _NATS)]
    remarks = []
    if rows[0]["seen from"] > _SEEN:
        remarks.append(
            f"{sum(sums['tokens']):.0f} tokens show no share of the draft's own below "
            f"{min(rows[0]['seen from'], 1.0):.0%}; ask more prompts or longer answers"
        )
    findings = []
    if _beyond(share, _SHARE):
        words = f"{with_interval(share.estimate, 0, scale=100)} % of the tokens are the draft's own"
        findings.append((abs(share.z), f"{words}: {_UNVERIFIED}"))
    if _beyond(likelihood, _NATS):
        nats = with_interval(likelihood.estimate, 2, sign=True)
        words = f"the tokens have {nats} nats each beside the target's own: {_OTHER}"
        findings.append((abs(likelihood.z), words))
    # The figure that is further away is nearer to the cause.
    findings.sort(reverse=True)
    return Texts(rows, "; ".join(words for _, words in findings) or None, remarks)


def _beyond(figure: TextFigure, margin: float) -> bool:
    """Whether a figure is significant by both errors, and more than rounding."""
    found = figure.estimate
    away = (found["low"] or 0.0) > 0 or (found["high"] or 0.0) < 0
    return away and abs(figure.z) > _Z and abs(found["value"] or 0.0) > margin


def _greedy(traces: Traces, picks: Resamples) -> Texts:
    gaps_PL, drafts_PL, differs_PL = (traces.values[name][0] for name in TEXT_VALUES[-3:])
    parted_PL = gaps_PL > 0
    wide_PL = gaps_PL > _ROUNDING
    own_PL = wide_PL * drafts_PL
    parted_P = parted_PL.sum(1)
    share = estimate(PromptSums(own_PL.sum(1), differs_PL.sum(1)), picks)
    other = estimate(PromptSums(parted_P, traces.lengths_P.astype(float)), picks)
    drafts = estimate(PromptSums((parted_PL * drafts_PL).sum(1), parted_P), picks)
    rows: list[JsonObject] = [
        {"text": "draft's share", "value": share},
        {"text": "tokens that are not the target's choice", "value": other},
        {"text": "of them the draft's choice", "value": drafts},
    ]
    places = np.argwhere(parted_PL.T)
    if len(places):
        at, text = places[0]
        gap = float(gaps_PL[text, at])
        rows.append(
            {
                "text": "answers that are not its own",
                "value": int((parted_P > 0).sum()),
                # The answer's first token is not among those that are read.
                "first": f"token {at + 2} of answer {text + 1}, by {gap:.3f}",
                "gap": gap,
            }
        )
    # Another target's tokens are the draft's choice only now and then.
    drafted = 2 * own_PL.sum() > wide_PL.sum()
    if drafted and (share["low"] or 0.0) > 0 and (share["value"] or 0.0) > _SHARE:
        words = f"{with_interval(share, 0, scale=100)} % of the tokens are the draft's own"
        return Texts(rows, f"{words}: {_UNVERIFIED}")
    if (other["low"] or 0.0) > 0 and (other["value"] or 0.0) > _OTHER_TOKENS:
        words = f"{with_interval(other, 0, scale=100)} % of the tokens are not the target's choice"
        return Texts(rows, f"{words}: {_OTHER}")
    return Texts(rows, None)
