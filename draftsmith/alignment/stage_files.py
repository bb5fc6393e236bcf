"""The files of `align`: for each stage a whole configuration of its command, with the reason beside
each value that was chosen.
"""

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from draftsmith.alignment.choices import Choices
from draftsmith.alignment.config import AlignConfig
from draftsmith.core.command_line import parse
from draftsmith.core.io import JsonObject, write_text_atomic
from draftsmith.core.options import known_by_content, options_of, put, value_at
from draftsmith.distill.config import DistillConfig
from draftsmith.eval.config import EvalConfig
from draftsmith.train.config import TrainConfig

# By stage, in their order.
CONFIGS: dict[str, type[Any]] = {
    "distill": DistillConfig,
    "general": DistillConfig,
    "train": TrainConfig,
    "eval": EvalConfig,
}


@dataclass(frozen=True)
class Stage:
    """A stage: its name, the file of its options, what that says, and by dotted key why options
    were chosen, if the file is not written yet.
    """

    name: str
    file: Path
    options: Any
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def command(self) -> str:
        """The command that does what the stage does."""
        name = self.name.replace("general", "distill")
        return f"draftsmith {name} --config {shlex.quote(str(self.file))}"

    def write(self) -> None:
        """Write the options that are chosen or not at their defaults, if there is no file."""
        if self.file.is_file():
            return
        values = asdict(self.options)
        written: JsonObject = {}
        for option in options_of(CONFIGS[self.name]):
            value = value_at(values, option.key)
            if value != option.default or option.key in self.reasons:
                put(written, option.key, value)
        lines = [f"# {self.command}"]
        for key, value in written.items():
            text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=math.inf)
            shown = text.removesuffix("...\n").strip()
            why = [why for name, why in self.reasons.items() if name.split(".")[0] == key]
            comment = f"  # {'; '.join(why)}" if why else ""
            lines.append(f"{key}: {shown}{comment}")
        write_text_atomic(self.file, "\n".join([*lines, ""]))


def files_of(config: AlignConfig) -> dict[str, Path]:
    """Return the file of each stage, by its name: `distill`, `general`, `train` or `train-NAME`,
    `eval`.
    """
    general = ["general"] if config.policy == "balanced" else []
    names = ["distill", *general, *(draft.stage for draft in config.trained()), "eval"]
    return {name: config.directory / f"{name}.yaml" for name in names}


def stage_of(name: str, file: Path, chosen: Choices | None = None) -> Stage:
    """Return a stage with the options that were chosen, else with those of its file. Raise
    InputError, with its line, for what its command does not take.
    """
    stage, _, _ = name.partition("-")
    if chosen is not None:
        return Stage(stage, file, CONFIGS[stage](**chosen.values), chosen.reasons)
    options, _ = parse(CONFIGS[stage], stage, ["--config", str(file)])
    return Stage(stage, file, options)


def relocate(config: AlignConfig, record: JsonObject) -> None:
    """Let the files of a run that was moved name the places of now, not those of its record."""
    now = known_by_content(config) | {"out": config.out}
    moved: dict[str, str] = {}
    for key, value in record["inputs"].items():
        if isinstance(value, list):
            moved |= zip(value, now[key], strict=False)
        elif value is not None:
            moved[value] = now[key]
    places = "|".join(map(re.escape, sorted(moved, reverse=True)))
    pattern = re.compile(rf"(?<![\w/.-])(?:{places})(?![\w:=.-])")
    for file in filter(Path.is_file, files_of(config).values()):
        text = file.read_text(encoding="utf-8")
        write_text_atomic(file, pattern.sub(lambda found: moved[found[0]], text))
