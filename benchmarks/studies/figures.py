"""Make the tables and figures of the docs again from kept results.

    python -m benchmarks.studies.figures

docs/results/ holds the results.json files, compressed. `--keep NAME=FILE` first takes a new one,
without the paths of the machine: `--keep demo=out/demo/eval/results.json
demo-large=out/demo/eval-large/results.json`.
"""

import argparse
import json
import lzma
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmarks.lib.pages import table
from benchmarks.lib.seeds import estimate_of_mean, pool_sums
from benchmarks.studies import (
    domains,
    frontier_tables,
    objectives_figure,
    objectives_tables,
    real_figures,
    real_speed,
)
from draftsmith.demo.demo_run import write_page
from draftsmith_core.sampling import row_seed
from eval.bootstrap import PromptSums, pool_resamples, resamples
from eval.report.formats import number, with_interval
from eval.results import Results
from eval.schema import Row

# Takes the counts of one cell; gives a number per prompt.
Sums = Callable[[Mapping[str, Any]], Sequence[float]]
ROOT = Path(__file__).parents[2]
DRAFTS = {
    "base": "base",
    "jsd-plain": "plain (`jsd-plain`)",
    "jsd-balanced": "**balanced** (`jsd-balanced`)",
}
REAL = {
    "pruned": "two pruned layers",
    "eagle3": "EAGLE-3",
    "eagle": "EAGLE-1",
    "hydra": "Hydra",
    "fresh": "a small LLaMA",
    "dflash": "DFlash",
    "dspark": "DSpark",
    "jetspec": "JetSpec",
    "base": "of chat",
    "plain": "plain",
    "balanced": "**balanced**",
    "all chats": "replay of all chats",
}


def kept(root: Path, name: str) -> Any:
    """A kept document; None if there is none of this name."""
    file = root / "docs" / "results" / f"{name}.json.xz"
    return json.loads(lzma.decompress(file.read_bytes())) if file.is_file() else None


def keep(
    root: Path,
    name: str,
    source: Path,
    public: Mapping[str, str] | None = None,
    rows: Sequence[str] = (),
) -> None:
    """Keep results under a name. public: what paths of this machine become; the run's directory is
    out/demo. rows: figures whose rows are kept; all when empty.
    """
    text, runs = (
        source.read_text(encoding="utf-8"),
        (source.resolve().parents[1], source.parents[1]),
    )
    for path, word in (public or dict.fromkeys(map(str, runs), "out/demo")).items():
        text = text.replace(path, word) if len(path) > 1 else text
    if rows:
        document = json.loads(text)
        document["rows"] = [row for row in document["rows"] if row["figure"] in rows]
        text = json.dumps(document)
    (folder := root / "docs" / "results").mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json.xz").write_bytes(lzma.compress(text.encode(), preset=9))


def demo_tables(results: Results) -> dict[str, list[str]]:
    """The tables of the README by their first line."""
    sets = [
        f"{name} (ID)" if results.kind(name) == "id" else f"{name} (OOD)"
        for name in results.domains()
    ]
    alphas = []
    for draft in results.drafts:
        taus = [
            results.figure(name, draft, "id", 1.0, "chain:2", "speculative")
            for name in ("tau_predicted", "tau")
        ]
        cells = [with_interval(results.alpha(draft, domain, 1.0)) for domain in results.domains()]
        cells += [with_interval(taus[0], 2), number(taus[1]["value"] if taus[1] else None, 2)]
        alphas.append([DRAFTS.get(draft, draft), *cells])
    head = ["draft", *sets, "tokens per target call ID, predicted", "decoded"]
    names = {draft: draft.removeprefix("jsd-") for draft in results.aligned}
    changed = dict(zip(results.domains(), sets, strict=True))
    return by_header(
        table(head, alphas), changes(results, "change of alpha over base", names, changed)
    )


def changes(results: Results, first: str, names: Mapping[str, str], sets: Mapping[str, str]) -> str:
    """Change of alpha of every aligned draft on these sets, by temperature. names, sets: what the
    table calls them.
    """
    rows = [
        [f"{names[draft]}, temperature {t:g}"]
        + [with_interval(results.gain(draft, domain, t), sign=True) for domain in sets]
        for t in sorted(results.temperatures, reverse=True)
        for draft in reversed(results.aligned)
    ]
    return table([first, *sets.values()], rows)


def predicted_tau(results: Results, draft: str, kind: str, temperature: float) -> Row | None:
    """The tau that is predicted of chains of 4."""
    return results.figure("tau_predicted", draft, kind, temperature, *real_figures.CHAIN)


def acceptance(results: Results, first: str, temperature: float) -> str:
    """Alpha of every draft by set, and the predicted tau of chains of 4 in distribution and out of
    it.
    """
    rows = []
    for draft in results.drafts:
        cells = [
            with_interval(results.alpha(draft, domain, temperature)) for domain in results.domains()
        ]
        cells += [
            with_interval(predicted_tau(results, draft, kind, temperature), 2)
            for kind in ("id", "ood")
        ]
        rows.append([REAL.get(draft, draft), *cells])
    own = results.domains("id")[0]
    return table([first, *results.domains(), f"tau {own}", "tau elsewhere"], rows)


def over_seeds(seeds: Sequence[Results], first: str) -> str:
    """alpha of drafts that were trained with every seed: its mean with the interval over prompts,
    and by seed; by seed the predicted tau of chains of 4.
    """
    own, *others = seeds[0].domains()
    drafts = [
        draft for draft in seeds[0].drafts if all(draft in results.drafts for results in seeds)
    ]
    rows = [[REAL[draft]] for draft in drafts]
    for temperature in (0.0, 1.0):
        alphas = [real_figures.sums_of(results, temperature) for results in seeds]
        for row, draft in zip(rows, drafts, strict=True):
            for names in ([own], others):
                picks = pool_resamples(
                    [frontier_tables.picks_of(alphas[0][draft][name], name, 2000) for name in names]
                )
                sums = [pool_sums([alpha[draft][name] for name in names]) for alpha in alphas]
                by_seed = ", ".join(number(one.pooled, 3) for one in sums)
                row.append(f"{with_interval(estimate_of_mean(sums, picks))} ({by_seed})")
            taus = [predicted_tau(results, draft, "id", temperature) for results in seeds]
            row.append(", ".join(number(tau["value"] if tau else None, 2) for tau in taus))
    heading = [
        f"{what}, T = {at}" for at in (0, 1) for what in (own, "elsewhere", f"tau {own} by seed")
    ]
    return table([first, *heading], rows)


def draft_speeds(rows: Sequence[Mapping[str, Any]]) -> str:
    """Speed over the target alone and decoded tau, by draft, tree and temperature."""
    cells = {(row["draft"], row["tree"], row["temperature"]): row for row in rows if row["draft"]}
    drafts, trees, temperatures = (dict.fromkeys(key[at] for key in cells) for at in range(3))
    head = ["one chat at a time", *(f"{tree}, T = {at:g}" for at in temperatures for tree in trees)]
    lines = []
    for draft in drafts:
        by_way = [cells[draft, tree, at] for at in temperatures for tree in trees]
        lines.append(
            [
                REAL[draft],
                *(f"{number(way['over_alone'], 2)} ({number(way['tau'], 2)})" for way in by_way),
            ]
        )
    return table(head, lines)


def heads(results: Results, first: str) -> list[str]:
    """Drafts called KIND-SEED and KIND-seconds (`heads.py`): alpha and decoded tau, and
    acceptance by depth.

    Means over seeds; intervals are over prompts. alpha in distribution also by seed.
    """
    (chain, rule), (tree, tree_rule) = results.methods
    own, *others = results.domains()
    kinds = list(dict.fromkeys(draft.rpartition("-")[0] for draft in results.drafts))

    def pooled(
        of: str, kind: str, domains: Sequence[str], at: float, above: Sums, below: Sums, *how: str
    ) -> str:
        """The figure above / below over all seeds of a kind, pooled over domains."""
        counts = results.counts(of)
        drafts = [draft for draft in results.drafts if re.fullmatch(rf"{kind}-\d+", draft)]
        parts = [
            [counts[draft, domain, at, *(how or (None, None))]["per_prompt"] for domain in domains]
            for draft in drafts
        ]
        seeds = [
            pool_sums([PromptSums.of(above(part), below(part)) for part in each]) for each in parts
        ]
        sizes = [len(above(part)) for part in parts[0]]
        picks = [
            resamples(size, 2000, row_seed(0, name) % 2**32)
            for size, name in zip(sizes, domains, strict=True)
        ]
        text = with_interval(
            estimate_of_mean(seeds, pool_resamples(picks)), 3 if of == "alpha" else 2
        )
        by_seed = ", ".join(number(one.pooled, 3) for one in seeds)
        return f"{text} ({by_seed})" if of == "alpha" and domains == [own] else text

    alpha: Any = (itemgetter("sum"), itemgetter("count"))
    tau: Any = (itemgetter("emitted"), itemgetter("target_calls"))
    rows, depths = [], []
    for kind in kinds:
        model: Any = results.document["models"][f"{kind}-1"]
        row = [REAL[kind], f"{model['parameters'] / 1e6:.2f} M"]
        row += [
            pooled("alpha", kind, domains, at, *alpha)
            for at in (0.0, 1.0)
            for domains in ([own], others)
        ]
        row += [pooled("decoding", kind, [own], at, *tau, chain, rule) for at in (0.0, 1.0)]
        row += [pooled("decoding", kind, [own], at, *tau, tree, tree_rule) for at in (0.0, 1.0)]
        timed = f"{kind}-seconds" if f"{kind}-seconds" in results.drafts else f"{kind}-1"
        training: Any = results.document["models"][timed]["training"]
        rows.append(
            [*row, f"{with_interval(results.alpha(timed, own, 1.0))}, {training['steps']} steps"]
        )
        at_depth = (
            pooled(
                "decoding",
                kind,
                [own],
                1.0,
                _by_depth("accepted", d),
                _by_depth("reached", d),
                chain,
                rule,
            )
            for d in range(int(chain.partition(":")[2]))
        )
        depths.append([REAL[kind], *at_depth])
    heading = [
        "parameters",
        *(f"alpha {place}, T = {at}" for at in (0, 1) for place in (own, "elsewhere")),
    ]
    heading += [f"tau {shape}, T = {at}" for shape in ("chain", "tree") for at in (0, 1)]
    by_depth = table([f"{first}, token", *(str(d + 1) for d in range(len(depths[0]) - 1))], depths)
    return [table([first, *heading, f"equal seconds: alpha {own}, T = 1"], rows), by_depth]


def _by_depth(what: str, depth: int) -> Sums:
    return lambda part: [row[depth] if depth < len(row) else 0 for row in part[f"{what}_by_depth"]]


def weightless(found: Sequence[tuple[str, str, float, float | None]]) -> str:
    """Decoded tau by method, set and temperature, of rows (method, set, temperature, tau); no
    intervals.
    """
    places = list(dict.fromkeys((domain, temperature) for _, domain, temperature, _ in found))
    taus = {(name, domain, temperature): tau for name, domain, temperature, tau in found}
    rows = (
        [name, *(number(taus.get((name, *at)), 2) for at in places)]
        for name in dict.fromkeys(n for n, *_ in found)
    )
    return table(["method, decoded", *(f"{domain}, T = {at:g}" for domain, at in places)], rows)


def by_depth(results: Results, first: str, temperature: float) -> str:
    """The chance that each of four drafted tokens of a chain is accepted, given those before it, in
    distribution.
    """
    rows = []
    for draft in results.drafts:
        accepted = results.series("accept_predicted", draft, "id", temperature, *real_figures.CHAIN)
        cells = [with_interval(row) for row in accepted]
        cells += [
            with_interval(predicted_tau(results, draft, kind, temperature), 2)
            for kind in ("id", "ood")
        ]
        rows.append([REAL.get(draft, draft), *cells])
    return table([first, *map(str, range(1, 5)), "tau chat", "tau elsewhere"], rows)


def by_header(*tables: str) -> dict[str, list[str]]:
    """The lines of tables by their first cell."""
    return {
        lines[0].split("|")[1].strip(): lines for lines in (text.split("\n") for text in tables)
    }


def put(page: Path, tables: dict[str, list[str]]) -> None:
    """Replace the tables of a page whose header begins with the same cell."""
    lines = page.read_text(encoding="utf-8").split("\n")
    for first, rows in tables.items():
        start = next(index for index, line in enumerate(lines) if line.startswith(f"| {first} |"))
        end = next(index for index in range(start, len(lines)) if not lines[index].startswith("|"))
        lines[start:end] = rows
    page.write_text("\n".join(lines), encoding="utf-8")


def demo(root: Path) -> None:
    """The tables of the README, and the first page of the demo's report, light and dark (by
    Chromium).
    """
    small, large = (kept(root, name) for name in ("demo", "demo-large"))
    put(root / "README.md", demo_tables(Results(small, Path())))
    if (chromium := shutil.which("chromium") or shutil.which("google-chrome")) is None:
        sys.stderr.write("docs/figures/demo-report*.png: not made again, needs chromium\n")
        return
    with tempfile.TemporaryDirectory() as scratch:
        write_page(
            Results(small, Path(scratch) / "eval"), Results(large, Path(scratch) / "eval-large")
        )
        for suffix, words in (("", []), ("-dark", ["--blink-settings=preferredColorScheme=0"])):
            picture = root / "docs" / "figures" / f"demo-report{suffix}.png"
            words = [
                *words,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                "--window-size=1000,1500",
            ]
            words += [
                f"--user-data-dir={scratch}/profile",
                f"--screenshot={picture}",
                f"file://{scratch}/report.html",
            ]
            subprocess.run([chromium, *words], check=True, capture_output=True)


def real_alignments(root: Path) -> dict[str, Results]:
    """The drafts of chat that were aligned to maths, by base."""
    documents = {base: kept(root, f"real-align-{base}") for base in REAL}
    return {base: Results(document, Path()) for base, document in documents.items() if document}


def changes_over_seeds(results: Results, first: str) -> str:
    """Change of alpha of every way to align to maths, over the draft of chat; the share of the
    plain gain; the bar of docs/robust.md. Intervals are over seeds and prompts.
    """
    rows = []
    domains = [*results.domains(), "ood"]
    for temperature in sorted(results.temperatures, reverse=True):
        for way, row in reversed(real_figures.over_seeds(results, temperature)["rows"].items()):
            cells = [
                with_interval(real_figures.change_on(row, domain), sign=True) for domain in domains
            ]
            share = (
                f"{with_interval(row['share'], 0, scale=100)} %, "
                f"{'met' if row['met'] else 'not met'}"
            )
            rows.append([f"{REAL[way]}, T = {temperature:g}", str(row["seeds"]), *cells, share])
    return table(
        [first, "seeds", *results.domains(), "all but maths", "of the plain gain, bar"], rows
    )


def amounts(results: Results, first: str, temperature: float) -> str:
    """alpha and the predicted tau of chains of 4, by the tokens and the steps that a head was
    trained with.
    """
    rows = []
    for draft in sorted(results.drafts):
        trained: Any = results.document["models"][draft]["training"]
        kind, _, share = draft.partition("-")
        what = f"1/{1 / float(share):g} of the {kind}" if share else "all"
        cells = [f"{trained['response_tokens']:,}", str(trained["steps"])]
        for place in ("id", "ood"):
            cells.append(with_interval(results.figure("alpha", draft, place, temperature)))
            cells.append(with_interval(predicted_tau(results, draft, place, temperature), 2))
        rows.append([what, *cells])
    return table(
        [first, "tokens", "steps", "alpha chat", "tau chat", "alpha maths", "tau maths"], rows
    )


def real(root: Path) -> None:
    """The tables of docs/real.md, and of the real pair in the README."""
    which, aligned = Results(kept(root, "real-which"), Path()), real_alignments(root)
    made = [acceptance(which, f"draft, T = {t:g}", t) for t in (0.0, 1.0)]
    made += [
        changes_over_seeds(results, f"{REAL[base]}, aligned to maths")
        for base, results in aligned.items()
    ]
    if document := kept(root, "real-amount"):
        made += [amounts(Results(document, Path()), f"share, T = {t:g}", t) for t in (0.0, 1.0)]
    if document := kept(root, "real-weightless"):
        made.append(weightless(document))
    tables = by_header(*made) | by_header(real_speed.speeds_table(kept(root, "real-speed")))
    put(root / "docs" / "real.md", tables)
    by_seed = [
        which,
        *(Results(document, Path()) for document in [kept(root, "real-which-2")] if document),
    ]
    blocks = [by_depth(which, f"token, T = {t:g}", t) for t in (0.0, 1.0)]
    blocks.append(over_seeds(by_seed, "draft, two seeds"))
    if rows := kept(root, "real-drafts-speed"):
        blocks.append(draft_speeds(rows))
    for pair in ("nano", "stories"):
        if document := kept(root, f"heads-{pair}"):
            blocks += heads(Results(document, Path()), f"head, {pair} pair")
    put(root / "docs" / "blocks.md", by_header(*blocks))
    put(
        root / "README.md",
        by_header(changes_over_seeds(aligned["eagle"], "change of alpha, SmolLM2-135M-Instruct")),
    )


def real_pictures(root: Path) -> None:
    """The pictures of docs/real.md and docs/blocks.md."""
    which, out = Results(kept(root, "real-which"), Path()), root / "docs" / "figures"
    real_figures.which(which, REAL, out)
    real_figures.align(real_alignments(root), REAL, out)
    real_figures.depths(which, REAL, out)
    real_figures.speed(real_speed.relative(kept(root, "real-speed")), out)


# Runs of docs/objectives.md that were longer, as its tables name them.
LONGER = ("nano, 320 steps", "stories, 480 steps")


def objectives(root: Path) -> None:
    """The pictures of docs/objectives.md, and the tables of its two pairs: each pair's section."""
    page = root / "docs" / "objectives.md"
    for pair in ("nano", "stories"):
        if document := kept(root, f"objectives-{pair}"):
            objectives_figure.write_pictures(
                document, root / "docs" / "figures", f"objectives-{pair}"
            )
            before, heading, rest = page.read_text(encoding="utf-8").partition(
                f"\n## {pair.capitalize()} pair\n"
            )
            after = rest[rest.index("\n## ") :]
            page.write_text(
                f"{before}{heading}\n{objectives_tables.tables(document)}{after}", encoding="utf-8"
            )
    longer = {
        name: kept(root, f"objectives-{name.replace(', ', '-').removesuffix(' steps')}")
        for name in LONGER
    }
    put(
        page,
        by_header(
            *(
                objectives_tables.in_short(document, name)
                for name, document in longer.items()
                if document
            )
        ),
    )


# Domains in distribution of docs/robust.md; nothing was chosen on the last two.
ALIGNED_TO = {
    "prose": "prose",
    "code": "code",
    "gsm8k": "gsm8k, held back",
    "unicode": "unicode, held back",
}


def frontier(root: Path) -> None:
    """The tables and the picture of docs/robust.md."""
    page, made = root / "docs" / "robust.md", []
    for pair in ("nano", "stories", "pruned"):
        if document := kept(root, f"frontier-{pair}"):
            made.append(frontier_tables.by_method(document, f"method, {pair}"))
    if document := kept(root, "frontier-nano"):
        frontier_tables.write_pictures(document, root / "docs" / "figures", "frontier-nano")
    documents = {name: kept(root, f"frontier-{domain}") for domain, name in ALIGNED_TO.items()}
    if document := kept(root, "domains"):
        made.append(domains.gains(document).rstrip())
    put(page, by_header(*made, frontier_tables.balanced(documents, "aligned to")))


def main() -> None:
    """Take new results, if any are given, and make everything again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", nargs="*", default=[], metavar="NAME=FILE")
    for name, _, file in (word.partition("=") for word in parser.parse_args().keep):
        keep(ROOT, name, Path(file), rows=("alpha",) if name.startswith("heads-") else ())
    for make in (demo, real, real_pictures, objectives, frontier):
        make(ROOT)


if __name__ == "__main__":
    main()
