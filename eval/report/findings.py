"""Choose and fill the sentences of a report, which are in templates/words.yaml.

Only an interval that leaves out zero is called a change.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from draftsmith.core.records import still_rising
from draftsmith.eval.decision import Cell, Decision, Setting, Shortfall, Tokens, decide, listed
from draftsmith.eval.formats import (
    number,
    percent,
    points,
    sign,
    tree_name,
    with_interval,
    with_seeds,
)
from draftsmith.eval.method import decode_options
from draftsmith.eval.remarks import TIES
from draftsmith.eval.report import WORDS, said
from draftsmith.eval.results_table import ResultsTable
from draftsmith.eval.schema import BUSY, Row, SuiteKind
from draftsmith.eval.seeds import seeded


def lead(results: ResultsTable) -> "Lead":
    """The decision, each of its cells, and the changes at each temperature."""
    return Lead(results, decide(results))


@dataclass(frozen=True)
class Lead:
    """The head of a report."""

    results: ResultsTable
    decision: Decision

    @property
    def draft(self) -> str:
        """The decided draft, or the best aligned one."""
        setting = self.decision.setting
        return setting.draft if setting else self.results.best_aligned

    @property
    def setting(self) -> str:
        """The decided draft, tree and verifier; empty if nothing was timed."""
        setting = self.decision.setting
        return _named(setting) if setting else ""

    @property
    def headline(self) -> str:
        """The decision."""
        if self.decision.verdict == "rejected":
            return said("headlines", "rejected", short=_short(self._nearest))
        return self._fill("headlines")

    @property
    def temperature(self) -> float:
        """The highest temperature at which the draft pays, else the highest of all."""
        paying = self.decision.temperature
        return self.results.top_temperature if paying is None else paying

    @property
    def alphas(self) -> list[dict[str, str]]:
        """The alphas of the base, the decided draft and the best aligned one."""
        results = self.results
        rows = []
        for name in dict.fromkeys([results.base, self.draft, results.best_aligned]):
            row = {"draft": name}
            for kind in results.kinds:
                alpha = results.alpha(name, kind, self.temperature)
                row[f"α {kind.upper()}"] = with_seeds(alpha, results.spread(alpha))
            rows.append(row)
        return rows

    @property
    def seeds(self) -> str:
        """What figures of drafts with several training seeds are; empty without."""
        return said("seeds") if seeded(self.results.drafts) else ""

    @property
    def _next(self) -> str:
        verdict: str = self.decision.verdict
        if verdict == "not_timed" and not self.results.methods:
            return "not_decoded"
        if verdict == "ship_for" and self.decision.busy:
            verdict = "busy"
        return "busy_again" if verdict == "busy" and self.again else verdict

    @property
    def again(self) -> str:
        """What would change timings that were taken again; empty if they were not."""
        document = self.results.document
        if not document["clock"].get("timed_again"):
            return ""
        return said(
            "again",
            quiet=document["clock"]["machine"]["cpus"] + 1,
            load=max(max(row["load"], default=0.0) for row in document["conditions"]),
            spread=max(row["spread"] or 0.0 for row in document["conditions"]),
            prompts=2 * document["config"]["speed_prompts"],
        )

    @property
    def todo(self) -> str:
        """What to do next."""
        rivals = []
        for rival in self.decision.rivals:
            setting = _with_tree(Setting.of(rival.tau))
            rivals.append(said("rival", setting=setting, **_tokens(rival)))
        steps = self._nearest.steps if self.decision.hopeless else None
        return said(
            "todo",
            self._next,
            steps=said("steps" if steps else "steps_unknown", steps=steps),
            rivals=" ".join(rivals),
            again=self.again,
        )

    @property
    def _nearest(self) -> Shortfall:
        """The draft to name, of those that cannot pay."""
        names = [self.results.best_aligned, *self.results.drafts]
        return min(self.decision.hopeless, key=lambda short: names.index(short.draft))

    @property
    def command(self) -> str:
        """The command of `todo`, ready to paste, if there is one."""
        document = self.results.document
        setting = self.decision.setting
        temperature = self.decision.temperature
        if self._next == "busy":
            out = document["config"].get("out", "DIR")
            return shlex.join(["draftsmith", "eval", "--time_again", out])
        if setting is None or temperature is None or self._next not in ("ship", "ship_for"):
            return ""
        models = document["models"]
        words = ["draftsmith", "decode", "--target", models["target"]["name"]]
        recorded = document["config"].get("compile")
        words += decode_options(models[setting.draft], setting.tree, recorded)
        words += ["--verifier", setting.verifier]
        words += ["--temperature", f"{temperature:g}", "--prompt", "TEXT"]
        return shlex.join(words)

    @property
    def rises(self) -> dict[str, float]:
        """The rise at the end of training of every draft whose held-out alpha still rose then, and
        for which the steps that it needs are not said.
        """
        said = {short.draft for short in self.decision.hopeless}
        found = {}
        for name in self.results.drafts:
            rise = still_rising(self.results.heldout(name))
            if rise is not None and name not in said:
                found[name] = rise
        return found

    @property
    def rising(self) -> str:
        """A sentence on every draft whose held-out alpha still rose when training stopped."""
        sentences = []
        for name, rise in self.rises.items():
            gained = number(rise, sign=True)
            sentences.append(said("rising", draft=name, gained=gained))
        return " ".join(sentences)

    @property
    def detail(self) -> str:
        """The decision with its figures."""
        decision = self.decision
        text = self._fill("details")
        if decision.verdict in ("ship", "ship_for"):
            if (over := decision.over_base) is not None:
                key = "beats_base" if sign(over, 1.0) == 1 else "as_base"
                figure = with_interval(over, 2)
                text += " " + said(key, base=self.results.base, figure=figure)
            if not self.results.domains("ood"):
                text += f" {said('no_ood')}"
        named = self._nearest if decision.verdict == "rejected" else None
        for short in decision.hopeless:
            if short != named and short.draft != self.results.base:
                text += f" {_short(short)}."
        if decision.busy and decision.verdict not in ("rejected", "none_beats_none"):
            cause = "the machine was busy during timing"
            for remark in self.results.document["remarks"]:
                if remark["about"] == BUSY:
                    cause = remark["text"]
            text += f" {cause[0].upper()}{cause[1:]}."
        return text.strip()

    @property
    def cells(self) -> list[tuple[str, str]]:
        """The decision in each cell: label and sentence."""
        found = []
        for cell in self.decision.cells:
            kind = self.results.kind(cell.domain).upper()
            label = f"{cell.domain} ({kind}), T = {cell.temperature:g}"
            found.append((label, self._of_cell(cell)))
        return found

    @property
    def changes(self) -> list[str]:
        """What alignment changed at each temperature."""
        return [f"At T = {t:g}, {self._change(t)}" for t in sorted(self.results.temperatures)]

    @property
    def lossless(self) -> str:
        """Whether outputs equal the target's own, over all lossless methods on every set."""
        results = self.results
        rules = {rule for _, rule in results.methods}
        lossy = sorted(rule for rule in rules if not results.lossless(rule))
        parts = [said("lossy", names=", ".join(lossy))] if lossy else []
        checks = []
        gaps = [0.0]
        for row in results.by_set("identical", "largest_gap"):
            if results.lossless(row["verifier"]):
                if row["figure"] == "identical":
                    checks.append(row)
                else:
                    gaps.append(row["value"] or 0.0)
        same = round(sum(row["value"] or 0.0 for row in checks))
        total = sum(row["n"] for row in checks)
        if checks and same == total:
            who = "The others are lossless" if lossy else "Lossless"
            parts.append(said("all_same", who=who, same=same, total=total))
        elif checks:
            gap = max(gaps)
            dtype = results.models["target"]["dtype"]
            cause = said("tie" if gap <= TIES.get(dtype, TIES["float32"]) else "no_tie")
            counts = {"same": same, "total": total, "gap": gap}
            parts.append(said("some_same", **counts, dtype=dtype, cause=cause))
        elif len(lossy) < len(rules):
            parts.append(said("not_compared"))
        return " ".join(parts)

    def _fill(self, key: str) -> str:
        """The sentence of the verdict under a key."""
        decision = self.decision
        results = self.results
        setting = decision.setting
        if setting is None:
            return said(key, decision.verdict)
        speedups = [cell.speedup for cell in decision.paying or decision.cells]
        with_prompt = [results.beside(row, "speedup_with_prompt") for row in speedups]
        whole = list(filter(None, with_prompt))
        unclear = decision.unclear if len(decision.unclear) < len(decision.cells) else []
        return said(
            key,
            decision.verdict,
            draft=setting.draft,
            joined=said("joined") if results.joins(setting.draft) else "",
            setting=_named(setting),
            method=f"{tree_name(setting.tree)} and {setting.verifier}",
            speed=_range(speedups),
            whole=said("whole", speed=_range(whole)) if whole else "",
            where=decision.where(decision.paying),
            unclear=said("unclear", where=decision.where(unclear)) if unclear else "",
            elsewhere="" if results.domains("ood") else said("elsewhere"),
            rest=" ".join(self._rest()),
        ).strip()

    def _rest(self) -> list[str]:
        """What is decided where the setting does not pay, and where another one pays."""
        decision = self.decision
        rest = []
        for cell_sign in WORDS["rest"]:
            fits = [cell for cell in decision.cells if cell.sign == cell_sign and not cell.busy]
            if fits and not (decision.verdict == "busy" and cell_sign == 0):
                where = decision.where(fits)
                rest.append(said("rest", cell_sign, where=where))
        if decision.busy and decision.verdict != "busy":
            where = decision.where(decision.busy)
            rest.append(said("busy_there", where=where))
        for cell in decision.cells:
            fastest = Setting.of(cell.fastest)
            elsewhere = cell.sign != 1 and not cell.busy and fastest != decision.setting
            if elsewhere and sign(cell.fastest, 1.0) == 1:
                where = decision.where([cell])
                setting = _with_tree(fastest)
                speed = with_interval(cell.fastest, 2)
                rest.append(said("faster_elsewhere", where=where, setting=setting, speed=speed))
        return rest

    def _of_cell(self, cell: Cell) -> str:
        words = WORDS["cells"][cell.sign]
        alone = sign(cell.speedup, 1.0)
        if cell.short:
            words = WORDS["short_cell"]
        elif cell.busy:
            words = WORDS["busy_cell"]
        elif cell.sign == 0 and alone:
            words = WORDS["taken_alone"][alone]
        speed = with_interval(cell.speedup, 2)
        text = str(words.format(speed=speed, count=self.decision.comparisons))
        fastest = cell.fastest
        if Setting.of(fastest) != self.decision.setting and (fastest["value"] or 0) > 1:
            judged = None if cell.busy else sign(fastest, 1.0)
            text += " " + said("fastest", judged, other=_clocked(fastest))
        if cell.slower and cell.sign != 1 and not cell.busy:
            others = listed([_clocked(other) for other in cell.slower])
            text += " " + said("slower", others=others)
        return text

    def _change(self, temperature: float) -> str:
        results = self.results
        draft = results.best_aligned
        base = results.base

        def accepted(name: str, kind: SuiteKind) -> str:
            return percent(results.alpha(name, kind, temperature)["value"])

        before = accepted(base, "id")
        if draft == base:
            text = f"the target accepts {before} of what {base} drafts in distribution"
            if "ood" in results.kinds:
                text += f" and {accepted(base, 'ood')} out of distribution"
            return f"{text}."
        who = "alignment"
        if len(results.aligned) > 1:
            both = " in and out of distribution together" if len(results.kinds) > 1 else ""
            who = f"{draft}, the best of {len(results.aligned)} alignments{both},"
        change = sign(results.gain(draft, "id", temperature))
        text = said("id_change", change, who=who, before=before, after=accepted(draft, "id"))
        worst = results.worst_set(draft, temperature)
        if worst is None:
            return f"{text}."
        aside = ""
        if len(results.domains("ood")) > 1:
            lost = number(100 * (worst["value"] or 0.0), 1, sign=True)
            aside = f" (worst: {worst['domain']}, {lost} points)"
        gain = results.gain(draft, "ood", temperature)
        return text + said("ood_change", sign(gain), points=points(gain), worst=aside)


def _short(short: Shortfall) -> str:
    return said("short", draft=short.draft, **_tokens(short.nearest))


def _tokens(tokens: Tokens) -> dict[str, str]:
    return {"tau": with_interval(tokens.tau, 2), "needed": number(tokens.needed, 2)}


def _range(rows: Sequence[Row]) -> str:
    values = [row["value"] or 0.0 for row in rows]
    low = number(min(values), 2)
    high = number(max(values), 2)
    return low if low == high else f"{low} to {high}"


def _named(setting: Setting) -> str:
    return f"{_with_tree(setting)} and {setting.verifier}"


def _with_tree(setting: Setting) -> str:
    return f"{setting.draft} with {tree_name(setting.tree)}"


def _clocked(speedup: Row) -> str:
    return f"{_with_tree(Setting.of(speedup))}, {with_interval(speedup, 2)}"
