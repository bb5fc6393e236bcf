"""Look up figures of results.json by draft, prompt set, temperature and method."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.core.errors import InputError
from draftsmith.core.io import JsonObject
from draftsmith.drafts.draft_sources import JOINED
from draftsmith.eval.counts import unpacked
from draftsmith.eval.schema import KINDS, TARGET, How, ModelRow, Row, SuiteKind

if TYPE_CHECKING:
    from pandas import DataFrame

FigureRow = Mapping[str, Any]
"""A row of the figures (`eval.schema.Row`)."""


@dataclass(frozen=True, repr=False)
class ResultsTable:
    """The figures of one evaluation. `eval.results.Results` adds files, requirements and plots."""

    document: JsonObject
    directory: Path

    @property
    def base(self) -> str:
        """The draft that the others are compared with."""
        return str(self.document["base"])

    @property
    def drafts(self) -> list[str]:
        """Names of all drafts that were measured, in the order they were given."""
        return list(self.document["drafts"])

    @property
    def models(self) -> dict[str, ModelRow]:
        """The target and the drafts; further training seeds of a draft are NAME#2 and so on."""
        models: dict[str, ModelRow] = self.document["models"]
        return models

    def copies_first(self, draft: str) -> bool:
        """Whether a draft copies from the text, alone or beside a model."""
        model = self.models[draft]
        return not model["parameters"] or model["kind"].startswith(JOINED)

    def select(self, *figures: str, parts: bool = False) -> list[FigureRow]:
        """The rows of some figures, of whole answers or of their parts."""
        named = [row for row in self.document["rows"] if row["figure"] in figures]
        return [row for row in named if (row["part"] is not None) == parts]

    def where(self, **wanted: object) -> list[Row]:
        """The rows that have these values in these columns."""
        return [row for row in self.document["rows"] if wanted.items() <= row.items()]

    @property
    def aligned(self) -> list[str]:
        """Names of the drafts that are models and are compared with the base."""
        models = [draft for draft in self.drafts if not self.copies_first(draft)]
        return [draft for draft in models if draft != self.base]

    @property
    def best_aligned(self) -> str:
        """The aligned draft that gains most, ID and OOD together: a gain that is lost elsewhere is
        no gain. Without one, the base.
        """

        def gained(draft: str) -> float:
            rows = [self.gain(draft, kind) for kind in self.kinds]
            return sum(row["value"] or 0.0 for row in rows if row is not None)

        return max(self.aligned, key=gained, default=self.base)

    @property
    def temperatures(self) -> list[float]:
        """The temperatures that were measured, in the order they were given."""
        return list(self.document["temperatures"])

    @property
    def top_temperature(self) -> float:
        """The highest temperature, the default of every figure."""
        return max(self.temperatures)

    @property
    def kinds(self) -> list[SuiteKind]:
        """The kinds of prompt sets that were measured, ID first."""
        return [kind for kind in KINDS if self.domains(kind)]

    def domains(self, kind: SuiteKind | None = None) -> list[str]:
        """Names of the prompt sets, of one kind or of both, ID first."""
        return [suite["name"] for suite in self.document["suites"] if kind in (None, suite["kind"])]

    @property
    def methods(self) -> list[How]:
        """Tree and verifier of every decoding method."""
        return [(method["tree"], method["verifier"]) for method in self.document["methods"]]

    def methods_of(self, draft: str, figure: str = "tau") -> list[How]:
        """Tree and verifier of every method with which a draft has a figure; by default those that
        it was decoded with.
        """
        rows = self.where(figure=figure, draft=draft)
        found = [(row["tree"], row["rule"]) for row in rows if row["tree"] and row["rule"]]
        return list(dict.fromkeys(found))

    def lossless(self, verifier: str | None) -> bool:
        """Whether outputs under a verifier follow the target's distribution. None: decoding with
        the target alone.
        """
        methods = self.document["methods"]
        lossless = [method["verifier"] for method in methods if method["lossless"]]
        return verifier in (None, *lossless)

    def busy(self, domain: str, temperature: float) -> bool:
        """Whether the machine was too busy to rely on the timings of a set, or of a pool of sets,
        at one temperature.
        """
        sets = self.domains(domain) if domain in KINDS else [domain]
        busy = [row for row in self.document["conditions"] if row["busy"]]
        return any(row["domain"] in sets and row["temperature"] == temperature for row in busy)

    @cached_property
    def rows(self) -> "DataFrame":
        """Every figure of every draft and set, as `eval.figures.estimate` returns them."""
        import pandas

        return pandas.DataFrame(self.document["rows"], columns=list(Row.__annotations__))

    @cached_property
    def counts(self) -> "DataFrame":
        """The table of counts that the figures are made of (`eval.counts`)."""
        return unpacked(self.document["counts"])

    def figure(
        self,
        figure: str,
        draft: str,
        domain: str,
        temperature: float | None = None,
        tree: str | None = None,
        verifier: str | None = None,
    ) -> Row | None:
        """Return a figure by its name in the table. None if it does not exist, such as the gain of
        the base over itself.
        """
        rows = self.series(figure, draft, domain, temperature, tree, verifier)
        return next((row for row in rows if row["part"] is None), None)

    def series(
        self,
        figure: str,
        draft: str,
        domain: str,
        temperature: float | None = None,
        tree: str | None = None,
        verifier: str | None = None,
    ) -> list[Row]:
        """Return the rows of a figure: of the whole, of every depth, or of every part."""
        temperature = self.top_temperature if temperature is None else temperature
        _check_measured("draft", draft, [*self.drafts, TARGET])
        _check_measured("domain", domain, [*self.domains(), *self.kinds])
        _check_measured("temperature", temperature, self.temperatures)
        wanted: dict[str, Any] = {"set": domain}
        if domain in KINDS:
            wanted = {"set": None, "kind": domain}
        if known := self.methods_of(draft, figure):
            wanted["tree"], wanted["rule"] = self._method(draft, known, tree, verifier)
        return self.where(figure=figure, draft=draft, temperature=temperature, **wanted)

    def _method(self, draft: str, known: list[How], tree: str | None, verifier: str | None) -> How:
        """Complete the name of a method. A decoded method goes before a predicted one."""
        decoded = self.methods_of(draft)
        fit = [how for how in known if tree in (None, how[0]) and verifier in (None, how[1])]
        fit = [how for how in fit if how in decoded] or fit
        if len(fit) != 1:
            wanted = " ".join(filter(None, (tree, verifier))) or "no tree named"
            problem = "several fit:" if fit else "not measured; there are"
            listed = ", ".join(map(" ".join, fit or known))
            raise InputError(f"{wanted}: {problem} {listed}")
        return fit[0]

    def alpha(self, draft: str, domain: str, temperature: float | None = None) -> Row:
        """Expected acceptance of one draft token."""
        return self._one("alpha", draft, domain, temperature)

    def gain(self, draft: str, domain: str, temperature: float | None = None) -> Row | None:
        """alpha minus the base draft's, paired by prompt; None for the base itself."""
        return self.figure("gain", draft, domain, temperature)

    def tau(
        self,
        draft: str,
        domain: str,
        temperature: float | None = None,
        tree: str | None = None,
        verifier: str | None = None,
    ) -> Row:
        """Measured tokens per target call."""
        return self._one("tau", draft, domain, temperature, tree, verifier)

    def _one(self, figure: str, draft: str, domain: str, *where: Any) -> Row:
        row = self.figure(figure, draft, domain, *where)
        if row is None:
            raise InputError(f"{figure} of {draft} on {domain}: was not measured")
        return row


def _check_measured(name: str, value: object, known: Sequence[object]) -> None:
    if value not in known:
        names = [f"{item:g}" if isinstance(item, float) else str(item) for item in known]
        raise InputError(f"{name} {value!r}: not measured; there are {', '.join(names)}")
