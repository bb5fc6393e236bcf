"""What `distill` needs of an engine that runs the target."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from distill.score import TeacherRows
from draftsmith_core.generation_defaults import ResolvedSampling


@dataclass(frozen=True)
class AnswerRequest:
    """One answer to make: the prompt's tokens, and the seed of the only generator it draws from."""

    prompt_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Answer:
    """One answer: tokens (EOS included when the target ended) and why it ended, `stop` or `length`."""

    response_ids: tuple[int, ...]
    finish_reason: str


class Engine(Protocol):
    """A target that answers requests."""

    @property
    def fingerprint(self) -> str:
        """Identifies the target's weights."""

    @property
    def dtype(self) -> str:
        """What the target computes in."""

    @property
    def sampling(self) -> ResolvedSampling:
        """The distribution that answers are drawn from, and what of it the target asked for."""

    @property
    def max_prompt_tokens(self) -> int | None:
        """The longest prompt that leaves room for an answer; None when there is no limit."""

    def generate(self, requests: Sequence[AnswerRequest]) -> list[Answer]:
        """Answers in the order of the requests."""

    def score(self, request: AnswerRequest, response: Answer, k: int) -> TeacherRows:
        """The target's distribution at every token of an answer: its k likeliest tokens and the mass of the rest."""
