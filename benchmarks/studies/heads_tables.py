"""Tables of the study of heads on small pairs."""

import re

from benchmarks.lib.pages import by_temperature, table
from benchmarks.studies.frontier_tables import Alphas, over_seeds
from benchmarks.studies.real_figures import sums_of
from benchmarks.studies.real_tables import NAMES
from draftsmith.eval.formats import with_interval
from draftsmith.eval.results import Results


def heads(results: Results, first: str) -> list[str]:
    """Drafts called KIND-SEED and KIND-seconds: alpha and decoded tau, and
    acceptance by depth.

    Means over seeds; intervals are over prompts. alpha in distribution also by seed.
    """
    own, *others = results.domains()
    chain = results.methods[0]
    alphas = [sums_of(results, at) for at in (0.0, 1.0)]
    taus = []
    for way in results.methods:
        taus += [sums_of(results, at, ("emitted", "calls"), way) for at in (0.0, 1.0)]
    tokens = range(int(chain[0].partition(":")[2]))
    depth = ("accepted_here", "reached")
    accepted = [sums_of(results, 1.0, depth, chain, token + 1) for token in tokens]
    rows = []
    depths = []
    for kind in dict.fromkeys(draft.rpartition("-")[0] for draft in results.drafts):
        model = results.document["models"][f"{kind}-1"]
        row = [NAMES[kind], f"{model['parameters'] / 1e6:.2f} M"]
        for sums in alphas:
            mean, by_seed = over_seeds(_seeds_of(kind, sums), [own])
            elsewhere, _ = over_seeds(_seeds_of(kind, sums), others)
            row += [f"{mean} ({by_seed})", elsewhere]
        row += [over_seeds(_seeds_of(kind, sums), [own], 2)[0] for sums in taus]
        timed = f"{kind}-seconds" if f"{kind}-seconds" in results.drafts else f"{kind}-1"
        training = results.document["models"][timed]["training"]
        assert training is not None
        alpha = with_interval(results.alpha(timed, own, 1.0))
        rows.append([*row, f"{alpha}, {training['steps']} steps"])
        at_depth = [over_seeds(_seeds_of(kind, sums), [own], 2)[0] for sums in accepted]
        depths.append([NAMES[kind], *at_depth])
    heading = by_temperature([f"alpha {own}", "alpha elsewhere"], (0, 1))
    heading += by_temperature(["tau chain"], (0, 1)) + by_temperature(["tau tree"], (0, 1))
    last = f"equal seconds: alpha {own}, T = 1"
    figures = table([first, "parameters", *heading, last], rows)
    return [figures, table([f"{first}, token", *(str(token + 1) for token in tokens)], depths)]


def _seeds_of(kind: str, sums: dict[str, Alphas]) -> list[Alphas]:
    """Of the drafts of a kind, one for each training seed."""
    return [alphas for draft, alphas in sums.items() if re.fullmatch(rf"{kind}-\d+", draft)]
