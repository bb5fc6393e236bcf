"""Tables of the study of objectives on small pairs."""

from benchmarks.lib.pages import gap, table
from draftsmith.core.io import JsonObject
from draftsmith.eval.report.formats import with_interval

# What differences are taken from, and what every data mode is trained with.
ALIKE = "fkl"


def tables(results: JsonObject) -> str:
    """All tables of a pair, in Markdown."""
    own, *others = results["domains"]
    parts = []
    objectives = list(results["by_rate"])
    modes = [name for name in results["cells"] if name not in objectives]
    for temperature, at in results["figures"].items():
        kinds = {"objectives": ["base", *objectives]} | (
            {"data modes": [ALIKE, *modes]} if modes else {}
        )
        for title, names in kinds.items():
            heading = [
                "draft",
                f"{own} (ID)",
                f"over {ALIKE}",
                "OOD",
                f"over {ALIKE}",
                "over base",
                *others,
            ]
            rows = []
            for name in names:
                words = [name]
                for place in (own, "ood"):
                    apart = None if name == "base" else at[name][place].get(f"above_{ALIKE}")
                    words += [with_interval(at[name][place]["alpha"]), _above(apart)]
                words.append(_above(at[name]["ood"].get("above_base")))
                rows.append(
                    [*words, *(f"{at[name][place]['alpha']['value']:.3f}" for place in others)]
                )
            parts.append(f"**T = {temperature}: {title}**\n\n{table(heading, rows)}")
    rates = [f"{rate:g}" for rate in results["options"]["rates"]]
    heading = [
        "objective",
        *(f"{rate}: {own}" for rate in rates),
        *(f"{rate}: OOD" for rate in rates),
        "chosen",
    ]
    rows = []
    for name, tried in results["by_rate"].items():
        values = [f"{tried[rate][place]:.3f}" for place in (own, "ood") for rate in rates]
        rows.append([name, *values, f"{results['cells'][name]['rate']:g}"])
    parts.append(f"**T = 1: by learning rate, one seed**\n\n{table(heading, rows)}")
    heading = [
        "draft",
        f"{own}, seed by seed",
        "OOD, seed by seed",
        "step of the kept weights",
        "processor s a step",
    ]
    rows = []
    for name, variant in results["cells"].items():
        at = results["figures"]["1"][name]
        each = [" ".join(f"{value:.3f}" for value in at[place]["seeds"]) for place in (own, "ood")]
        steps = " ".join(str(run["best_step"]) for run in variant["runs"])
        seconds = (
            min(run["processor_seconds"] for run in variant["runs"]) / results["options"]["steps"]
        )
        rows.append([name, *each, steps, f"{seconds:.2f}"])
    return "\n\n".join([*parts, f"**T = 1: seeds**\n\n{table(heading, rows)}"]) + "\n"


def in_short(results: JsonObject, first: str) -> str:
    """alpha ID and OOD at T = 1, and ID at T = 0, by objective, each over fkl."""
    own = results["domains"][0]
    rows = []
    for name in results["by_rate"]:
        cells = [
            results["figures"][at][name][place]
            for at, place in (("1", own), ("1", "ood"), ("0", own))
        ]
        words = [
            (with_interval(cell["alpha"]), _above(cell.get(f"above_{ALIKE}"))) for cell in cells
        ]
        rows.append([name, *(word for pair in words for word in pair)])
    over = f"over {ALIKE}"
    return table([first, "ID", over, "OOD", over, "ID, T = 0", over], rows)


def over_fkl(cell: JsonObject) -> str:
    """A figure over that of fkl; empty if there is none."""
    return _above(cell.get(f"above_{ALIKE}"))


def _above(change: JsonObject | None) -> str:
    return gap(change, clear=change is not None and change["told_apart"])
