"""A tiny random model of each type of transformers' that keeps a recurrent or convolution state."""

from functools import cache
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.tiny_models import redrawn

VOCAB = 17
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
_EQUAL_HEADS = {**_SIZES, "num_key_value_heads": 4}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_DELTA_RULE = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_MAMBA_2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 4,
}
_CONVOLUTIONS = {"conv_L_cache": 3, "layer_types": ["conv", "full_attention", "conv"]}
_MAMBA = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
_LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
# Transformers bounds the time step of a scan from below, and not that of a single token.
_NO_LEAST_STEP = {"time_step_min": 1e-12}
HYBRIDS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {
        **_EQUAL_HEADS,
        **_LATENT,
        "layer_types": _DELTA_RULE["layer_types"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    # A long chunk: the scans of short blocks are shortened.
    "bamba": {**_SIZES, **_MAMBA_2, "mamba_chunk_size": 256, "attn_layer_indices": [1]},
    "falcon_h1": {**_SIZES, **_MAMBA_2, "mamba_d_ssm": 64},
    "falcon_mamba": _MAMBA,
    "granitemoehybrid": {
        **_SIZES,
        **_MAMBA_2,
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 0,
        "shared_intermediate_size": 32,
    },
    "jamba": {
        **_SIZES,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "expert_layer_period": 3,
        "expert_layer_offset": 2,
        "num_experts": 2,
        "num_experts_per_tok": 1,
    },
    "kimi_linear": {
        **_EQUAL_HEADS,
        **_LATENT,
        "layer_types": _DELTA_RULE["layer_types"],
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 16,
    },
    "lfm2": {**_SIZES, **_CONVOLUTIONS},
    "lfm2_moe": {**_SIZES, **_EXPERTS, **_CONVOLUTIONS, "num_dense_layers": 1},
    "lfm3": {**_SIZES, **_CONVOLUTIONS},
    "mamba": _MAMBA,
    "mamba2": {
        **_MAMBA,
        "num_heads": 4,
        "head_dim": 16,
        "n_groups": 1,
        "chunk_size": 4,
    },
    "minimax": {
        **_SIZES,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "block_size": 4,
        "layer_types": _DELTA_RULE["layer_types"],
    },
    "nemotron_h": {
        **_SIZES,
        **_NO_LEAST_STEP,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 4,
        "hybrid_override_pattern": "M*-",
    },
    "olmo_hybrid": {**_SIZES, **_DELTA_RULE},
    "qwen3_5_moe_text": {**_SIZES, **_EXPERTS, **_DELTA_RULE},
    "qwen3_5_text": {**_SIZES, **_DELTA_RULE},
    "qwen3_next": {**_SIZES, **_EXPERTS, **_DELTA_RULE},
    "qwen4_exp_text": {
        **_SIZES,
        **_EXPERTS,
        **_DELTA_RULE,
        "hc_count": 2,
        "hc_lowrank": 8,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 64,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {
        **_SIZES,
        "num_key_value_heads": 1,
        "lru_width": 32,
        "attention_window_size": 6,
    },
    "rwkv": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "attention_hidden_size": 32,
        "intermediate_size": 48,
        "context_length": 64,
    },
    "xlstm": {
        "hidden_size": 64,
        "embedding_dim": 64,
        "num_hidden_layers": 2,
        "num_blocks": 2,
        "num_heads": 2,
        "qk_dim_factor": 1.0,
        "chunk_size": 4,
    },
    "zamba": {
        **_EQUAL_HEADS,
        "num_hidden_layers": 4,
        "mamba_d_state": 8,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "zamba2": {
        **_SIZES,
        **_NO_LEAST_STEP,
        "mamba_d_state": 8,
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "mamba_ngroups": 1,
        "chunk_size": 4,
        "num_mem_blocks": 1,
        "layers_block_type": ["mamba", "hybrid", "mamba"],
    },
    "zaya": _SIZES,
}

# Convolutions; a gated delta rule, Mamba 2 and attention in parallel, and a state that is read
# token by token, all with attention; recurrent layers alone.
SOME_HYBRIDS = ("lfm2", "qwen3_next", "falcon_h1", "jamba", "mamba2")


@cache
def hybrid(kind: str, seed: int = 1, vocabulary: int = VOCAB) -> PreTrainedModel:
    """One of `HYBRIDS` in fp32, in eval mode."""
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    special: dict[str, Any] = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    config = cast(Any, CONFIG_MAPPING[kind])(vocab_size=vocabulary, **special, **HYBRIDS[kind])
    torch.manual_seed(seed)
    return redrawn(cast(PreTrainedModel, AutoModelForCausalLM.from_config(config).float()), 0.3)
