"""The options of `draftsmith distill`. Needs no torch."""

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import Field

from draftsmith.core.errors import InputError
from draftsmith.core.options import (
    AtLeast1,
    ByContent,
    Directory,
    LargeTargetOptions,
    Model,
    NamedPrompts,
    NotIdentity,
    Of,
    Positive,
    PromptOptions,
    Prompts,
    Rare,
    RunOptions,
    SamplingOptions,
    Spec,
    Temperature,
    Text,
    Url,
    options,
    options_of,
)
from draftsmith.core.settings import Sampling

T = TypeVar("T")
OfServers = Annotated[T, Of("engine", ["openai"])]
OfRay = Annotated[T, Of("engine", ["ray"])]
OfStates = Annotated[T, Of("states")]
TeacherTopK = Annotated[int, Field(ge=0, le=65535)]


@dataclass(frozen=True)
class MixturePart:
    """upto: the shares of this part and of those before it, of 1 in all."""

    temperature: float
    upto: float


def magpie(prompts: str) -> int | None:
    """Return N of `magpie:N`, None for other prompts. Raise InputError if N is no count."""
    start, colon, count = prompts.partition(":")
    if start != "magpie" or not colon:
        return None
    if not (count.isascii() and count.isdecimal() and int(count)):
        raise InputError(f"prompts: {prompts!r}: expected magpie:N, such as magpie:1000")
    return int(count)


@options
class EngineOptions(LargeTargetOptions):
    """Where the target runs."""

    target: ByContent[Model]
    """The target: a local directory or hub name."""
    engine: Literal["hf", "openai", "vllm", "ray"] = "hf"
    """Where the target runs: `hf` in this process with transformers, `openai` on servers
    (--endpoint), `vllm` in this process with vLLM, `ray` on workers of a Ray cluster.
    """
    endpoint: NotIdentity[OfServers[list[Url]]] = field(default_factory=list)
    """Servers with OpenAI's API that all serve the target (vLLM, SGLang, llama-server, hosted),
    such as http://localhost:8000/v1. `target` then gives the tokenizer and needs no weights.
    """
    served_model: Rare[NotIdentity[OfServers[str | None]]] = None
    """Name of the target on the servers. Default: the one model that /models lists. A name is not
    looked up.
    """
    api_key_env: Rare[NotIdentity[OfServers[str]]] = "OPENAI_API_KEY"
    """Environment variable that holds the servers' key."""
    concurrency: Rare[NotIdentity[OfServers[AtLeast1]]] = 64
    """Requests in flight per server."""
    timeout_s: Rare[NotIdentity[OfServers[Positive]]] = 600.0
    """Seconds that a server has for one answer."""
    max_requests: Rare[NotIdentity[OfServers[AtLeast1 | None]]] = None
    """Stop after this many requests to servers; the same command resumes."""
    max_tokens: Rare[NotIdentity[OfServers[AtLeast1 | None]]] = None
    """Stop after this many tokens of prompts and answers, as servers count them; the same command
    resumes.
    """
    address: Rare[NotIdentity[OfRay[str | None]]] = None
    """Ray cluster, such as HOST:6379 or ray://HOST:10001. Default: RAY_ADDRESS, else a local
    cluster.
    """
    workers: Rare[NotIdentity[OfRay[AtLeast1 | None]]] = None
    """Copies of the target on the Ray cluster. Default: one per GPU, or one per node without
    GPUs.
    """
    tensor_parallel_size: Rare[NotIdentity[Annotated[AtLeast1, Of("engine", ["vllm"])]]] = 1
    """GPUs that vLLM splits the target over."""
    states: Rare[NotIdentity[Annotated[Directory | None, Of("engine", ["vllm", "openai"])]]] = None
    """Directory for the target's hidden states of every row, which vLLM gives with the answer; for
    `train --states`. In process, or served on this machine with a shared directory.
    """
    states_8bit: Rare[NotIdentity[OfStates[bool]]] = False
    """A state takes 8 bits a value and a scale a token: half of the engine's 16 bits."""
    states_layers: Rare[NotIdentity[OfStates[list[AtLeast1]]]] = field(default_factory=list)
    """Layers whose output is kept in addition to the last one's, from 1. Default: those that a
    fresh EAGLE-3 head reads.
    """

    def __post_init__(self) -> None:
        if self.engine != "hf" and (self.target_parallel > 1 or self.target_device_map):
            raise InputError("target_parallel and target_device_map: are for --engine hf")
        if self.engine == "openai" and not self.endpoint:
            raise InputError(
                "endpoint: --engine openai needs at least one, such as http://localhost:8000/v1"
            )
        for url in self.endpoint:
            parts = urlsplit(url)
            if (
                parts.scheme not in ("http", "https") or parts.username or parts.query
            ):  # secrets are not shown
                address = f"{parts.scheme}://{parts.hostname}" if parts.hostname else parts.scheme
                raise InputError(
                    f"endpoint: {address}: write http://localhost:8000/v1, and put the key into "
                    f"{self.api_key_env}"
                )


@options
class DistillConfig(EngineOptions, SamplingOptions, PromptOptions, RunOptions):
    """Let the target answer prompts, and keep its tokens as a distilled set."""

    prompts: ByContent[Prompts]
    """A .jsonl or .parquet file, here or in a store (s3://...), a hub dataset as
    owner/name[:split], or prompts that the target writes itself: self:N (N texts from the first
    token on), token:N (from a random token on), magpie:N (N user turns of its chat template).
    """
    num_samples: AtLeast1 = 1
    """Answers per prompt."""
    max_new_tokens: AtLeast1 = 256
    """Longest answer, in tokens."""
    temperature: Temperature | None = None
    """The temperature that you will serve with; 0 is greedy. Default: the target's
    generation_config.json, else 1.
    """
    temperatures: Rare[list[Spec]] = field(default_factory=list)
    """A mixture instead, TEMPERATURE:SHARE each, such as 0.0:0.2 0.7:0.4 1.0:0.4. Every sample
    draws its own.
    """
    turns: Literal["all", "last"] = "all"
    """Which turns of a chat to answer. `all`: regenerate every assistant turn in order; each sees
    the regenerated earlier ones; one row per turn. `last`: answer once, after the turns as they
    are.
    """
    thinking: Rare[Literal["keep", "drop"]] = "keep"
    """For targets that think. `keep`: leave the thinking in the answers. `drop`: switch it off in
    the chat template, and leave out answers that still think.
    """
    batch_size: AtLeast1 = 32
    """Rows generated together. A finished row is replaced by the next prompt."""
    part_rows: Rare[AtLeast1] = 1024
    """About this many rows per Parquet file."""
    teacher_top_k: Rare[TeacherTopK] = 0
    """Store the target's top-k token ids with log-probabilities, and the remaining probability
    mass, per token, for `train` without the target. About 4 k bytes per token; 0 stores none. Of
    servers, vLLM gives them.
    """
    decontaminate: Rare[list[NamedPrompts]] = field(default_factory=list)
    """Prompt sets of the evaluation, NAME=PROMPTS: skip prompts that share 13 words in a row with
    one of theirs.
    """
    drop: list[Literal["empty", "truncated", "repetitive"]] = field(default_factory=list)
    """Answers to leave out: `empty` text; `truncated` at max_new_tokens; `repetitive`, half of its
    runs of four tokens occurred before.
    """
    domain: Rare[Text] = "default"
    """Domain of rows that do not name one."""
    strict: Rare[NotIdentity[bool]] = False
    """Stop at the first row that cannot be read, instead of skipping and counting it."""
    ignore_eos: Rare[bool] = False
    """Continue to max_new_tokens even if the target ends."""
    push_to_hub: Rare[NotIdentity[str | None]] = None
    """Upload the finished set to this hub dataset, owner/name (token: HF_TOKEN). A new one is
    private.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        magpie(self.prompts)
        if self.temperatures and self.temperature is not None:
            raise InputError(
                "temperatures: a mixture replaces --temperature; leave one of them out"
            )
        self.mixture()
        if self.states and self.teacher_top_k:
            raise InputError("teacher_top_k: --states has the target's distributions; leave it out")

    def mixture(self) -> list[MixturePart]:
        """Return the parts of `temperatures`."""
        parts = []
        total = 0.0
        for part in self.temperatures:
            value, _, share = part.partition(":")
            try:
                temperature = Sampling(temperature=float(value)).temperature
                if not float(share) > 0:
                    raise ValueError
                total += float(share)
                parts.append(MixturePart(temperature, total))
            except ValueError:
                raise InputError(
                    f"temperatures: {part!r}: expected TEMPERATURE:SHARE, such as 0.7:0.4"
                ) from None
        return [replace(part, upto=part.upto / total) for part in parts]


@options
class StatesConfig(EngineOptions):
    """Write the target's states of answers that exist: `draftsmith distill --states_of SET`."""

    states_of: Annotated[list[Directory], Field(min_length=1)]
    """Distilled sets whose rows get their states in --states."""
    states: Annotated[NotIdentity[Directory], Of("engine", ["vllm", "openai"])]
    """Directory for the target's hidden states, for `train --states`."""

    def asking(self) -> DistillConfig:
        """Return the options of the engine that reads the answers."""
        values = {option.key: getattr(self, option.key) for option in options_of(EngineOptions)}
        return DistillConfig(**values, prompts="", out=self.states, max_new_tokens=1)


@options
class ScoreConfig(LargeTargetOptions):
    """Add the target's distributions to answers that exist: `draftsmith distill --score SET`."""

    score: Prompts
    """The answers: a distilled set, or a .jsonl or .parquet file or hub dataset whose rows have
    `messages` that end with the assistant's answer, or `prompt_ids` and `response_ids`.
    """
    target: Model
    """The target: a local directory or hub name."""
    out: NotIdentity[Text]
    """The scored set: a directory of part-*.parquet and manifest.json, for `train --data`."""
    teacher_top_k: Annotated[int, Field(ge=1, le=65535)] = 128
    """Token ids with log-probabilities to store per token of an answer: 4 k + 2 bytes, up to 6 more
    for a large vocabulary.
    """
    part_rows: Rare[AtLeast1] = 1024
    """Rows of a file per Parquet file; a set keeps its own parts. A killed run loses those in the
    making.
    """
