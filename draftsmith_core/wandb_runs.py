"""Weights & Biases: runs without prompts, and artifacts that link data, drafts and evaluations of different runs.

Keys and tokens stay in the environment, where wandb itself reads them; they are neither passed on nor printed.
Artifacts are named by the hash of their contents, so that runs on different machines refer to the same one.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftsmith_core.errors import InputError, one_line
from draftsmith_core.packages import require_package
from draftsmith_core.provenance import RECORD, read_record

_OFFLINE = "WANDB_MODE=offline, which needs neither account nor network"


def require_tracker(tracker: str) -> None:
    """InputError when the package of a tracker is not there."""
    if tracker != "none":
        require_package(tracker, "tracker")


def require_account() -> None:
    """InputError unless a run can be opened: its settings are sound, and there is a key where one is needed."""
    import wandb

    with without_prompts():
        settings = wandb.setup().settings
        if settings.mode in ("online", "run", "shared"):
            wandb.login()


@contextmanager
def without_prompts() -> Iterator[None]:
    """Run wandb without standard input, so that it cannot wait for an answer; its errors become InputErrors."""
    import wandb

    stdin = sys.stdin
    try:
        with open(os.devnull) as empty:
            sys.stdin = empty
            yield
    except InputError:
        raise
    except wandb.errors.UsageError as error:
        if "api key" in str(error).lower().replace("_", " "):
            raise InputError(f"tracker: wandb has no key; set WANDB_API_KEY, or {_OFFLINE}") from None
        raise InputError(f"tracker: wandb: {_one_line(error)}; there is {_OFFLINE}") from None
    except (wandb.errors.Error, ValueError) as error:
        raise InputError(f"tracker: wandb: {_one_line(error)}; there is {_OFFLINE}") from None
    finally:
        sys.stdin = stdin


def _one_line(error: Exception) -> str:
    if hasattr(error, "errors"):
        # The full text of a validation error contains the value, which may be the key.
        return ", ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
    return one_line(error).rstrip(".")


def run_options(directory: Path, name: str, run_id: str, job_type: str) -> dict[str, Any]:
    """Arguments of `wandb.init` beside the project; a `run_id` that was used before continues that run."""
    import wandb

    directory.mkdir(parents=True, exist_ok=True)
    return {
        "dir": str(directory),
        "name": name,
        "id": run_id,
        "resume": "allow",
        "job_type": job_type,
        # wandb would upload the uncommitted changes and the remote's address of the checkout it is started in.
        "settings": wandb.Settings(disable_git=True),
    }


def log_input(run: Any, artifact: Any) -> None:
    """Record `artifact` as an input of `run`, and create it where it is not known yet."""
    if run.disabled:
        return
    if run.offline:
        # `use_artifact` refuses to work offline. This call writes down the same two steps (log it, then mark it as an
        # input), which take effect when the run is synchronised.
        run._log_artifact(artifact, is_user_created=True, use_after_commit=True)
    else:
        run.use_artifact(artifact)


def log_output(run: Any, artifact: Any, aliases: list[str] | None = None) -> None:
    """Record `artifact` as an output of `run`."""
    if not run.disabled:
        run.log_artifact(artifact, aliases=aliases)


@contextmanager
def staging_artifacts_in(directory: Path) -> Iterator[None]:
    """Keep files of artifacts in `directory`, and not in the user's home directory, until they are uploaded."""
    kept = os.environ.get("WANDB_DATA_DIR")
    os.environ["WANDB_DATA_DIR"] = kept or str(directory.resolve())
    try:
        yield
    finally:
        if kept is None:
            del os.environ["WANDB_DATA_DIR"]


def data_artifact(name: str, digest: str, sources: list[str]) -> Any:
    """A data set as an artifact: its digest and the names of its sources, without any rows."""
    import wandb

    artifact = wandb.Artifact(f"{name}-{digest[:16]}", type="dataset", metadata={"digest": digest, "sources": sources})
    with artifact.new_file("digest.json") as file:
        json.dump({"digest": digest}, file)
    return artifact


def draft_artifact(source: str, fingerprint: str) -> Any:
    """A draft as an artifact: its record, and its other files by reference and checksum, so no weights are uploaded.

    source: a directory or a hub name. fingerprint: of the draft as it was loaded; used only when the directory has no
    record, whose fingerprint is of the weights as they were written.
    """
    import wandb

    directory = Path(source)
    record = read_record(directory)
    fingerprint = record.get("fingerprint", fingerprint)
    keys = ("kind", "objective", "target", "target_fingerprint", "steps", "best_step", "data", "git_commit", "versions")
    about = {"source": source, "fingerprint": fingerprint} | {key: record[key] for key in keys if key in record}
    artifact = wandb.Artifact(f"draft-{fingerprint}", type="model", metadata=about)
    with artifact.new_file("fingerprint.json") as file:
        json.dump({"fingerprint": fingerprint}, file)
    if record:
        artifact.add_file(str(directory / RECORD), RECORD)
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        if path.is_file() and path.name != RECORD and not path.name.startswith("."):
            artifact.add_reference(path.resolve().as_uri(), name=path.name)
    return artifact
