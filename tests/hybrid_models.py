"""A tiny random model of each type of transformers' that keeps a recurrent or convolution state."""

from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from benchmarks.lib.tiny_types import tiny_config
from tests.tiny_models import redrawn

VOCAB = 17
HYBRIDS = """
bailing_hybrid bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 lfm2_moe lfm3
mamba mamba2 minimax nemotron_h olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp_text
recurrent_gemma rwkv xlstm zamba zamba2 zaya
""".split()
# Convolutions; a gated delta rule, Mamba 2 and attention in parallel, and a state that is read
# token by token, all with attention; recurrent layers alone.
SOME_HYBRIDS = ("lfm2", "qwen3_next", "falcon_h1", "jamba", "mamba2")


@cache
def hybrid(kind: str, seed: int = 1, vocabulary: int = VOCAB) -> PreTrainedModel:
    """One of `HYBRIDS` in fp32, in eval mode."""
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    config: Any = tiny_config(kind)
    config.vocab_size = vocabulary
    config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    if kind == "bamba":
        # A long chunk: the scans of short blocks are shortened.
        config.mamba_chunk_size = 256
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).float()
    return redrawn(model, 0.3)
