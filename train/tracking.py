"""The trackers of a training run, which accelerate opens: curves in W&B or tensorboard, and in W&B
the checkpoint as an artifact.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from draftsmith.core import wandb_runs
from draftsmith.core.errors import InputError
from draftsmith.core.io import JsonObject
from draftsmith.core.ranks import on_main

if TYPE_CHECKING:
    import wandb
    from accelerate import Accelerator

log = logging.getLogger(__name__)


def start(
    accelerator: "Accelerator", out: Path, identity: JsonObject, beside: JsonObject, *, tracker: str
) -> None:
    """Open the tracker of a training run, if there is one; a resumed run continues the same W&B
    run. beside: every option, and how the run is divided, which do not decide what it makes.
    """

    def start_wandb() -> None:
        inputs = {name: value for name, value in identity.items() if name != "config"}
        config = {**identity["config"], "inputs": inputs}
        with wandb_runs.without_prompts():
            options = wandb_runs.run_options(
                out / "run", out=out, identity=config, beside=beside, job_type="train"
            )
            accelerator.init_trackers(wandb_runs.project(), init_kwargs={"wandb": options})
        run = accelerator.get_tracker("wandb", unwrap=True)
        run.define_metric("heldout/*", summary="min,max")
        wandb_runs.announce(run)

    if tracker == "tensorboard":
        # Its table of settings takes plain values only. A kill loses what is not flushed.
        accelerator.init_trackers(
            "tensorboard",
            config={"identity": json.dumps(identity)},
            init_kwargs={"tensorboard": {"flush_secs": 10}},
        )
    elif tracker == "wandb":
        on_main(start_wandb)


def curve_names(figures: Mapping[str, float]) -> dict[str, float]:
    """Return the figures of a step as `train/NAME` and `heldout/NAME`."""
    named = {}
    for name, value in figures.items():
        heldout = name.removeprefix("heldout_")
        named[f"train/{name}" if heldout == name else f"heldout/{heldout}"] = value
    return named


def log_again(accelerator: "Accelerator", lines: Iterable[str]) -> None:
    """Log the lines of metrics.jsonl whose steps the W&B run lacks: those not sent before a kill,
    and all when offline.
    """
    for tracker in accelerator.trackers:
        for line in lines if tracker.name == "wandb" else ():
            figures = json.loads(line)
            step = figures.pop("step")
            if tracker.tracker.step <= step:
                tracker.log(curve_names(figures), step=step)


def finish(accelerator: "Accelerator", record: JsonObject, out: Path) -> None:
    """Log the checkpoint of a training run (W&B only, in the main process), and close the
    tracker.
    """
    # `end_training` would also leave the process group, which the next stage of `align` needs.
    for tracker in accelerator.trackers:
        if tracker.name == "wandb":
            try:
                with wandb_runs.without_prompts():
                    _log_checkpoint(tracker.tracker, record, out)
            except InputError as error:
                # The draft is written; a tracker that fails now must not fail the run.
                log.warning("%s", error)
        tracker.finish()


def _log_checkpoint(run: "wandb.Run", record: JsonObject, out: Path) -> None:
    """Log the files by checksum; no weights are uploaded."""
    import wandb

    run.summary.update({key: record[key] for key in ("best_step", "fingerprint")})
    artifact = wandb.Artifact(f"draft-{record['fingerprint']}", type="model", metadata=record)
    for path in out.resolve().glob("[!.]*.*"):
        artifact.add_reference(path.as_uri(), name=path.name)
    run.log_artifact(artifact, aliases=["best"])
