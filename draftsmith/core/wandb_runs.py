"""Weights & Biases (and tensorboard, for training): runs without prompts, curves, the checkpoint as
an artifact.

Keys and tokens stay in the environment, where wandb reads them; nothing here passes or prints them.
"""

import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.core.errors import InputError, one_line, require_package
from draftsmith.core.io import hash_json
from draftsmith.core.ranks import launched, on_main, say

if TYPE_CHECKING:
    import wandb
    from accelerate import Accelerator

log = logging.getLogger(__name__)


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
            # Without the line that says who is logged in.
            setup = wandb.setup(wandb.Settings(show_info=False))
            if setup.settings.mode in ("online", "run", "shared"):
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
        raise InputError(
            f"tracker: wandb: {reason.rstrip('.')}; or set WANDB_MODE=offline, which needs neither "
            "account nor network"
        ) from None
    finally:
        sys.stdin = stdin


def run_options(
    directory: Path, *, out: Path, config: dict[str, Any], job_type: str
) -> dict[str, Any]:
    """Return the arguments of `wandb.init` beside the project. The same directory and config
    continue their run.
    """
    import wandb

    directory.mkdir(parents=True, exist_ok=True)
    return {
        "dir": str(directory),
        "name": out.resolve().name,
        "id": hash_json([str(directory.resolve()), config])[:16],
        "resume": "allow",
        "job_type": job_type,
        "config": config,
        # Without `disable_git` wandb uploads uncommitted changes of the current directory, and its
        # remote. `announce` stands for its banners.
        "settings": wandb.Settings(disable_git=True, silent=True),
    }


def announce(run: "wandb.Run") -> None:
    """Print where the run is."""
    directory = os.path.relpath(run.settings.sync_dir)
    place = f"offline; upload with: wandb sync {directory}" if run.offline else run.url
    say(f"W&B: {place}")


def start(accelerator: "Accelerator", out: Path, identity: dict[str, Any], *, tracker: str) -> None:
    """Open the tracker of a training run, if there is one; a resumed run continues the same W&B
    run.
    """
    if tracker == "tensorboard":
        # Its table of settings takes plain values only. A kill loses what is not flushed.
        accelerator.init_trackers(
            "tensorboard",
            config={"identity": json.dumps(identity)},
            init_kwargs={"tensorboard": {"flush_secs": 10}},
        )
    elif tracker == "wandb":
        inputs = {name: value for name, value in identity.items() if name != "config"}
        config = {**identity["config"], "inputs": inputs}
        on_main(lambda: _start_wandb(accelerator, out, config))


def project() -> str:
    """Return the W&B project of a run."""
    return os.environ.get("WANDB_PROJECT", "draftsmith")


def _start_wandb(accelerator: "Accelerator", out: Path, config: dict[str, Any]) -> None:
    with without_prompts():
        options = run_options(out / "run", out=out, config=config, job_type="train")
        accelerator.init_trackers(project(), init_kwargs={"wandb": options})
    run = accelerator.get_tracker("wandb", unwrap=True)
    run.define_metric("heldout/*", summary="min,max")
    announce(run)


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


def finish(accelerator: "Accelerator", record: dict[str, Any], out: Path) -> None:
    """Log the checkpoint of a training run (W&B only, in the main process), and close the
    tracker.
    """
    # `end_training` would also leave the process group, which the next stage of `align` needs.
    for tracker in accelerator.trackers:
        if tracker.name == "wandb":
            try:
                with without_prompts():
                    _log_checkpoint(tracker.tracker, record, out)
            except InputError as error:
                # The draft is written; a tracker that fails now must not fail the run.
                log.warning("%s", error)
        tracker.finish()


def _log_checkpoint(run: "wandb.Run", record: dict[str, Any], out: Path) -> None:
    """Log the files by checksum; no weights are uploaded."""
    import wandb

    run.summary.update({key: record[key] for key in ("best_step", "fingerprint")})
    artifact = wandb.Artifact(f"draft-{record['fingerprint']}", type="model", metadata=record)
    for path in out.resolve().glob("[!.]*.*"):
        artifact.add_reference(path.as_uri(), name=path.name)
    run.log_artifact(artifact, aliases=["best"])
