"""A training job: all that a run needs, and how far it is."""

import math
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedModel

from draftsmith.core.io import JsonObject
from draftsmith.core.ranks import groups
from draftsmith.core.tokenization import Tokenizer
from draftsmith.train.config import TrainConfig
from draftsmith.train.data import Examples
from draftsmith.train.objective import Objective
from draftsmith.train.world import World


@dataclass(frozen=True)
class TrainingJob:
    """All that a run needs beside the draft.

    tokenizer: saved with the draft. date: in the prompts, if the chat template prints one.
    drafted: the tokens of the draft's vocabulary, chosen once; None for all. identity: settings
    that must match for a run to resume this one.
    """

    config: TrainConfig
    world: World
    objective: Objective
    training: Examples
    heldout: Examples
    tokenizer: Tokenizer | None = None
    target: PreTrainedModel | None = None
    date: str | None = None
    drafted: list[int] | None = None
    identity: JsonObject = field(default_factory=dict)

    @property
    def rows_per_step(self) -> int:
        return self.config.batch_size * self.config.accumulation * groups()

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        rows = self.config.epochs * len(self.training)
        return self.config.steps or math.ceil(rows / self.rows_per_step)

    def evaluates(self, step: int) -> bool:
        """Whether a held-out evaluation follows after this many steps."""
        return step % self.config.eval_every == 0 or step == self.steps

    @property
    def run_dir(self) -> Path:
        """Directory of what only training needs: checkpoints and metrics."""
        return Path(self.config.out) / "run"

    @property
    def metrics(self) -> Path:
        """File of the figures of every step and evaluation."""
        return self.run_dir / "metrics.jsonl"

    @property
    def draft_vocabulary(self) -> Path:
        """File of the tokens that the draft drafts, if these are a part of the vocabulary."""
        return self.run_dir / "draft_vocabulary.json"

    @property
    def checkpoints(self) -> Path:
        """Directory of the checkpoints, `step_N` each."""
        return self.run_dir / "checkpoints"

    @property
    def layout(self) -> str:
        """How this run divides the rows of a step."""
        config = self.config
        world = self.world
        together = f"groups of {world.size // groups()} " if groups() < world.size else ""
        return (
            f"{config.batch_size} x {config.accumulation} x {groups()} {together}processes "
            f"({world.sharing})"
        )


@dataclass(frozen=True)
class Position:
    """How far training is. Data order and schedule follow from `step` alone.

    best: held-out alpha at `best_step`; without a teacher, the negated held-out loss. best_figures:
    all figures there.
    """

    step: int = 0
    best_step: int = 0
    best: float | None = None
    best_figures: dict[str, float] = field(default_factory=dict)
    evaluations_since_best: int = 0
    stopped: bool = False
