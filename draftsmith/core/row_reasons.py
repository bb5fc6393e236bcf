"""Reasons why rows were left out, counted."""

import re
from dataclasses import dataclass


@dataclass
class _Reason:
    """Rows with one reason. text: the reason of the first of them."""

    row: int
    text: str
    count: int = 0


class Reasons:
    """Counts of reasons. Reasons that differ only in their numbers count as one."""

    def __init__(self) -> None:
        self._reasons: dict[str, _Reason] = {}

    def add(self, row: int, reason: str) -> None:
        pattern = re.sub(r"\d+", "N", reason)
        self._reasons.setdefault(pattern, _Reason(row, reason)).count += 1

    def total(self) -> int:
        return sum(reason.count for reason in self._reasons.values())

    def lines(self, outcome: str) -> list[str]:
        """One line per reason: the number of rows with this `outcome`, and the first of them."""
        lines = []
        for reason in self._reasons.values():
            row = f"row {reason.row}, the first" if reason.count > 1 else f"row {reason.row}"
            lines.append(f"{reason.count} {outcome}: {reason.text} ({row})")
        return lines
