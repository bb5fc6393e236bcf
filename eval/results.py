"""Read results.json: one table of counts, one of the figures made of it, and queries of them.

results = Results.load("out/eval")
results.alpha("jsd", "code", temperature=1.0)["value"]
results.tau("jsd", "id", tree="chain:4")
results.to_frame("alpha", "gain").pivot(columns="figure", values="value", index=["draft", "kind",
"set", "temperature"])
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.core.errors import InputError, RequirementError, nearest
from draftsmith.core.io import read_json_value, write_text_atomic
from draftsmith.core.records import RESULTS_SCHEMA
from draftsmith.eval.requirement import Requirement, Scope
from draftsmith.eval.results_table import ResultsTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

SCHEMA_VERSION = RESULTS_SCHEMA


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
        """Read results.json (or DIR/results.json). Raise InputError if it is missing or of another
        schema version.
        """
        file = Path(path)
        file = file / "results.json" if file.suffix != ".json" else file
        document: Any = read_json_value(file, "the results of `draftsmith eval`")
        version = document.get("schema_version") if isinstance(document, dict) else None
        if version != SCHEMA_VERSION:
            raise InputError(f"{file}: made by another version (schema {version}); evaluate again")
        return cls(document, file.parent)

    def write(self) -> None:
        """Write results.json whole, with one line per row of figures and per column of counts."""
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
        scope = Scope(
            base=self.base,
            id_sets=self.domains("id"),
            ood_sets=self.domains("ood"),
            temperatures=self.temperatures,
            methods={draft: self.methods_of(draft) for draft in self.drafts},
            copying=list(filter(self.copies_first, self.drafts)),
        )
        unmet = []
        for requirement in [Requirement.parse(text) for text in requirements]:
            for judged in requirement.judged(scope):
                row = self.figure(requirement.figure, *judged)
                busy = self.busy(judged.domain, judged.temperature)
                if line := requirement.unmet(judged, row, busy=busy):
                    unmet.append(line)
        if unmet:
            raise RequirementError(unmet)

    def to_frame(self, *figures: str, parts: bool = False) -> "DataFrame":
        """Return the figures as a pandas DataFrame, or some of them without the columns that are
        empty there; or, as "counts", the table of counts. Raise InputError for a figure that was
        not measured.

        parts: also the rows of parts of the answers. Columns: figure, draft, set, kind,
        temperature, tree, rule, depth, part, value, low, high, n, seed_low, seed_high, seeds.
        """
        if figures == ("counts",):
            return self.counts
        frame = self.rows
        known = sorted(set(frame["figure"]))
        for figure in figures:
            if figure not in known:
                raise InputError(f"no figure {figure!r}; {nearest(figure, known)}")
        if not parts:
            frame = frame[frame["part"].isna()]
        if not figures:
            return frame.reset_index(drop=True)
        frame = frame[frame["figure"].isin(figures)].reset_index(drop=True)
        absent = frame.isna().all()
        optional = ("tree", "rule", "depth", "part", "seed_low", "seed_high", "seeds")
        empty = [name for name in optional if absent[name]]
        if len(figures) == 1:
            empty.append("figure")
        return frame.drop(columns=empty)

    def plot(self, name: str = "alpha") -> "Figure":
        """Draw a figure of the report, such as alpha, gain, accept or tau; `.savefig(FILE)` of it
        writes a file. Raise InputError for a figure that is unknown or has too few points.
        """
        from draftsmith.eval.report.page import FIGURES
        from draftsmith.eval.report.theme import LIGHT, Look, roles_of

        if name not in FIGURES:
            raise InputError(f"plot: no figure {name!r}; {nearest(name, FIGURES)}")
        drawn = FIGURES[name](self, Look(LIGHT, roles_of(self.drafts, self.base)))
        if drawn is None:
            raise InputError(f"plot: {name}: too few points were measured; to_frame() has them")
        return drawn.figure
