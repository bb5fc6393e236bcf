"""Options of `draftsmith doctor`, without torch."""

from draftsmith_core.options import CodeOptions, options


@options
class DoctorConfig(CodeOptions):
    """Which engines will load a target with a draft, which will not and why, and the commands that serve the pair."""

    target: str
    """The target: a local directory or hub name."""
    draft: str
    """The draft: a local directory or hub name of a language model, or a directory of a head."""
    plan: str | None = None
    """A plan of `draftsmith plan`, for the number of drafted tokens in the commands; 4 without one."""
