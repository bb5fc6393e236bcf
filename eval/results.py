"""Read results.json: one tidy table of figures, and methods for the common ones.

results = Results.load("out/eval")
results.alpha("jsd", "code", temperature=1.0)["value"]
results.tau("jsd", "id", tree="chain:4")
results.to_frame("alpha", "gain").pivot(columns="figure", values="value", index=["draft", "domain",
"temperature"])
Results.concat({"demo": "out/demo/eval", "mine": results}, "tau")
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from draftsmith.core.errors import InputError, RequirementError, nearest
from draftsmith.core.io import read_json_value, write_text_atomic
from draftsmith.core.options import reason_of
from draftsmith.eval.requirement import Requirement, Scope
from draftsmith.eval.results_table import ResultsTable
from draftsmith.eval.schema import SCHEMA_VERSION, ResultsDocument, Row
from draftsmith.eval.seeds import shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

_COLUMNS = list(Row.__annotations__)


class Results(ResultsTable):
    """The results of one evaluation. `document` is results.json, `directory` is where it was
    written.

    A `domain` is the name of a prompt set, or "id" or "ood" for all sets of that kind pooled.
    `temperature` None is the highest that was measured. `tree` and `verifier` may be left out if
    only one was measured. A name that was not measured raises InputError, which lists those that
    were. A figure is a row of the table (`eval.schema.Row`): `row["value"]` with the 95 % interval
    `row["low"]`, `row["high"]` over `row["n"]` prompts.
    """

    def __repr__(self) -> str:
        return f"Results({str(self.directory)!r}, drafts={self.drafts}, domains={self.domains()})"

    @classmethod
    def load(cls, path: str | Path) -> "Results":
        """Read results.json (or DIR/results.json). Raise InputError if it is missing, lacks a part
        or is of another schema version.
        """
        file = Path(path)
        file = file / "results.json" if file.suffix != ".json" else file
        document: Any = read_json_value(file, "the results of `draftsmith eval`")
        version = document.get("schema_version") if isinstance(document, dict) else None
        if version != SCHEMA_VERSION:
            raise InputError(f"{file}: made by another version (schema {version}); evaluate again")
        try:
            _document_type().validate_python(document)
        except ValidationError as error:
            raise InputError(f"{file}: {reason_of(error).line}; evaluate again") from None
        return cls(document, file.parent)

    def write(self) -> None:
        """Write results.json whole, with one line per row of its tables."""
        parts = []
        for key, value in self.document.items():
            text = json.dumps(value, indent=1, ensure_ascii=False)
            if isinstance(value, list):
                lines = [f"\n  {json.dumps(row, ensure_ascii=False)}" for row in value]
                text = f"[{','.join(lines)}\n ]"
            parts.append(f" {json.dumps(key)}: {text}")
        write_text_atomic(self.directory / "results.json", "{\n" + ",\n".join(parts) + "\n}\n")

    def require(self, *requirements: str) -> None:
        """Raise RequirementError, with one line per unmet figure, unless all requirements hold on
        the bounds of their 95 % intervals (see `eval.requirement.Requirement`):
        `results.require("alpha[code] >= 0.4")`.
        """
        methods = {draft: self.methods_of(draft) for draft in (*self.drafts, *self.shown)}
        scope = Scope(
            base=self.base,
            id_sets=self.domains("id"),
            ood_sets=self.domains("ood"),
            temperatures=self.temperatures,
            methods=methods,
            copying=shown(list(filter(self.copies_first, self.drafts))),
        )
        unmet = []
        for requirement in [Requirement.parse(text) for text in requirements]:
            for key in requirement.keys(scope):
                row = self.figure(requirement.figure, *key)
                reason = self.why_undefined(row) if row and row["figure"] == "transfer" else None
                timed = requirement.figure == "speedup"
                busy = timed and self.busy(key.domain, key.temperature)
                if line := requirement.unmet(key, row, reason, self.spread(row), busy=busy):
                    unmet.append(line)
        if unmet:
            raise RequirementError(unmet)

    def to_frame(self, *figures: str) -> "DataFrame":
        """Return the table as a pandas DataFrame, or the rows of some figures without the columns
        that are empty there. Raise InputError for a figure that was not measured.

        Columns: figure, draft, domain, kind, temperature, tree, verifier, at, part, value, low,
        high, n.
        """
        return _frame(self.document["rows"], figures, _COLUMNS)

    @classmethod
    def concat(cls, runs: "Mapping[str, Results | str | Path]", *figures: str) -> "DataFrame":
        """Return the tables of several evaluations as one DataFrame, as `to_frame` does, with the
        name of the run in the first column, `run`.

        runs: results, or where to load them, by name. Raise InputError as `load` and `to_frame` do.
        """
        if not isinstance(runs, Mapping) or not runs:
            raise InputError('runs: expected results by name, such as {"demo": results}')
        rows: list[Mapping[str, object]] = []
        for name, source in runs.items():
            results = source if isinstance(source, Results) else cls.load(source)
            rows += [{"run": name} | row for row in results.document["rows"]]
        return _frame(rows, figures, ["run", *_COLUMNS])

    def plot(self, name: str = "alpha") -> "Figure":
        """Draw a figure of the report, such as alpha, gain, accept or tau; `.savefig(FILE)` of it
        writes a file. Raise InputError for a figure that is unknown or has too few points.
        """
        from draftsmith.eval.report.page import FIGURES
        from draftsmith.eval.report.theme import LIGHT, Look, roles_of

        if name not in FIGURES:
            raise InputError(f"plot: no figure {name!r}; {nearest(name, FIGURES)}")
        figure = FIGURES[name](self, Look(LIGHT, roles_of(self.shown, self.base)))
        if figure is None:
            raise InputError(f"plot: {name}: too few points were measured; to_frame() has them")
        return figure


@cache
def _document_type() -> TypeAdapter[ResultsDocument]:
    return TypeAdapter(ResultsDocument)


def _frame(
    rows: Sequence[Mapping[str, object]], figures: Sequence[str], columns: Sequence[str]
) -> "DataFrame":
    # pandas takes half a second to import, and only this needs it.
    import pandas

    frame = pandas.DataFrame(rows, columns=columns)
    if not figures:
        return frame
    known = sorted(set(frame["figure"]))
    for figure in figures:
        if figure not in known:
            raise InputError(f"no figure {figure!r}; {nearest(figure, known)}")
    frame = frame[frame["figure"].isin(figures)]
    frame = frame.reset_index(drop=True)
    absent = frame.isna().all()
    empty = [name for name in ("tree", "verifier", "at", "part") if absent[name]]
    if len(figures) == 1:
        empty.append("figure")
    return frame.drop(columns=empty)
