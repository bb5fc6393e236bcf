"""Weights & Biases: a run that asks nobody anything, and the artifacts by which data, drafts and evaluations join.

Keys and tokens stay in the environment, where wandb itself looks for them: no value of it is passed on or printed.
An artifact is known by its contents: what two runs describe alike, wherever they ran, is one version of one artifact.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftsmith_core.errors import InputError
from draftsmith_core.io import read_json
from draftsmith_core.packages import require_package

_OFFLINE = "WANDB_MODE=offline, which needs neither account nor network"
RECORD = "draftsmith.json"


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
    """wandb with no terminal to ask at: what it would ask, and what it fails with, is an InputError of one line."""
    import wandb

    stdin = sys.stdin
    try:
        with open(os.devnull) as nobody:
            sys.stdin = nobody
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
        # What a validator says in full has the value in it, which may be the key.
        return ", ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
    return " ".join(str(error).split()).rstrip(".")


def run_options(directory: Path, name: str, run_id: str, job_type: str) -> dict[str, Any]:
    """What `wandb.init` is given, beside the project; the same `run_id` goes on in the same run."""
    import wandb

    directory.mkdir(parents=True, exist_ok=True)
    return {
        "dir": str(directory),
        "name": name,
        "id": run_id,
        "resume": "allow",
        "job_type": job_type,
        # It would take along the uncommitted changes, and the remote's address, of whatever checkout it is started in.
        "settings": wandb.Settings(disable_git=True),
    }


def log_input(run: Any, artifact: Any) -> None:
    """Say that `artifact` went into `run`; it is made where it is not known yet."""
    if run.disabled:
        return
    if run.offline:
        # `use_artifact` refuses offline, though what it does online (log it, and mark it as an input once it is there)
        # can be written down as well: synchronised later, it is an input all the same.
        run._log_artifact(artifact, is_user_created=True, use_after_commit=True)
    else:
        run.use_artifact(artifact)


def log_output(run: Any, artifact: Any, aliases: list[str] | None = None) -> None:
    """Say that `artifact` came out of `run`."""
    if not run.disabled:
        run.log_artifact(artifact, aliases=aliases)


@contextmanager
def staging_artifacts_in(directory: Path) -> Iterator[None]:
    """Files of artifacts wait in `directory`, beside their run, and not in the user's home, until they are uploaded."""
    kept = os.environ.get("WANDB_DATA_DIR")
    os.environ["WANDB_DATA_DIR"] = kept or str(directory.resolve())
    try:
        yield
    finally:
        if kept is None:
            del os.environ["WANDB_DATA_DIR"]


def data_artifact(name: str, digest: str, sources: list[str]) -> Any:
    """A data set by its digest: no rows."""
    import wandb

    artifact = wandb.Artifact(f"{name}-{digest[:16]}", type="dataset", metadata={"digest": digest, "sources": sources})
    with artifact.new_file("digest.json") as file:
        json.dump({"digest": digest}, file)
    return artifact


def draft_artifact(source: str, fingerprint: str) -> Any:
    """A draft: its record, and its other files by reference and checksum, so that no weights are uploaded.

    source: a directory or a hub name. fingerprint: of the draft as it was loaded; a record's own, of the weights as
    they were written, goes before it. A draft with neither record nor files is known by its fingerprint alone.
    """
    import wandb

    directory = Path(source)
    recorded = directory / RECORD
    record = read_json(recorded, "the record of a draft checkpoint") if recorded.is_file() else {}
    fingerprint = record.get("fingerprint", fingerprint)
    keys = ("kind", "objective", "target", "target_fingerprint", "steps", "best_step", "data", "git_commit", "versions")
    about = {"source": source, "fingerprint": fingerprint} | {key: record[key] for key in keys if key in record}
    artifact = wandb.Artifact(f"draft-{fingerprint}", type="model", metadata=about)
    with artifact.new_file("fingerprint.json") as file:
        json.dump({"fingerprint": fingerprint}, file)
    if record:
        artifact.add_file(str(recorded), RECORD)
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        if path.is_file() and path.name != RECORD and not path.name.startswith("."):
            artifact.add_reference(path.resolve().as_uri(), name=path.name)
    return artifact
