"""Recipes of `configs/train` in small: tiny models of the same families, and made-up text."""

import json
import random
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from tests.conftest import ROOT, tiny_tokenizer

FAMILIES = {
    "llama": "llama",
    "vicuna": "llama",
    "opt": "opt",
    "gemma": "gemma2",
    "pythia": "gpt_neox",
    "qwen3": "qwen3",
}
SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 320,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
SMALL = {
    "heldout_fraction": 0.2,
    "max_length": 48,
    "batch_size": 2,
    "accumulation": 2,
    "steps": 2,
    "eval_every": 1,
    "save_every": 2,
    "device": "cpu",
}


def family_of(source: str) -> str:
    """The family of a published model, by its name."""
    name = Path(source).name.lower()
    return next(family for begin, family in FAMILIES.items() if name.startswith(begin))


def small_recipe(recipe: Path, place: Path) -> Path:
    """Write models, text and the recipe for them, two steps long, whose `out` is `place/out`."""
    values: dict[str, Any] = yaml.safe_load(recipe.read_text())
    draw = random.Random(0)
    texts = ["".join(draw.choices("abcdefgh ", k=draw.randrange(20, 120))) for _ in range(24)]
    text = place / "text.jsonl"
    text.write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
    for role, layers in {"target": 6, "draft": 2}.items():
        if role not in values:
            continue
        source = values.pop("draft_config", values[role]) if role == "draft" else values[role]
        values[role] = str(_tiny(source, place / role, layers))
    for key in {"data", "heldout", "replay"} & values.keys():
        values[key] = [str(text)]
    head = values.get("head", {})
    for key, most in {"test_steps": 3, "block_size": 6}.items():
        if key in head:
            head[key] = min(head[key], most)
    head.pop("target_layers", None)
    if "features" in head:
        head["features"] = str(place / "features")
    if "draft_vocab_size" in values:
        values["draft_vocab_size"] = 64
    values.setdefault("optim", {})["warmup_steps"] = 1
    small = place / "recipe.yaml"
    small.write_text(yaml.safe_dump(values | SMALL | {"out": str(place / "out")}))
    return small


def _tiny(source: str, path: Path, layers: int) -> Path:
    """Write a model of the family. A target has six layers, so that heads find those they read."""
    torch.manual_seed(0)
    shape = ROOT / source
    kept = json.loads(shape.read_text()) if shape.is_file() else {}
    tied = {key: kept[key] for key in ("tie_word_embeddings",) if key in kept}
    config = AutoConfig.for_model(family_of(source), **SIZES, **tied, num_hidden_layers=layers)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path
