"""A tiny random model of each causal architecture of transformers' registry.

Sizes are set by the name of the option: `SIZES` holds what many configs share, `OVERRIDES` what one
type needs beside it. Windows, chunks and numbers of selected tokens are smaller than the texts that
the models are tried on, so that they count.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from draftsmith.core.io import JsonObject

# A class of configs; their fields differ.
Config = Any
CONFIGS: Mapping[str, Config] = CONFIG_MAPPING
VOCABULARY = 64
# Tokens of padding, begin and end; texts avoid them.
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LAYERS = 4
_BY_SIZE: dict[int | None, str] = {
    32: "index_n_heads indexer_n_heads "
    "hidden_size d_model n_embd dim_model embedding_size embedding_dim word_embed_proj_dim",
    LAYERS: "num_hidden_layers n_layer num_layers n_layers decoder_layers encoder_layers "
    "num_blocks num_encoder_layers num_decoder_layers "
    "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
    "num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads "
    "num_experts n_routed_experts num_local_experts moe_num_experts "
    "index_topk indexer_budget mamba_n_heads mamba_num_heads linear_num_heads n_mamba_heads "
    "linear_num_value_heads chunk_size mamba_chunk_size block_size conv_size",
    2: "num_key_value_heads swa_num_key_value_heads num_experts_per_tok moe_topk moe_k "
    "num_experts_per_token indexer_kv_heads "
    "linear_num_key_heads mamba_expand expand index_block_size top_k_experts",
    1: "n_group topk_group n_groups mamba_n_groups mamba_ngroups index_topk_blocks",
    48: "intermediate_size ffn_dim d_ff d_inner n_inner ffn_hidden_size decoder_ffn_dim "
    "encoder_ffn_dim moe_intermediate_size shared_expert_intermediate_size dff dim_ff "
    "expert_ffn_hidden_size shared_intermediate_size dense_intermediate_size feed_forward_size "
    "moe_shared_expert_intermediate_size shared_experts_intermediate_size",
    8: "head_dim swa_head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim kv_channels dim_head "
    "rotary_dim linear_key_head_dim linear_value_head_dim linear_head_dim sliding_window "
    "sliding_window_size window_size attention_window_size local_attention mamba_d_state "
    "state_size ssm_state_size lru_width_per_head attention_chunk_size laurel_rank adapter_rank "
    "indexer_head_dim gated_norm_rank query_pre_attn_scalar index_head_dim router_hidden_size "
    "hc_lowrank d_rel",
    16: "q_lora_rank kv_lora_rank o_lora_rank mamba_head_dim mamba_d_head",
    128: "max_position_embeddings n_positions n_ctx context_length max_seq_len",
    VOCABULARY: "vocab_size unpadded_vocab_size vocab_size_per_layer_input",
}
SIZES: JsonObject = SPECIAL | {"tie_word_embeddings": False}
for _size, _names in _BY_SIZE.items():
    SIZES |= dict.fromkeys(_names.split(), _size)
# What a type needs beside them; None leaves an option out. A dict is for the config of a part.
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_DOTS = {"swa_num_key_value_heads": LAYERS, "swa_head_dim": 16}
for _name in "num_attention_heads q_lora_rank kv_lora_rank qk_nope_head_dim v_head_dim".split():
    _DOTS[f"swa_{_name}"] = SIZES[_name]
_ALTERNATE = ["sliding_attention", "full_attention"] * 2
_ATTENTION = ["global", "local"]
_LINEAR = ["linear_attention", "hybrid"] * 2
OVERRIDES: dict[str, JsonObject] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {
        "encoder_hash_byte_group_vocab": 50,
        "encoder_config": {"hidden_size_global": 32, "num_key_value_heads": 4},
        "decoder_config": {"hidden_size_global": 32, "num_key_value_heads": 4},
    },
    "cohere_compass_text": {
        "rope_parameters": {kind: _ROPE for kind in _ALTERNATE},
        "layer_types": _ALTERNATE,
    },
    "dbrx": {
        "attn_config": {"clip_qkv": 8, "kv_n_heads": 2, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_top_k": 2},
        "tie_word_embeddings": False,
    },
    "dots3_note": {
        "text_config": _DOTS,
        "vision_config": {
            "mlp_layer_types": ["dense"] * LAYERS,
            "adapter_in_dim": 32,
            "adapter_out_dim": 32,
        },
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "dots3_note_text": _DOTS,
    "dots1": {"n_shared_experts": 1},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "layer_types": _ALTERNATE,
        "hidden_size_per_layer_input": 8,
    },
    "gemma4_assistant": {
        "backbone_hidden_size": 32,
        "text_config": {
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "layer_types": _ALTERNATE,
        },
    },
    "gemma4_unified_assistant": {
        "backbone_hidden_size": 32,
        "text_config": {"layer_types": _ALTERNATE},
    },
    "got_ocr2": {"vision_config": {"image_size": 64, "output_channels": 8}},
    "gemma4_text": {"hidden_size_per_layer_input": 8},
    "gpt_neo": {"attention_types": [[_ATTENTION, 2]]},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "qwen4_exp_text": {"indexer_compress_ratio": 2, "indexer_kv_heads": 1},
    "qwen4_exp": {"text_config": {"indexer_compress_ratio": 2, "indexer_kv_heads": 1}},
    "reformer": {
        "attention_head_size": 8,
        "attn_layers": ["local", "lsh", "local", "lsh"],
        "axial_pos_embds": False,
        "axial_pos_shape": [8, 16],
        "axial_pos_embds_dim": [16, 16],
    },
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "rembert": {"input_embedding_size": 16, "output_embedding_size": 24},
    "roc_bert": {
        "pronunciation_vocab_size": VOCABULARY,
        "shape_vocab_size": VOCABULARY,
        "shape_embed_dim": 16,
        "pronunciation_embed_dim": 16,
    },
    "xlm": {"emb_dim": 32, "n_langs": 1, "causal": True},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": _LINEAR},
    "zamba2": {"layers_block_type": _LINEAR},
    # The sizes of its cache are rounded up to multiples of 64.
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(name: str) -> PreTrainedConfig:
    """Return the configuration of a tiny model of this type."""
    return _shrunk(CONFIGS[name], OVERRIDES.get(name, {}))


def _shrunk(kind: Config, overrides: JsonObject) -> PreTrainedConfig:
    names = {field.name for field in dataclasses.fields(kind)}
    values = {name: size for name, size in SIZES.items() if name in names}
    if "is_decoder" in names:
        values["is_decoder"] = True
    if "kv_lora_rank" in names:
        # Multi-head latent attention has no grouped heads.
        values["num_key_value_heads"] = LAYERS
    for part, spec in _parts(kind).items():
        if part in names:
            values[part] = _shrunk(spec, overrides.get(part, {}))
    plain = {name: value for name, value in overrides.items() if name not in _parts(kind)}
    config: PreTrainedConfig = kind(**values | plain)
    if "layer_types" in names and "layer_types" not in plain:
        usual = kind().layer_types or ()
        kinds = sorted(set(usual))
        if not set(config.layer_types or ()).issuperset(kinds):
            # The pattern of the first layers lacks some kinds of layer.
            layers = (kinds * LAYERS)[:LAYERS]
            config = kind(**values | plain | {"layer_types": layers})
    return config


def _parts(kind: Config) -> dict[str, Config]:
    """The classes of the configs inside a config, without optional ones."""
    parts: dict[str, Config] = {}
    for name, spec in getattr(kind, "sub_configs_defaults", {}).items():
        if dataclasses.is_dataclass(spec) and isinstance(spec, type):
            parts[name] = spec
        elif not spec.optional:
            parts[name] = CONFIGS[spec.model_type] if spec.model_type else spec.config_class
    return parts


def causal_types() -> list[str]:
    """The names of all causal language models that transformers registers."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_model(name: str, seed: int = 0, spread: float = 0.2) -> PreTrainedModel:
    """Return a random model in fp32 and eval mode. Its matrices vary enough that it does not repeat
    one token.
    """
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        tiny_config(name), dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, spread)
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx].zero_()
    model.eval()
    return model
