"""The answers of an earlier run of `align`, on which another draft is trained and compared."""

import shutil
from dataclasses import asdict, replace
from pathlib import Path

import yaml
from transformers import PreTrainedModel

from draftsmith.alignment.config import AlignConfig, DistillChoices
from draftsmith.alignment.prompt_split import check_unchanged
from draftsmith.alignment.stage_configs import distill_config, given
from draftsmith.core.errors import InputError
from draftsmith.core.models import fingerprint
from draftsmith.core.options import identity
from draftsmith.core.ranks import say
from draftsmith.core.runs import kept_identity
from draftsmith.distill.manifest import IDENTITY_FILES

# What depends on the policy, which another draft may have.
_REPLAY = ("general_texts", "general_from")


def earlier_run(directory: str) -> AlignConfig:
    """Return the options of the run whose answers are asked for. Raise InputError if it has not
    distilled them all.
    """
    file = Path(directory) / "align.yaml"
    if not file.is_file():
        raise InputError(f"distilled: {file}: no such file; name the --out of an earlier `align`")
    if not (Path(directory) / "distilled" / "manifest.json").is_file():
        raise InputError(f"distilled: {directory}: has not distilled all answers; finish it first")
    return AlignConfig(**yaml.safe_load(file.read_text(encoding="utf-8")))


def as_earlier(config: AlignConfig, earlier: AlignConfig) -> AlignConfig:
    """Take from the earlier run what is left open and decides the answers. Raise InputError if it
    had other prompts.
    """
    directory = str(config.distilled)
    check_unchanged(config.prompts, Path(directory) / "prompts", f"the run in {directory}")
    if bool(config.id) != bool(earlier.id):
        raise InputError(
            f"distilled: {directory} {'has' if earlier.id else 'has no'} --id; do as it did"
        )
    taken = given(asdict(earlier.distill))
    if "id" in (config.policy, earlier.policy):
        taken = {key: value for key, value in taken.items() if key not in _REPLAY}
    return replace(
        config,
        distill=DistillChoices(**(taken | given(asdict(config.distill)))),
        heldout_prompts=config.heldout_prompts or earlier.heldout_prompts,
        date=config.date or earlier.date,
        dtype=earlier.dtype if config.dtype == "auto" else config.dtype,
    )


def check_same(config: AlignConfig, earlier: AlignConfig, target: PreTrainedModel) -> None:
    """Raise InputError if this run would distil other answers. config: complete."""
    directory = Path(str(config.distilled))
    kept = kept_identity(directory / "distilled", IDENTITY_FILES)
    if kept.get("target_fingerprint") != fingerprint(target):
        raise InputError(
            f"distilled: {directory} has answers of other weights than {config.target}"
        )
    now = identity(distill_config(config))
    for key, then in identity(distill_config(earlier)).items():
        if now[key] != then:
            raise InputError(
                f"distilled: {directory} has {key} {then}, now it is {now[key]}; give the same, or "
                "leave --distilled out"
            )


def copy_answers(config: AlignConfig) -> None:
    """Copy the divided prompts and what the target wrote."""
    directory = Path(str(config.distilled))
    for name in ("prompts", "distilled", "general"):
        if (directory / name).is_dir():
            shutil.copytree(directory / name, config.directory / name, dirs_exist_ok=True)
    say(f"distilled: takes the answers of {directory}, and the prompts that it held out")
