"""What a command hands back."""

from collections.abc import Mapping
from dataclasses import dataclass

from draftsmith.core.errors import RequirementError


@dataclass(frozen=True)
class CommandResult:
    """The result of a command.

    summary: what `--json` prints. lines: what a person reads. unmet: set if results miss a
    requirement; the command then exits with 3.
    """

    summary: Mapping[str, object]
    lines: list[str]
    unmet: RequirementError | None = None
