"""Requirements on the figures of an evaluation."""

import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from draftsmith_core.errors import InputError, nearest
from eval.results import Results
from eval.schema import KINDS, SuiteKind

OPERATORS: dict[str, Any] = {
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
class Requirement:
    """A requirement on an evaluation, such as `alpha[code] >= 0.4`, judged on interval bounds:

        FIGURE[DOMAIN draft=NAME T=NUMBER tree=SPEC verifier=NAME] OP NUMBER

    `>=` and `>` are judged on the low bound of the 95 % interval, `<=` and `<` on its high bound.
    So a draft that lies exactly on the number meets a requirement in at most 2.5 % of evaluations.
    Requirements are judged one by one, without a correction for their number. What is left out of
    the brackets means every: every draft but the base (the base, if it is the only one and the
    figure is no gain), every prompt set, every temperature, every tree. `wanted` maps domain,
    draft, T, tree and verifier to the names in the brackets.
    """

    text: str
    figure: str
    wanted: dict[str, str]
    sign: str
    bound: float

    @staticmethod
    def parse(text: str) -> "Requirement":
        """Read a requirement; InputError if it is not FIGURE[...] OP NUMBER."""
        where = f"--require {text!r}"
        match = _FORM.fullmatch(text)
        if not match:
            raise InputError(
                f"{where}: expected FIGURE[DOMAIN] >= NUMBER, such as 'alpha[code] >= 0.4'"
            )
        figure, inside, sign, number = match.groups()
        if figure not in FIGURES:
            raise InputError(f"{where}: no figure {figure!r}; {nearest(figure, FIGURES)}")
        keys = ("draft", "T") + (("tree", "verifier") if figure in _PER_METHOD else ())
        wanted: dict[str, str] = {}
        for word in (inside or "").split():
            key, equals, value = word.strip(",").partition("=")
            key, value = (key, value) if equals else ("domain", key)
            if key not in ("domain", *keys) or not value or key in wanted:
                fix = f"{figure} takes one prompt set and {'=, '.join(keys)}="
                raise InputError(f"{where}: {word!r} selects nothing; {fix}")
            wanted[key] = value
        return Requirement(text, figure, wanted, sign, float(number))

    def cells(
        self,
        drafts: Sequence[str],
        base: str,
        sets: Mapping[SuiteKind, Sequence[str]],
        temperatures: Sequence[float],
        methods: Sequence[tuple[str, str]],
    ) -> list[tuple[Any, ...]]:
        """Return the figures to judge, each as the arguments of `Results.figure`. Raise InputError
        if the requirement names something that the evaluation does not measure.
        """
        sets = {
            kind: () if (kind, self.figure) == ("id", "transfer") else names
            for kind, names in sets.items()
        }
        domains = [name for names in sets.values() for name in names]
        judged = [draft for draft in drafts if draft != base]
        if self.figure not in _OF_GAIN and (not judged or "draft" in self.wanted):
            judged = list(drafts)
        if not judged:
            raise InputError(
                f"--require {self.text!r}: {self.figure} needs a draft beside the base"
            )
        if "domain" in self.wanted:
            domains = self._pick("domain", [*domains, *(kind for kind in sets if sets[kind])])
        trees = self._pick("tree", [tree for tree, _ in methods])
        rules = self._pick("verifier", [rule for _, rule in methods])
        chosen: list[tuple[Any, ...]] = [
            method for method in methods if method[0] in trees and method[1] in rules
        ]
        texts = self._pick("T", [f"{t:g}" for t in temperatures])
        picked = [t for t in temperatures if f"{t:g}" in texts]
        if self.figure not in _PER_METHOD:
            chosen = [(None, None)]
        return [
            (*cell, *method)
            for *cell, method in product(self._pick("draft", judged), domains, picked, chosen)
        ]

    def _pick(self, key: str, known: list[str]) -> list[str]:
        value = self.wanted.get(key)
        if value is None:
            return known
        if key == "T" and re.fullmatch(r"[0-9]*\.?[0-9]+", value):
            value = f"{float(value):g}"
        if value not in known:
            fix = nearest(value, list(dict.fromkeys(known)), "there are")
            raise InputError(f"--require {self.text!r}: {key} {value!r} is not measured; {fix}")
        return [value]

    def judge(self, results: Results) -> Iterator[str]:
        """Yield one line for every figure that misses the requirement."""
        sets = {kind: results.domains(kind) for kind in KINDS}
        for cell in self.cells(
            results.drafts, results.base, sets, results.temperatures, results.methods
        ):
            draft, domain, temperature, tree, rule = cell
            method = f", {tree} {rule}" if tree else ""
            where = (
                f"required {self.text}: {draft} on {domain} at T={temperature:g}{method}: "
                f"{self.figure}"
            )
            row = results.figure(self.figure, *cell)
            if row is None:
                yield f"{where} is undefined (it was not measured)"
            elif row["value"] is None:
                reason = results.why_undefined(row) if self.figure == "transfer" else None
                yield f"{where} is undefined ({reason or 'nothing to divide by'})"
            elif row["low"] is None or row["high"] is None:
                yield f"{where} {row['value']:.4f} has no interval to judge; use more prompts"
            else:
                side = "low" if self.sign.startswith(">") else "high"
                if not OPERATORS[self.sign](
                    row["low"] if side == "low" else row["high"], self.bound
                ):
                    spread = f"95 % interval [{row['low']:.4f}, {row['high']:.4f}]"
                    yield (
                        f"{where} {row['value']:.4f}, {spread}; its {side} bound is not "
                        f"{self.sign} {self.bound:g}"
                    )
