"""Options of `draftsmith doctor`, without torch."""

from dataclasses import dataclass

from draftsmith_core.option_types import check_types


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """Which engines will load a target with a draft, which will not and why, and the commands that serve the pair."""

    target: str
    """The target: a local directory or hub name."""
    draft: str
    """The draft: a local directory or hub name of a language model, or a directory of a head."""
    plan: str | None = None
    """A plan of `draftsmith plan`, for the number of drafted tokens in the commands; 4 without one."""
    trust_remote_code: bool = False
    """Run model code that comes with a checkpoint."""

    def __post_init__(self) -> None:
        check_types(self)
