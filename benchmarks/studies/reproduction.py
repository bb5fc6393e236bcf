r"""Claims of the MCSD and EAGLE-2 papers that a small pair can test: what we measured, and whether
it agrees.

    python benchmarks/studies/reproduction.py --out out/reproduction [--stories DIR] \
        [--real DIR] [--page FILE]

The pairs: the demo's; with `--stories`, a directory with the stories260k checkpoint (or
../shared/models/stories260k, where it is), that one; with `--real`, the directory that
`real_pair.py` has filled, SmolLM2-135M-Instruct. For the first two, what is missing is
made first: the target's answers, a draft aligned on them, a fine-tuned target, and for stories two
drafts of different size trained alike. Then `draftsmith eval` measures. Everything is kept below
OUT and not made again. Prints one JSON object; `--page` puts the table into a page. Nothing is
timed.

A row agrees when the 95 % interval of its figure lies on the claimed side, disagrees when it lies
on the other, and is open when it holds the border, or when training left the weights as they were
and nothing was tested.
"""

# ruff: noqa: E402
import sys
from pathlib import Path

if __name__ == "__main__":
    # Python puts this directory first, where eval.py beside this file would hide the package
    # `eval`.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from benchmarks.lib.pages import put, table
from benchmarks.studies.reproduction_pairs import (
    Options,
    Pair,
    demo_pair,
    real_pairs,
    stories_pair,
    unchanged,
)
from draftsmith.core.command_line import parse
from draftsmith.core.errors import InputError
from draftsmith.core.io import write_json_atomic
from draftsmith.core.provenance import versions
from draftsmith.eval.bootstrap import PromptSums, difference, resamples
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.evaluate import evaluate
from draftsmith.eval.report.formats import with_interval
from draftsmith.eval.results import Results

MARKERS = "<!-- rows: written by benchmarks/studies/reproduction.py -->", "<!-- end of rows -->"
# A chain, a tree as deep, and one that grows with as many nodes and levels as the tree.
CHAIN, TREE, GROWN = "chain:4", "kary:3,2,1,1", "eagle2:depth=4,beam=4,nodes=21"
# Options that say where things lie.
APART = ("out", "stories", "real", "real_target", "page")
# What "little" and "small errors" are taken to mean.
LITTLE = 0.05
UNCHANGED = (
    "; not tested: training ended with the weights it began with, no later ones did "
    "better on held-out text"
)


@dataclass(frozen=True)
class Measured:
    """A pair's evaluations: all drafts; for MCSD the aligned draft on trees, and with another rule;
    for EAGLE-2 on static and growing trees under one rule; and the judge of fine-tuning under the
    tuned target.
    """

    pair: Pair
    drafts: Results
    trees: Results | None
    replaced: Results | None
    grown: Results | None
    tuned: Results | None

    @property
    def id_name(self) -> str:
        """The set in distribution."""
        return next(iter(self.pair.id))


@dataclass(frozen=True)
class Row:
    """One claim on one pair. value and bounds: the figure that is judged; measured: all figures, in
    words.
    """

    claim: str
    paper: str
    pair: str
    measured: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    agrees: bool | None = None


def main() -> None:
    """Make, measure, judge, print."""
    options, _ = parse(Options, "reproduction", sys.argv[1:])
    out = Path(options.out)
    pairs = [demo_pair(out / "demo", options)]
    if Path(options.stories).is_dir():
        pairs.append(stories_pair(out / "stories", options))
    pairs += real_pairs(options)
    measured = [
        measure(pair, out / pair.name.replace(", ", "-").replace(" ", "-"), options)
        for pair in pairs
    ]
    rows = [
        row
        for paper, judge in CLAIMS
        for each in measured
        if paper in each.pair.papers
        for row in judge(each)
    ]
    found: dict[str, Any] = {
        "pairs": {pair.name: pair.sizes for pair in pairs},
        "options": {key: value for key, value in asdict(options).items() if key not in APART},
        "rows": [asdict(row) for row in rows],
        "versions": versions(),
    }
    write_json_atomic(out / "reproduction.json", found)
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    if options.page is not None:
        put(Path(options.page), MARKERS, verdicts(found["rows"]))


def measure(pair: Pair, out: Path, options: Options) -> Measured:
    """The evaluations that the claims need; what is there is not measured again."""

    def run(name: str, target: str, drafts: Sequence[str], **changed: Any) -> Results:
        named = {each: place for each in drafts if (place := getattr(pair, each))}
        asked: dict[str, Any] = {
            "id": [f"{key}={value}" for key, value in pair.id.items()],
            "ood": [f"{key}={value}" for key, value in pair.other.items()],
            "temperature": [0.0, 1.0],
            "tree": [CHAIN],
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
        }
        return evaluate(
            EvalConfig(
                target=target,
                draft=[f"{key}={value}" for key, value in named.items()],
                out=str(out / name),
                max_prompts=options.prompts,
                max_new_tokens=options.max_new_tokens,
                bootstrap=options.bootstrap,
                speed_prompts=0,
                device="cpu",
                dtype=pair.dtype,
                **(asked | changed),
            )
        )

    warm: dict[str, Any] = {"temperature": [0.0, 0.6, 1.0], "ood": []}
    drafts = run("eval-drafts", pair.target, ["base", "aligned", "larger"], tree=["none"])
    trees = replaced = grown = tuned = None
    if "MCSD" in pair.papers:
        trees = run("eval-trees", pair.target, ["aligned"], tree=[CHAIN, TREE], **warm)
        other_rule: dict[str, Any] = {
            "verifier": ["mcsd_replacement"],
            "temperature": [1.0],
            "ood": [],
        }
        replaced = run("eval-replacement", pair.target, ["aligned"], tree=[TREE], **other_rule)
    if "EAGLE-2" in pair.papers:
        grown = run(
            "eval-grown", pair.target, ["aligned"], tree=[TREE, GROWN], verifier=["naive"], **warm
        )
    if pair.tuned is not None:
        first = [f"{key}={value}" for key, value in islice(pair.other.items(), 1)]
        tuned = run("eval-tuned", pair.tuned, [pair.judge], id=first, ood=[], temperature=[1.0])
    return Measured(pair, drafts, trees, replaced, grown, tuned)


def _alphas(results: Results, draft: str, domain: str) -> PromptSums:
    part = results.counts("alpha")[draft, domain, 1.0, None, None]["per_prompt"]
    return PromptSums.of(part["sum"], part["count"])


def _difference(new: PromptSums, old: PromptSums) -> Any:
    """Paired by prompt."""
    return difference(new, old, resamples(len(old.numerator_P), 2000, 7))


def _side(found: Any, border: float = 0.0, *, above: bool = True) -> dict[str, Any]:
    """Figure, bounds and verdict for a claim that the figure lies above (or below) a border."""
    low, high = found["low"], found["high"]
    agrees = None if low is None or low <= border <= high else (low > border) == above
    return {"value": found["value"], "low": low, "high": high, "agrees": agrees}


def _trained(judged: dict[str, Any], checkpoint: str) -> tuple[dict[str, Any], str]:
    """The verdict on what this training changed, and what to say of it when it changed nothing."""
    return (judged | {"agrees": None}, UNCHANGED) if unchanged(checkpoint) else (judged, "")


def _tau(
    results: Results | None, domain: str, temperature: float, tree: str, verifier: str | None = None
) -> PromptSums:
    assert results is not None
    draft = results.drafts[-1]
    row = results.tau(draft, domain, temperature, tree, verifier)
    part = results.counts("decoding")[draft, domain, temperature, tree, row["verifier"]][
        "per_prompt"
    ]
    return PromptSums.of(part["emitted"], part["target_calls"])


def candidates(m: Measured) -> Iterator[Row]:
    """Acceptance against k."""
    at: dict[Any, Any] = {
        row["at"]: row for row in m.drafts.series("candidates_drawn", "aligned", "id", 1.0)
    }
    said = ", ".join(f"{row['value']:.3f}" for row in at.values())
    text = f"acceptance with {', '.join(map(str, at))} candidates: {said}"
    one, many = at[1], at[32]
    grows = (
        True
        if (many["low"] or 0) > (one["high"] or 1)
        else False
        if (many["high"] or 1) < (one["low"] or 0)
        else None
    )
    last, whole = at[64]["value"] - at[32]["value"], at[32]["value"] - at[1]["value"]
    yield Row(
        "acceptance grows with the number of candidates", "MCSD", m.pair.name, text, agrees=grows
    )
    share = last / whole if whole > 0 else None
    flat = None if share is None else share < LITTLE
    text = f"from 32 to 64 candidates it gains {last:.4f}, from 1 to 32 {whole:.3f}"
    yield Row("and flattens by 32", "MCSD", m.pair.name, text, value=share, agrees=flat)


def tuned_target(m: Measured) -> Iterator[Row]:
    """The same draft under a target that was fine-tuned."""
    if m.tuned is None or m.pair.tuned is None:
        return
    (domain,), draft = m.tuned.domains("id"), m.pair.judge
    found = _difference(_alphas(m.tuned, draft, domain), _alphas(m.drafts, draft, domain))
    before, after = (each.alpha(draft, domain, 1.0)["value"] for each in (m.drafts, m.tuned))
    text = (
        f"on {domain}, α {before:.3f} before, {after:.3f} after: {with_interval(found, sign=True)}"
    )
    judged, note = _trained(_side(found, above=False), m.pair.tuned)
    yield Row(
        "fine-tuning the target lowers acceptance", "MCSD", m.pair.name, text + note, **judged
    )


def multi_over_single(m: Measured) -> Iterator[Row]:
    """A tree over a chain as deep, under argmax decoding and under sampling."""
    assert m.trees is not None
    for temperature, name in ((1.0, "sampling"), (0.0, "argmax decoding")):
        chain, tree = (_tau(m.trees, m.id_name, temperature, each) for each in (CHAIN, TREE))
        found = _difference(tree, chain)
        alpha = m.trees.alpha("aligned", m.id_name, temperature)
        text = (
            f"τ {chain.pooled:.2f} on {CHAIN}, {tree.pooled:.2f} on {TREE}: "
            f"{with_interval(found, 2, sign=True)}"
        )
        text += f"; α {with_interval(alpha)}"
        yield Row(f"several candidates over one, {name}", "MCSD", m.pair.name, text, **_side(found))


def replacement(m: Measured) -> Iterator[Row]:
    """Candidates drawn without replacement over candidates drawn with it."""
    with_it = _tau(m.replaced, m.id_name, 1.0, TREE, "mcsd_replacement")
    without = _tau(m.trees, m.id_name, 1.0, TREE, "mcsd")
    found = _difference(without, with_it)
    text = (
        f"τ {without.pooled:.2f} without, {with_it.pooled:.2f} with, on {TREE}: "
        f"{with_interval(found, 2, sign=True)}"
    )
    yield Row("drawing without replacement over with", "MCSD", m.pair.name, text, **_side(found))


def larger_draft(m: Measured) -> Iterator[Row]:
    """A larger draft beside the aligned one."""
    if m.pair.larger is None:
        return
    small, large = (m.drafts.alpha(draft, m.id_name, 1.0) for draft in ("aligned", "larger"))
    found = _difference(*(_alphas(m.drafts, draft, m.id_name) for draft in ("larger", "aligned")))
    models = m.drafts.document["models"]
    times = models["larger"]["parameters"] / models["aligned"]["parameters"]
    text = f"α {small['value']:.3f}, {large['value']:.3f} with {times:.1f} times the parameters: "
    text += with_interval(found, sign=True)
    judged = _side(found, LITTLE, above=False)
    if not m.pair.alike:
        text, judged = (
            text + "; not tested: it was also trained longer and on more domains",
            judged | {"agrees": None},
        )
    yield Row(
        f"a larger draft helps little (below {LITTLE:g})", "MCSD", m.pair.name, text, **judged
    )


def out_of_distribution(m: Measured) -> Iterator[Row]:
    """What alignment bought out of distribution, as a share of what it bought in distribution."""
    found = m.drafts.transfer("aligned", "ood", 1.0)
    assert found is not None
    id_gain, ood_gain = (
        with_interval(m.drafts.gain("aligned", kind, 1.0), sign=True) for kind in ("id", "ood")
    )
    text = f"gain in α {id_gain} in distribution, {ood_gain} out of it"
    judged, note = _trained(_side(found, 1.0, above=False), m.pair.aligned)
    if judged["value"] is None:
        text += f"; the share is undefined: {m.drafts.why_undefined(found)}"
    yield Row(
        "alignment is less robust out of distribution", "MCSD", m.pair.name, text + note, **judged
    )


def dynamic(m: Measured) -> Iterator[Row]:
    """A tree that grows over a static one with as many nodes and levels, both under EAGLE-2's rule,
    by temperature.
    """
    for temperature in (0.0, 0.6, 1.0):
        grown, static = (
            _tau(m.grown, m.id_name, temperature, tree, "naive") for tree in (GROWN, TREE)
        )
        found = _difference(grown, static)
        text = (
            f"τ {grown.pooled:.2f} dynamic, {static.pooled:.2f} static, 21 nodes in 4 levels each: "
        )
        text += with_interval(found, 2, sign=True)
        claim = f"a dynamic tree over a static one, T = {temperature:g}"
        yield Row(claim, "EAGLE-2", m.pair.name, text, **_side(found))


def confidence(m: Measured) -> Iterator[Row]:
    """Calibration of the aligned draft."""
    found = m.drafts.figure("ece", "aligned", "id", 1.0)
    text = f"mean distance of the draft's q and the target's p (ECE) {with_interval(found)}"
    claim = f"confidence is close to acceptance (within {LITTLE:g})"
    yield Row(claim, "EAGLE-2", m.pair.name, text, **_side(found, LITTLE, above=False))


def code_most(m: Measured) -> Iterator[Row]:
    """Acceptance by domain, with the base draft, which was not aligned on any."""
    if "code" not in m.pair.other:
        return
    alphas = {domain: m.drafts.alpha("base", domain, 1.0) for domain in m.drafts.domains()}
    code, rest = alphas["code"], [value for domain, value in alphas.items() if domain != "code"]
    above = all((code["low"] or 0) > (value["high"] or 1) for value in rest)
    below = any((code["high"] or 1) < (value["low"] or 0) for value in rest)
    text = "α of the base: " + ", ".join(
        f"{domain} {with_interval(value)}" for domain, value in alphas.items()
    )
    yield Row(
        "code is accepted most",
        "EAGLE-2",
        m.pair.name,
        text,
        agrees=True if above else False if below else None,
    )


CLAIMS: list[tuple[str, Callable[[Measured], Iterator[Row]]]] = [
    ("MCSD", candidates),
    ("MCSD", multi_over_single),
    ("MCSD", replacement),
    ("MCSD", tuned_target),
    ("MCSD", larger_draft),
    ("MCSD", out_of_distribution),
    ("EAGLE-2", dynamic),
    ("EAGLE-2", confidence),
    ("EAGLE-2", code_most),
]
VERDICTS = {True: "agrees", False: "disagrees", None: "open"}


def verdicts(rows: Sequence[Any]) -> str:
    """The rows as Markdown."""
    cells = (
        [*(row[key] for key in ("claim", "paper", "pair", "measured")), VERDICTS[row["agrees"]]]
        for row in rows
    )
    agree, disagree, undecided = (
        [row["agrees"] for row in rows].count(verdict) for verdict in VERDICTS
    )
    text = table(["claim", "paper", "pair", "what we measured", "verdict"], cells)
    return f"{text}\n\n{agree} rows agree, {disagree} disagree, {undecided} are open."


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"benchmarks/studies/reproduction.py: {error}")
