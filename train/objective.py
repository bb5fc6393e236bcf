"""Objectives by name: `fkl`, `jsd:beta=0.1`, `0.9*lk_hybrid:eta=10+0.1*ce`, `ce@dpace`; or a
function.

    objective = term { "+" term } [ "@dpace" ]
    term      = [ number "*" ] name [ ":" key "=" number ]

Parsing needs no torch, so that a typo is answered at once; the functions are in `train.losses`.

Legend: N tokens, V vocabulary.
"""

import hashlib
import inspect
import math
import tokenize
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from draftsmith.core.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from draftsmith.train.losses import InPlaceFn, LossFn

# The losses by name, and the options of each with the open interval that they must lie in.
LOSS_OPTIONS: dict[str, dict[str, tuple[float, float]]] = {
    "ce": {},
    "fkl": {},
    "rkl": {},
    "jsd": {"beta": (0.0, 1.0)},
    "tvd": {},
    "tvd_pp": {},
    "lk_alpha": {},
    "lk_hybrid": {"eta": (0.0, math.inf)},
}
# Dividing the logits by T shrinks the gradient of these by T squared (Hinton et al. 2015, section
# 2.1).
_MULTIPLIED_BY_T_SQUARED = frozenset({"fkl", "rkl", "jsd"})

# What the name of a caller's own loss begins with.
OWN_LOSS = "custom:"


@dataclass(frozen=True)
class Term:
    """One weighted loss: a named one with its options, or a `function` of the caller's own."""

    weight: float
    name: str
    options: tuple[tuple[str, float], ...] = ()
    function: "LossFn | None" = None

    def loss(self, draft_NV: "Tensor", target_NV: "Tensor | None", tokens_N: "Tensor") -> "Tensor":
        """Loss `[N]` per token, not weighted. Raise InputError if a caller's own function does not
        return that.
        """
        from draftsmith.train.losses import LOSSES

        if self.function is None:
            return LOSSES[self.name](draft_NV, target_NV, tokens_N, **dict(self.options))
        value = self.function(draft_NV, target_NV, tokens_N)
        if value.shape != tokens_N.shape:
            raise InputError(
                f"loss: {self.name} returned {list(value.shape)}; return one value per token"
            )
        return value


@dataclass(frozen=True)
class Objective:
    """A weighted sum of losses.

    temperature: divides the logits of draft and target in every loss but `ce`; fkl, rkl and jsd are
    multiplied by its square, so that the size of their gradient does not depend on it. paced: weigh
    the slots of a block by how likely the draft gets there (D-PACE).
    """

    spec: str
    terms: tuple[Term, ...]
    temperature: float = 1.0
    paced: bool = False

    @property
    def needs_target(self) -> bool:
        """Whether it reads the target's logits; a caller's own loss does unless its `needs_target`
        is False.
        """
        return any(
            term.name != "ce" and bool(getattr(term.function, "needs_target", True))
            for term in self.terms
        )

    @property
    def reads_tokens(self) -> bool:
        """Whether any term may read the tokens of the data, beside or instead of the target's
        logits.
        """
        return any(term.function is not None or term.name == "ce" for term in self.terms)

    @property
    def in_place(self) -> "InPlaceFn | None":
        """The same computed in place, without autograd, on finite logits; None where that is not
        written.
        """
        from draftsmith.train.losses import IN_PLACE

        term = self.terms[0]
        # The name of a caller's own loss is in no table.
        in_place = IN_PLACE.get(term.name)
        if len(self.terms) > 1 or term.weight != 1 or self.temperature != 1 or in_place is None:
            return None
        return partial(in_place, **dict(term.options))

    def loss(self, draft_NV: "Tensor", target_NV: "Tensor | None", tokens_N: "Tensor") -> "Tensor":
        """Loss `[N]` per token, fp32, from logits. `target_NV` may be None when `needs_target` is
        false.
        """
        total: Tensor | None = None
        for term in self.terms:
            if term.name == "ce" or self.temperature == 1:
                value = term.loss(draft_NV, target_NV, tokens_N)
            else:
                cooled_NV = None if target_NV is None else target_NV / self.temperature
                value = term.loss(draft_NV / self.temperature, cooled_NV, tokens_N)
                if term.name in _MULTIPLIED_BY_T_SQUARED:
                    value = value * self.temperature**2
            value = value if term.weight == 1 else term.weight * value
            total = value if total is None else total + value
        assert total is not None
        return total


def parse_objective(spec: str, temperature: float = 1.0) -> Objective:
    """Parse an objective. Raise InputError, one line, that shows the part at fault and what would
    be right.
    """
    text = "".join(spec.split())
    losses, at, pace = text.partition("@")
    if at and pace != "dpace":
        raise InputError(f"objective: {spec!r}: after '@' write dpace, not '{pace}'")
    terms = tuple(_term(part, spec) for part in losses.split("+"))
    return Objective(text, terms, temperature, paced=bool(at))


def custom_objective(loss: "LossFn", temperature: float = 1.0) -> Objective:
    """Make an objective of your own loss: any callable `(draft_NV, target_NV, tokens_N) -> loss_N`.

    The arguments are logits `[N, V]`, divided by `temperature`, and the tokens of the data `[N]`.
    The value of a token must be differentiable and not depend on which tokens share a call. A loss
    that needs no target has the attribute `needs_target = False`. A logit may be minus infinity.
    """
    module = getattr(loss, "__module__", None) or "__main__"
    name = f"{OWN_LOSS}{module}.{getattr(loss, '__qualname__', type(loss).__qualname__)}"
    return Objective(name, (Term(1.0, name, function=loss),), temperature)


def loss_digest(loss: Callable[..., Any]) -> str | None:
    """sha256 of the source of your own loss, so that a run continues only with the same; None
    without source.
    """
    try:
        source = inspect.getsource(loss if hasattr(loss, "__qualname__") else type(loss))
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):
        return None
    return hashlib.sha256(source.encode()).hexdigest()


def _number(text: str, what: str, spec: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"objective: {spec!r}: {what} '{text}' is not a number") from None


def _term(part: str, spec: str) -> Term:
    weight_text, starred, rest = part.rpartition("*")
    weight = _number(weight_text, "the weight", spec) if starred else 1.0
    if not 0 < weight < math.inf:
        raise InputError(f"objective: {spec!r}: the weight {weight:g} must be above 0")
    name, colon, option = rest.partition(":")
    if name not in LOSS_OPTIONS:
        raise InputError(
            f"objective: {spec!r}: no loss is named '{name}'; there are {', '.join(LOSS_OPTIONS)}"
        )
    if not colon:
        return Term(weight, name)
    key, _, value_text = option.partition("=")
    if key not in LOSS_OPTIONS[name]:
        known = ", ".join(LOSS_OPTIONS[name]) or "none"
        raise InputError(f"objective: {spec!r}: {name} has no option '{key}'; it has {known}")
    value = _number(value_text, key, spec)
    low, high = LOSS_OPTIONS[name][key]
    if not low < value < high:
        raise InputError(
            f"objective: {spec!r}: {key} must lie between {low:g} and {high:g}, not {value:g}"
        )
    return Term(weight, name, ((key, value),))
