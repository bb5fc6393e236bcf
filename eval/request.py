"""Parse an `EvalConfig` into names, sources, samplings, methods and requirements, and check all
that needs no model.

Imports no torch.
"""

import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from decode import VERIFIERS, TreeShape, default_verifier, parse_tree
from draftsmith_core.errors import InputError, nearest
from draftsmith_core.io import read_tree_file
from draftsmith_core.prompt_rows import load_suite, parse_named, suite_name
from draftsmith_core.settings import Sampling
from eval.config import EvalConfig
from eval.results import Results
from eval.schema import KINDS, SuiteKind


@dataclass(frozen=True)
class Method:
    """A decoding method: a tree and the rule that verifies it."""

    tree: str
    verifier: str

    @property
    def name(self) -> str:
        return f"{self.tree} {self.verifier}"

    @property
    def lossless(self) -> bool:
        """Whether the output distribution is the target's own."""
        return VERIFIERS[self.verifier].lossless

    @cached_property
    def shape(self) -> TreeShape:
        """The tree itself, read once, because its file may change during the run."""
        return parse_tree(self.tree, read_tree_file)


@dataclass(frozen=True)
class EvalRequest:
    """What an evaluation measures. Drafts and prompt sets map names to sources."""

    drafts: dict[str, str]
    base: str
    id_sets: dict[str, str]
    ood_sets: dict[str, str]
    samplings: list[Sampling]
    methods: list[Method]


def _sets(option: str, values: Sequence[str]) -> dict[str, str]:
    sets = parse_named(option, values)
    for name, source in sets.items():
        if name in ("id", "ood"):
            raise InputError(
                f"{option} {name}=...: this name stands for all sets of a kind; use another"
            )
        if source.startswith("@"):
            load_suite(suite_name(source))  # refuses an unknown suite
    return sets


def _methods(trees: Sequence[str], verifiers: Sequence[str]) -> list[Method]:
    methods: list[Method] = []
    for spec in trees:
        try:
            for name in verifiers or [default_verifier(parse_tree(spec, read_tree_file))]:
                if name not in VERIFIERS:
                    raise InputError(f"unknown verifier; {nearest(name, VERIFIERS)}")
                methods.append(method := Method(spec, name))
                # A draft can draw the siblings of a static tree in any way, so take the verifier's
                # first choice.
                VERIFIERS[name].check(method.shape, VERIFIERS[name].drawings[0])
        except ValueError as error:
            raise InputError(
                f"--tree {spec} --verifier {' '.join(verifiers) or 'default'}: {error}"
            ) from None
    return list(dict.fromkeys(methods))


def check(config: EvalConfig) -> EvalRequest:
    """Parse the options. Raise InputError for those that no models can satisfy."""
    drafts = parse_named("--draft", config.draft)
    if "target" in drafts:
        raise InputError("--draft target=...: this name is the target's; use another")
    id_sets, ood_sets = _sets("--id", config.id), _sets("--ood", config.ood)
    if both := id_sets.keys() & ood_sets.keys():
        raise InputError(f"--ood {min(both)}: --id has this name; a set is either ID or OOD")
    base = config.base or next(iter(drafts))
    if base not in drafts:
        raise InputError(f"--base {base}: no draft has this name; {nearest(base, drafts)}")
    planned = Path(drafts[next((name for name in drafts if name != base), base)]) / "plan.json"
    if "auto" in config.tree and not planned.is_file():
        raise InputError(
            f"--tree auto: {planned} is missing; `draftsmith plan` with this draft makes it"
        )
    # Until the target is loaded, what its generation_config.json decides is off.
    top_p = 1.0 if config.top_p is None else config.top_p
    samplings = [
        Sampling(
            temperature=temperature, top_k=config.top_k or 0, top_p=top_p, min_p=config.min_p or 0.0
        )
        for temperature in dict.fromkeys(config.temperature)
    ]
    trees = [f"auto:{planned}" if spec == "auto" else spec for spec in config.tree]
    methods = [] if trees == ["none"] else _methods(trees, config.verifier)
    for text in config.require:
        requirement = Requirement.parse(text)
        if requirement.figure == "speedup" and not config.speed_prompts:
            raise InputError(f"--require {text!r}: --speed_prompts 0 times nothing")
        if requirement.figure == "transfer" and not ood_sets:
            raise InputError(f"--require {text!r}: needs sets out of distribution; add --ood")
        hows = [(method.tree, method.verifier) for method in methods]
        requirement.cells(
            list(drafts),
            base,
            {"id": list(id_sets), "ood": list(ood_sets)},
            config.temperature,
            hows,
        )
    return EvalRequest(drafts, base, id_sets, ood_sets, samplings, methods)


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
