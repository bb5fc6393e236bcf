"""Tables of the study of heads on small pairs."""

import re
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from benchmarks.lib.pages import table
from benchmarks.lib.seeds import estimate_of_mean, pool_resamples, pool_sums
from benchmarks.studies.real_tables import NAMES
from draftsmith.core.sampling import row_seed
from draftsmith.eval.bootstrap import PromptSums, resamples
from draftsmith.eval.report.formats import number, with_interval
from draftsmith.eval.results import Results

# Takes the counts of one cell; gives a number per prompt.
Sums = Callable[[Mapping[str, Any]], Sequence[float]]


def heads(results: Results, first: str) -> list[str]:
    """Drafts called KIND-SEED and KIND-seconds: alpha and decoded tau, and
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
        counts = {tuple(cell): found for cell, found in results.counts(of).items()}
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
            resamples(range(size), 2000, row_seed(0, name) % 2**32)
            for size, name in zip(sizes, domains, strict=True)
        ]
        text = with_interval(
            estimate_of_mean(seeds, pool_resamples(picks)), 3 if of == "alpha" else 2
        )
        by_seed = ", ".join(number(one.pooled, 3) for one in seeds)
        return f"{text} ({by_seed})" if of == "alpha" and domains == [own] else text

    alpha: Any = (itemgetter("sum"), itemgetter("count"))
    tau: Any = (itemgetter("emitted"), itemgetter("target_calls"))
    rows = []
    depths = []
    for kind in kinds:
        model: Any = results.document["models"][f"{kind}-1"]
        row = [NAMES[kind], f"{model['parameters'] / 1e6:.2f} M"]
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
        depths.append([NAMES[kind], *at_depth])
    heading = [
        "parameters",
        *(f"alpha {place}, T = {at}" for at in (0, 1) for place in (own, "elsewhere")),
    ]
    heading += [f"tau {shape}, T = {at}" for shape in ("chain", "tree") for at in (0, 1)]
    by_depth = table([f"{first}, token", *(str(d + 1) for d in range(len(depths[0]) - 1))], depths)
    return [table([first, *heading, f"equal seconds: alpha {own}, T = 1"], rows), by_depth]


def _by_depth(what: str, depth: int) -> Sums:
    return lambda part: [row[depth] if depth < len(row) else 0 for row in part[f"{what}_by_depth"]]
