"""What `distill` needs of an engine that runs the target."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from draftsmith_core.generation_defaults import ResolvedSampling
from draftsmith_core.sampling_options import Sampling


@dataclass(frozen=True)
class AnswerRequest:
    """One answer to make: the prompt's tokens, and the seed of the only generator it draws from.

    key: (row of the prompts, sample, turn), each of which is asked once. temperature: in place of the engine's own.
    """

    key: tuple[int, int, int]
    prompt_ids: tuple[int, ...]
    seed: int
    temperature: float | None = None


@dataclass(frozen=True)
class Answer:
    """One answer: tokens (EOS included when the target ended) and why it ended, `stop` or `length`.

    tokens_from: `target` where the engine gave the ids; `text` where they are the tokenizer's for the text that a
    server gave; `text_differs` where those cannot be what the target drew: they give another text or are too many.
    """

    response_ids: tuple[int, ...]
    finish_reason: str
    tokens_from: str = "target"


@dataclass(frozen=True)
class Failed:
    """A request that got no answer, with the reason."""

    reason: str


def at_temperature(sampling: Sampling, temperature: float | None) -> Sampling:
    """`sampling`, at the temperature of a request where it has one."""
    return sampling if temperature is None else replace(sampling, temperature=temperature)


# What an engine calls with each request it was given and the outcome. The request that comes back is asked next.
Done = Callable[[AnswerRequest, Answer | Failed], AnswerRequest | None]


class Engine(Protocol):
    """A target that answers requests."""

    @property
    def identity(self) -> dict[str, Any]:
        """What identifies the target, for `run.json` and the manifest: its fingerprint and dtype, or its name."""

    @property
    def sampling(self) -> ResolvedSampling:
        """The distribution that answers are drawn from, and what of it the target asked for."""

    @property
    def max_prompt_tokens(self) -> int | None:
        """The longest prompt that leaves room for an answer; None when there is no limit."""

    @property
    def takes_ids(self) -> bool:
        """Whether a prompt reaches the target as its token ids, so that any tokens can be a prompt."""

    @property
    def keeps_answers(self) -> bool:
        """Whether every answer is worth keeping at once: it costs money or time, and does not depend on its batch."""

    def run(self, groups: Iterator[Sequence[AnswerRequest]], done: Done) -> None:
        """Ask everything in `groups`, calling `done` once for each request, in any order.

        A group is the requests of one part of the set. Groups are taken when there is room for their requests, so that
        memory does not grow with the number of prompts. An answer does not depend on any other group.
        """

    def score(self, request: AnswerRequest, response: Answer, k: int) -> bytes:
        """The target's distribution at every token of an answer, as `draftsmith_core.teacher_rows` stores it."""

    def close(self) -> None:
        """End what runs outside this process for the engine."""


class DraftingEngine(Engine, Protocol):
    """An engine that can generate speculatively. tree: what the draft of the options drafts, "" while it does not."""

    tree: str

    def seconds_per_token(self, requests: Sequence[AnswerRequest]) -> dict[str, float]:
        """With each tree that may be drafted, and of the target alone as "", for these requests as one batch."""
