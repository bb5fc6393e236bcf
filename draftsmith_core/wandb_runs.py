"""Weights & Biases for training and evaluation: a run without prompts, and the draft checkpoint as an artifact.

Keys and tokens stay in the environment, where wandb reads them; nothing here passes or prints them.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftsmith_core.errors import InputError, one_line
from draftsmith_core.packages import require_package
from draftsmith_core.processes import launched

_OFFLINE = "set WANDB_MODE=offline, which needs neither account nor network"


def check_tracker(tracker: str) -> None:
    """Raise InputError if the tracker is not installed, or if wandb has neither an account nor offline mode."""
    if tracker == "none":
        return
    require_package(tracker, "tracker")
    # Before several processes are connected they cannot share an error; opening the run finds a missing key then.
    if tracker == "wandb" and launched() == 1:
        import wandb

        with without_prompts():
            if wandb.setup().settings.mode in ("online", "run", "shared"):
                wandb.login()


@contextmanager
def without_prompts() -> Iterator[None]:
    """Run wandb without standard input, so that it cannot wait for an answer; raise its errors as InputError."""
    import wandb

    stdin = sys.stdin
    try:
        with open(os.devnull) as empty:
            sys.stdin = empty
            yield
    except (wandb.errors.Error, ValueError) as error:
        if isinstance(error, InputError):
            raise
        # The full text of a validation error contains the value, which may be the key.
        reasons = [reason["msg"] for reason in error.errors()] if hasattr(error, "errors") else [one_line(error)]
        raise InputError(f"tracker: wandb: {', '.join(reasons).rstrip('.')}; or {_OFFLINE}") from None
    finally:
        sys.stdin = stdin


def run_options(directory: Path, name: str, run_id: str, job_type: str) -> dict[str, Any]:
    """Return the arguments of `wandb.init` beside the project; a `run_id` that was used before continues that run."""
    import wandb

    directory.mkdir(parents=True, exist_ok=True)
    # disable_git: wandb would upload uncommitted changes and the remote's address of the checkout it is started in.
    settings = wandb.Settings(disable_git=True)
    options = {"dir": str(directory), "name": name, "id": run_id, "resume": "allow", "job_type": job_type}
    return options | {"settings": settings}


def log_checkpoint(run: Any, directory: Path, record: dict[str, Any]) -> None:
    """Log a draft checkpoint as an artifact that refers to its files by checksum; no weights are uploaded."""
    import wandb

    artifact = wandb.Artifact(f"draft-{record['fingerprint']}", type="model", metadata=record)
    for path in sorted(path for path in directory.iterdir() if path.is_file() and not path.name.startswith(".")):
        artifact.add_reference(path.resolve().as_uri(), name=path.name)
    run.log_artifact(artifact, aliases=["best"])
