"""Weights & Biases (and tensorboard, for training): runs without prompts, curves, the checkpoint as
an artifact.

Keys and tokens stay in the environment, where wandb reads them; nothing here passes or prints them.
"""

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith_core.errors import InputError, one_line, require_package
from draftsmith_core.io import hash_json
from draftsmith_core.ranks import launched, on_main

if TYPE_CHECKING:
    import wandb
    from accelerate import Accelerator

log = logging.getLogger(__name__)

_OFFLINE = "set WANDB_MODE=offline, which needs neither account nor network"


def check_tracker(tracker: str) -> None:
    """Raise InputError if the tracker is not installed, or if wandb has neither an account nor
    offline mode.
    """
    if tracker == "none":
        return
    require_package(tracker, "tracker")
    # Before several processes are connected they cannot share an error; opening the run finds a
    # missing key then.
    if tracker == "wandb" and launched() == 1:
        import wandb

        with without_prompts():
            if wandb.setup().settings.mode in ("online", "run", "shared"):
                wandb.login()


@contextmanager
def without_prompts() -> Iterator[None]:
    """Run wandb without standard input, so that it cannot wait for an answer; raise its errors as
    InputError.
    """
    import wandb

    stdin = sys.stdin
    try:
        with open(os.devnull) as sys.stdin:
            yield
    except InputError:
        raise
    except (wandb.errors.Error, ValueError) as error:
        reason = one_line(error)
        if hasattr(error, "errors"):
            # The full text of a validation error contains the value, which may be the key.
            reason = ", ".join(part["msg"] for part in error.errors())
        raise InputError(f"tracker: wandb: {reason.rstrip('.')}; or {_OFFLINE}") from None
    finally:
        sys.stdin = stdin


def run_options(directory: Path, name: str, run_id: str, job_type: str) -> dict[str, Any]:
    """Return the arguments of `wandb.init` beside the project; a `run_id` that was used before
    continues that run.
    """
    import wandb

    directory.mkdir(parents=True, exist_ok=True)
    return {
        "dir": str(directory),
        "name": name,
        "id": run_id,
        "resume": "allow",
        "job_type": job_type,
        # Else wandb uploads uncommitted changes of the directory it is started in, and its remote.
        "settings": wandb.Settings(disable_git=True),
    }


def start(
    accelerator: "Accelerator",
    run_dir: Path,
    identity: dict[str, Any],
    *,
    tracker: str,
    project: str,
) -> None:
    """Open the tracker of a training run, if there is one; a resumed run continues the same W&B
    run.
    """
    if tracker == "wandb":
        on_main(lambda: _start_wandb(accelerator, run_dir, identity, project))
    elif tracker == "tensorboard":
        # Its table of settings takes plain values only. A kill loses what is not flushed.
        accelerator.init_trackers(
            "tensorboard",
            config={"identity": json.dumps(identity)},
            init_kwargs={"tensorboard": {"flush_secs": 10}},
        )


def _start_wandb(
    accelerator: "Accelerator", run_dir: Path, identity: dict[str, Any], project: str
) -> None:
    # Another directory is another run.
    run_id = hash_json([str(run_dir.resolve()), identity])[:16]
    with without_prompts():
        options = run_options(run_dir, run_dir.resolve().parent.name, run_id, "train")
        accelerator.init_trackers(project, config=identity, init_kwargs={"wandb": options})
        run = accelerator.get_tracker("wandb", unwrap=True)
        run.define_metric("heldout_loss", summary="min")
        run.define_metric("heldout_alpha", summary="max")
        run.define_metric("heldout_tau", summary="max")
        _catch_up(run, run_dir)


def _catch_up(run: "wandb.Run", run_dir: Path) -> None:
    """Log the steps up to the newest checkpoint that the W&B run lacks: those not sent before a
    kill, and all of them when offline.
    """
    checkpoints = run_dir.glob("checkpoints/step_*")
    last = max((int(path.name.removeprefix("step_")) for path in checkpoints), default=-1)
    metrics = run_dir / "metrics.jsonl"
    for text in metrics.read_text().splitlines() if metrics.exists() else []:
        # A kill may have cut the last line short; that step is repeated.
        if text.endswith("}"):
            line = json.loads(text)
            step = line.pop("step")
            if run.step <= step <= last:
                run.log(line, step=step)


def finish(accelerator: "Accelerator", tracker: str, record: dict[str, Any], out: Path) -> None:
    """Log the checkpoint of a training run (W&B only), and close the tracker."""
    if tracker == "wandb" and accelerator.is_main_process:
        try:
            with without_prompts():
                _log_checkpoint(accelerator.get_tracker("wandb", unwrap=True), record, out)
        except InputError as error:
            # The draft is written; a tracker that fails now must not fail the run.
            log.warning("%s", error)
    # `end_training` would also leave the process group, which the next stage of `align` needs.
    for opened in accelerator.trackers:
        opened.finish()


def _log_checkpoint(run: "wandb.Run", record: dict[str, Any], out: Path) -> None:
    """Log the files by checksum; no weights are uploaded."""
    import wandb

    run.summary.update({key: record[key] for key in ("best_step", "fingerprint")})
    artifact = wandb.Artifact(f"draft-{record['fingerprint']}", type="model", metadata=record)
    for path in sorted(out.glob("[!.]*")):
        if path.is_file():
            artifact.add_reference(path.resolve().as_uri(), name=path.name)
    run.log_artifact(artifact, aliases=["best"])
