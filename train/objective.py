"""Objectives by name: `fkl`, `jsd:beta=0.1`, `0.9*lk_hybrid:eta=10+0.1*ce`, `fkl@adaspec:keep=0.4`.

    objective = term { "+" term } [ "@" "adaspec" [ ":keep=" number ] ]
    term      = [ number "*" ] name [ ":" key "=" number ]

Legend: N tokens, V vocabulary, S sequences.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from draftsmith_core.errors import InputError
from train.losses import IN_PLACE, LOSSES, NEEDS_TARGET, LossFn

# Draft's and target's logits and room for two more -> loss and alpha a token; the draft's logits become the slope.
InPlaceFn = Callable[[Tensor, Tensor, tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]

KEEP = 0.4
# What a loss may be given, and the open interval it must lie in.
_OPTIONS = {"jsd": {"beta": (0.0, 1.0)}, "lk_hybrid": {"eta": (0.0, math.inf)}}
# Their gradient shrinks with the square of the temperature (Hinton et al. 2015, section 2.1).
_SCALED = frozenset({"fkl", "rkl", "jsd"})


@dataclass(frozen=True)
class Term:
    """One weighted loss."""

    weight: float
    name: str
    loss: LossFn = field(compare=False)


@dataclass(frozen=True)
class Objective:
    """A weighted sum of losses; with `keep`, on the share of the tokens of a sequence that the draft can gain most on.

    temperature: divides the logits of draft and target in every loss but `ce`; fkl, rkl and jsd are multiplied by its
    square, so that the size of their gradient does not depend on it.
    """

    spec: str
    terms: tuple[Term, ...]
    temperature: float = 1.0
    keep: float | None = None

    @property
    def needs_target(self) -> bool:
        """Whether it reads the target's laws."""
        return any(term.name in NEEDS_TARGET for term in self.terms)

    @property
    def needs_reference(self) -> bool:
        """Whether it needs a reference draft to choose its tokens by."""
        return self.keep is not None

    @property
    def in_place(self) -> InPlaceFn | None:
        """The same on finite logits and without autograd (`train.losses.IN_PLACE`), where there is such a way."""
        term = self.terms[0]
        if len(self.terms) > 1 or term.weight != 1 or self.temperature != 1 or term.name not in IN_PLACE:
            return None
        options = term.loss.keywords if isinstance(term.loss, partial) else {}
        return partial(IN_PLACE[term.name], **options)

    def loss(self, draft_NV: Tensor, target_NV: Tensor | None, tokens_N: Tensor) -> Tensor:
        """Loss `[N]` a token, fp32, from logits. `target_NV` may be None when `needs_target` is false."""
        total: Tensor | None = None
        for term in self.terms:
            if term.name == "ce" or self.temperature == 1:
                value = term.loss(draft_NV, target_NV, tokens_N)
            else:
                assert target_NV is not None
                value = term.loss(draft_NV / self.temperature, target_NV / self.temperature, tokens_N)
                value = value * self.temperature**2 if term.name in _SCALED else value
            value = value if term.weight == 1 else term.weight * value
            total = value if total is None else total + value
        assert total is not None
        return total


def parse_objective(spec: str, temperature: float = 1.0) -> Objective:
    """Read an objective's name; InputError, one line, that shows the part at fault and what would do."""
    if not 0 < temperature < math.inf:
        raise InputError(f"temperature: {temperature} must be above 0")
    text = "".join(spec.split())
    losses, _, mask = text.partition("@")
    if losses.split(":")[0] == "adaspec" and not mask:
        # Hu et al. (2025) select for the forward KL.
        losses, mask = "fkl", losses
    keep = _keep(mask, spec) if mask or "@" in text else None
    return Objective(text, tuple(_term(part, spec) for part in losses.split("+")), temperature, keep)


def select(gain_N: Tensor, sequence_N: Tensor, keep: float) -> Tensor:
    """Weights `[N]`, fp32, of AdaSPEC's choice of tokens (Hu et al., NeurIPS 2025, section 3).

    gain_N: the draft's loss less the reference draft's, per token; sequence_N: the sequence of each token, ascending.
    Kept are the ceil(keep * n) tokens of largest gain *of each sequence* of n tokens, where the paper takes them from
    the batch, and each weighs n / kept: so what is kept, and the sum of weights (all valid tokens), are the same
    however a step's sequences are divided into batches and processes (law 6). Ties go to the earlier token.
    """
    weights_N = torch.zeros_like(gain_N, dtype=torch.float32)
    _, lengths_S = torch.unique_consecutive(sequence_N, return_counts=True)
    start = 0
    for length in lengths_S.tolist():
        kept = math.ceil(round(keep * length, 6))
        chosen = gain_N[start : start + length].sort(descending=True, stable=True).indices[:kept]
        weights_N[start + chosen] = length / kept
        start += length
    return weights_N


def _number(text: str, what: str, spec: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"objective: {spec!r}: {what} '{text}' is not a number") from None


def _keep(mask: str, spec: str) -> float:
    name, _, option = mask.partition(":")
    key, _, value = option.partition("=")
    if name != "adaspec" or (option and key != "keep"):
        raise InputError(f"objective: {spec!r}: after '@' stands adaspec or adaspec:keep=0.4, not '{mask}'")
    keep = _number(value, "keep", spec) if option else KEEP
    if not 0 < keep <= 1:
        raise InputError(f"objective: {spec!r}: keep must be above 0 and at most 1, not {keep:g}")
    return keep


def _meant(name: str) -> str:
    """What a word that is no loss was probably meant to be."""
    loss, equals, value = name.partition("=")
    if equals and loss in _OPTIONS:
        return f" (write {loss}:{next(iter(_OPTIONS[loss]))}={value})"
    number = name.rstrip("abcdefghijklmnopqrstuvwxyz_")
    if number and name.removeprefix(number) in LOSSES:
        return f" (write {number}*{name.removeprefix(number)})"
    return ""


def _term(part: str, spec: str) -> Term:
    weight_text, starred, rest = part.rpartition("*")
    weight = _number(weight_text, "the weight", spec) if starred else 1.0
    if not 0 < weight < math.inf:
        raise InputError(f"objective: {spec!r}: the weight {weight:g} must be above 0")
    name, _, option = rest.partition(":")
    if name not in LOSSES:
        raise InputError(f"objective: {spec!r}: no loss is named '{name}'{_meant(name)}; there are {', '.join(LOSSES)}")
    loss = LOSSES[name]
    if option:
        key, _, value_text = option.partition("=")
        limits = _OPTIONS.get(name, {}).get(key)
        if limits is None:
            known = ", ".join(_OPTIONS.get(name, {})) or "none"
            raise InputError(f"objective: {spec!r}: {name} has no option '{key}'; it has {known}")
        value = _number(value_text, key, spec)
        if not limits[0] < value < limits[1]:
            hint = "; use fkl or rkl for its limits" if name == "jsd" else ""
            raise InputError(
                f"objective: {spec!r}: {key} must lie between {limits[0]:g} and {limits[1]:g}, not {value:g}{hint}"
            )
        loss = partial(loss, **{key: value})
    return Term(weight, name, loss)
