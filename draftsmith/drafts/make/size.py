"""The size of a draft: what its config takes from the target, and what a forward costs."""

from transformers import PretrainedConfig

from draftsmith.core.io import JsonObject

# From the target's config, under the same names in the draft's.
_FROM_TARGET = (
    "vocab_size",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "max_position_embeddings",
)
COSTLY = 0.5


def filled(values: JsonObject, target_config: PretrainedConfig) -> tuple[JsonObject, JsonObject]:
    """Complete a draft's config values from the target's config; also return what was taken from
    there.

    Takes vocabulary, special tokens, context and rotary base.
    """
    text = target_config.get_text_config(decoder=True)
    taken = {
        key: value
        for key in _FROM_TARGET
        if key not in values and (value := getattr(text, key, None)) is not None
    }
    rope = getattr(text, "rope_parameters", None) or {}
    given = {"rope_parameters", "rope_theta", "rope_scaling"} & values.keys()
    if not given and {"rope_type", "rope_theta"} <= rope.keys():
        if any(isinstance(value, list) for value in rope.values()):
            # One factor for each dimension of a head of the target (longrope), and the draft's are
            # of another size.
            rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
        taken["rope_parameters"] = {
            key: value for key, value in rope.items() if key != "partial_rotary_factor"
        }
    return values | taken, taken


def too_costly(draft: int, target: int) -> str | None:
    """A warning if a draft reads more than half of its target's parameters per token; else None."""
    if draft <= COSTLY * target:
        return None
    return (
        f"the draft reads {draft:,} parameters per token and the target {target:,}: more than "
        "half, so that drafting "
        f"can hardly pay; docs/choosing-a-draft.md says how large a draft should be"
    )
