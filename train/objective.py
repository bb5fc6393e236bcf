"""Objectives by name: `fkl`, `jsd:beta=0.1`, `0.9*lk_hybrid:eta=10+0.1*ce`, `fkl@adaspec:keep=0.4`; or a function.

    objective = term { "+" term } [ "@" "adaspec" [ ":keep=" number ] ] | "tvd" "@" "e2e" [ ":depth=" number ]
    term      = [ number "*" ] name [ ":" key "=" number ]

Reading a name needs no torch (so that a mistyped option is answered at once); the functions are in `train.losses`.

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

from draftsmith_core.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from train.losses import InPlaceFn, LossFn

# The losses that can be named, and what each may be given with the open interval it must lie in.
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
_DEFAULT_KEEP = 0.4
# Drafted tokens in a row that `@e2e` looks at.
_DEFAULT_DEPTH, _DEEPEST = 4, 64
# Dividing the logits by T shrinks the gradient of these by T squared (Hinton et al. 2015, section 2.1).
_MULTIPLIED_BY_T_SQUARED = frozenset({"fkl", "rkl", "jsd"})


@dataclass(frozen=True)
class Term:
    """One weighted loss: a named one with its options, or a `function` of the caller's own."""

    weight: float
    name: str
    options: tuple[tuple[str, float], ...] = ()
    function: "LossFn | None" = None

    @property
    def needs_target(self) -> bool:
        """Whether the loss reads the target's logits; of a caller's own: its attribute `needs_target`, True without."""
        if self.function is not None:
            return bool(getattr(self.function, "needs_target", True))
        return self.name != "ce"

    @property
    def reads_tokens(self) -> bool:
        """Whether the loss may read the tokens of the data, beside or instead of the target's logits."""
        return self.function is not None or self.name == "ce"

    def loss(self, draft_NV: "Tensor", target_NV: "Tensor | None", tokens_N: "Tensor") -> "Tensor":
        """Loss `[N]` per token, not weighted. InputError when a caller's own function does not return that."""
        if self.function is None:
            from train.losses import LOSSES

            return LOSSES[self.name](draft_NV, target_NV, tokens_N, **dict(self.options))
        value = self.function(draft_NV, target_NV, tokens_N)
        if getattr(value, "shape", None) != tokens_N.shape:
            found = list(value.shape) if hasattr(value, "shape") else type(value).__name__
            raise InputError(f"loss: {self.name} returned {found}; it must return one value per token, {len(tokens_N)}")
        if draft_NV.requires_grad and not value.requires_grad:
            raise InputError(f"loss: what {self.name} returned has no gradient; compute it from the draft's logits")
        return value


@dataclass(frozen=True)
class Objective:
    """A weighted sum of losses; with `keep`, on the share of each sequence's tokens where the draft can gain most;
    with `depth`, of runs of so many tokens in place of single ones (`train.end_to_end`).

    temperature: divides the logits of draft and target in every loss but `ce`; fkl, rkl and jsd are multiplied by its
    square, so that the size of their gradient does not depend on it.
    """

    spec: str
    terms: tuple[Term, ...]
    temperature: float = 1.0
    keep: float | None = None
    depth: int | None = None

    @property
    def needs_target(self) -> bool:
        """Whether it reads the target's logits."""
        return any(term.needs_target for term in self.terms)

    @property
    def needs_reference(self) -> bool:
        """Whether it needs a reference draft to choose its tokens by."""
        return self.keep is not None

    @property
    def reads_tokens(self) -> bool:
        """Whether any term may read the tokens of the data."""
        return any(term.reads_tokens for term in self.terms)

    @property
    def in_place(self) -> "InPlaceFn | None":
        """The same computed in place, without autograd, on finite logits; None where that is not written."""
        from train.losses import IN_PLACE

        term = self.terms[0]
        if len(self.terms) > 1 or term.weight != 1 or self.temperature != 1 or term.function is not None:
            return None
        return partial(IN_PLACE[term.name], **dict(term.options)) if term.name in IN_PLACE else None

    def loss(self, draft_NV: "Tensor", target_NV: "Tensor | None", tokens_N: "Tensor") -> "Tensor":
        """Loss `[N]` per token, fp32, from logits. `target_NV` may be None when `needs_target` is false."""
        total: Tensor | None = None
        for term in self.terms:
            if term.name == "ce" or self.temperature == 1:
                value = term.loss(draft_NV, target_NV, tokens_N)
            else:
                cooled_NV = None if target_NV is None else target_NV / self.temperature
                value = term.loss(draft_NV / self.temperature, cooled_NV, tokens_N)
                value = value * self.temperature**2 if term.name in _MULTIPLIED_BY_T_SQUARED else value
            value = value if term.weight == 1 else term.weight * value
            total = value if total is None else total + value
        assert total is not None
        return total


def parse_objective(spec: str, temperature: float = 1.0) -> Objective:
    """Read an objective's name; InputError, one line, shows the part at fault and what would be right."""
    _check_temperature(temperature)
    text = "".join(spec.split())
    losses, _, mask = text.partition("@")
    if losses.split(":")[0] == "adaspec" and not mask:
        # Hu et al. (2025) select tokens for the forward KL.
        losses, mask = "fkl", losses
    if losses.split(":")[0] == "e2e" and not mask:
        losses, mask = "tvd", losses
    terms = tuple(_term(part, spec) for part in losses.split("+"))
    if mask.split(":")[0] == "e2e":
        if losses != "tvd":
            raise InputError(f"objective: {spec!r}: @e2e multiplies acceptances, so only tvd stands before it")
        return Objective(text, terms, temperature, depth=_depth(mask, spec))
    return Objective(text, terms, temperature, _keep(mask, spec) if mask or "@" in text else None)


def custom_objective(loss: "LossFn", temperature: float = 1.0) -> Objective:
    """An objective of a loss of one's own: any callable `(draft_NV, target_NV, tokens_N) -> loss_N`.

    It gets the logits of draft and target `[N, V]` divided by `temperature`, and the tokens of the data `[N]`; it
    returns a differentiable value per token and must not depend on which tokens share a call. The target's logits are
    None where there is no target; a loss that does without one has the attribute `needs_target = False`. Where the
    target cannot give a token, or a stored row has no tail, a logit is minus infinity.
    """
    _check_temperature(temperature)
    if not callable(loss):
        raise InputError(f"loss: {loss!r} cannot be called; give a function of (draft_NV, target_NV, tokens_N)")
    module = getattr(loss, "__module__", None) or "__main__"
    name = f"custom:{module}.{getattr(loss, '__qualname__', type(loss).__qualname__)}"
    return Objective(name, (Term(1.0, name, function=loss),), temperature)


def loss_digest(loss: Callable[..., Any]) -> str | None:
    """sha256 of the source text of a loss of one's own, so that a run does not continue with another; None where Python
    does not find that text, as for functions that were compiled, typed into an interpreter or executed from a string.
    """
    try:
        source = inspect.getsource(loss if hasattr(loss, "__qualname__") else type(loss))
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):
        return None
    return hashlib.sha256(source.encode()).hexdigest()


def _check_temperature(temperature: float) -> None:
    if not 0 < temperature < math.inf:
        raise InputError(f"temperature: {temperature} must be above 0")


def _number(text: str, what: str, spec: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"objective: {spec!r}: {what} '{text}' is not a number") from None


def _keep(mask: str, spec: str) -> float:
    name, colon, option = mask.partition(":")
    key, _, value = option.partition("=")
    if name != "adaspec" or (colon and key != "keep"):
        raise InputError(
            f"objective: {spec!r}: after '@' stands adaspec or adaspec:keep=0.4, or e2e or e2e:depth=4, not '{mask}'"
        )
    keep = _number(value, "keep", spec) if colon else _DEFAULT_KEEP
    if not 0 < keep <= 1:
        raise InputError(f"objective: {spec!r}: keep must be above 0 and at most 1, not {keep:g}")
    return keep


def _depth(mask: str, spec: str) -> int:
    _, colon, option = mask.partition(":")
    key, _, value = option.partition("=")
    if colon and key != "depth":
        raise InputError(f"objective: {spec!r}: e2e has the option depth, such as e2e:depth=4, not '{option}'")
    depth = _number(value, "depth", spec) if colon else _DEFAULT_DEPTH
    if not 1 <= depth <= _DEEPEST or depth != int(depth):
        raise InputError(f"objective: {spec!r}: depth must be a whole number from 1 to {_DEEPEST}, not {depth:g}")
    return int(depth)


def _suggestion(name: str) -> str:
    """How a name that is no loss was probably meant to be written; empty when that cannot be told."""
    loss, equals, value = name.partition("=")
    if equals and LOSS_OPTIONS.get(loss):
        return f" (write {loss}:{next(iter(LOSS_OPTIONS[loss]))}={value})"
    number = name.rstrip("abcdefghijklmnopqrstuvwxyz_")
    if number and name.removeprefix(number) in LOSS_OPTIONS:
        return f" (write {number}*{name.removeprefix(number)})"
    return ""


def _term(part: str, spec: str) -> Term:
    weight_text, starred, rest = part.rpartition("*")
    weight = _number(weight_text, "the weight", spec) if starred else 1.0
    if not 0 < weight < math.inf:
        raise InputError(f"objective: {spec!r}: the weight {weight:g} must be above 0")
    name, colon, option = rest.partition(":")
    if name not in LOSS_OPTIONS:
        raise InputError(
            f"objective: {spec!r}: no loss is named '{name}'{_suggestion(name)}; there are {', '.join(LOSS_OPTIONS)}"
        )
    if not colon:
        return Term(weight, name)
    key, _, value_text = option.partition("=")
    limits = LOSS_OPTIONS[name].get(key)
    if limits is None:
        known = ", ".join(LOSS_OPTIONS[name]) or "none"
        raise InputError(f"objective: {spec!r}: {name} has no option '{key}'; it has {known}")
    value = _number(value_text, key, spec)
    if not limits[0] < value < limits[1]:
        hint = "; use fkl or rkl for its limits" if name == "jsd" else ""
        raise InputError(
            f"objective: {spec!r}: {key} must lie between {limits[0]:g} and {limits[1]:g}, not {value:g}{hint}"
        )
    return Term(weight, name, ((key, value),))
