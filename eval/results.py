"""Reading what an evaluation found: one place that looks figures up by draft, domain, temperature and method.

results = Results.load("out/eval")
results.alpha("jsd", "code", temperature=1.0)["value"]
results.decoding("jsd", "id", tree="chain:4")["tau"]
results.to_frame("decoding").pivot_table(...)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith_core.errors import InputError
from draftsmith_core.io import read_json_value
from eval.schema import (
    SCHEMA_VERSION,
    AlphaRow,
    DecodingRow,
    Difference,
    Estimate,
    PredictionRow,
    ResultsDocument,
    SpeedRow,
    SuiteKind,
    TransferRow,
)

if TYPE_CHECKING:
    from pandas import DataFrame

KINDS: tuple[SuiteKind, ...] = ("id", "ood")
FRAMES = tuple("alpha decoding predictions speed costs transfer why lost baselines suites models".split())


@dataclass(frozen=True)
class Results:
    """The results of one evaluation. `document` is all of results.json, `directory` where it was written.

    A `domain` is the name of a prompt set, or "id" or "ood" for all sets of that kind pooled. `temperature` None is
    the highest that was measured. `tree` and `verifier` may be left out when only one was measured. A name that is
    not there raises InputError, which lists those that are.
    """

    document: ResultsDocument
    directory: Path

    @classmethod
    def load(cls, path: str | Path) -> "Results":
        """Read results.json (or DIR/results.json). InputError if it is missing or of another schema version."""
        file = Path(path)
        file = file / "results.json" if file.suffix != ".json" else file
        document: Any = read_json_value(file, "the results of `draftsmith eval`")
        version = document.get("schema_version") if isinstance(document, dict) else None
        if version != SCHEMA_VERSION:
            raise InputError(f"{file}: made by another version (schema {version}); evaluate again")
        return cls(document, file.parent)

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
        """The highest temperature, which a figure is about when none is named."""
        return max(self.temperatures)

    def domains(self, kind: SuiteKind | None = None) -> list[str]:
        """Names of the prompt sets, of one kind or of both, ID first."""
        return [suite["name"] for suite in self.document["suites"] if kind in (None, suite["kind"])]

    def kind(self, domain: str) -> SuiteKind:
        """Whether a domain is in distribution ("id") or out of it ("ood")."""
        return next(suite["kind"] for suite in self.document["suites"] if suite["name"] == self._domain(domain))

    def has(self, kind: SuiteKind) -> bool:
        """Whether any prompt set of this kind was measured."""
        return bool(self.domains(kind))

    def alpha_row(self, draft: str, domain: str, temperature: float | None = None) -> AlphaRow:
        """The row of expected acceptance of one draft, as results.json has it."""
        rows = self._pooled_or_not(domain, "alpha", "overall_alpha")
        row: AlphaRow = self._one(rows, draft, domain, temperature)
        return row

    def alpha(self, draft: str, domain: str, temperature: float | None = None) -> Estimate:
        """Expected acceptance of one draft token, a share of 1, with its 95 % interval and counts."""
        return self.alpha_row(draft, domain, temperature)["alpha"]

    def gain(self, draft: str, domain: str, temperature: float | None = None) -> Difference | None:
        """alpha minus the base draft's, paired by prompt, with its 95 % interval; None for the base itself."""
        return self.alpha_row(draft, domain, temperature)["gain"]

    def decoding(
        self,
        draft: str,
        domain: str,
        temperature: float | None = None,
        tree: str | None = None,
        verifier: str | None = None,
    ) -> DecodingRow:
        """What was counted while decoding: tau (tokens per target call), accept@d, outputs equal to the target's."""
        rows = self._pooled_or_not(domain, "decoding", "overall_decoding")
        method = self._method(tree, verifier)
        row: DecodingRow = self._one(rows, draft, domain, temperature, **method)
        return row

    def predicted(
        self,
        draft: str,
        domain: str,
        temperature: float | None = None,
        tree: str = "chain:4",
        verifier: str = "speculative",
    ) -> PredictionRow | None:
        """tau of a tree as predicted without decoding, with its intervals; None where it was not predicted. Every chain
        of 1 to 16 tokens is there, under `speculative` and `block`, and the trees that were decoded.
        """
        rows = self.document["predictions"]
        row: PredictionRow | None = self._one(rows, draft, domain, temperature, tree=tree, verifier=verifier)
        return row

    def speed(
        self,
        draft: str | None,
        domain: str,
        temperature: float | None = None,
        tree: str | None = None,
        verifier: str | None = None,
    ) -> SpeedRow | None:
        """Tokens per second and speedup at batch 1; `draft` None is the target alone. None when nothing was timed."""
        rows = self.document["speed"]["domains" if self._domain(domain) else "overall"]
        if not rows:
            return None
        method = {"tree": None, "verifier": None} if draft is None else self._method(tree, verifier)
        row: SpeedRow = self._one(rows, draft, domain, temperature, **method)
        return row

    def busy(self, domain: str, temperature: float) -> bool:
        """Whether the machine was too busy for the clock times of one set at one temperature to be relied on."""
        rows = self.document["speed"]["conditions"]
        return any(row["busy"] for row in rows if (row["domain"], row["temperature"]) == (domain, temperature))

    def transfer(self, draft: str, domain: str = "ood", temperature: float | None = None) -> TransferRow | None:
        """Gain out of distribution over gain in distribution; None for the base, and when no OOD set was measured."""
        ood = self.domains("ood")
        if draft == self.base or not ood:
            return None
        name = self._domain(domain)
        # A single OOD set is not pooled with anything, so that its own row is the only one.
        name = ood[0] if name is None and len(ood) == 1 else name
        rows = [{**row, "kind": "ood"} for row in self.document["transfer"]]
        row: TransferRow = self._one(rows, draft, name or "ood", temperature)
        return row

    def require(self, *requirements: str) -> None:
        """Return when all requirements, such as "alpha[code] >= 0.4", are met on the bounds of their 95 % intervals
        (`eval.require` says how); RequirementError with one line for each figure that does not meet one.
        """
        from eval.require import require  # which reads Results

        require(self, requirements)

    def to_frame(self, table: str) -> "DataFrame":
        """One table as a pandas DataFrame, one row per measurement: figures as columns with `_low` and `_high`.

        Tables: alpha, decoding, predictions, speed, costs, transfer, why, lost (of the diagnosis), baselines, suites,
        models. Sets of a kind pooled have domain None.
        """
        if table not in FRAMES:
            raise InputError(f"to_frame: no table {table!r}; there are {', '.join(FRAMES)}")
        # pandas takes half a second to import, and only this needs it.
        import pandas

        found: Any = self.document
        tables: dict[str, Any] = {
            **found,
            **{name: found[name] + found[f"overall_{name}"] for name in ("alpha", "decoding")},
            **(found["diagnosis"] or {"why": [], "lost": []}),
            "speed": found["speed"]["domains"] + found["speed"]["overall"],
            "costs": found["speed"]["costs"],
            "models": [{"role": role, **row} for role, row in found["models"].items()],
        }
        return pandas.DataFrame([_flat(row) for row in tables[table]])

    def _domain(self, domain: str) -> str | None:
        """The name of a prompt set, or None for "id" and "ood", all sets of a kind. A set's own name comes first."""
        if domain in self.domains():
            return domain
        kinds = [kind for kind in KINDS if self.has(kind)]
        if domain in kinds:
            return None
        raise InputError(f"domain {domain!r}: not measured; there are {', '.join([*self.domains(), *kinds])}")

    def _pooled_or_not(self, domain: str, own: str, pooled: str) -> Any:
        document: Any = self.document
        return document[own if self._domain(domain) else pooled]

    def _method(self, tree: str | None, verifier: str | None) -> dict[str, str]:
        """The one tree and verifier that were asked for; InputError when none or several fit."""
        methods = self.document["methods"]
        fit = [m for m in methods if tree in (None, m["tree"]) and verifier in (None, m["verifier"])]
        if len(fit) != 1:
            asked = " ".join(word for word in (tree, verifier) if word) or "no tree named"
            problem = "several fit, name one" if fit else "not measured"
            known = ", ".join(f"{m['tree']} {m['verifier']}" for m in fit or methods)
            raise InputError(f"{asked}: {problem} of: {known}" if fit else f"{asked}: {problem}; there are {known}")
        return {"tree": fit[0]["tree"], "verifier": fit[0]["verifier"]}

    def _one(self, rows: Any, draft: str | None, domain: str, temperature: float | None, **method: str | None) -> Any:
        if draft is not None and draft not in self.drafts:
            raise InputError(f"draft {draft!r}: not measured; there are {', '.join(self.drafts)}")
        temperature = self.top_temperature if temperature is None else temperature
        if temperature not in self.temperatures:
            known = ", ".join(f"{t:g}" for t in self.temperatures)
            raise InputError(f"temperature {temperature:g}: not measured; there are {known}")
        name = self._domain(domain)
        wanted = {"draft": draft, "domain": name, "temperature": temperature, **method}
        if name is None:
            wanted["kind"] = domain
        return next((row for row in rows if all(row[key] == value for key, value in wanted.items())), None)


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """One row of a table: intervals and counts become columns; per-prompt lists stay in the document."""
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if key == "accept_at":
            for depth, at in enumerate(value, 1):
                flat |= _flat({f"accept@{depth}": at})
        elif key == "counts":
            flat |= value
        elif isinstance(value, dict) and "value" in value:
            flat |= {key: value["value"], f"{key}_low": value["low"], f"{key}_high": value["high"]}
        elif isinstance(value, dict) and key != "per_prompt":
            flat |= {f"{key}_{name}": inner for name, inner in value.items()}
        elif not isinstance(value, dict | list) and key not in ("per_prompt", "identical_outputs"):
            flat[key] = value
    return flat
