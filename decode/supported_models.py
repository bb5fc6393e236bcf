"""Which models a token tree can be run through, and how far: everything is read from the model, nothing is run."""

import sys
from collections.abc import Sequence
from inspect import getsource, signature
from itertools import takewhile

from transformers import PreTrainedModel

from draftsmith_core.models import text_config

_FULL = ("full_attention",)
_SLIDING = ("sliding_attention",)


def attention_windows(model: PreTrainedModel) -> dict[str, int | None]:
    """Sliding window by type of layer, None for full attention: `{"full_attention": None, "sliding_attention": 4096}`.

    Raises ValueError, in one line with the reason, for models that a tree cannot be run through with a mask, positions
    and a key/value cache alone.
    """
    config = text_config(model)
    name = type(model).__name__
    if model.training:
        raise ValueError(f"{name} is in training mode; call model.eval() first, dropout would change its outputs")
    arguments = signature(model.forward).parameters
    if "past_key_values" not in arguments:
        if "cache_params" in arguments or "state" in arguments:
            raise ValueError(
                f"{name} is recurrent: its state cannot go back to an earlier token, as it must when a draft is "
                f"refused; use a model with attention"
            )
        raise ValueError(f"{name} keeps no key/value cache, and decoding here rests on one; use another model")
    if "position_ids" not in arguments or getattr(config, "alibi", False):
        raise ValueError(
            f"{name} does not take position_ids (it counts positions itself, or uses ALiBi), and the tokens of a tree "
            f"need positions of their own; use another model"
        )
    if getattr(config, "attention_layers", None) is not None:
        raise ValueError(
            f"{name} masks by a table of its own (GPT-Neo) that a tree's mask cannot replace; use another model"
        )
    attention = getattr(config, "_attn_implementation", "eager")
    if attention not in ("eager", "sdpa"):
        raise ValueError(
            f"{name} uses attention '{attention}', which takes no tree mask; load it with attn_implementation='sdpa'"
        )
    if getattr(config, "num_hidden_layers", None) == 0:
        raise ValueError(f"{name} has no layers (num_hidden_layers in its config.json is 0); use another model")
    window: int | None = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if (window is not None or "sliding_attention" in (types or ())) and not _reads_windows(model):
        # Transformers' cache would drop keys that the forward without a cache sees, so the two give different outputs.
        raise ValueError(
            f"{name} attends to all tokens, and its config.json sets a sliding window, which only the cache would "
            f"follow; take sliding_window (and layer_types) out of config.json"
        )
    if types is None:
        # Without layer_types a window applies to every layer (Mistral, Phi-3).
        return {"full_attention": None} if window is None else {"sliding_attention": window}
    for each in types:
        if each not in _FULL + _SLIDING:
            raise ValueError(f"{name} has layers of type '{each}'; only full and sliding attention can verify a tree")
    return {each: window if each in _SLIDING else None for each in sorted(set(types))}


def _reads_windows(model: PreTrainedModel) -> bool:
    """Whether the code of a model knows sliding windows; true where its code cannot be read."""
    own = takewhile(lambda each: each is not PreTrainedModel, type(model).__mro__)
    try:
        return any("sliding_window" in getsource(sys.modules[each.__module__]) for each in own)
    except (OSError, TypeError):
        return True


def check_context(name: str, limit: int | None, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """ValueError when the longest prompt and `max_new_tokens` do not fit `limit` positions of the model `name`."""
    longest = max(len(prompt) for prompt in prompts)
    if limit is not None and longest + max_new_tokens > limit:
        raise ValueError(
            f"prompt of {longest} tokens + max_new_tokens {max_new_tokens} exceed the {name}'s context "
            f"of {limit} tokens; shorten the prompt or lower max_new_tokens to {max(limit - longest, 0)}"
        )


def check_window(model: PreTrainedModel, nodes: int, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """ValueError when a text would grow beyond the window within which Doge or Moshi agree with themselves.

    Behind it their forward with a cache differs from the one without, so there is no output to be equal to: Doge keeps
    only the `keep_window_size` keys that score best among all that are in the cache, a tree of `nodes` included, and
    Moshi's cache drops keys that its mask still allows.
    """
    config = text_config(model)
    window = {"doge": getattr(config, "keep_window_size", None), "moshi": getattr(config, "sliding_window", None)}.get(
        getattr(config, "model_type", "")
    )
    if window is None:
        return
    longest = max(len(prompt) for prompt in prompts)
    room = window - longest - nodes - 1
    if max_new_tokens > room:
        raise ValueError(
            f"prompt of {longest} tokens + max_new_tokens {max_new_tokens} + a tree of {nodes} go beyond the window of "
            f"{window} tokens, behind which {type(model).__name__} gives other outputs with a cache than without; "
            f"lower max_new_tokens to {max(room, 0)}, or use another model"
        )
