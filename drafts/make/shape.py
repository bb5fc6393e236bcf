"""What of a draft's config follows from its target, and what a forward of each costs."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from draftsmith_core.models import parameter_count

# From the target's config, under the same names in the draft's.
_FROM_TARGET = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")
COSTLY = 0.5


def filled(values: Mapping[str, Any], target_config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A draft's config values completed from the target's config, and what was taken from there.

    Taken are vocabulary, special tokens, context and rotary base: transformers' defaults for these (a vocabulary of
    32,000) fit no target in particular.
    """
    text = target_config.get_text_config(decoder=True)
    taken = {
        key: value for key in _FROM_TARGET if key not in values and (value := getattr(text, key, None)) is not None
    }
    if "rope_parameters" not in values and "rope_theta" not in values and "rope_scaling" not in values:
        rope = getattr(text, "rope_parameters", None)
        if isinstance(rope, Mapping) and isinstance(rope.get("rope_type"), str) and "rope_theta" in rope:
            if any(isinstance(value, list) for value in rope.values()):
                # One factor for each dimension of a head of the target (longrope), and the draft's are of another size.
                rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
            taken["rope_parameters"] = {key: value for key, value in rope.items() if key != "partial_rotary_factor"}
    return dict(values) | taken, taken


def read_per_token(model: nn.Module) -> int:
    """Parameters that a forward of one token reads: all but the rows of an embedding that is only looked up."""
    embedding, output = None, None
    if isinstance(model, PreTrainedModel):
        embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    looked_up = embedding is not None and (output is None or embedding.weight is not output.weight)
    size = embedding.weight.numel() if looked_up and embedding is not None else 0  # type: ignore[operator]
    return parameter_count(model) - int(size)


def too_costly(draft: int, target: int) -> str | None:
    """A warning if a draft costs more than half of its target, both in parameters read; else None."""
    if draft <= COSTLY * target:
        return None
    return (
        f"the draft reads {draft:,} parameters per token and the target {target:,}: more than half, so that drafting "
        f"can hardly pay; docs/choosing-a-draft.md says how large a draft should be"
    )
