"""Trackers beside metrics.jsonl: Weights & Biases and tensorboard."""

import json
import logging
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from draftsmith_core import wandb_runs
from draftsmith_core.errors import InputError
from draftsmith_core.io import hash_json
from draftsmith_core.processes import on_main
from train.config import TrainConfig

log = logging.getLogger(__name__)


def start(accelerator: Accelerator, config: TrainConfig, identity: dict[str, Any], run_dir: Path) -> None:
    """Open the tracker, if there is one; a resumed run continues the same W&B run."""
    if config.tracker == "wandb":
        on_main(lambda: _start_wandb(accelerator, config, identity, run_dir))
    elif config.tracker == "tensorboard":
        # Its table of settings takes plain values only. Flush often, because a kill loses what is not flushed.
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
        _catch_up(run, run_dir)


def _catch_up(run: Any, run_dir: Path) -> None:
    """Log the finished steps that the W&B run lacks: those not sent before a kill, and all of them when offline."""
    last = max((int(path.name.removeprefix("step_")) for path in run_dir.glob("checkpoints/step_*")), default=-1)
    metrics = run_dir / "metrics.jsonl"
    for text in metrics.read_text().splitlines() if metrics.exists() else []:
        # A kill may have cut the last line short; that step is repeated.
        line = json.loads(text) if text.endswith("}") else {"step": last + 1}
        step = line.pop("step")
        if run.step <= step <= last:
            run.log(line, step=step)


def finish(accelerator: Accelerator, config: TrainConfig, record: dict[str, Any], out: Path) -> None:
    """Log the checkpoint (W&B only), and close the tracker."""
    if config.tracker == "wandb" and accelerator.is_main_process:
        run = accelerator.get_tracker("wandb", unwrap=True)
        try:
            with wandb_runs.without_prompts():
                run.summary.update({key: record[key] for key in ("best_step", "fingerprint")})
                wandb_runs.log_checkpoint(run, out, record)
        except InputError as error:
            # The draft is written; a tracker that fails now must not fail the run.
            log.warning("%s", error)
    # `end_training` would also leave the process group, which the next stage of `align` needs.
    for tracker in accelerator.trackers:
        tracker.finish()
