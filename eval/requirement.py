"""Requirements on the figures of an evaluation, such as `alpha[code] >= 0.4`."""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from draftsmith.core.errors import InputError, nearest
from draftsmith.eval.schema import How, Row

OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_FORM = re.compile(r"\s*([\w@]+)\s*(?:\[([^\]]*)\])?\s*(>=|<=|>|<)\s*([-+]?[0-9]*\.?[0-9]+)\s*")
_PER_METHOD = ("tau", "tau_gain", "speedup")
_OF_GAIN = ("gain", "tau_gain", "transfer")
FIGURES = ("alpha", "gain", "transfer", "tau", "tau_gain", "speedup")


@dataclass(frozen=True)
class Scope:
    """Names of what an evaluation measures, from which a requirement selects.

    methods: tree and verifier of each method, by draft. copying: the drafts that copy, alone or
    beside a model.
    """

    base: str
    id_sets: Sequence[str]
    ood_sets: Sequence[str]
    temperatures: Sequence[float]
    methods: Mapping[str, Sequence[How]]
    copying: Sequence[str] = ()


class Judged(NamedTuple):
    """What a required figure is of."""

    draft: str
    domain: str
    temperature: float
    tree: str | None = None
    verifier: str | None = None

    @property
    def T(self) -> str:  # noqa: N802 (as in the brackets)
        return f"{self.temperature:g}"


@dataclass(frozen=True)
class Requirement:
    """A requirement on an evaluation, judged on interval bounds:

        FIGURE[DOMAIN draft=NAME T=NUMBER tree=SPEC verifier=NAME] OP NUMBER

    `>=` and `>` are judged on the low bound of the 95 % interval, `<=` and `<` on its high bound.
    So a draft that lies exactly on the number meets a requirement in at most 2.5 % of evaluations.
    Of a draft with several training seeds, every seed's value must meet it too. Requirements are
    judged one by one, without a correction for their number. A name that the brackets omit stands
    for all: every prompt set, temperature and tree, and every draft with weights but the base. The
    base is judged if it is the only draft and the figure is no gain. `wanted` maps domain, draft,
    T, tree and verifier to the names in the brackets.
    """

    text: str
    figure: str
    wanted: dict[str, str]
    sign: str
    bound: float

    @staticmethod
    def parse(text: str) -> "Requirement":
        """Read a requirement; raise InputError if it is not FIGURE[...] OP NUMBER."""
        where = f"--require {text!r}"
        match = _FORM.fullmatch(text)
        if not match:
            raise InputError(
                f"{where}: expected FIGURE[DOMAIN] >= NUMBER, such as 'alpha[code] >= 0.4'"
            )
        figure, inside, sign, number = match.groups()
        if figure not in FIGURES:
            raise InputError(f"{where}: no figure {figure!r}; {nearest(figure, FIGURES)}")
        keys = ["draft", "T"] + ["tree", "verifier"] * (figure in _PER_METHOD)
        wanted: dict[str, str] = {}
        for word in (inside or "").split():
            name = word.strip(",")
            key, _, value = name.partition("=") if "=" in name else ("domain", "", name)
            if key not in ("domain", *keys) or not value or key in wanted:
                fix = f"{figure} takes one prompt set and {'=, '.join(keys)}="
                raise InputError(f"{where}: {word!r} selects nothing; {fix}")
            if key == "T" and re.fullmatch(r"[0-9]*\.?[0-9]+", value):
                value = f"{float(value):g}"
            wanted[key] = value
        return Requirement(text, figure, wanted, sign, float(number))

    def judged(self, scope: Scope) -> list[Judged]:
        """Return what the figure is judged of. Raise InputError if the requirement names something
        that the evaluation does not measure.
        """
        drafts = list(scope.methods)
        if "draft" not in self.wanted:
            drafts = [draft for draft in drafts if draft not in scope.copying] or drafts
        others = [draft for draft in drafts if draft != scope.base]
        if self.figure in _OF_GAIN or (others and "draft" not in self.wanted):
            drafts = others
        if not drafts:
            raise InputError(
                f"--require {self.text!r}: {self.figure} needs a draft beside the base"
            )
        id_sets = () if self.figure == "transfer" else scope.id_sets
        domains = [*id_sets, *scope.ood_sets]
        if "domain" in self.wanted:
            domains += ["id"] * bool(id_sets) + ["ood"] * bool(scope.ood_sets)
        judged = []
        for draft in drafts:
            decoded = self.figure in _PER_METHOD
            methods = scope.methods[draft] if decoded else [(None, None)]
            for domain, temperature, (tree, rule) in product(domains, scope.temperatures, methods):
                judged.append(Judged(draft, domain, temperature, tree, rule))
        if not judged:
            raise InputError(f"--require {self.text!r}: needs sets or trees that are not measured")
        for key, value in self.wanted.items():
            names = [getattr(each, key) for each in judged]
            judged = [each for each in judged if getattr(each, key) == value]
            if not judged:
                fix = nearest(value, list(dict.fromkeys(names)), "there are")
                raise InputError(f"--require {self.text!r}: {key} {value!r} is not measured; {fix}")
        return judged

    def unmet(self, judged: Judged, row: Row | None, *, busy: bool) -> str | None:
        """Say why a figure misses the requirement; None if it meets it. busy: whether the machine
        was, when speeds were timed.
        """
        method = f", {judged.tree} {judged.verifier}" if judged.tree else ""
        where = f"{judged.draft} on {judged.domain} at T={judged.T}{method}"
        where = f"required {self.text}: {where}: {self.figure}"
        if row is None or row["value"] is None:
            why = "nothing was measured"
            if self.figure == "transfer":
                why = "the gain in distribution is not surely above zero"
            return f"{where} is undefined ({why})"
        if row["low"] is None or row["high"] is None:
            return f"{where} {row['value']:.4f} has no interval to judge; use more prompts"
        if busy and self.figure == "speedup" and row["low"] <= self.bound <= row["high"]:
            return f"{where} cannot be told: the machine was busy; time again (--time_again)"
        side = "low" if self.sign.startswith(">") else "high"
        bound, seed = row["low"], row["seed_low"]
        if side == "high":
            bound, seed = row["high"], row["seed_high"]
        meets = OPERATORS[self.sign]
        found = f"{where} {row['value']:.4f}, 95 % interval [{row['low']:.4f}, {row['high']:.4f}]"
        if not meets(bound, self.bound):
            return f"{found}; its {side} bound is not {self.sign} {self.bound:g}"
        if seed is not None and not meets(seed, self.bound):
            return f"{found}; its {side}est seed, {seed:.4f}, is not {self.sign} {self.bound:g}"
        return None
