"""What generation asks of an engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from distill.score import TeacherRows


@dataclass(frozen=True)
class Request:
    """One answer to make: prompt tokens and the seed that alone decides its randomness."""

    prompt_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Response:
    """One answer: tokens (EOS included when the target ended) and why it ended, `stop` or `length`."""

    response_ids: tuple[int, ...]
    finish_reason: str


class Engine(Protocol):
    """A target that answers."""

    @property
    def fingerprint(self) -> str:
        """Identifies the target's weights."""

    @property
    def dtype(self) -> str:
        """What the target computes in."""

    @property
    def max_prompt_tokens(self) -> int | None:
        """The longest prompt that leaves room for an answer; None when there is no limit."""

    def generate(self, requests: Sequence[Request]) -> list[Response]:
        """Answers in the order of the requests."""

    def score(self, request: Request, response: Response, k: int) -> TeacherRows:
        """The target's law at every token of an answer: its k likeliest tokens, and the mass of the others."""
