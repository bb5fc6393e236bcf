"""The options of `draftsmith align`, without torch."""

import re
from dataclasses import asdict, field
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from draftsmith.core.errors import InputError, without_secrets
from draftsmith.core.io import JsonObject
from draftsmith.core.options import (
    AtLeast1,
    ByContent,
    LargeTargetOptions,
    Model,
    NamedPrompts,
    NotIdentity,
    PartOf,
    Prompts,
    Rare,
    RunOptions,
    Spec,
    options,
)
from draftsmith.core.prompt_rows import parse_named
from draftsmith.distill.config import DistillConfig
from draftsmith.eval.config import EvalConfig
from draftsmith.train.config import DraftKind, TrainConfig
from draftsmith.train.objective import parse_objective


class Trained(NamedTuple):
    """A draft to train, and the stage that does it. replays: whether it also sees what the target
    writes by itself.
    """

    name: str
    objective: str
    replays: bool
    stage: str


@options
class AlignConfig(LargeTargetOptions, RunOptions):
    """Align a draft with a target: distil, train, evaluate. Options that you leave open are chosen
    and written, with the reasons, to a file per stage, which you can edit; --print_config stops
    there.
    """

    target: ByContent[Model]
    """The target: a local directory or hub name."""
    prompts: ByContent[Prompts]
    """Prompts that you will serve: a .jsonl or .parquet file, or hub dataset as
    owner/name[:split].
    """
    draft: ByContent[Model | None] = None
    """The draft to start from. Without one, train a fresh head."""
    kind: DraftKind | None = None
    """What to train without --draft. Default: EAGLE-3."""
    init: Literal["prune"] | None = None
    """Make the draft to start from in OUT/start, as `draftsmith init --method prune` does."""
    objective: Annotated[list[Spec], Field(min_length=1)] = field(
        default_factory=lambda: ["jsd:beta=0.5"]
    )
    """Training objectives, as `train --objective` takes them, to compare."""
    policy: Literal["id", "balanced"] = "balanced"
    """balanced: fill half of each step with what the target writes by itself (docs/robust.md). id:
    train on the answers alone.
    """
    plain: Rare[bool] = False
    """Also train every objective without replay, on as many answers, as NAME-plain."""
    id: ByContent[list[NamedPrompts]] = field(default_factory=list)
    """Prompt sets in distribution, as for `eval`. Default: a part of --prompts, held out."""
    ood: ByContent[list[NamedPrompts]] = field(default_factory=list)
    """Prompt sets out of distribution, as for `eval`."""
    prompt_tokens: Rare[AtLeast1] = 32
    """For rows with `text`: number of leading tokens that make the prompt."""
    fresh: NotIdentity[Literal["distill", "general", "train", "eval"] | None] = None
    """Delete what this stage and those after it made, and run them again."""
    distill: Annotated[JsonObject, PartOf(DistillConfig)] = field(default_factory=dict)
    train: Annotated[JsonObject, PartOf(TrainConfig)] = field(default_factory=dict)
    eval: Annotated[JsonObject, PartOf(EvalConfig)] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if sum(map(bool, (self.draft, self.init, self.kind))) > 1:
            raise InputError("draft: give one of --draft, --init and --kind")
        if self.init is not None and (self.target_parallel > 1 or self.target_device_map):
            raise InputError(
                "init: reads a whole target; make the draft by draftsmith init, and give --draft"
            )
        values = asdict(self)
        for part in ("distill", "train", "eval"):
            if taken := values[part].keys() & (values.keys() | {"data"}):
                raise InputError(f"{part}.{min(taken)}: is set by align; leave it out")
        for key, value in values.items():
            # Prompts that are divided are read from files of the run.
            named = key != "prompts" or self.id
            if named and without_secrets(value) != value:
                raise InputError(f"{key}: no file keeps the secrets of a URL; give a file")
        for spec in self.objective:
            parse_objective(spec)
        parse_named("id", self.id)
        parse_named("ood", self.ood)

    @property
    def directory(self) -> Path:
        """Where everything is written."""
        return Path(self.out)

    def trained(self) -> list[Trained]:
        """Return the drafts to train. Names say the objective, `jsd` for `jsd:beta=0.5` if that is
        clear, and the policy.
        """
        short = [re.split(r"[^a-z_]", spec)[0] for spec in self.objective]
        endings = {"-plain": False} if self.plain else {}
        endings |= {"-balanced": True} if self.policy == "balanced" else {"": False}
        alone = len(short) * len(endings) == 1
        drafts = []
        for ending, replays in endings.items():
            for name, spec in zip(short, self.objective, strict=True):
                if not name or short.count(name) > 1:
                    name = re.sub(r"[^A-Za-z0-9.]+", "-", spec).strip("-.")
                stage = "train" if alone else f"train-{name}{ending}"
                drafts.append(Trained(name + ending, spec, replays, stage))
        return drafts
