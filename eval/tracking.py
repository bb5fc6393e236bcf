"""Log an evaluation to Weights & Biases."""

import shutil

from draftsmith.core import wandb_runs
from draftsmith.core.ranks import launched
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.results import Results
from draftsmith.eval.summary import lead

# Figures that are logged as tables.
TABLES = ("alpha", "gain", "transfer", "tau", "accept", "tau_predicted", "speedup")


def track(config: EvalConfig, results: Results) -> None:
    """Log the results to the tracker, if there is one; the same evaluation again is the same W&B
    run.
    """
    if config.tracker == "none":
        return
    import wandb

    out = results.directory
    settings = {**results.document["config"], "models": results.models}
    options = wandb_runs.run_options(
        out, out=out, identity=settings, beside={"processes": launched()}, job_type="eval"
    )
    measured = [name for name in TABLES if results.select(name)]
    with wandb_runs.without_prompts(), wandb.init(project=wandb_runs.project(), **options) as run:
        wandb_runs.announce(run)
        head = lead(results)
        verdict = {"decision": head.headline, "verdict": head.decision.verdict}
        run.summary.update(verdict | figures(results))
        frames = {f"tables/{name}": results.to_frame(name) for name in measured}
        run.log({name: wandb.Table(dataframe=frame) for name, frame in frames.items()})
        plots = (out / "plots").glob("*.png")
        run.log({f"figures/{png.stem}": wandb.Image(str(png)) for png in plots})
        for name in ("results.json", "report.html"):
            # `save` warns of every file outside the run's directory.
            run.save(shutil.copy(out / name, run.dir), base_path=run.dir, policy="now")


def figures(results: Results) -> dict[str, float]:
    """Every figure under one flat name, such as `alpha/mine/prose/T1` or
    `tau/mine/ood/T0/chain:4/speculative`.

    Speeds that were timed on a busy machine are named `speedup_busy`. Figures that are not defined
    are left out.
    """
    named: dict[str, float] = {}
    for row in results.select("alpha", "gain", "tau", "speedup", "transfer"):
        name = row["figure"]
        domain = row["set"] or row["kind"]
        if name == "speedup" and results.busy(domain, row["temperature"]):
            name = "speedup_busy"
        words = [name, row["draft"], domain, f"T{row['temperature']:g}"]
        words += filter(None, (row["tree"], row["rule"]))
        if row["value"] is not None:
            named["/".join(words)] = row["value"]
    return named
