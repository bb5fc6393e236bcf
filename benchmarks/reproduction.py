"""Claims of the MCSD and EAGLE-2 papers that a small pair can test: what we measured, and whether it agrees.

    python benchmarks/reproduction.py --out out/reproduction [--stories DIR] [--page FILE]

The pair is the demo's; with `--stories`, a directory with the stories260k checkpoint (or ../shared/models/stories260k,
where it is), that one too. What is missing is made first: the target's answers, a draft aligned on them, a fine-tuned
target, and for stories two drafts of different size trained alike. Then `draftsmith eval` measures. Everything is kept
below OUT and not made again. Prints one JSON object; `--page` puts the table into a page. Nothing is timed.

A row agrees when the 95 % interval of its figure lies on the claimed side, disagrees when it lies on the other, and is
open when it holds the border.
"""

# ruff: noqa: E402
import sys
from pathlib import Path

if __name__ == "__main__":
    # Python puts this directory first, where eval.py beside this file would hide the package `eval`.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, product
from typing import Any

from distill.config import DistillConfig
from distill.generate import distill
from draftsmith.demo import corpus
from draftsmith_core.io import write_json_atomic, write_rows
from draftsmith_core.options import parse
from draftsmith_core.provenance import versions
from eval.bootstrap import PromptSums, difference, resamples
from eval.config import EvalConfig
from eval.evaluate import evaluate
from eval.report.formats import with_interval
from eval.results import Results
from train.config import Optim, TrainConfig
from train.training_run import train

ROOT = Path(__file__).resolve().parents[1]
DEMO, LARGER = ROOT / "draftsmith" / "demo" / "pair", ROOT / "configs" / "bench" / "draft"
STORIES = ROOT.parent / "shared" / "models" / "stories260k"
BEGIN, END = "<!-- rows: written by benchmarks/reproduction.py -->", "<!-- end of rows -->"
# A chain, a tree as deep, and one that grows with as many nodes and levels as the tree.
CHAIN, TREE, GROWN = "chain:4", "kary:3,2,1,1", "eagle2:depth=4,beam=4,nodes=21"
# What "little" and "small errors" are taken to mean.
LITTLE = 0.05
SUBJECTS: tuple[str, ...] = (
    "Once upon a time",
    "One day, a boy",
    "There was a little",
    "Lily and Tom",
    "The big dog",
    "Mom said",
)
SUBJECTS += ("In the park", "A small bird", "Ben had a", "The old man", "Her friend", "It was a sunny day")
ENDINGS = ("", " who", " and", " was", " saw", " went", " had", " with")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Test the claims."""

    out: str
    """Directory for everything."""
    stories: str = str(STORIES)
    """The stories260k checkpoint; left out where there is none."""
    prompts: int = 40
    """Prompts of every set."""
    max_new_tokens: int = 48
    """Tokens per prompt."""
    steps: int = 120
    """Optimizer steps of every training."""
    bootstrap: int = 2000
    """Resamples behind every interval."""
    page: str | None = None
    """A page whose rows are written anew."""


@dataclass(frozen=True)
class Pair:
    """A target, its drafts and prompts.

    `larger` is set beside `aligned`; `tuned` is the target after fine-tuning on text of the first of `other`.
    """

    name: str
    target: str
    tuned: str
    base: str
    aligned: str
    larger: str
    sizes: str
    home: dict[str, str]
    other: dict[str, str]


@dataclass(frozen=True)
class Measured:
    """A pair's evaluations: all drafts on a chain, the aligned draft on trees, and the base under the tuned target."""

    pair: Pair
    drafts: Results
    trees: Results
    replaced: Results
    tuned: Results

    @property
    def home(self) -> str:
        """The set in distribution."""
        return next(iter(self.pair.home))


@dataclass(frozen=True)
class Row:
    """One claim on one pair. value and bounds: the figure that is judged; measured: all figures, in words."""

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
    measured = [measure(pair, out / pair.name, options) for pair in pairs]
    rows = [row for judge in CLAIMS for each in measured for row in judge(each)]
    found: dict[str, Any] = {
        "pairs": {pair.name: pair.sizes for pair in pairs},
        "options": {key: value for key, value in asdict(options).items() if key not in ("out", "stories", "page")},
        "rows": [asdict(row) for row in rows],
        "versions": versions(),
    }
    write_json_atomic(out / "reproduction.json", found)
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    if options.page is not None:
        _put(Path(options.page), table(found["rows"]))


def demo_pair(out: Path, options: Options) -> Pair:
    """The demo's pair, aligned on prose; the larger draft is the benchmarks' one, trained on all three domains."""
    prompts = {}
    for domain in corpus.DOMAINS:
        rows = islice(corpus.passages(domain, corpus.split(domain).heldout, 300), options.prompts)
        prompts[domain] = _rows(out / f"{domain}.jsonl", rows)
    train_rows = islice(corpus.passages("prose", corpus.split("prose").train, 300), 384)
    answers = _answers(out, str(DEMO / "target"), _rows(out / "train.jsonl", train_rows))
    # Text that the target has not seen, so that training on it changes the target; the evaluation's prompts are others.
    unseen = islice(corpus.passages("code", corpus.split("code").heldout), options.prompts, options.prompts + 600)
    home = {"prose": prompts.pop("prose")}
    return Pair(
        name="demo",
        target=str(DEMO / "target"),
        tuned=_trained(
            out / "tuned", options.steps, [_rows(out / "code.train.jsonl", unseen)], "ce", DEMO / "target", 1e-3
        ),
        base=str(DEMO / "base"),
        aligned=_trained(out / "aligned", options.steps, answers, "jsd:beta=0.5", DEMO / "base", 3e-3, DEMO / "target"),
        larger=str(LARGER),
        sizes="target 3.4 M; drafts .4 M, and a larger one of 1.2 M that was trained longer and on all domains",
        home=home,
        other={"code": prompts["code"], "unicode": prompts["unicode"]},
    )


def stories_pair(out: Path, options: Options) -> Pair:
    """stories260k; both drafts are trained from nothing on its answers, alike; the base has an eighth of the steps."""
    openings = [{"prompt": subject + ending} for subject, ending in product(SUBJECTS, ENDINGS)]
    answers = _answers(out, options.stories, _rows(out / "train.jsonl", openings[::2]), num_samples=8)
    wiki = Path(options.stories).parents[1] / "data" / "wiki.jsonl"
    texts = [json.loads(line)["text"] for line in wiki.read_text(encoding="utf-8").splitlines()]
    passages = [{"text": text[start : start + 300]} for text in texts for start in range(0, len(text) - 300, 300)]

    def fresh(name: str, width: int, layers: int, steps: int) -> str:
        shape = {"model_type": "llama", "vocab_size": 512, "hidden_size": width, "intermediate_size": 2 * width}
        shape |= {"num_hidden_layers": layers, "num_attention_heads": 2, "num_key_value_heads": 2}
        shape |= {"max_position_embeddings": 512, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2}
        write_json_atomic(out / f"{name}.json", shape)
        return _trained(
            out / name, steps, answers, "jsd:beta=0.5", None, 4e-3, Path(options.stories), out / f"{name}.json"
        )

    held = [passages[index] for index in range(0, len(passages), max(1, len(passages) // options.prompts))]
    return Pair(
        name="stories",
        target=options.stories,
        tuned=_trained(
            out / "tuned", options.steps, [_rows(out / "wiki.train.jsonl", passages)], "ce", Path(options.stories), 1e-3
        ),
        base=fresh("base", 32, 1, max(1, options.steps // 8)),
        aligned=fresh("aligned", 32, 1, 2 * options.steps),
        larger=fresh("larger", 64, 2, 2 * options.steps),
        sizes="target .26 M; drafts .03 M and .1 M, from nothing, trained alike on its answers",
        home={"stories": _rows(out / "stories.jsonl", openings[1::2])},
        other={"wiki": _rows(out / "wiki.jsonl", held)},
    )


def _rows(path: Path, rows: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_rows(path, rows)
    return str(path)


def _answers(out: Path, target: str, prompts: str, num_samples: int = 2) -> list[str]:
    """The target's answers at temperature 1."""
    if not (out / "answers").is_dir():
        distill(
            DistillConfig(
                target=target,
                prompts=prompts,
                out=str(out / "answers"),
                num_samples=num_samples,
                max_new_tokens=96,
                temperature=1.0,
                batch_size=64,
                seed=5,
                device="cpu",
            )
        )
    return [str(out / "answers")]


def _trained(
    out: Path,
    steps: int,
    data: list[str],
    objective: str,
    start: Path | None,
    rate: float,
    target: Path | None = None,
    shape: Path | None = None,
) -> str:
    if not (out / "model.safetensors").is_file():
        train(
            TrainConfig(
                out=str(out),
                data=data,
                draft=str(start) if start else None,
                draft_config=str(shape) if shape else None,
                target=str(target) if target else None,
                objective=objective,
                max_length=128,
                batch_size=16,
                steps=steps,
                eval_every=steps,
                save_every=10 * steps,
                heldout_fraction=0.03,
                optim=Optim(lr=rate, warmup_steps=max(1, steps // 20)),
                seed=3,
                device="cpu",
            )
        )
    return str(out)


def measure(pair: Pair, out: Path, options: Options) -> Measured:
    """Four evaluations; what is there is not measured again."""

    def run(name: str, target: str, drafts: Sequence[str], **changed: Any) -> Results:
        named = {each: getattr(pair, each) for each in drafts}
        asked: dict[str, Any] = {
            "id": [f"{key}={value}" for key, value in pair.home.items()],
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
                **(asked | changed),
            )
        )

    other = [f"{key}={value}" for key, value in islice(pair.other.items(), 1)]
    warm: dict[str, Any] = {"temperature": [0.0, 0.6, 1.0], "ood": []}
    return Measured(
        pair=pair,
        drafts=run("eval-drafts", pair.target, ["base", "aligned", "larger"]),
        trees=run("eval-trees", pair.target, ["aligned"], tree=[CHAIN, TREE, GROWN], **warm),
        replaced=run(
            "eval-replacement",
            pair.target,
            ["aligned"],
            tree=[TREE],
            verifier=["mcsd_replacement"],
            temperature=[1.0],
            ood=[],
        ),
        tuned=run("eval-tuned", pair.tuned, ["base"], id=other, ood=[], temperature=[1.0]),
    )


def _sums(row: Any, above: str, below: str) -> PromptSums:
    return PromptSums.of(row["per_prompt"][above], row["per_prompt"][below])


def _difference(new: PromptSums, old: PromptSums) -> Any:
    """Paired by prompt."""
    return difference(new, old, resamples(len(old.numerator_P), 2000, 7))


def _side(found: Any, border: float = 0.0, *, above: bool = True) -> dict[str, Any]:
    """Figure, bounds and verdict for a claim that the figure lies above (or below) a border."""
    low, high = found["low"], found["high"]
    agrees = None if low is None or low <= border <= high else (low > border) == above
    return {"value": found["value"], "low": low, "high": high, "agrees": agrees}


def _tau(results: Results, domain: str, temperature: float, tree: str, verifier: str | None = None) -> PromptSums:
    draft = results.drafts[-1]
    return _sums(results.decoding(draft, domain, temperature, tree, verifier), "emitted", "target_calls")


def candidates(m: Measured) -> Iterator[Row]:
    """Acceptance against k."""
    diagnosis = m.drafts.document["diagnosis"]
    assert diagnosis is not None
    wanted = {"draft": "aligned", "kind": "id", "temperature": 1.0, "way": "drawn"}
    untyped: list[Any] = list(diagnosis["candidates"])
    row = next(row for row in untyped if all(row[key] == value for key, value in wanted.items()))
    at = dict(zip(row["k"], row["acceptance"], strict=True))
    said = ", ".join(f"{at[k]['value']:.3f}" for k in row["k"])
    text = f"acceptance with {', '.join(map(str, row['k']))} candidates: {said}"
    grows = None if at[1]["high"] is None else at[32]["low"] > at[1]["high"]
    last, whole = at[64]["value"] - at[32]["value"], at[32]["value"] - at[1]["value"]
    yield Row("acceptance grows with the number of candidates", "MCSD", m.pair.name, text, agrees=grows)
    share = last / whole if whole > 0 else None
    flat = None if share is None else share < LITTLE
    text = f"from 32 to 64 candidates it gains {last:.4f}, from 1 to 32 {whole:.3f}"
    yield Row("and flattens by 32", "MCSD", m.pair.name, text, value=share, agrees=flat)


def tuned_target(m: Measured) -> Iterator[Row]:
    """The same draft under a target that was fine-tuned."""
    (domain,) = m.tuned.domains("id")
    new, old = m.tuned.alpha_row("base", domain, 1.0), m.drafts.alpha_row("base", domain, 1.0)
    found = _difference(_sums(new, "sum", "count"), _sums(old, "sum", "count"))
    before, after = old["alpha"]["value"], new["alpha"]["value"]
    text = f"on {domain}, α {before:.3f} before, {after:.3f} after: {with_interval(found, sign=True)}"
    yield Row("fine-tuning the target lowers acceptance", "MCSD", m.pair.name, text, **_side(found, above=False))


def multi_over_single(m: Measured) -> Iterator[Row]:
    """A tree over a chain as deep, under argmax decoding and under sampling."""
    for temperature, name in ((1.0, "sampling"), (0.0, "argmax decoding")):
        chain, tree = (_tau(m.trees, m.home, temperature, each) for each in (CHAIN, TREE))
        found = _difference(tree, chain)
        alpha = m.trees.alpha("aligned", m.home, temperature)
        text = f"τ {chain.pooled:.2f} on {CHAIN}, {tree.pooled:.2f} on {TREE}: {with_interval(found, 2, sign=True)}"
        text += f"; α {with_interval(alpha)}"
        yield Row(f"several candidates over one, {name}", "MCSD", m.pair.name, text, **_side(found))


def replacement(m: Measured) -> Iterator[Row]:
    """Candidates drawn without replacement over candidates drawn with it."""
    with_it = _tau(m.replaced, m.home, 1.0, TREE, "mcsd_replacement")
    without = _tau(m.trees, m.home, 1.0, TREE, "mcsd")
    found = _difference(without, with_it)
    text = f"τ {without.pooled:.2f} without, {with_it.pooled:.2f} with, on {TREE}: {with_interval(found, 2, sign=True)}"
    yield Row("drawing without replacement over with", "MCSD", m.pair.name, text, **_side(found))


def larger_draft(m: Measured) -> Iterator[Row]:
    """A larger draft beside the aligned one."""
    small, large = (m.drafts.alpha_row(draft, m.home, 1.0) for draft in ("aligned", "larger"))
    found = _difference(_sums(large, "sum", "count"), _sums(small, "sum", "count"))
    models = m.drafts.document["models"]
    times = models["larger"]["parameters"] / models["aligned"]["parameters"]
    text = f"α {small['alpha']['value']:.3f}, {large['alpha']['value']:.3f} with {times:.1f} times the parameters: "
    text += with_interval(found, sign=True)
    claim = f"a larger draft helps little (below {LITTLE:g})"
    yield Row(claim, "MCSD", m.pair.name, text, **_side(found, LITTLE, above=False))


def out_of_distribution(m: Measured) -> Iterator[Row]:
    """What alignment bought elsewhere, as a share of what it bought at home."""
    found = m.drafts.transfer("aligned", "ood", 1.0)
    assert found is not None
    home, away = (with_interval(found[key], sign=True) for key in ("gain_id", "gain_ood"))
    text = f"gain in α {home} in distribution, {away} out of it"
    judged = _side(found, 1.0, above=False)
    if judged["value"] is None:
        judged["agrees"] = None
        text += f"; the share is undefined: {found['undefined']}"
    yield Row("alignment is less robust out of distribution", "MCSD", m.pair.name, text, **judged)


def dynamic(m: Measured) -> Iterator[Row]:
    """A tree that grows over a static one with as many nodes and levels, by temperature."""
    for temperature in (0.0, 0.6, 1.0):
        grown, static = (_tau(m.trees, m.home, temperature, tree) for tree in (GROWN, TREE))
        found = _difference(grown, static)
        text = f"τ {grown.pooled:.2f} dynamic, {static.pooled:.2f} static, 21 nodes in 4 levels each: "
        text += with_interval(found, 2, sign=True)
        claim = f"a dynamic tree over a static one, T = {temperature:g}"
        yield Row(claim, "EAGLE-2", m.pair.name, text, **_side(found))


def confidence(m: Measured) -> Iterator[Row]:
    """Calibration of the aligned draft."""
    diagnosis = m.drafts.document["diagnosis"]
    assert diagnosis is not None
    for temperature in (0.0, 1.0):
        wanted = {"draft": "aligned", "kind": "id", "temperature": temperature}
        untyped: list[Any] = list(diagnosis["calibration"])
        row = next(row for row in untyped if all(row[key] == value for key, value in wanted.items()))
        found: Any = {"value": row["ece"], "low": row["low"], "high": row["high"]}
        text = f"mean distance of confidence and acceptance (ECE) {with_interval(found)}"
        claim = f"confidence is close to acceptance (within {LITTLE:g}), T = {temperature:g}"
        yield Row(claim, "EAGLE-2", m.pair.name, text, **_side(found, LITTLE, above=False))


def code_most(m: Measured) -> Iterator[Row]:
    """Acceptance by domain, with the base draft, which was not aligned on any."""
    if "code" not in m.pair.other:
        return
    alphas = {domain: m.drafts.alpha("base", domain, 1.0) for domain in m.drafts.domains()}
    code, rest = alphas["code"], [value for domain, value in alphas.items() if domain != "code"]
    above = all((code["low"] or 0) > (value["high"] or 1) for value in rest)
    below = any((code["high"] or 1) < (value["low"] or 0) for value in rest)
    text = "α of the base: " + ", ".join(f"{domain} {with_interval(value)}" for domain, value in alphas.items())
    yield Row("code is accepted most", "EAGLE-2", m.pair.name, text, agrees=True if above else False if below else None)


CLAIMS: list[Callable[[Measured], Iterator[Row]]] = [
    candidates,
    multi_over_single,
    replacement,
    tuned_target,
    larger_draft,
    out_of_distribution,
    dynamic,
    confidence,
    code_most,
]
VERDICTS = {True: "agrees", False: "disagrees", None: "open"}


def table(rows: Sequence[Any]) -> str:
    """The rows as Markdown."""
    lines = ["| claim | paper | pair | what we measured | verdict |", "|---|---|---|---|---|"]
    for row in rows:
        cells = (row["claim"], row["paper"], row["pair"], row["measured"], VERDICTS[row["agrees"]])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _put(page: Path, text: str) -> None:
    whole = page.read_text(encoding="utf-8")
    before, begin, rest = whole.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"benchmarks/reproduction.py: {page} has no lines '{BEGIN}' and '{END}' for the table")
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
