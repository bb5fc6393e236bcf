"""Weights & Biases: runs without prompts.

Keys and tokens stay in the environment, where wandb reads them; nothing here passes or prints them.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from draftsmith.core.errors import InputError, one_line, require_package
from draftsmith.core.io import JsonObject, hash_json
from draftsmith.core.ranks import launched, say
from draftsmith.core.records import versions

if TYPE_CHECKING:
    import wandb


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
    directory: Path, *, out: Path, identity: JsonObject, beside: JsonObject, job_type: str
) -> JsonObject:
    """Return the arguments of `wandb.init` beside the project. The same directory and identity
    continue their run, whatever is shown `beside` it.
    """
    import wandb

    directory.mkdir(parents=True, exist_ok=True)
    return {
        "dir": str(directory),
        "name": out.resolve().name,
        "id": hash_json([str(directory.resolve()), identity])[:16],
        "resume": "allow",
        "job_type": job_type,
        "config": identity | beside | {"versions": versions()},
        # Without `disable_git` wandb uploads uncommitted changes of the current directory, and its
        # remote. `announce` stands for its banners.
        "settings": wandb.Settings(disable_git=True, silent=True),
    }


def announce(run: "wandb.Run") -> None:
    """Print where the run is."""
    directory = os.path.relpath(run.settings.sync_dir)
    where = f"offline; upload with: wandb sync {directory}" if run.offline else run.url
    say(f"W&B: {where}")


def project() -> str:
    """Return the W&B project of a run."""
    return os.environ.get("WANDB_PROJECT", "draftsmith")
