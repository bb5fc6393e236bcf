"""Trackers beside metrics.jsonl: Weights & Biases with the lineage of what is made from what, and tensorboard.

Keys and tokens stay in the environment, where the trackers themselves look for them: no value of it is passed on.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from draftsmith.errors import InputError
from draftsmith.io import hash_json
from train.config import TrainConfig

_PACKAGES = {"wandb": "wandb", "tensorboard": "tensorboard"}


def check_installed(config: TrainConfig) -> None:
    """InputError when the tracker that is asked for is not there."""
    if config.tracker != "none" and importlib.util.find_spec(_PACKAGES[config.tracker]) is None:
        raise InputError(f"tracker: {config.tracker} is not installed; pip install 'draftsmith[{config.tracker}]'")


def start(accelerator: Accelerator, config: TrainConfig, identity: dict[str, Any], run_dir: Path) -> None:
    """Open the tracker, if one is asked for; a run that continues goes on in the same W&B run."""
    if config.tracker == "wandb":
        # Another `out` is another run.
        run_id = hash_json([str(run_dir.resolve()), identity])[:16]
        options = {"dir": str(run_dir), "name": Path(config.out).name, "id": run_id, "resume": "allow"}
        accelerator.init_trackers(config.project, config=identity, init_kwargs={"wandb": options})
        if accelerator.is_main_process:
            _use_data(accelerator, config, identity)
    elif config.tracker == "tensorboard":
        # Its table of settings takes plain values only.
        accelerator.init_trackers("tensorboard", config={"identity": json.dumps(identity)})


def _use_data(accelerator: Accelerator, config: TrainConfig, identity: dict[str, Any]) -> None:
    """The data sets as artifacts this run uses: their names and hashes, no rows."""
    import wandb

    run = accelerator.get_tracker("wandb", unwrap=True)
    for name, sources in (("data", config.data), ("heldout_data", config.heldout or config.data)):
        digest = identity[name]
        about = {"digest": digest, "sources": list(sources)}
        artifact = wandb.Artifact(f"{name.replace('_', '-')}-{digest[:16]}", type="dataset", metadata=about)
        with artifact.new_file("digest.json") as file:
            file.write(json.dumps(about))
        # Offline a run can make artifacts and not use them; synchronised later, both still hang on the same run.
        (run.log_artifact if run.offline else run.use_artifact)(artifact)


def finish(accelerator: Accelerator, config: TrainConfig, record: dict[str, Any], out: Path) -> None:
    """Tell the tracker what came of the run (W&B: the draft as an artifact, by reference), and close it."""
    if config.tracker == "wandb" and accelerator.is_main_process:
        import wandb

        run = accelerator.get_tracker("wandb", unwrap=True)
        keys = ("kind", "objective", "target", "target_fingerprint", "fingerprint", "steps", "best_step", "data")
        about = {key: record[key] for key in keys if key in record}
        artifact = wandb.Artifact(f"draft-{record['fingerprint']}", type="model", metadata=about)
        artifact.add_reference(out.resolve().as_uri(), name="checkpoint", checksum=False)
        with artifact.new_file("draftsmith.json") as file:
            file.write(json.dumps(record))
        run.log_artifact(artifact)
    accelerator.end_training()
