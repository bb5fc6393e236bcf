"""`--smoke`: any recipe at a size that runs in seconds, on made-up data, with nothing downloaded.

Models are replaced by random ones of the same family with two narrow layers (a target has more, so that heads find the
layers they read), with the rotary scaling and the vocabulary padding that `configs/models` knows of them. Data is
replaced by a small distilled set with teacher columns, the run has a few steps, and a head starts fresh. What is tried
out is the rest of the recipe: its kind, objective, data mode, optimizer and launcher.
"""

import json
import logging
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from draftsmith_core.errors import InputError
from draftsmith_core.io import make_dir, read_json, sha256_file, write_json_atomic
from draftsmith_core.sources import quiet
from draftsmith_core.teacher_rows import COLUMN, pack
from train.config import TrainConfig

log = logging.getLogger(__name__)

_SHIPPED = Path(__file__).parents[1] / "configs" / "models"
_MARK = "smoke.json"
# Parts of published models' names and the model_type that they imply; the longest that fits counts.
_FAMILIES = {
    "vicuna": "llama",
    "llama": "llama",
    "mistral": "mistral",
    "opt": "opt",
    "pythia": "gpt_neox",
    "gemma-2": "gemma2",
    "gemma-3": "gemma3_text",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "phi": "phi",
    "gpt2": "gpt2",
}
_VOCABULARY = 320
# Size of the vocabularies that are padded in the recipe, that is, larger than the smallest of them.
_PADDED = 384
_DRAFT_VOCABULARY = 64
_POSITIONS = 128
_TARGET_LAYERS = 6
_ROWS = 24


def make_inputs(config: TrainConfig) -> None:
    """Write the models and data that `smoke_config` names; InputError when something else is in their place."""
    quiet()
    out = Path(f"{config.out}-smoke")
    inputs = out / "inputs"
    if out.exists() and not (inputs / _MARK).exists():
        raise InputError(f"{out}: is not from an earlier --smoke; move it away or choose another `out`")
    if not _SHIPPED.is_dir():
        log.warning(
            "smoke: the shapes of published models are in configs/models of a clone, which is not here; families are "
            "told from names, and rotary scaling and padded vocabularies are not tried"
        )
    shapes = {role: _shape(source) for role, source in _sources(config).items()}
    sizes = _vocabularies(shapes)
    shutil.rmtree(out, ignore_errors=True)
    make_dir(inputs, "out")
    write_json_atomic(inputs / _MARK, {"recipe": config.out})
    _write_data(inputs / "data")
    tokenizer = _tokenizer()
    for role, shape in shapes.items():
        _write_model(inputs / role, shape, _TARGET_LAYERS if role == "target" else 2, sizes[role], tokenizer)


def smoke_config(config: TrainConfig) -> TrainConfig:
    """The same recipe at a small size, in a directory beside `out`."""
    out = Path(f"{config.out}-smoke")
    inputs = out / "inputs"
    data = str(inputs / "data")
    named = {role: str(inputs / role) for role in _sources(config)}
    head, policy = config.head, config.on_policy
    return replace(
        config,
        out=str(out),
        data=[data],
        heldout=[data] if config.heldout else [],
        replay=[data] if config.replay else [],
        heldout_fraction=0.2,
        draft=named.get("draft"),
        draft_config=None,
        target=named.get("target"),
        reference=named.get("reference"),
        tokenizer=None if config.tokenizer is None else named.get("target", named.get("draft")),
        head=replace(
            head,
            draft_vocab_size=head.draft_vocab_size and min(head.draft_vocab_size, _DRAFT_VOCABULARY),
            test_steps=head.test_steps and min(head.test_steps, 3),
            features=head.features and str(out / "features"),
            features_gib=head.features_gib and min(head.features_gib, 0.1),
        ),
        on_policy=replace(policy, max_new_tokens=min(policy.max_new_tokens, 8)) if policy.fraction else policy,
        max_length=min(config.max_length, 48),
        batch_size=min(config.batch_size, 2),
        accumulation=min(config.accumulation, 2),
        steps=4,
        eval_every=2,
        save_every=2,
        optim=replace(config.optim, warmup_steps=min(config.optim.warmup_steps, 1)),
        trust_remote_code=False,
    )


def _sources(config: TrainConfig) -> dict[str, str]:
    """The directory, file or name that the shape of each model of the recipe is read from."""
    draft = config.draft_config or config.draft if config.kind == "lm" else None
    wanted = {"draft": draft, "target": config.target, "reference": config.reference}
    return {role: source for role, source in wanted.items() if source is not None}


def _shape(source: str) -> dict[str, Any]:
    """What is known of a config.json, a directory, or the name of a published model: at least the `model_type`."""
    name = Path(source).name.lower()
    if name.endswith(".json") and not Path(source).is_file():
        raise InputError(f"draft_config: {source}: no such file; paths are relative to the current directory")
    for path in (Path(source), Path(source) / "config.json", _SHIPPED / f"{name}.config.json"):
        if path.is_file():
            shape: dict[str, Any] = read_json(path, "a Hugging Face config.json")
            if isinstance(shape.get("model_type"), str):
                return shape
    known = [part for part in _FAMILIES if part in name]
    if not known:
        raise InputError(f"smoke: {source}: which family it is of cannot be told from its name; give a directory")
    return {"model_type": _FAMILIES[max(known, key=len)]}


def _vocabularies(shapes: dict[str, dict[str, Any]]) -> dict[str, int]:
    """The small vocabulary size of each model: padded where the real one is larger than another's."""
    real = {role: shape["vocab_size"] for role, shape in shapes.items() if isinstance(shape.get("vocab_size"), int)}
    smallest = min(real.values(), default=0)
    sizes = {role: _PADDED if real.get(role, smallest) > smallest else _VOCABULARY for role in shapes}
    # A reference is a distilled draft, so it has the draft's vocabulary.
    return sizes | ({"reference": sizes["draft"]} if "reference" in sizes else {})


def _write_model(
    path: Path, like: dict[str, Any], layers: int, vocabulary: int, tokenizer: PreTrainedTokenizerFast
) -> None:
    family = like["model_type"]
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": _POSITIONS,
        "vocab_size": vocabulary,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
    }
    if family == "opt":
        shape |= {"ffn_dim": 48, "word_embed_proj_dim": 32}
    if like.get("tie_word_embeddings") is not None:
        shape["tie_word_embeddings"] = like["tie_word_embeddings"]
    rope = like.get("rope_parameters") or {}
    # Lists have one factor per dimension of the real head size, which is not that of these small heads.
    if rope.get("rope_type", "default") != "default" and not any(isinstance(value, list) for value in rope.values()):
        shape["rope_parameters"] = rope
    torch.manual_seed(layers)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape), dtype=torch.float32)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def _tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and the two that begin and end a text."""
    pieces = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def _write_data(directory: Path) -> None:
    """A distilled set of random tokens, whose teacher gives each of them half of the mass."""
    draw = random.Random(0)
    rows = []
    for _ in range(_ROWS):
        prompt = [draw.randrange(2, 258) for _ in range(draw.randrange(3, 12))]
        response = [draw.randrange(2, 258) for _ in range(draw.randrange(4, 24))]
        rows.append(
            {
                "prompt_ids": prompt,
                "response_ids": response,
                COLUMN: pack(
                    np.array([[token, token + 1] for token in response]),
                    np.log([[0.5, 0.25]] * len(response)),
                    np.full(len(response), 0.25),
                    258,
                ),
            }
        )
    ids = pa.list_(pa.int32())
    schema = pa.schema([("prompt_ids", ids), ("response_ids", ids), (COLUMN, pa.large_binary())])
    directory.mkdir(parents=True)
    part = directory / "part-00000.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), part)
    manifest = {"complete": True, "parts": [{"file": part.name, "rows": _ROWS, "sha256": sha256_file(part)}]}
    (directory / "manifest.json").write_text(json.dumps(manifest))
