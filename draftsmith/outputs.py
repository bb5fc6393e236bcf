"""One output of decoding."""

from dataclasses import dataclass
from typing import Any

from decode import DecodeStats


@dataclass(frozen=True)
class Output:
    """One continuation of one prompt.

    output_ids: new tokens only, EOS included if the model ended. finish_reason: "stop" (EOS or a stop text) or
    "length". from_draft[i]: whether token i was drafted and accepted, or added by the target. stats: counts of this
    output alone; `stats.tau` is tokens per target call. prefill_s, decode_s: this output's share of its batch's wall
    clock. waited_s: seconds from the end of prefill to its own last token.
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
        """Undo `dataclasses.asdict` and a round trip through JSON."""
        counts: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in values["stats"].items()
        }
        return Output(**{**values, "stats": DecodeStats(**counts)})

    def row(self) -> dict[str, Any]:
        """The row of `draftsmith decode --out`."""
        keys = ("id", "sample_index", "prompt_ids", "output_ids", "text", "finish_reason")
        stats: dict[str, Any] = {key: getattr(self.stats, key) for key in ("target_calls", "proposed", "accepted")}
        stats |= {
            "accepted_by_depth": list(self.stats.accepted_by_depth),
            "seconds": self.prefill_s + self.decode_s,
        }
        return {key: getattr(self, key) for key in keys} | {"stats": stats}
