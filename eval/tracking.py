"""An evaluation in Weights & Biases: its figures, tables and pictures."""

from draftsmith_core import wandb_runs
from draftsmith_core.io import hash_json
from eval.config import EvalConfig
from eval.results import Results

# Figures of which a table is logged.
TABLES = ("alpha", "gain", "transfer", "tau", "accept", "tau_predicted", "speedup")


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
            run.summary.update(figures(results))
            known = {row["figure"] for row in document["rows"]}
            frames = {f"tables/{name}": results.to_frame(name) for name in TABLES if name in known}
            run.log({name: wandb.Table(dataframe=frame) for name, frame in frames.items()})
            run.log({f"figures/{png.stem}": wandb.Image(str(png)) for png in sorted((out / "plots").glob("*.png"))})


def figures(results: Results) -> dict[str, float]:
    """Every figure under one flat name, such as `alpha/mine/prose/T1` or `tau/mine/ood/T0/chain:4/speculative`.

    Figures that are not defined are left out.
    """
    named: dict[str, float] = {}
    for row in results.rows("alpha", "gain", "tau", "speedup", "transfer"):
        words = (row["figure"], row["draft"], row["domain"], f"T{row['temperature']:g}", row["tree"], row["verifier"])
        if row["value"] is not None:
            named["/".join(filter(None, words))] = row["value"]
    return named
