"""What a model can verify: a token tree, or a chain by its own cache; and how far it reads."""

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Literal

from transformers import PreTrainedModel

from draftsmith.core.errors import InputError, warn_once
from draftsmith.core.models import check_causal, text_config
from draftsmith.core.transformers_api import FULL, SLIDING, cache_name, layer_kinds
from draftsmith.decode.tree import CHAIN, TreeShape

# How a model goes on from its own cache: with several tokens at once, with one at a time, or not at
# all, so that the whole text is forwarded.
Reading = Literal["several", "single", "whole"]
# Of several tokens behind a state, these forget the state (transformers 5.23).
_SINGLE = ("falcon_mamba", "jamba", "mamba", "minimax", "zamba")
# Doge keeps the keys that score best among all in the cache, Dory adds layers to its cache, Moshi's
# cache drops keys that its mask allows, RecurrentGemma keeps its state in its modules, and CPM-Ant
# puts tokens before each text.
_WHOLE = ("cpmant", "doge", "dory", "moshi", "recurrent_gemma")


@dataclass(frozen=True)
class Ability:
    """What can be verified with a model.

    drafts: "tree", or "chain" by the model's own cache, row by row. windows: of a tree, the sliding
    window by type of layer, None for full attention: `{"sliding_attention": 4096}`. reading: of a
    chain, how the model goes on from its cache. reason: why no tree, as the end of a sentence that
    begins with the model.
    """

    drafts: Literal["tree", "chain"]
    windows: dict[str, int | None]
    reading: Reading = "several"
    reason: str = ""


def ability(model: PreTrainedModel) -> Ability:
    """Return what can be verified with a model. Raise InputError if nothing can: an encoder, or a
    config.json that contradicts the model.
    """
    check_causal(model)
    reason = _why_no_tree(model)
    if not reason:
        return Ability("tree", _windows(model))
    kind = text_config(model).model_type
    reading: Reading = "several"
    if kind in _SINGLE:
        reading = "single"
    layerless = getattr(text_config(model), "num_hidden_layers", None) is None
    if layerless or kind in _WHOLE or not cache_name(model.forward):
        reading = "whole"
    return Ability("chain", {}, reading, reason)


def takes_trees(*models: object) -> bool:
    """Whether trees can be drafted and verified with all of these. Heads and copies always can;
    language models are asked.
    """
    able = [ability(model) for model in models if isinstance(model, PreTrainedModel)]
    return all(each.drafts == "tree" for each in able)


def check_tree(model: PreTrainedModel, able: Ability, tree: TreeShape) -> None:
    """Raise ValueError if a model cannot verify or draft this tree. Say once which models run row
    by row.
    """
    if able.drafts == "tree":
        return
    name = type(model).__name__
    if tree.grows or not tree.is_chain:
        fix = f"chain:{min(tree.depth, CHAIN)} and a proposer of chains"
        raise ValueError(f"tree: {name} {able.reason}; use {fix}")
    how = {
        "several": "with a cache per row",
        "single": "with a cache per row and token by token, so that a chain saves no time",
        "whole": "without a cache, which takes long",
    }
    warn_once(f"{name} {able.reason}: decoding row by row, {how[able.reading]}")


def _why_no_tree(model: PreTrainedModel) -> str:
    config = text_config(model)
    arguments = signature(model.forward).parameters
    positions = "position_ids" in arguments and not getattr(config, "alibi", False)
    attention = getattr(config, "_attn_implementation", "eager")
    own_masks = getattr(config, "attention_layers", None) is not None
    layers = getattr(config, "num_hidden_layers", None)
    other = set(layer_kinds(config)) - {FULL, SLIDING}
    kinds = ", ".join(map(repr, sorted(other)))
    reasons = {
        "is recurrent": model._is_stateful and "position_ids" not in arguments,
        "keeps no key/value cache": not cache_name(model.forward),
        "does not take position_ids, which the tokens of a tree need": not positions,
        "counts positions from another number than 0": counts_positions(model),
        "masks by a table of its own": own_masks,
        "says no number of layers, which a cache needs": layers is None,
        "gives other outputs with a cache than without": config.model_type in _WHOLE,
        f"uses attention '{attention}', which takes no tree mask (attn_implementation='sdpa' "
        "does)": attention not in ("eager", "sdpa"),
        f"has layers of type {kinds}, which cannot verify a tree": bool(other),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def counts_positions(model: PreTrainedModel) -> bool:
    """Whether the model makes positions from its tokens, the first behind that of padding
    (RoBERTa).
    """
    return any(hasattr(part, "create_position_ids_from_input_ids") for part in model.modules())


def _windows(model: PreTrainedModel) -> dict[str, int | None]:
    config = text_config(model)
    window: int | None = getattr(config, "sliding_window", None)
    kinds = sorted(set(layer_kinds(config)))
    windowed = window is not None or SLIDING in kinds
    if windowed and not _reads_windows(model):
        # Transformers' cache would drop keys that the forward without a cache sees.
        raise InputError(
            f"{type(model).__name__} attends to all tokens, and its config.json sets a sliding "
            "window; remove sliding_window and layer_types"
        )
    return {kind: window if kind == SLIDING else None for kind in kinds}


def _reads_windows(model: PreTrainedModel) -> bool:
    """Whether models of this class know sliding windows: a config of theirs has the option before
    anybody sets it.
    """
    try:
        usual = type(text_config(model))()
    except TypeError:  # a config of somebody's own that needs arguments
        return True
    return hasattr(usual, "sliding_window")


def check_context(
    name: str, limit: int | None, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> None:
    """Raise ValueError if the longest prompt and `max_new_tokens` do not fit `limit` positions of
    the model `name`.
    """
    longest = max(len(prompt) for prompt in prompts)
    if limit is not None and longest + max_new_tokens > limit:
        fix = "shorten the prompt"
        if longest < limit:
            fix += f" or lower max_new_tokens to {limit - longest}"
        raise ValueError(
            f"prompt of {longest} tokens + max_new_tokens {max_new_tokens} exceed the {name}'s "
            "context "
            f"of {limit} tokens; {fix}"
        )
