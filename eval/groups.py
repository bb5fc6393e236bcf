"""What the rows of results.json are about: every prompt set by itself and all of a kind pooled, at each temperature,
with the resamples that their intervals share."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith_core.sampling import row_seed
from eval.bootstrap import PromptSums, Resamples, pool_resamples, pool_sums, resamples
from eval.estimate import AlphaMeasurement
from eval.measure import BaselineMeasurement, DecodingMeasurement, SpeedMeasurement
from eval.request import Method
from eval.results import KINDS
from eval.schema import OfDraft, OfMethod, OfSet, SuiteKind
from eval.suites import Suite


@dataclass(frozen=True)
class Measured:
    """All finished measurements. Keys: (suite, temperature), then the draft, then the method."""

    baselines: dict[tuple[str, float], BaselineMeasurement]
    alphas: dict[tuple[str, float, str], AlphaMeasurement]
    decodings: dict[tuple[str, float, str, Method], DecodingMeasurement]
    speeds: dict[tuple[str, float], SpeedMeasurement]


@dataclass(frozen=True)
class Group:
    """What one row of a table is about: a suite (`domain`), or all of a kind pooled (None), at one temperature."""

    domain: str | None
    kind: SuiteKind
    suites: list[Suite]
    temperature: float
    picks: Resamples

    def alphas(self, measured: Measured, draft: str) -> list[AlphaMeasurement]:
        """What was estimated of a draft on every suite."""
        return [measured.alphas[suite.name, self.temperature, draft] for suite in self.suites]

    def decodings(self, measured: Measured, draft: str, method: Method) -> list[DecodingMeasurement]:
        """What was counted while decoding every suite; empty where the method was not decoded."""
        keys = [(suite.name, self.temperature, draft, method) for suite in self.suites]
        return [measured.decodings[key] for key in keys if key in measured.decodings]

    def of_draft(self, draft: str) -> OfDraft:
        """The columns of a row about all suites of a kind."""
        return OfDraft(draft=draft, kind=self.kind, temperature=self.temperature)

    def of_set(self, draft: str) -> OfSet:
        """The columns of a row about this group."""
        return OfSet(draft=draft, domain=self.domain, kind=self.kind, temperature=self.temperature)

    def of_method(self, draft: str, method: Method) -> OfMethod:
        """The columns of a row about one way of decoding."""
        return OfMethod({**self.of_set(draft), "tree": method.tree, "verifier": method.verifier})


@dataclass(frozen=True)
class Setting:
    """What was compared with what, and how the intervals are drawn."""

    suites: Sequence[Suite]
    drafts: Sequence[str]
    base: str
    temperatures: Sequence[float]
    methods: Sequence[Method]
    bootstrap: int
    seed: int

    def kind(self, kind: SuiteKind) -> list[Suite]:
        """The suites of one kind."""
        return [suite for suite in self.suites if suite.kind == kind]

    def groups(self) -> Iterator[Group]:
        """Every suite by itself, then all of a kind pooled; each at every temperature."""
        alone: list[tuple[str | None, SuiteKind, list[Suite]]] = [(s.name, s.kind, [s]) for s in self.suites]
        pooled = [(None, kind, self.kind(kind)) for kind in KINDS if self.kind(kind)]
        for domain, kind, suites in alone + pooled:
            picks = self.picks(suites, [len(suite.prompts) for suite in suites])
            for temperature in self.temperatures:
                yield Group(domain, kind, suites, temperature, picks)

    def picks(self, suites: Sequence[Suite], counts: Sequence[int]) -> Resamples:
        """The resamples of the first prompts of some suites; a suite's own are the same wherever it appears."""
        return pool_resamples(
            [
                resamples(count, self.bootstrap, row_seed(self.seed, f"bootstrap/{suite.name}/{count}"))
                for suite, count in zip(suites, counts, strict=True)
            ]
        )


def ratio(parts: Sequence[Any], above: str, below: str) -> PromptSums:
    """The per-prompt lists `above` and `below` of some measurements, side by side."""
    return pool_sums([PromptSums.of(part[above], part[below]) for part in parts])


def at_depth(parts: Sequence[Any], depth: int) -> PromptSums:
    """accept@depth; a prompt whose steps never offered that depth counts zero of zero."""

    def column(rows: Sequence[Sequence[float]]) -> list[float]:
        return [row[depth - 1] if len(row) >= depth else 0 for row in rows]

    sums = [PromptSums.of(column(part["accepted_by_depth"]), column(part["reached_by_depth"])) for part in parts]
    return pool_sums(sums)


def joined(parts: Sequence[Any], key: str) -> list[Any]:
    """The per-prompt lists of several measurements, one after another."""
    return [value for part in parts for value in part[key]]
