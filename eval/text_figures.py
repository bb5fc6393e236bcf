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
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.core.io import JsonObject
from draftsmith.eval.bootstrap import PromptSums, Resamples, estimate, pooled_ratios, resampled
from draftsmith.eval.predict import Traces
from draftsmith.eval.schema import Estimate

# A token without probability counts as one of this.
_LEAST = 1e-9
# Names of the values: of drawn texts, and of greedy ones.
TEXT_VALUES = (
    *("likelihood", "likelihood_variance", "share", "share_variance", "apart"),
    *("gap", "parted", "of_draft", "wide", "differs"),
)
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


def text_values(p_NV: Tensor, q_NV: Tensor, x_N1: Tensor) -> dict[str, Tensor]:
    """Return what the figures sum over the tokens x of texts, each `[N, 1]`."""
    return _sampled_values(p_NV, q_NV, x_N1) | _greedy_values(p_NV, q_NV, x_N1)


def _sampled_values(p_NV: Tensor, q_NV: Tensor, x_N1: Tensor) -> dict[str, Tensor]:
    both_NV = (q_NV + p_NV).clamp(min=torch.finfo(p_NV.dtype).tiny)
    lean_NV = (q_NV - p_NV) / both_NV
    values = {"apart": ((q_NV - p_NV) * lean_NV).sum(1, keepdim=True)}
    for name, f_NV in {"likelihood": p_NV.clamp(min=_LEAST).log(), "share": lean_NV}.items():
        mean_N1 = (p_NV * f_NV).sum(1, keepdim=True)
        square_N1 = (p_NV * f_NV.square()).sum(1, keepdim=True)
        values[name] = f_NV.gather(1, x_N1) - mean_N1
        values[f"{name}_variance"] = square_N1 - mean_N1.square()
    return values


def _greedy_values(p_NV: Tensor, q_NV: Tensor, x_N1: Tensor) -> dict[str, Tensor]:
    """Return what a greedy server's tokens say; p and q at temperature 1.

    gap: how much likelier, in logits, the target's own choice is. parted: there is a gap. of_draft:
    and x is the draft's choice; wide: by a gap that rounding does not explain. differs: the draft's
    choice has such a gap.
    """
    log_NV = p_NV.clamp(min=_LEAST).log()
    gap_NV = log_NV.amax(1, keepdim=True) - log_NV
    choice_N1 = q_NV.argmax(1, keepdim=True)
    gap_N1 = gap_NV.gather(1, x_N1)
    parted_N1 = gap_N1 > 0
    of_draft_N1 = parted_N1 & (choice_N1 == x_N1)
    return {
        "gap": gap_N1,
        "parted": parted_N1,
        "of_draft": of_draft_N1,
        "wide": of_draft_N1 & (gap_N1 > _ROUNDING),
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
    found = resampled(ratio.pooled, pooled_ratios(ratio, picks), picks)
    total = sum(sums[below])
    return TextFigure(found, math.sqrt(sum(sums[f"{name}_variance"])) / total if total else 0.0)


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
    sums = {name: traces.sums(name) for name in TEXT_VALUES}
    sums["tokens"] = traces.lengths_P.tolist()
    return _greedy(traces, sums, picks) if greedy else _sampled(sums, picks)


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


def _greedy(traces: Traces, sums: Mapping[str, Sequence[float]], picks: Resamples) -> Texts:
    def row(name: str, above: str, below: str) -> JsonObject:
        found = estimate(PromptSums.of(sums[above], sums[below]), picks)
        return {"text": name, "value": found}

    rows = [
        row("draft's share", "wide", "differs"),
        row("tokens that are not the target's choice", "parted", "tokens"),
        row("of them the draft's choice", "of_draft", "parted"),
    ]
    gaps_PL = traces.values["gap"][0]
    if parted := [text for text, count in enumerate(sums["parted"]) if count]:
        first_P = (gaps_PL > 0).argmax(1)
        text = min(parted, key=lambda text: first_P[text])
        gap = float(gaps_PL[text, first_P[text]])
        # The answer's first token is not among those that are read.
        words = f"token {first_P[text] + 2} of answer {text + 1}, by {gap:.3f}"
        found: JsonObject = {"text": "answers that are not its own", "value": len(parted)}
        rows.append(found | {"first": words, "gap": gap})
    share, other = rows[0]["value"], rows[1]["value"]
    if (share["low"] or 0) > 0 and share["value"] > _SHARE:
        words_of = f"{share['value']:.0%} of the tokens are the draft's own"
        return Texts(rows, f"{words_of}: not every drafted token is verified by the target")
    if (other["low"] or 0) > 0 and other["value"] > _OTHER_TOKENS:
        words_of = f"{other['value']:.0%} of the tokens are not the target's choice"
        return Texts(rows, f"{words_of}: another target, prompt, temperature or penalty")
    return Texts(rows, None)
