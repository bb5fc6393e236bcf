"""An evaluation in Weights & Biases: its figures, its files, and which drafts they are about."""

from typing import Any

from draftsmith_core import wandb_runs
from draftsmith_core.io import hash_json
from eval.config import EvalConfig
from eval.results import Results
from eval.schema import ResultsDocument

# Tables of `Results.to_frame` that are logged.
TABLES = ("alpha", "decoding", "predictions", "speed", "costs", "transfer", "why", "lost")


def check_tracker(config: EvalConfig) -> None:
    """InputError when the tracker that is asked for is not installed or has no account."""
    wandb_runs.require_tracker(config.tracker)
    if config.tracker == "wandb":
        wandb_runs.require_account()


def track(config: EvalConfig, results: Results) -> None:
    """Tell the tracker, if one is asked for, what results.json says; the same evaluation again is the same run."""
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
        with (
            wandb.init(project=config.project, config=settings, **options) as run,
            wandb_runs.staging_artifacts_in(out / "wandb"),
        ):
            for name in document["drafts"]:
                row = document["models"][name]
                wandb_runs.log_input(run, wandb_runs.draft_artifact(row["name"], row["fingerprint"]))
            run.summary.update(figures(document))
            # Tables that can be filtered there, and the figures of the report.
            frames = {f"tables/{name}": results.to_frame(name) for name in TABLES}
            run.log({name: wandb.Table(dataframe=frame) for name, frame in frames.items() if len(frame)})
            run.log({f"figures/{png.stem}": wandb.Image(str(png)) for png in sorted((out / "plots").glob("*.png"))})
            artifact = wandb.Artifact(f"eval-{run_id}", type="eval", metadata={"drafts": models})
            for file in ("results.json", "report.html"):
                artifact.add_file(str(out / file), file)
            wandb_runs.log_output(run, artifact)


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
