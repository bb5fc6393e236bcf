"""The kinds of draft that can be trained. Each trainee owns its draft and returns `LossSums` for a
batch.
"""

from collections.abc import Callable

from train.trainee import Trainee
from train.trainees.block import BlockTrainee
from train.trainees.head import (
    Eagle3Trainee,
    EagleTrainee,
    HydraTrainee,
    MedusaTrainee,
    MtpTrainee,
)
from train.trainees.lm import LMTrainee

TRAINEES: dict[str, Callable[..., Trainee]] = {
    "lm": LMTrainee,
    "eagle": EagleTrainee,
    "eagle3": Eagle3Trainee,
    "mtp": MtpTrainee,
    "medusa": MedusaTrainee,
    "hydra": HydraTrainee,
    "dflash": BlockTrainee,
    "dspark": BlockTrainee,
    "jetspec": BlockTrainee,
}
