"""The kinds of draft that can be trained. Each trainee owns its draft and returns `LossSums` for a
batch.
"""

from collections.abc import Callable

from draftsmith.train.trainee import Trainee
from draftsmith.train.trainees.block import BlockTrainee
from draftsmith.train.trainees.head import (
    Eagle3Trainee,
    EagleTrainee,
    MtpTrainee,
    ParallelTrainee,
)
from draftsmith.train.trainees.lm import LMTrainee

TRAINEES: dict[str, Callable[..., Trainee]] = {
    "lm": LMTrainee,
    "eagle": EagleTrainee,
    "eagle3": Eagle3Trainee,
    "mtp": MtpTrainee,
    "medusa": ParallelTrainee,
    "hydra": ParallelTrainee,
    "dflash": BlockTrainee,
    "dspark": BlockTrainee,
    "jetspec": BlockTrainee,
}
