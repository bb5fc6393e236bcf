"""An evaluation in Weights & Biases: its figures, tables and pictures."""

from typing import Any

from draftsmith_core import wandb_runs
from draftsmith_core.io import hash_json
from eval.config import EvalConfig
from eval.results import Results
from eval.schema import ResultsDocument

# Tables of `Results.to_frame` that are logged.
TABLES = ("alpha", "decoding", "predictions", "speed", "costs", "transfer", "why", "lost")


def track(config: EvalConfig, results: Results) -> None:
    """Log the results to the tracker, if there is one; the same evaluation again is the same W&B run."""
    if config.tracker == "none":
        return
    import wandb

    document, out = results.document, results.directory
    models = {
        name: {key: row[key] for key in ("name", "kind", "fingerprint", "parameters", "dtype", "quantize")}
        for name, row in document["models"].items()
    }
    settings = {**document["config"], "models": models}
    run_id = hash_json([str(out.resolve()), settings])[:16]
    with wandb_runs.without_prompts():
        options = wandb_runs.run_options(out, out.resolve().name, run_id, "eval")
        with wandb.init(project=config.project, config=settings, **options) as run:
            run.summary.update(figures(document))
            frames = {f"tables/{name}": results.to_frame(name) for name in TABLES}
            run.log({name: wandb.Table(dataframe=frame) for name, frame in frames.items() if len(frame)})
            run.log({f"figures/{png.stem}": wandb.Image(str(png)) for png in sorted((out / "plots").glob("*.png"))})


def figures(document: ResultsDocument) -> dict[str, float]:
    """Every figure under one flat name, such as `alpha/mine/prose/T1` or `tau/mine/all ood/T0/chain:4/speculative`.

    tau and speedup depend on the tree and the verifier, alpha and transfer do not. What is not defined is left out.
    """
    found: dict[str, float | None] = {}
    for row in (*document["alpha"], *document["overall_alpha"]):
        found[f"alpha/{_name(row)}"] = row["alpha"]["value"]
        if row["gain"] is not None:
            found[f"gain/{_name(row)}"] = row["gain"]["value"]
    for decoded in (*document["decoding"], *document["overall_decoding"]):
        found[f"tau/{_name(decoded)}/{decoded['tree']}/{decoded['verifier']}"] = decoded["tau"]["value"]
    for timed in (*document["speed"]["domains"], *document["speed"]["overall"]):
        if timed["speedup"] is not None:
            found[f"speedup/{_name(timed)}/{timed['tree']}/{timed['verifier']}"] = timed["speedup"]["value"]
    for share in document["transfer"]:
        found[f"transfer/{_name({**share, 'kind': 'ood'})}"] = share["value"]
    return {name: value for name, value in found.items() if value is not None}


def _name(row: Any) -> str:
    # Names of sets have no spaces, so no set is called `all id`.
    return f"{row['draft']}/{row['domain'] or 'all ' + row['kind']}/T{row['temperature']:g}"
