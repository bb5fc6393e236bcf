"""Trackers beside metrics.jsonl: Weights & Biases, which also records what was made from what, and tensorboard."""

import json
import logging
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from draftsmith_core import wandb_runs
from draftsmith_core.errors import InputError
from draftsmith_core.io import hash_json
from draftsmith_core.processes import launched, on_main
from train.config import TrainConfig

log = logging.getLogger(__name__)


def check_installed(config: TrainConfig) -> None:
    """InputError when the tracker is not installed, or wandb has no account and is not offline."""
    wandb_runs.require_tracker(config.tracker)
    # Before several processes are connected they cannot share an error; there `start` finds a missing key.
    if config.tracker == "wandb" and launched() == 1:
        wandb_runs.require_account()


def start(accelerator: Accelerator, config: TrainConfig, identity: dict[str, Any], run_dir: Path) -> None:
    """Open the tracker, if one is asked for; a resumed run continues the same W&B run."""
    if config.tracker == "wandb":
        on_main(lambda: _start_wandb(accelerator, config, identity, run_dir))
    elif config.tracker == "tensorboard":
        # Its table of settings takes plain values only. Flushed often, because a kill loses what is not.
        options = {"tensorboard": {"flush_secs": 10}}
        accelerator.init_trackers("tensorboard", config={"identity": json.dumps(identity)}, init_kwargs=options)


def _start_wandb(accelerator: Accelerator, config: TrainConfig, identity: dict[str, Any], run_dir: Path) -> None:
    # Another `out` is another run.
    run_id = hash_json([str(run_dir.resolve()), identity])[:16]
    with wandb_runs.without_prompts():
        options = wandb_runs.run_options(run_dir, Path(config.out).resolve().name, run_id, "train")
        accelerator.init_trackers(config.project, config=identity, init_kwargs={"wandb": options})
        run = accelerator.get_tracker("wandb", unwrap=True)
        for figure, best in (("loss", "min"), ("alpha", "max"), ("tau", "max")):
            run.define_metric(f"heldout_{figure}", summary=best)
        heldout = config.heldout or config.data
        with wandb_runs.staging_artifacts_in(run_dir / "wandb"):
            wandb_runs.log_input(
                run, wandb_runs.data_artifact("data", identity["data"], [*config.data, *config.replay])
            )
            wandb_runs.log_input(run, wandb_runs.data_artifact("heldout-data", identity["heldout_data"], list(heldout)))
        _catch_up(run, run_dir)


def _catch_up(run: Any, run_dir: Path) -> None:
    """Log the figures of finished steps that the W&B run lacks: those that wandb had not sent when it was killed, and
    all of them when it is offline, where every start makes a new run directory.
    """
    kept = max((int(path.name.removeprefix("step_")) for path in run_dir.glob("checkpoints/step_*")), default=-1)
    metrics = run_dir / "metrics.jsonl"
    for text in metrics.read_text().splitlines() if metrics.exists() else []:
        # A kill may have cut the last line short; it is then of a step that is done again.
        line = json.loads(text) if text.endswith("}") else {"step": kept + 1}
        step = line.pop("step")
        if run.step <= step <= kept:
            run.log(line, step=step)


def finish(accelerator: Accelerator, config: TrainConfig, record: dict[str, Any], out: Path) -> None:
    """Record the result of the run (W&B: the draft as an artifact, by reference), and close the tracker."""
    if config.tracker == "wandb" and accelerator.is_main_process:
        run = accelerator.get_tracker("wandb", unwrap=True)
        try:
            with wandb_runs.without_prompts(), wandb_runs.staging_artifacts_in(out / "run" / "wandb"):
                run.summary.update({key: record[key] for key in ("best_step", "fingerprint")})
                wandb_runs.log_output(run, wandb_runs.draft_artifact(str(out), record["fingerprint"]), ["best"])
        except InputError as error:
            # The draft is written; that W&B could not be told of it is no reason to fail.
            log.warning("%s", error)
    # Not `end_training`: that also leaves the process group, which the next stage of `align` needs.
    for tracker in accelerator.trackers:
        tracker.finish()
