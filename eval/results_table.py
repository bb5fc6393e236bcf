"""Look up figures of results.json by draft, prompt set, temperature and method."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from draftsmith.core.errors import InputError
from draftsmith.decode.propose import CHAIN
from draftsmith.drafts.draft_sources import JOINED
from draftsmith.eval.schema import (
    KINDS,
    TARGET,
    Counts,
    How,
    ModelRow,
    ResultsDocument,
    Row,
    RowKey,
    SuiteKind,
)
from draftsmith.eval.seeds import Spread, runs_of, seeded, shown

Name = str | None
Number = float | None
# By figure and draft.
Methods = dict[tuple[str, str], dict[How, None]]
Index = dict[tuple[str, RowKey], list[Row]]


@dataclass(frozen=True, repr=False)
class ResultsTable:
    """The figures of one evaluation. `eval.results.Results` adds files, requirements and plots."""

    document: ResultsDocument
    directory: Path

    @property
    def base(self) -> str:
        """The draft that the others are compared with."""
        return self.document["base"]

    @property
    def drafts(self) -> list[str]:
        """Names of all drafts that were measured, in the order they were given; runs with several
        training seeds are NAME#1, NAME#2 and so on.
        """
        return self.document["drafts"]

    @property
    def shown(self) -> list[str]:
        """Names of all drafts, each once whatever the number of its runs."""
        return shown(self.drafts)

    @property
    def models(self) -> dict[str, ModelRow]:
        """The target and the drafts."""
        return self.document["models"]

    @property
    def aligned(self) -> list[str]:
        """Names of the drafts that are models and are compared with the base."""
        models = [draft for draft in self.drafts if not self.copies_first(draft)]
        return [draft for draft in shown(models) if draft != self.base]

    @property
    def best_aligned(self) -> str:
        """The aligned draft that gains most, ID and OOD together: a gain that is lost elsewhere is
        no gain. Without one, the base.
        """

        def gains(draft: str) -> float:
            rows = [self.gain(draft, kind) for kind in self.kinds]
            values = [row["value"] if row else None for row in rows]
            return sum(-1.0 if value is None else value for value in values)

        return max(self.aligned, key=gains, default=self.base)

    def copies(self, draft: str) -> bool:
        """Whether a draft is a method without weights."""
        return self.models[draft]["parameters"] == 0

    def copies_first(self, draft: str) -> bool:
        """Whether a draft copies from the text, alone or beside a model."""
        return self.copies(draft) or self.joins(draft)

    def joins(self, draft: str) -> bool:
        """Whether lookup comes before the model of a draft."""
        return self.models[draft]["kind"].startswith(JOINED)

    def heldout(self, draft: str) -> Sequence[tuple[int, float]]:
        """Steps and held-out alphas of a draft's training; empty if they are not known."""
        training = self.models[draft]["training"]
        return training.get("heldout", []) if training else []

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
    def methods(self) -> list[How]:
        """Tree and verifier of every decoding method."""
        return [(method["tree"], method["verifier"]) for method in self.document["methods"]]

    def most_tokens(self, tree: str | None) -> float:
        """The tokens per call that a tree brings at most; of one that grows, and of one that was
        not decoded, it is not known.
        """
        for method in self.document["methods"]:
            if method["tree"] == tree and "parents" in method["shape"]:
                return 1 + len(method["shape"]["parents"])
        return math.inf

    def methods_of(self, draft: str) -> list[How]:
        """Tree and verifier of every method that a draft was decoded with."""
        return list(self._methods_of.get(("tau", draft), ()))

    def drafts_of(self, how: How) -> list[str]:
        """Names of the drafts that were decoded with a tree and a verifier."""
        return [draft for draft in self.drafts if how in self.methods_of(draft)]

    def domains(self, kind: SuiteKind | None = None) -> list[str]:
        """Names of the prompt sets, of one kind or of both, ID first."""
        return [suite["name"] for suite in self.document["suites"] if kind in (None, suite["kind"])]

    def kind(self, domain: str) -> SuiteKind:
        """Whether a prompt set is in distribution ("id") or out of it ("ood")."""
        return "id" if domain in self.domains("id") else "ood"

    def prompt_groups(self, domain: str) -> Sequence[int | str]:
        """The group of each prompt of a set; of old results, prompts of equal tokens are one."""
        suite = next(suite for suite in self.document["suites"] if suite["name"] == domain)
        return suite.get("prompt_groups", suite["prompt_hashes"])

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
        sets = [domain]
        for kind in self.kinds:
            if kind == domain:
                sets += self.domains(kind)
        busy = [row for row in self.document["conditions"] if row["busy"]]
        return any(row["domain"] in sets and row["temperature"] == temperature for row in busy)

    def figure(
        self,
        figure: str,
        draft: str,
        domain: str,
        temperature: Number = None,
        tree: Name = None,
        verifier: Name = None,
    ) -> Row | None:
        """Return a figure by its name in the table. None if it does not exist, such as the gain of
        the base over itself.
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
        """Return the rows of a figure that has several, such as `accept` by depth, in the order of
        `at`.
        """
        temperature = self.top_temperature if temperature is None else temperature
        _check_measured("draft", draft, [*self.drafts, *seeded(self.drafts), TARGET])
        _check_measured("domain", domain, [*self.domains(), *self.kinds])
        _check_measured("temperature", temperature, self.temperatures)
        key = RowKey(draft, domain, temperature)
        if (figure, draft) in self._methods_of:
            tree, verifier = self._method(figure, draft, tree, verifier)
            key = key._replace(tree=tree, verifier=verifier)
        return self._index.get((figure, key), [])

    def _method(self, figure: str, draft: str, tree: Name, verifier: Name) -> How:
        """Complete the name of a method. A decoded method goes before a predicted one."""
        known = dict.fromkeys([*self.methods_of(draft), *self._methods_of[figure, draft]])
        fit = [how for how in known if tree in (None, how[0]) and verifier in (None, how[1])]
        fit = [how for how in fit if how in self.methods] or fit
        if len(fit) != 1:
            named = filter(None, (tree, verifier))
            wanted = " ".join(named) or "no tree named"
            methods = fit or self.methods_of(draft)
            listed = ", ".join(map(" ".join, methods))
            problem = "several fit:" if fit else "not measured; there are"
            raise InputError(f"{wanted}: {problem} {listed}")
        return fit[0]

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
        # It imports numpy, which a mistyped option need not wait for.
        from draftsmith.eval.bootstrap import why_undefined

        at_home = self.gain(transfer["draft"], "id", transfer["temperature"])
        elsewhere = self.beside(transfer, "gain")
        assert at_home is not None and elsewhere is not None, "only gains have a transfer"
        return why_undefined(at_home, elsewhere)

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

    def worst_set(self, draft: str, temperature: float) -> Row | None:
        """The gain on the OOD set where a draft gains least; None for the base."""
        gains = (self.gain(draft, domain, temperature) for domain in self.domains("ood"))
        return min(filter(None, gains), key=lambda gain: gain["value"] or 0.0, default=None)

    def best_tau(self, draft: str, domain: str, temperature: float) -> Row:
        """tau with the method that is fastest there, or, if nothing was timed, emits most; lossless
        ones first.

        If the draft was not decoded, the tau that is predicted of chains.
        """
        if not self.methods_of(draft):
            spec = f"chain:{CHAIN}"
            return self.series("tau_predicted", draft, domain, temperature, spec, "speculative")[0]

        def merit(tau: Row) -> tuple[bool, float, float]:
            timed = self.beside(tau, "speedup")
            speedup = (timed["value"] if timed else None) or 0.0
            return self.lossless(tau["verifier"]), speedup, tau["value"] or 0.0

        return max(self.taus(draft, domain, temperature), key=merit)

    def taus(self, draft: str, domain: str, temperature: float) -> list[Row]:
        """tau with every method that a draft was decoded with."""
        methods = self.methods_of(draft)
        return [self.tau(draft, domain, temperature, tree, rule) for tree, rule in methods]

    def beside(self, row: Row, figure: str, at: int | None = None) -> Row | None:
        """Return another figure of the same draft, set, temperature, method and part as a row."""
        for other in self._index.get((figure, key_of(row)), []):
            if other["at"] == at and other["part"] == row["part"]:
                return other
        return None

    def of_runs(self, row: Row, draft: str) -> list[float]:
        """A figure of every run of a draft; empty for a draft of one run."""
        values = []
        for run in runs_of(draft, self.drafts) if draft not in self.drafts else ():
            rows = self._index.get((row["figure"], key_of(row)._replace(draft=run)), [])
            values += [other["value"] for other in rows if other["value"] is not None]
        return values

    def spread(self, row: Row | None) -> Spread | None:
        """The spread of a figure over training seeds; None without several, and for transfers."""
        if row is None or row["value"] is None or row["figure"] == "transfer":
            return None
        own = self.of_runs(row, row["draft"]) or [row["value"]]
        base = [0.0]
        if row["figure"].endswith("gain"):
            # Gains of the runs of the base over their mean.
            base = self.of_runs(row, self.base) or base
        if len(own) == len(base) == 1:
            return None
        seeds = f"{len(own)} x {len(base)}" if len(base) > 1 else str(len(own))
        return Spread(min(own) - max(base), max(own) - min(base), seeds)

    def rows(self, *figures: str) -> Iterator[Row]:
        """All rows of some figures."""
        return (row for row in self.document["rows"] if row["figure"] in figures)

    def by_set(self, *figures: str) -> Iterator[Row]:
        """The rows of some figures about one set each, without those of pooled sets."""
        sets = self.domains()
        rows = self.document["rows"]
        return (row for row in rows if row["figure"] in figures and row["domain"] in sets)

    def counts(self, of: str) -> dict[RowKey, Counts]:
        """Per-prompt sums of one measurement."""
        rows = self.document["counts"]
        return {key_of(counts): counts for counts in rows if counts["of"] == of}

    @cached_property
    def _index(self) -> Index:
        index: Index = {}
        for row in self.document["rows"]:
            index.setdefault((row["figure"], key_of(row)), []).append(row)
        return index

    @cached_property
    def _methods_of(self) -> Methods:
        methods: Methods = {}
        for figure, key in self._index:
            if key.tree is not None and key.verifier is not None:
                known = methods.setdefault((figure, key.draft), {})
                known[key.tree, key.verifier] = None
        return methods


def key_of(row: Row | Counts) -> RowKey:
    """Return the key that a row is about."""
    return RowKey(row["draft"], row["domain"], row["temperature"], row["tree"], row["verifier"])


def _check_measured(name: str, value: object, known: Sequence[object]) -> None:
    if value not in known:
        names = [f"{item:g}" if isinstance(item, float) else str(item) for item in known]
        raise InputError(f"{name} {value!r}: not measured; there are {', '.join(names)}")
