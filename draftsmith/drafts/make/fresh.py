"""The size of a draft: what its config takes from the target, what a forward costs, and a fresh
LLaMA of a given cost.

Candidates are wide rather than deep, because a draft's forwards are one token each and their time
is that of reading weights and starting layers. Of those that cost at most the given share, the one
with the most parameters in its layers is taken.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from draftsmith.core.errors import InputError
from draftsmith.core.models import read_per_token, vocabulary_size

# From the target's config, under the same names in the draft's.
_FROM_TARGET = (
    "vocab_size",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "max_position_embeddings",
)
COSTLY = 0.5
_HEAD = 64
_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16)


def filled(values: Mapping[str, Any], target_config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
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
    return dict(values) | taken, taken


def too_costly(draft: int, target: int) -> str | None:
    """A warning if a draft reads more than half of its target's parameters per token; else None."""
    if draft <= COSTLY * target:
        return None
    return (
        f"the draft reads {draft:,} parameters per token and the target {target:,}: more than "
        "half, so that drafting "
        f"can hardly pay; docs/choosing-a-draft.md says how large a draft should be"
    )


def fresh(target: PreTrainedModel, cost: float, seed: int = 0) -> tuple[PreTrainedModel, float]:
    """An untrained draft that reads at most `cost` of the target's parameters per token, and the
    share that it reads.

    Raises InputError if the smallest shape still costs more.
    """
    shares = [(_read(config) / read_per_token(target), config) for config in _shapes(target)]
    affordable = [(share, config) for share, config in shares if share <= cost]
    if not affordable:
        least = min(share for share, _ in shares)
        raise InputError(
            f"cost: no shape costs as little as {cost} of the target; least found was "
            f"{least:.3f}; raise it"
        )
    share, config = max(affordable, key=lambda shape: _layer_parameters(shape[1]))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    nn.Module.to(model, dtype=target.dtype, device=target.device)
    model.eval()
    return model, share


def _shapes(target: PreTrainedModel) -> list[LlamaConfig]:
    # Widths from an eighth of the target's up to its own, in steps of a head, by depths below the
    # target's.
    text = target.config.get_text_config(decoder=True)
    hidden = int(text.hidden_size)
    depth = int(text.num_hidden_layers)
    # Even, because rotary embeddings turn pairs.
    head = min(_HEAD, max(8, hidden // 8 * 2))
    widths = {max(head, round(hidden * eighth / 8 / head) * head) for eighth in range(1, 9)}
    shared, _ = filled({"tie_word_embeddings": True}, target.config)
    return [
        LlamaConfig(
            **shared | {"vocab_size": vocabulary_size(target)},
            hidden_size=width,
            intermediate_size=round(width * 8 / 3 / 16) * 16,
            num_hidden_layers=layers,
            num_attention_heads=width // head,
            num_key_value_heads=width // head,
        )
        for width in sorted(widths)
        for layers in _DEPTHS
        if layers <= max(1, depth // 2)
    ]


def _layer_parameters(config: LlamaConfig) -> int:
    hidden = config.hidden_size
    return int(config.num_hidden_layers * (4 * hidden**2 + 3 * hidden * config.intermediate_size))


def _read(config: LlamaConfig) -> int:
    with torch.device("meta"):
        return read_per_token(LlamaForCausalLM(config))
