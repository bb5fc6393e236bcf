"""`--smoke`: try a recipe in seconds, with tiny random models of the same families and made-up
text.
"""

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from draftsmith.core.errors import InputError
from draftsmith.core.hub import quiet
from draftsmith.core.io import JsonObject, read_json, read_words, write_rows
from draftsmith.core.ranks import require_single_process
from draftsmith.train.config import TrainConfig

_SHIPPED = Path(__file__).parent / "configs" / "models"


def smoke_recipe(recipe: TrainConfig) -> TrainConfig:
    """Write tiny models and a text below `OUT-smoke`; return the recipe for them, a few steps long.

    Raise InputError if `OUT-smoke` holds something else.
    """
    require_single_process("train --smoke")
    inputs = Path(f"{recipe.out}-smoke") / "inputs"
    _write_inputs(recipe, inputs)
    head, optim = recipe.head, recipe.optim
    limits = {"test_steps": 3, "features_gib": 0.1, "block_size": 6}
    small: dict[str, Any] = {"target_layers": None}
    for key, most in limits.items():
        if (given := getattr(head, key)) is not None:
            small[key] = min(given, most)
    if head.features is not None:
        small["features"] = str(inputs.parent / "features")
    text = [str(inputs / "text.jsonl")]
    vocabulary = recipe.draft_vocab_size
    return replace(
        recipe,
        out=str(inputs.parent),
        data=text * len(recipe.data),
        heldout=text if recipe.heldout else [],
        heldout_fraction=0.2,
        replay=text if recipe.replay else [],
        target=str(inputs / "target"),
        tokenizer=None,
        draft=str(inputs / "draft") if recipe.kind == "lm" else None,
        draft_config=None,
        draft_vocab_size=None if vocabulary is None else min(vocabulary, 64),
        head=replace(head, **small),
        optim=replace(optim, warmup_steps=min(optim.warmup_steps, 1)),
        trust_remote_code=False,
        max_length=min(recipe.max_length, 48),
        batch_size=2,
        accumulation=min(recipe.accumulation, 2),
        steps=4,
        eval_every=2,
        save_every=2,
        push_to_hub=None,
    )


@quiet()
def _write_inputs(config: TrainConfig, inputs: Path) -> None:
    """Write models and text. A target has six layers, so that heads find those they read."""
    if inputs.parent.exists() and not (inputs / "text.jsonl").exists():
        raise InputError(
            f"{inputs.parent}: is not from an earlier --smoke; move it away or choose another `out`"
        )
    draft = config.draft_config or config.draft or config.target
    sources = {"target": config.target or draft, "draft": draft}
    shapes = {role: _shape(source) for role, source in sources.items() if source}
    shutil.rmtree(inputs.parent, ignore_errors=True)
    pieces = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    for role, shape in shapes.items():
        torch.manual_seed(0)
        small = AutoConfig.for_model(**shape, num_hidden_layers=6 if role == "target" else 2)
        AutoModelForCausalLM.from_config(small, dtype=torch.float32).save_pretrained(inputs / role)
        saved.save_pretrained(inputs / role)
    draw = random.Random(0)
    texts = ["".join(draw.choices("abcdefgh ", k=draw.randrange(20, 120))) for _ in range(24)]
    write_rows(inputs / "text.jsonl", [{"text": text} for text in texts])


def _shape(source: str) -> JsonObject:
    """What a small model keeps of a config.json, a directory, or the name of a published model."""
    words = read_words(__file__)
    name = Path(source).name.lower()
    given = (Path(source), Path(source) / "config.json")
    shipped = (_SHIPPED / f"{name}.config.json", _SHIPPED / name)
    for path in (*given, *shipped):
        if path.is_file():
            shape = read_json(path, "a Hugging Face config.json")
            kept = [key for key in ("model_type", "tie_word_embeddings") if key in shape]
            return words["sizes"] | {key: shape[key] for key in kept}
    families: dict[str, str] = words["families"]
    family = next((family for part, family in families.items() if part in name), None)
    if name.endswith(".json") or family is None:
        raise InputError(
            f"smoke: {source}: no such file, and its name contains no known family of models"
        )
    return words["sizes"] | {"model_type": family}
