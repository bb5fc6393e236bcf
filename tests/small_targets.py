"""Random targets of several families, with the tokenizer of the tests."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.conftest import tiny_tokenizer
from tests.tiny_models import redrawn

SIZES = {
    "vocab_size": 290,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}


def made(kind: str, path: Path, **changes: Any) -> None:
    """Save a small random target."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SIZES | changes)))
    redrawn(model, 0.3).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
