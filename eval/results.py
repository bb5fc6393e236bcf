"""Read results.json: one tidy table of figures, and methods for the common ones.

results = Results.load("out/eval")
results.alpha("jsd", "code", temperature=1.0)["value"]
results.tau("jsd", "id", tree="chain:4")
results.to_frame("alpha", "gain").pivot(columns="figure", values="value", index=["draft", "domain",
"temperature"])
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith_core.errors import InputError, RequirementError, nearest
from draftsmith_core.io import read_json_value, write_text_atomic
from eval.schema import KINDS, SCHEMA_VERSION, TARGET, Counts, ResultsDocument, Row, SuiteKind

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

Name = str | None
Number = float | None
Cell = tuple[str, str, float, str | None, str | None]


@dataclass(frozen=True, repr=False)
class Results:
    """The results of one evaluation. `document` is results.json, `directory` is where it was
    written.

    A `domain` is the name of a prompt set, or "id" or "ood" for all sets of that kind pooled.
    `temperature` None is the highest that was measured. `tree` and `verifier` may be left out if
    only one was measured. A name that was not measured raises InputError, which lists those that
    were. A figure is a row of the table (`eval.schema.Row`): `row["value"]` with the 95 % interval
    `row["low"]`, `row["high"]` over `row["n"]` prompts.
    """

    document: ResultsDocument
    directory: Path

    def __repr__(self) -> str:
        return f"Results({str(self.directory)!r}, drafts={self.drafts}, domains={self.domains()})"

    @classmethod
    def load(cls, path: str | Path) -> "Results":
        """Read results.json (or DIR/results.json). InputError if it is missing or of another schema
        version.
        """
        file = Path(path)
        file = file / "results.json" if file.suffix != ".json" else file
        document: Any = read_json_value(file, "the results of `draftsmith eval`")
        version = document.get("schema_version") if isinstance(document, dict) else None
        if version != SCHEMA_VERSION:
            raise InputError(f"{file}: made by another version (schema {version}); evaluate again")
        return cls(document, file.parent)

    def write(self) -> None:
        """Write results.json whole, with one line per row of its tables."""
        parts = []
        for key, value in self.document.items():
            text = json.dumps(value, indent=1, ensure_ascii=False)
            if isinstance(value, list):
                text = (
                    "["
                    + ",".join(f"\n  {json.dumps(row, ensure_ascii=False)}" for row in value)
                    + "\n ]"
                )
            parts.append(f" {json.dumps(key)}: {text}")
        write_text_atomic(self.directory / "results.json", "{\n" + ",\n".join(parts) + "\n}\n")

    @property
    def base(self) -> str:
        """The draft that the others are compared with."""
        return self.document["base"]

    @property
    def drafts(self) -> list[str]:
        """Names of all drafts, in the order they were given."""
        return self.document["drafts"]

    @property
    def aligned(self) -> list[str]:
        """Names of the drafts that are compared with the base."""
        return [draft for draft in self.drafts if draft != self.base]

    @property
    def temperatures(self) -> list[float]:
        """The temperatures that were measured, in the order they were given."""
        return self.document["temperatures"]

    @property
    def top_temperature(self) -> float:
        """The highest temperature, the default of every figure."""
        return max(self.temperatures)

    @property
    def kinds(self) -> list[SuiteKind]:
        """The kinds of prompt sets that were measured, ID first."""
        return [kind for kind in KINDS if self.domains(kind)]

    @property
    def methods(self) -> list[tuple[str, str]]:
        """Tree and verifier of every decoding method."""
        return [(method["tree"], method["verifier"]) for method in self.document["methods"]]

    def domains(self, kind: SuiteKind | None = None) -> list[str]:
        """Names of the prompt sets, of one kind or of both, ID first."""
        return [suite["name"] for suite in self.document["suites"] if kind in (None, suite["kind"])]

    def kind(self, domain: str) -> SuiteKind:
        """Whether a prompt set is in distribution ("id") or out of it ("ood")."""
        return "id" if domain in self.domains("id") else "ood"

    def lossless(self, verifier: str | None) -> bool:
        """Whether outputs under a verifier follow the target's distribution; the target's own
        (None) do.
        """
        rules = {
            method["verifier"]: bool(method["lossless"]) for method in self.document["methods"]
        }
        return verifier is None or rules[verifier]

    def busy(self, domain: str, temperature: float) -> bool:
        """Whether the machine was too busy to rely on the timings of one set at one temperature."""
        rows = self.document["conditions"]
        return any(
            row["busy"]
            for row in rows
            if (row["domain"], row["temperature"]) == (domain, temperature)
        )

    def figure(
        self,
        figure: str,
        draft: str,
        domain: str,
        temperature: Number = None,
        tree: Name = None,
        verifier: Name = None,
    ) -> Row | None:
        """Any figure by its name in the table; None if there is none, as for the gain of the base
        over itself.
        """
        return next(iter(self.series(figure, draft, domain, temperature, tree, verifier)), None)

    def series(
        self,
        figure: str,
        draft: str,
        domain: str,
        temperature: Number = None,
        tree: Name = None,
        verifier: Name = None,
    ) -> list[Row]:
        """The rows of a figure that has several, such as `accept` by depth, in the order of
        `at`.
        """
        temperature = self.top_temperature if temperature is None else temperature
        for name, value, known in (
            ("draft", draft, [*self.drafts, TARGET]),
            ("domain", domain, [*self.domains(), *self.kinds]),
            ("temperature", temperature, self.temperatures),
        ):
            if value not in known:
                listed = ", ".join(
                    f"{item:g}" if isinstance(item, float) else str(item) for item in known
                )
                raise InputError(f"{name} {value!r}: not measured; there are {listed}")
        methods = self._methods_of.get(figure)
        if methods is None or draft == TARGET:
            tree = verifier = None
        else:
            fit = [
                method
                for method in methods
                if tree in (None, method[0]) and verifier in (None, method[1])
            ]
            fit = [
                method for method in fit if method in self.methods
            ] or fit  # a decoded one before a predicted one
            if len(fit) != 1:
                wanted = " ".join(filter(None, (tree, verifier))) or "no tree named"
                listed = ", ".join(map(" ".join, fit or self.methods))
                raise InputError(
                    f"{wanted}: {'several fit:' if fit else 'not measured; there are'} {listed}"
                )
            tree, verifier = fit[0]
        return self._index.get((figure, draft, domain, temperature, tree, verifier), [])

    def alpha(self, draft: str, domain: str, temperature: Number = None) -> Row:
        """Expected acceptance of one draft token."""
        return self.series("alpha", draft, domain, temperature)[0]

    def gain(self, draft: str, domain: str, temperature: Number = None) -> Row | None:
        """alpha minus the base draft's, paired by prompt; None for the base itself."""
        return self.figure("gain", draft, domain, temperature)

    def transfer(self, draft: str, domain: str = "ood", temperature: Number = None) -> Row | None:
        """Gain out of distribution over gain in distribution; None for the base, and if no OOD set
        was measured.
        """
        return self.figure("transfer", draft, domain, temperature) if self.domains("ood") else None

    def why_undefined(self, transfer: Row) -> str | None:
        """Say why a transfer has no value; None if it has one."""
        draft, temperature = transfer["draft"], transfer["temperature"]
        sides: list[Any] = [
            self.gain(draft, domain, temperature) for domain in ("id", transfer["domain"])
        ]
        from eval.bootstrap import why_undefined  # numpy, which a mistyped option need not wait for

        return why_undefined(*sides)

    def tau(
        self,
        draft: str,
        domain: str,
        temperature: Number = None,
        tree: Name = None,
        verifier: Name = None,
    ) -> Row:
        """Measured tokens per target call."""
        return self.series("tau", draft, domain, temperature, tree, verifier)[0]

    def speedup(
        self,
        draft: str,
        domain: str,
        temperature: Number = None,
        tree: Name = None,
        verifier: Name = None,
    ) -> Row | None:
        """Tokens per second over the target's own at batch 1; None if nothing was timed."""
        return self.figure("speedup", draft, domain, temperature, tree, verifier)

    def beside(self, row: Row, figure: str, at: int | None = None) -> Row | None:
        """Another figure of the same draft, set, temperature, method and part as a row."""
        others = self._index.get((figure, *_cell_of(row)), [])
        return next(
            (other for other in others if (other["at"], other["part"]) == (at, row["part"])), None
        )

    def rows(self, *figures: str) -> Iterator[Row]:
        """All rows of some figures."""
        return (row for row in self.document["rows"] if row["figure"] in figures)

    def counts(self, of: str) -> dict[Cell, Counts]:
        """Per-prompt sums of one measurement by draft, set, temperature, tree and verifier."""
        return {
            _cell_of(counts): counts for counts in self.document["counts"] if counts["of"] == of
        }

    def require(self, *requirements: str) -> None:
        """Raise RequirementError, with one line per unmet figure, unless all requirements hold on
        the bounds of their 95 % intervals (see `eval.requirement.Requirement`):
        `results.require("alpha[code] >= 0.4")`.
        """
        from eval.requirement import Requirement  # which reads Results

        parsed = [Requirement.parse(text) for text in requirements]
        if unmet := [line for requirement in parsed for line in requirement.judge(self)]:
            raise RequirementError(unmet)

    def to_frame(self, *figures: str) -> "DataFrame":
        """The table as a pandas DataFrame, or the rows of some figures without the columns that are
        empty there.

        Columns: figure, draft, domain, kind, temperature, tree, verifier, at, part, value, low,
        high, n.
        """
        # pandas takes half a second to import, and only this needs it.
        import pandas

        frame = pandas.DataFrame(self.document["rows"], columns=list(Row.__annotations__))
        if not figures:
            return frame
        known = sorted(set(frame["figure"]))
        for figure in figures:
            if figure not in known:
                raise InputError(f"to_frame: no figure {figure!r}; {nearest(figure, known)}")
        frame = frame[frame["figure"].isin(figures)].reset_index(drop=True)
        empty = [name for name in ("tree", "verifier", "at", "part") if frame[name].isna().all()]
        return frame.drop(columns=[*empty, *(["figure"] if len(figures) == 1 else [])])

    def plot(self, name: str = "alpha") -> "Figure":
        """Draw a figure of the report, such as alpha, gain, accept or tau; `.savefig(FILE)` of it
        writes a file.
        """
        from eval.report.page import FIGURES
        from eval.report.theme import LIGHT, Look, roles_of

        if name not in FIGURES:
            raise InputError(f"plot: no figure {name!r}; {nearest(name, FIGURES)}")
        figure = FIGURES[name](self, Look(LIGHT, roles_of(self.drafts, self.base)))
        if figure is None:
            raise InputError(f"plot: {name} was not measured")
        return figure

    @cached_property
    def _index(self) -> dict[tuple[Any, ...], list[Row]]:
        index: dict[Any, list[Row]] = {}
        for row in self.document["rows"]:
            index.setdefault((row["figure"], *_cell_of(row)), []).append(row)
        return index

    @cached_property
    def _methods_of(self) -> dict[str, dict[tuple[str, str], None]]:
        methods: dict[str, dict[tuple[str, str], None]] = {}
        for figure, *_, tree, verifier in self._index:
            if tree is not None and verifier is not None:
                methods.setdefault(figure, dict.fromkeys(self.methods))[tree, verifier] = None
        return methods


def _cell_of(row: Any) -> Cell:
    return row["draft"], row["domain"], row["temperature"], row["tree"], row["verifier"]
