"""Tables of the study of objectives on small pairs."""

from collections.abc import Iterable, Sequence
from itertools import product

from benchmarks.lib.pages import gap, table
from draftsmith.core.io import JsonObject
from draftsmith.eval.formats import number, with_interval

# What differences are taken from, and what every data mode is trained with.
ALIKE = "fkl"
OVER = f"over {ALIKE}"


def tables(results: JsonObject) -> str:
    """All tables of a pair, in Markdown."""
    objectives = list(results["by_rate"])
    kinds = {"objectives": ["base", *objectives]}
    if modes := [name for name in results["cells"] if name not in objectives]:
        kinds["data modes"] = [ALIKE, *modes]
    parts = {}
    for temperature in results["figures"]:
        for kind, names in kinds.items():
            parts[f"T = {temperature}: {kind}"] = _by_set(results, temperature, names)
    parts["T = 1: by learning rate, one seed"] = _by_rate(results)
    parts["T = 1: seeds"] = _by_seed(results)
    texts = [f"**{title}**\n\n{text}" for title, text in parts.items()]
    return "\n\n".join(texts) + "\n"


def _by_set(results: JsonObject, temperature: str, names: Sequence[str]) -> str:
    """alpha of every draft by set, with its changes."""
    own, *others = results["domains"]
    rows = []
    for name in names:
        at = results["figures"][temperature][name]
        cells = []
        for place in (own, "ood"):
            alpha, change = _with_change(at[place])
            cells += [alpha, "" if name == "base" else change]
        cells.append(_above(at["ood"].get("above_base")))
        alphas = [at[place]["alpha"] for place in others]
        cells += [number(alpha["value"]) for alpha in alphas]
        rows.append([name, *cells])
    heading = ["draft", f"{own} (ID)", OVER, "OOD", OVER, "over base", *others]
    return table(heading, rows)


def _by_rate(results: JsonObject) -> str:
    """alpha of one seed by learning rate."""
    own = results["domains"][0]
    rates = [f"{rate:g}" for rate in results["options"]["rates"]]
    rows = []
    for name, tried in results["by_rate"].items():
        values = [number(tried[rate][place]) for place, rate in product((own, "ood"), rates)]
        chosen = results["cells"][name]["rate"]
        rows.append([name, *values, f"{chosen:g}"])
    heading = [f"{rate}: {place}" for place, rate in product((own, "OOD"), rates)]
    return table(["objective", *heading, "chosen"], rows)


def _by_seed(results: JsonObject) -> str:
    """alpha of every seed, and what training it took."""
    own = results["domains"][0]
    rows = []
    for name, variant in results["cells"].items():
        at = results["figures"]["1"][name]
        runs = variant["runs"]
        steps = " ".join(str(run["best_step"]) for run in runs)
        seconds = min(run["processor_seconds"] for run in runs) / results["options"]["steps"]
        each = [_in_a_row(at[place]["seeds"]) for place in (own, "ood")]
        rows.append([name, *each, steps, f"{seconds:.2f}"])
    heading = [f"{own}, seed by seed", "OOD, seed by seed", "step of the kept weights"]
    return table(["draft", *heading, "processor s a step"], rows)


def _in_a_row(values: Iterable[float]) -> str:
    return " ".join(map(number, values))


def in_short(results: JsonObject, first: str) -> str:
    """alpha ID and OOD at T = 1, and ID at T = 0, by objective, each over fkl."""
    own = results["domains"][0]
    rows = []
    for name in results["by_rate"]:
        row = [name]
        for at, place in (("1", own), ("1", "ood"), ("0", own)):
            row += _with_change(results["figures"][at][name][place])
        rows.append(row)
    return table([first, "ID", OVER, "OOD", OVER, "ID, T = 0", OVER], rows)


def _with_change(cell: JsonObject) -> tuple[str, str]:
    return with_interval(cell["alpha"]), over_fkl(cell)


def over_fkl(cell: JsonObject) -> str:
    """A figure over that of fkl; empty if there is none."""
    return _above(cell.get(f"above_{ALIKE}"))


def _above(change: JsonObject | None) -> str:
    return gap(change, clear=change is not None and change["told_apart"])
