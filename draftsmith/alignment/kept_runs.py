"""What kept trainings reached, for the forecast of `align`. A new series is a new entry of `KEPT`.

Numbers are of the results that an entry names, at temperature 1 on held-out prompts of the trained
domain. A test compares them.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class KeptRun:
    """One training. file: in docs/results. alpha: its 95 % interval. tau: tokens per call on
    chain:2, predicted.
    """

    file: str
    draft: str
    steps: int
    alpha_low: float
    alpha_high: float
    tau: float


@dataclass(frozen=True)
class KeptSeries:
    """Trainings of fresh heads of one kind and size, by number of steps.

    parameters: trained ones of the head. answers: per step. rows: kind of prompts. most_passes:
    over the answers; more passes over fewer answers reach less. page: in docs.
    """

    kind: str
    parameters: int
    target_parameters: int
    answers: int
    rows: str
    most_passes: float
    optimizer: str
    page: str
    runs: tuple[KeptRun, ...]


_EAGLE = KeptSeries(
    kind="eagle",
    parameters=10_396_224,
    target_parameters=134_515_008,
    answers=4,
    rows="chat",
    most_passes=4.0,
    optimizer="adamw",
    page="docs/evidence/how-much.md",
    runs=(
        KeptRun("real-amount", "steps-0.0625", 39, 0.120, 0.143, 1.137),
        KeptRun("real-amount", "steps-0.125", 78, 0.154, 0.182, 1.177),
        KeptRun("real-amount", "steps-0.25", 156, 0.188, 0.219, 1.215),
        KeptRun("real-amount", "steps-0.5", 312, 0.249, 0.280, 1.302),
        KeptRun("real-amount", "all", 624, 0.307, 0.340, 1.384),
    ),
)
_EAGLE3 = replace(
    _EAGLE,
    kind="eagle3",
    parameters=9_808_128,
    page="docs/evidence/which-draft.md",
    runs=(KeptRun("real-which", "eagle3", 624, 0.284, 0.313, 1.367),),
)
KEPT = (
    _EAGLE,
    _EAGLE3,
    replace(
        _EAGLE,
        optimizer="muon",
        page="docs/evidence/recipe.md",
        runs=(KeptRun("real-recipe", "eagle", 312, 0.284, 0.315, 1.349),),
    ),
    replace(
        _EAGLE3,
        optimizer="muon",
        page="docs/evidence/recipe.md",
        runs=(
            KeptRun("real-recipe", "eagle3", 312, 0.301, 0.333, 1.385),
            KeptRun("real-longer", "eagle3", 1248, 0.376, 0.410, 1.497),
        ),
    ),
)
