"""Where the target runs. `ENGINES` names the class of each engine; its module is imported when the
engine is chosen.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import NamedTuple, Protocol, TypeAlias

from pydantic import Base64Bytes
from transformers import GenerationConfig

from draftsmith.core.chats import end_of_answer
from draftsmith.core.errors import require_package
from draftsmith.core.models import end_tokens
from draftsmith.core.settings import (
    HasGenerationConfig,
    ResolvedSampling,
    Sampling,
    resolve_sampling,
    sampling_options,
)
from draftsmith.core.tokenization import Tokenizer
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.engines.state_writer import StateWriter

# Batches of answers that a killed run may lose. A wave is refilled only from itself, so that a
# repeated wave gives the same bytes. Smaller waves waste more time on batches that run empty.
WAVE_BATCHES = 8


class Key(NamedTuple):
    """Identifies a request: row of the prompts (from 1), sample and turn (from 0)."""

    row: int
    sample: int
    turn: int


@dataclass(frozen=True)
class AnswerRequest:
    """One answer to generate. seed: of the only generator that the answer draws from.
    max_new_tokens: None for those of the run.
    """

    key: Key
    prompt_ids: tuple[int, ...]
    seed: int
    sampling: Sampling
    max_new_tokens: int | None = None

    @property
    def conversation(self) -> tuple[int, int]:
        """Row and sample, which all turns of a conversation share."""
        return self.key[:2]


@dataclass(frozen=True)
class Answer:
    """Token ids, EOS included if the target ended, and why the answer ended: `stop` or `length`.

    tokens_from: `target`; `text` if a server returned text that was encoded again; `text_differs`
    if those ids cannot be the ones that the target drew. teacher: packed teacher rows, if the
    options ask for them; in JSON as base64.
    """

    response_ids: tuple[int, ...]
    finish_reason: str
    tokens_from: str = "target"
    teacher: Base64Bytes | None = None


@dataclass(frozen=True)
class Failed:
    """A request that got no answer, with the reason."""

    reason: str


# Requests that are asked together, the groups in turn.
Groups: TypeAlias = Iterator[Sequence[AnswerRequest]]
# Called once per request with its outcome, in any order. Returns the request to ask next (the next
# turn of a chat).
Done = Callable[[AnswerRequest, Answer | Failed], AnswerRequest | None]


class Engine(Protocol):
    """A target that answers requests.

    identity: fingerprint and dtype, or the served name. max_prompt_tokens: the longest prompt that
    leaves room for an answer, None if unlimited. takes_ids: prompts reach the target as token ids.
    wave: number of requests in a group, and of answers that are kept together, because an answer's
    rounding depends on the batch; None to keep each one at once. states: takes in those of every
    answer, if the options ask for them.
    """

    identity: dict[str, str | None]
    sampling: ResolvedSampling
    max_prompt_tokens: int | None
    takes_ids: bool = True
    wave: int | None = None
    states: StateWriter | None = None

    def run(self, groups: Groups, done: Done) -> None:
        """Answer all requests of all groups, each the requests of one part of the set.

        Take a group only when there is room, so that memory does not grow with the number of
        prompts. An empty group says that there is nothing to ask yet.
        """

    def one_by_one(self) -> Iterator[str]:
        """Ask one server alone until the next is taken; yield its name."""
        yield "the engine"

    def close(self) -> None:
        """Release what the engine holds outside this process."""
        return


Maker = Callable[[DistillConfig, Tokenizer], Engine]


def _lazy(module: str, name: str, package: str | None = None, instead: str = "") -> Maker:
    """Import engine `name` of a module of this package when it is made; it may need an optional
    package.
    """

    def make(config: DistillConfig, tokenizer: Tokenizer) -> Engine:
        if package is not None:
            require_package(package, f"--engine {module}", instead)
        engine: Maker = getattr(import_module(f"draftsmith.distill.engines.{module}"), name)
        return engine(config, tokenizer)

    return make


ENGINES: dict[str, Maker] = {
    "hf": _lazy("hf", "HFEngine"),
    "openai": _lazy("openai", "OpenAIEngine"),
    "vllm": _lazy("vllm", "VLLMEngine", "vllm", "serve the target with it and use --engine openai"),
    "ray": _lazy("ray", "RayEngine", "ray"),
}


def sampling_of(config: DistillConfig, target: HasGenerationConfig) -> ResolvedSampling:
    """Resolve sampling: options first, then the target's generation config, then temperature 1."""
    options = sampling_options(config)
    mixture = config.mixture()
    if mixture:
        options["temperature"] = max(part.temperature for part in mixture)
    return resolve_sampling(config.target, target, options, default_temperature=1.0)


class RemoteTarget:
    """The generation config and EOS ids of a target whose weights are not loaded here."""

    def __init__(self, name: str, tokenizer: Tokenizer) -> None:
        try:
            self.generation_config = GenerationConfig.from_pretrained(name)
        except OSError:  # a directory with a tokenizer alone
            self.generation_config = GenerationConfig()
        ids = list(end_tokens(name, self.generation_config.eos_token_id))
        if not ids and tokenizer.eos_token_id is not None:
            ids = [tokenizer.eos_token_id]
        # First, because it is appended when a server says `stop` without an end token.
        first = end_of_answer(tokenizer, ids)
        self.eos_ids = tuple(sorted(ids, key=lambda token: token != first))
