"""Names and shapes of the tensors that other engines' loaders look for, from the sizes in a config.json.

Written from the engines' sources, apart from the code that writes the files, so that the two check each other:
SafeAILab/EAGLE `eagle/model/cnets.py` and `cnets1.py`; vLLM `models/llama_eagle.py`, `llama_eagle3.py`, `medusa.py`;
SGLang `models/llama_eagle.py`, `llama_eagle3.py`; speculators `models/eagle3/core.py`.
"""

from collections.abc import Mapping
from typing import Any

Shapes = dict[str, tuple[int, ...]]


def _layer(config: Mapping[str, Any], prefix: str, inputs: int) -> Shapes:
    """A LLaMA layer whose queries, keys and values read `inputs` numbers."""
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    return {
        f"{prefix}self_attn.q_proj.weight": (queries, inputs),
        f"{prefix}self_attn.k_proj.weight": (keys, inputs),
        f"{prefix}self_attn.v_proj.weight": (keys, inputs),
        f"{prefix}self_attn.o_proj.weight": (hidden, queries),
        f"{prefix}mlp.gate_proj.weight": (inner, hidden),
        f"{prefix}mlp.up_proj.weight": (inner, hidden),
        f"{prefix}mlp.down_proj.weight": (hidden, inner),
        f"{prefix}post_attention_layernorm.weight": (hidden,),
    }


def eagle(config: Mapping[str, Any]) -> Shapes:
    """EAGLE-1/2: no input norm in its layer, no final norm, no output projection."""
    hidden = config["hidden_size"]
    found = _layer(config, "layers.0.", hidden) | {
        "embed_tokens.weight": (config["vocab_size"], hidden),
        "fc.weight": (hidden, 2 * hidden),
    }
    return found | ({"fc.bias": (hidden,)} if config["bias"] else {})


def eagle3(config: Mapping[str, Any], prefix: str = "midlayer.", embedding: bool = False) -> Shapes:
    """EAGLE-3, with a table of embeddings of its own where `embedding`."""
    hidden, vocabulary, drafted = config["hidden_size"], config["vocab_size"], config["draft_vocab_size"]
    found = _layer(config, prefix, 2 * hidden) | {
        f"{prefix}input_layernorm.weight": (hidden,),
        f"{prefix}hidden_norm.weight": (hidden,),
        "fc.weight": (hidden, 3 * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (drafted, hidden),
    }
    if embedding:
        found["embed_tokens.weight"] = (vocabulary, hidden)
    return found | ({"d2t": (drafted,), "t2d": (vocabulary,)} if drafted < vocabulary else {})


def medusa(config: Mapping[str, Any]) -> Shapes:
    """vLLM's Medusa: residual blocks apart from the projections."""
    hidden = config["hidden_size"]
    found: Shapes = {}
    for head in range(config["num_heads"]):
        for block in range(config["num_hidden_layers"]):
            found[f"blocks.{head}.layers.{block}.weight"] = (hidden, hidden)
            found[f"blocks.{head}.layers.{block}.bias"] = (hidden,)
        found[f"lm_heads.{head}.weight"] = (config["vocab_size"], hidden)
    return found
