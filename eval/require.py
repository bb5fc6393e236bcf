"""Requirements on an evaluation, such as `alpha[code] >= 0.4`: judged on interval bounds, never on the figure alone.

    REQUIREMENT = FIGURE[DOMAIN draft=NAME T=NUMBER tree=SPEC verifier=NAME] OP NUMBER

`>=` and `>` are judged on the low bound of the 95 % interval, `<=` and `<` on its high bound, so that a requirement is
met by chance in at most 2.5 % of evaluations of a draft that lies exactly on the number (a one-sided test at that
level; the bootstrap interval is `eval.bootstrap`'s). Several requirements are each judged alone, without a correction.
What is left out of the brackets means every: every draft but the base (the base, when it is the only one and the figure
is no gain), every prompt set, every temperature, every tree. All of them must meet the requirement. Imports no torch.
"""

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith_core.errors import InputError, RequirementError, nearest
from eval.results import Results
from eval.schema import Difference, Estimate, TransferRow

OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_FORM = re.compile(r"\s*([\w@]+)\s*(?:\[([^\]]*)\])?\s*(>=|<=|>|<)\s*([-+]?[0-9]*\.?[0-9]+)\s*")
_EXAMPLE = "alpha[code] >= 0.4"
Figure = Estimate | Difference | TransferRow | None


@dataclass(frozen=True)
class Cell:
    """One figure of an evaluation that a requirement is about; `tree` and `verifier` are None for alpha and gain."""

    draft: str
    domain: str
    temperature: float
    tree: str | None
    verifier: str | None

    def __str__(self) -> str:
        method = f", {self.tree} {self.verifier}" if self.tree else ""
        return f"{self.draft} on {self.domain} at T={self.temperature:g}{method}"


def _decoded(key: str) -> Callable[[Results, Cell], Figure]:
    def find(results: Results, cell: Cell) -> Figure:
        row: Any = results.decoding(cell.draft, cell.domain, cell.temperature, cell.tree, cell.verifier)
        figure: Figure = row[key]
        return figure

    return find


def _speedup(results: Results, cell: Cell) -> Figure:
    row = results.speed(cell.draft, cell.domain, cell.temperature, cell.tree, cell.verifier)
    return row["speedup"] if row else None


# Figure: how it is looked up. Those of `_PER_METHOD` depend on tree and verifier, those of `_OF_GAIN` on the base.
FIGURES: dict[str, Callable[[Results, Cell], Figure]] = {
    "alpha": lambda results, cell: results.alpha(cell.draft, cell.domain, cell.temperature),
    "gain": lambda results, cell: results.gain(cell.draft, cell.domain, cell.temperature),
    "transfer": lambda results, cell: results.transfer(cell.draft, cell.domain, cell.temperature),
    "tau": _decoded("tau"),
    "tau_gain": _decoded("tau_gain"),
    "speedup": _speedup,
}
_PER_METHOD = ("tau", "tau_gain", "speedup")
_OF_GAIN = ("gain", "tau_gain", "transfer")


@dataclass(frozen=True)
class Requirement:
    """One requirement, taken apart: `wanted` maps domain, draft, T, tree and verifier to what was named of them."""

    text: str
    figure: str
    wanted: dict[str, str]
    sign: str
    bound: float

    @staticmethod
    def parse(text: str) -> "Requirement":
        """Read a requirement; raises InputError, one line, for anything that is not FIGURE[...] OP NUMBER."""
        where = f"--require {text!r}"
        found = _FORM.fullmatch(text)
        if not found:
            raise InputError(f"{where}: expected FIGURE[DOMAIN] >= NUMBER, such as {_EXAMPLE!r}")
        figure, inside, sign, number = found.groups()
        if figure not in FIGURES:
            raise InputError(f"{where}: no figure {figure!r}; {nearest(figure, FIGURES)}")
        keys = ("draft", "T") + (("tree", "verifier") if figure in _PER_METHOD else ())
        wanted: dict[str, str] = {}
        for word in (inside or "").split():
            key, equals, value = word.strip(",").partition("=")
            key, value = (key, value) if equals else ("domain", key)
            if key not in ("domain", *keys) or not value:
                raise InputError(f"{where}: {word!r} selects nothing; {figure} takes a prompt set, {'=, '.join(keys)}=")
            if key in wanted:
                raise InputError(f"{where}: two values for {key}; write one, or leave it out for all")
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
        """What it is about in an evaluation with these names; InputError where it names something else. `methods` are
        pairs of tree and verifier.
        """
        sets = {"id": list(id_sets), "ood": list(ood_sets)}
        if self.figure == "transfer":
            del sets["id"]
        domains, kinds = [name for names in sets.values() for name in names], [kind for kind in sets if sets[kind]]
        judged = [draft for draft in drafts if draft != base]
        if self.figure not in _OF_GAIN:
            judged = judged if judged and "draft" not in self.wanted else list(drafts)
        if not judged:
            raise InputError(
                f"--require {self.text!r}: {self.figure} compares with the base, and there is no other draft"
            )
        named = self._pick("domain", [*domains, *kinds], alone=domains)
        trees = self._pick("tree", list(dict.fromkeys(tree for tree, _ in methods)))
        rules = self._pick("verifier", list(dict.fromkeys(rule for _, rule in methods)))
        chosen: list[Any] = [(tree, rule) for tree, rule in methods if tree in trees and rule in rules]
        if not chosen:
            raise InputError(f"--require {self.text!r}: this tree is not decoded with this verifier")
        texts = self._pick("T", [f"{t:g}" for t in temperatures])
        for draft in self._pick("draft", judged):
            for domain in named:
                for temperature in temperatures:
                    if f"{temperature:g}" not in texts:
                        continue
                    for tree, rule in chosen if self.figure in _PER_METHOD else [(None, None)]:
                        yield Cell(draft, domain, temperature, tree, rule)

    def _pick(self, key: str, known: list[str], alone: list[str] | None = None) -> list[str]:
        """What was named of `known`; when nothing was, `alone` or all of it."""
        value = self.wanted.get(key)
        if value is None:
            return known if alone is None else alone
        if key == "T" and re.fullmatch(r"[0-9]*\.?[0-9]+", value):
            value = f"{float(value):g}"
        if value not in known:
            fix = nearest(value, known, "there are")
            raise InputError(f"--require {self.text!r}: {key} {value!r} is not measured; {fix}")
        return [value]

    def judge(self, results: Results) -> list[str]:
        """One line for every cell that does not meet it; empty when all do."""
        cells = self.cells(
            drafts=results.drafts,
            base=results.base,
            id_sets=results.domains("id"),
            ood_sets=results.domains("ood"),
            temperatures=results.temperatures,
            methods=[(each["tree"], each["verifier"]) for each in results.document["methods"]],
        )
        return [line for cell in cells if (line := self._unmet(results, cell))]

    def _unmet(self, results: Results, cell: Cell) -> str | None:
        figure = FIGURES[self.figure](results, cell)
        side = "low" if self.sign.startswith(">") else "high"
        where = f"required {self.text}: {cell}"
        if figure is None or figure["value"] is None:
            why = figure.get("undefined") if figure else "it was not measured"
            return f"{where}: {self.figure} is undefined ({why or 'nothing to divide by'})"
        if figure["low"] is None or figure["high"] is None:
            return f"{where}: {self.figure} {figure['value']:.4f} has no interval to judge; use more prompts"
        judged: float = figure["low"] if side == "low" else figure["high"]
        if OPERATORS[self.sign](judged, self.bound):
            return None
        return (
            f"{where}: {self.figure} {figure['value']:.4f}, 95 % interval [{figure['low']:.4f}, {figure['high']:.4f}]; "
            f"its {side} bound is not {self.sign} {self.bound:g}"
        )


def require(results: Results, texts: Iterable[str]) -> None:
    """Raise RequirementError, one line per unmet figure; InputError where one names what was not measured."""
    unmet = [line for requirement in list(map(Requirement.parse, texts)) for line in requirement.judge(results)]
    if unmet:
        raise RequirementError(unmet)
