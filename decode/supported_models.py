"""Which models a token tree can be run through, and how far."""

import sys
from collections.abc import Sequence
from inspect import getsource, signature
from itertools import takewhile

from transformers import PreTrainedModel

from draftsmith_core.errors import InputError
from draftsmith_core.models import check_causal, text_config

_FULL = "full_attention"
_SLIDING = "sliding_attention"


def attention_windows(model: PreTrainedModel) -> dict[str, int | None]:
    """Return the sliding window by type of layer, None for full attention: `{"sliding_attention":
    4096}`.

    Raise InputError for models that a tree cannot be run through with a mask, positions and a
    key/value cache alone.
    """
    check_causal(model)
    config = text_config(model)
    arguments = signature(model.forward).parameters
    cached = "past_key_values" in arguments
    recurrent = not cached and ("cache_params" in arguments or "state" in arguments)
    positions = "position_ids" in arguments and not getattr(config, "alibi", False)
    attention = getattr(config, "_attn_implementation", "eager")
    own_masks = getattr(config, "attention_layers", None) is not None
    odd_cache = config.model_type in ("doge", "moshi")
    window: int | None = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    windowed = window is not None or _SLIDING in (types or ())
    other = set(types or ()) - {_FULL, _SLIDING}
    kinds = ", ".join(map(repr, sorted(other)))
    reasons = {
        "is recurrent: its state cannot go back to an earlier token; use another model": recurrent,
        "keeps no key/value cache; use another model": not cached,
        "does not take position_ids, which the tokens of a tree need; "
        "use another model": not positions,
        "masks by a table of its own; use another model": own_masks,
        # Doge keeps the keys that score best among all in the cache, and Moshi's cache drops keys
        # that its mask allows.
        "gives other outputs with a cache than without; use another model": odd_cache,
        f"uses attention '{attention}', which takes no tree mask; load it with "
        "attn_implementation='sdpa'": attention not in ("eager", "sdpa"),
        # Transformers' cache would drop keys that the forward without a cache sees.
        "attends to all tokens, and its config.json sets a sliding window; remove sliding_window "
        "and layer_types": windowed and not _reads_windows(model),
        f"has layers of type {kinds}, which cannot verify a tree": bool(other),
    }
    for reason, applies in reasons.items():
        if applies:
            raise InputError(f"{type(model).__name__} {reason}")
    if types is None:
        # Without layer_types a window applies to every layer (Mistral, Phi-3).
        return {_FULL: None} if window is None else {_SLIDING: window}
    return {kind: window if kind == _SLIDING else None for kind in sorted(set(types))}


def _reads_windows(model: PreTrainedModel) -> bool:
    """Whether the code of a model knows sliding windows; true where its code cannot be read."""
    classes = takewhile(lambda kind: kind is not PreTrainedModel, type(model).__mro__)
    try:
        return any("sliding_window" in getsource(sys.modules[kind.__module__]) for kind in classes)
    except (OSError, TypeError):
        return True


def check_context(
    name: str, limit: int | None, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> None:
    """Raise ValueError if the longest prompt and `max_new_tokens` do not fit `limit` positions of
    the model `name`.
    """
    longest = max(len(prompt) for prompt in prompts)
    if limit is not None and longest + max_new_tokens > limit:
        raise ValueError(
            f"prompt of {longest} tokens + max_new_tokens {max_new_tokens} exceed the {name}'s "
            "context "
            f"of {limit} tokens; shorten the prompt or lower max_new_tokens to "
            f"{max(limit - longest, 0)}"
        )
