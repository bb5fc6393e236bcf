"""Requirements on an evaluation, such as `alpha[code] >= 0.4`, judged on interval bounds.

    REQUIREMENT = FIGURE[DOMAIN draft=NAME T=NUMBER tree=SPEC verifier=NAME] OP NUMBER

`>=` and `>` are judged on the low bound of the 95 % interval, `<=` and `<` on its high bound. So a draft that lies
exactly on the number meets a requirement in at most 2.5 % of evaluations. Requirements are judged one by one, without a
correction for their number. What is left out of the brackets means every: every draft but the base (the base, if it is
the only one and the figure is no gain), every prompt set, every temperature, every tree. Imports no torch.
"""

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith_core.errors import InputError, RequirementError, nearest
from eval.results import Cell, Results

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
class Requirement:
    """One requirement, parsed: `wanted` maps domain, draft, T, tree and verifier to the names in the brackets."""

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
            raise InputError(f"{where}: expected FIGURE[DOMAIN] >= NUMBER, such as 'alpha[code] >= 0.4'")
        figure, inside, sign, number = match.groups()
        if figure not in FIGURES:
            raise InputError(f"{where}: no figure {figure!r}; {nearest(figure, FIGURES)}")
        keys = ("draft", "T") + (("tree", "verifier") if figure in _PER_METHOD else ())
        wanted: dict[str, str] = {}
        for word in (inside or "").split():
            key, equals, value = word.strip(",").partition("=")
            key, value = (key, value) if equals else ("domain", key)
            if key not in ("domain", *keys) or not value or key in wanted:
                raise InputError(
                    f"{where}: {word!r} selects nothing; {figure} takes one prompt set and {'=, '.join(keys)}="
                )
            wanted[key] = value
        return Requirement(text, figure, wanted, sign, float(number))

    def cells(
        self,
        *,
        drafts: Sequence[str],
        base: str,
        id_sets: Iterable[str],
        ood_sets: Iterable[str],
        temperatures: Sequence[float],
        methods: Sequence[tuple[str, str]],
    ) -> Iterator[Cell]:
        """The figures that it is about in an evaluation; InputError if it names something else."""
        sets = {"id": list(id_sets), "ood": list(ood_sets)}
        if self.figure == "transfer":
            del sets["id"]
        domains = [name for names in sets.values() for name in names]
        judged = [draft for draft in drafts if draft != base]
        if self.figure not in _OF_GAIN:
            judged = judged if judged and "draft" not in self.wanted else list(drafts)
        if not judged:
            raise InputError(
                f"--require {self.text!r}: {self.figure} compares with the base, and there is no other draft"
            )
        named = self._pick("domain", [*domains, *(kind for kind in sets if sets[kind])])
        named = named if "domain" in self.wanted else domains
        trees = self._pick("tree", [tree for tree, _ in methods])
        rules = self._pick("verifier", [rule for _, rule in methods])
        chosen: list[Any] = [(tree, rule) for tree, rule in methods if tree in trees and rule in rules]
        if not chosen:
            raise InputError(f"--require {self.text!r}: this tree is not decoded with this verifier")
        texts = self._pick("T", [f"{t:g}" for t in temperatures])
        for draft in self._pick("draft", judged):
            for domain in named:
                for temperature in temperatures:
                    if f"{temperature:g}" in texts:
                        for tree, rule in chosen if self.figure in _PER_METHOD else [(None, None)]:
                            yield draft, domain, temperature, tree, rule

    def _pick(self, key: str, known: Sequence[str]) -> Sequence[str]:
        """The name in the brackets, or all that are known."""
        value = self.wanted.get(key)
        if value is None:
            return known
        if key == "T" and re.fullmatch(r"[0-9]*\.?[0-9]+", value):
            value = f"{float(value):g}"
        if value not in known:
            fix = nearest(value, list(dict.fromkeys(known)), "there are")
            raise InputError(f"--require {self.text!r}: {key} {value!r} is not measured; {fix}")
        return [value]

    def judge(self, results: Results) -> list[str]:
        """One line for every figure that does not meet it."""
        cells = self.cells(
            drafts=results.drafts,
            base=results.base,
            id_sets=results.domains("id"),
            ood_sets=results.domains("ood"),
            temperatures=results.temperatures,
            methods=results.methods,
        )
        return [line for cell in cells if (line := self._unmet(results, cell))]

    def _unmet(self, results: Results, cell: Cell) -> str | None:
        draft, domain, temperature, tree, rule = cell
        row = results.figure(self.figure, draft, domain, temperature, tree, rule)
        method = f", {tree} {rule}" if tree else ""
        where = f"required {self.text}: {draft} on {domain} at T={temperature:g}{method}"
        if row is None or row["value"] is None:
            reason = "it was not measured" if row is None else "nothing to divide by"
            if row is not None and self.figure == "transfer":
                reason = results.why_undefined(row) or reason
            return f"{where}: {self.figure} is undefined ({reason})"
        if row["low"] is None or row["high"] is None:
            return f"{where}: {self.figure} {row['value']:.4f} has no interval to judge; use more prompts"
        side = "low" if self.sign.startswith(">") else "high"
        if OPERATORS[self.sign](row["low"] if side == "low" else row["high"], self.bound):
            return None
        return (
            f"{where}: {self.figure} {row['value']:.4f}, 95 % interval [{row['low']:.4f}, {row['high']:.4f}]; "
            f"its {side} bound is not {self.sign} {self.bound:g}"
        )


def require(results: Results, texts: Iterable[str]) -> None:
    """Raise RequirementError, one line per unmet figure; InputError if one names what was not measured."""
    unmet = [line for requirement in list(map(Requirement.parse, texts)) for line in requirement.judge(results)]
    if unmet:
        raise RequirementError(unmet)
