"""Log an evaluation to Weights & Biases."""

from draftsmith_core import wandb_runs
from draftsmith_core.io import hash_json
from eval.config import EvalConfig
from eval.results import Results

# Figures that are logged as tables.
TABLES = ("alpha", "gain", "transfer", "tau", "accept", "tau_predicted", "speedup")
# Facts of a model that are logged as settings.
FACTS = ("name", "kind", "fingerprint", "parameters", "dtype", "quantize")


def track(config: EvalConfig, results: Results) -> None:
    """Log the results to the tracker, if there is one; the same evaluation again is the same W&B
    run.
    """
    if config.tracker == "none":
        return
    import wandb

    out = results.directory
    models = {}
    for name, row in results.document["models"].items():
        models[name] = {key: value for key, value in row.items() if key in FACTS}
    settings = {**results.document["config"], "models": models}
    run_id = hash_json([str(out.resolve()), settings])[:16]
    with wandb_runs.without_prompts():
        options = wandb_runs.run_options(out, out.resolve().name, run_id, "eval")
        with wandb.init(project=config.project, config=settings, **options) as run:
            run.summary.update(figures(results))
            measured = [name for name in TABLES if any(results.rows(name))]
            frames = {f"tables/{name}": results.to_frame(name) for name in measured}
            run.log({name: wandb.Table(dataframe=frame) for name, frame in frames.items()})
            plots = sorted((out / "plots").glob("*.png"))
            run.log({f"figures/{png.stem}": wandb.Image(str(png)) for png in plots})


def figures(results: Results) -> dict[str, float]:
    """Every figure under one flat name, such as `alpha/mine/prose/T1` or
    `tau/mine/ood/T0/chain:4/speculative`.

    Figures that are not defined are left out.
    """
    named: dict[str, float] = {}
    for row in results.rows("alpha", "gain", "tau", "speedup", "transfer"):
        if row["value"] is not None:
            words = [row["figure"], row["draft"], row["domain"], f"T{row['temperature']:g}"]
            words += filter(None, (row["tree"], row["verifier"]))
            named["/".join(words)] = row["value"]
    return named
