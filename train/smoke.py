"""`--smoke`: try a recipe in seconds, with tiny random models of the same families and made-up
text.
"""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from draftsmith_core.errors import InputError
from draftsmith_core.io import read_json
from train.config import TrainConfig

_SHIPPED = Path(__file__).parents[1] / "configs" / "models"
# Parts of published models' names and the model_type that they imply; the first that fits counts.
_FAMILIES = {
    "vicuna": "llama",
    "llama": "llama",
    "mistral": "mistral",
    "opt": "opt",
    "pythia": "gpt_neox",
}
_FAMILIES |= {"gemma-2": "gemma2", "gemma-3": "gemma3_text", "phi": "phi", "gpt2": "gpt2"}
_FAMILIES |= {"qwen2": "qwen2", "qwen3": "qwen3"}
_SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 320,
}
_SIZES |= {
    "intermediate_size": 48,
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
    "max_position_embeddings": 128,
}
_SIZES |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}


def smoke_config(config: TrainConfig) -> TrainConfig:
    """The same recipe for the files of `make_inputs`, with a few short steps."""
    inputs, head, optim = Path(f"{config.out}-smoke/inputs"), config.head, config.optim
    limits = {"test_steps": 3, "features_gib": 0.1, "block_size": 6}
    sizes: dict[str, Any] = {
        key: min(getattr(head, key), most) for key, most in limits.items() if getattr(head, key)
    }
    text = [str(inputs / "text.jsonl")]
    changes: dict[str, Any] = {
        "out": str(inputs.parent),
        "data": text * len(config.data),
        "heldout_fraction": 0.2,
    }
    changes |= {"heldout": text if config.heldout else [], "replay": text if config.replay else []}
    changes |= {"target": str(inputs / "target"), "tokenizer": None}
    changes |= {
        "draft": str(inputs / "draft") if config.kind == "lm" else None,
        "draft_config": None,
    }
    changes |= {"draft_vocab_size": config.draft_vocab_size and min(config.draft_vocab_size, 64)}
    sizes["target_layers"] = None
    changes |= {
        "head": replace(head, **sizes, features=head.features and str(inputs.parent / "features"))
    }
    changes |= {
        "optim": replace(optim, warmup_steps=min(optim.warmup_steps, 1)),
        "trust_remote_code": False,
    }
    changes |= {
        "max_length": min(config.max_length, 48),
        "accumulation": min(config.accumulation, 2),
    }
    return replace(config, **changes, batch_size=2, steps=4, eval_every=2, save_every=2)


def make_inputs(config: TrainConfig) -> None:
    """Write the models and the text. A target has six layers, so that heads find those that they
    read.
    """
    inputs = Path(f"{config.out}-smoke") / "inputs"
    if inputs.parent.exists() and not (inputs / "text.jsonl").exists():
        raise InputError(
            f"{inputs.parent}: is not from an earlier --smoke; move it away or choose another `out`"
        )
    draft = config.draft_config or config.draft or config.target
    sources = {"target": config.target or draft, "draft": draft}
    shapes = {role: _shape(source) for role, source in sources.items() if source}
    shutil.rmtree(inputs.parent, ignore_errors=True)
    pieces = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[])
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    for role, shape in shapes.items():
        torch.manual_seed(0)
        small = AutoConfig.for_model(**shape, num_hidden_layers=6 if role == "target" else 2)
        AutoModelForCausalLM.from_config(small, dtype=torch.float32).save_pretrained(inputs / role)
        saved.save_pretrained(inputs / role)
    draw = random.Random(0)
    texts = ["".join(draw.choices("abcdefgh ", k=draw.randrange(20, 120))) for _ in range(24)]
    (inputs / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def _shape(source: str) -> dict[str, Any]:
    """What a small model keeps of a config.json, a directory, or the name of a published model."""
    name = Path(source).name.lower()
    for path in (Path(source), Path(source) / "config.json", _SHIPPED / f"{name}.config.json"):
        if path.is_file():
            shape = read_json(path, "a Hugging Face config.json")
            return {
                key: shape[key] for key in ("model_type", "tie_word_embeddings") if key in shape
            } | _SIZES
    family = next((family for part, family in _FAMILIES.items() if part in name), None)
    if name.endswith(".json") or family is None:
        raise InputError(
            f"smoke: {source}: no such file, and its name contains no known family of models"
        )
    return {"model_type": family} | _SIZES
