"""What decoding gives and what it is asked for: one output, the request for one, and the settings that all share."""

from dataclasses import dataclass
from typing import Any

from decode import BatchOutput, DecodeStats, Generation, StopCondition
from draftsmith_core.prompts import Prompt
from draftsmith_core.sampling_options import Sampling
from draftsmith_core.tokenization import Tokenizer, decode_text


@dataclass(frozen=True)
class Output:
    """One continuation of one prompt.

    output_ids: new tokens only, EOS included where the model ended. finish_reason: "stop" (EOS or a stop text) or
    "length". from_draft[i]: whether token i was drafted and accepted, rather than added by the target. stats: counts
    of this output alone; `stats.tau` is tokens per target call. prefill_s and decode_s: this output's share of its
    batch's wall clock; waited_s: from the end of prefill to its own last token.
    """

    id: str
    sample_index: int
    prompt_ids: list[int]
    output_ids: list[int]
    text: str
    finish_reason: str
    from_draft: list[bool]
    stats: DecodeStats
    prefill_s: float
    decode_s: float
    waited_s: float

    @staticmethod
    def from_json(values: dict[str, Any]) -> "Output":
        """What `dataclasses.asdict` gave, after a round trip through JSON."""
        counts: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in values["stats"].items()
        }
        return Output(**{**values, "stats": DecodeStats(**counts)})

    def row(self) -> dict[str, Any]:
        """The row of `draftsmith decode --out`."""
        return {
            "id": self.id,
            "sample_index": self.sample_index,
            "prompt_ids": self.prompt_ids,
            "output_ids": self.output_ids,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "stats": {
                "target_calls": self.stats.target_calls,
                "proposed": self.stats.proposed,
                "accepted": self.stats.accepted,
                "accepted_by_depth": list(self.stats.accepted_by_depth),
                "seconds": self.prefill_s + self.decode_s,
            },
        }


@dataclass(frozen=True)
class OutputRequest:
    """One output to make. Its randomness follows from the seed, the prompt's id and `sample_index`."""

    prompt: Prompt
    sample_index: int = 0


@dataclass(frozen=True)
class Settings:
    """How outputs are drawn and where they end."""

    sampling: Sampling
    max_new_tokens: int
    seed: int
    eos: tuple[int, ...]
    stop: StopCondition | None


def make_output(
    request: OutputRequest, generation: Generation, batch: BatchOutput, waited_s: float, tokenizer: Tokenizer
) -> Output:
    """The output of `request` from its row of `batch`. waited_s: see `Output`."""
    rows = len(batch.generations)
    return Output(
        request.prompt.id,
        request.sample_index,
        list(request.prompt.ids),
        generation.output_ids,
        decode_text(tokenizer, generation.output_ids),
        generation.finish_reason,
        generation.from_draft,
        generation.stats,
        batch.prefill_s / rows,
        batch.decode_s / rows,
        waited_s,
    )
