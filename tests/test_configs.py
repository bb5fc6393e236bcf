"""Every recipe is read by the command it is for, and every model shape is built at its true size."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from distill.config import DistillConfig
from draftsmith.config import parse
from eval.config import EvalConfig, check
from train.config import TrainConfig
from train.run import read_shape

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
TRAIN = sorted(CONFIGS.glob("train/*.yaml"))
SHAPES = sorted(CONFIGS.glob("**/*.config.json"))


@dataclass(frozen=True)
class Recipe:
    path: str
    command: str
    config: type[Any]
    missing: tuple[str, ...]


RECIPES = [
    *(Recipe(str(path.relative_to(ROOT)), "train", TrainConfig, ()) for path in TRAIN),
    Recipe("configs/bench/draft.yaml", "train", TrainConfig, ("--out=o", "--data=d", "--draft=b", "--target=t")),
    Recipe("configs/demo/target.yaml", "train", TrainConfig, ("--out=o", "--data=d")),
    Recipe("configs/demo/base.yaml", "train", TrainConfig, ("--out=o", "--data=d")),
    Recipe("configs/demo/seqkd.yaml", "train", TrainConfig, ("--out=o", "--data=d", "--draft=b", "--target=t")),
    Recipe("configs/demo/fkl.yaml", "train", TrainConfig, ("--out=o", "--data=d", "--draft=b", "--target=t")),
    Recipe("configs/demo/distill.yaml", "distill", DistillConfig, ("--out=o", "--target=t", "--prompts=p")),
    Recipe("configs/demo/eval.yaml", "eval", EvalConfig, ("--out=o", "--target=t", "--draft=a=b", "--id=c=d")),
    Recipe("configs/distill/alpaca.yaml", "distill", DistillConfig, ("--out=o", "--target=t")),
    Recipe("configs/eval/gemma2-9b-2b-nf4.yaml", "eval", EvalConfig, ("--out=o", "--id=c=d")),
    Recipe("configs/eval/id_ood.yaml", "eval", EvalConfig, ("--out=o", "--target=t", "--draft=a=b", "--id=c=d")),
]


def test_no_recipe_is_left_out() -> None:
    there = {str(p.relative_to(ROOT)) for p in CONFIGS.rglob("*.yaml") if p.parent.name != "accelerate"}
    assert len(TRAIN) >= 4
    assert there == {recipe.path for recipe in RECIPES}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.path)
def test_recipe_is_read_by_its_command(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config, _ = parse(recipe.config, recipe.command, ["--config", recipe.path, *recipe.missing])
    written = yaml.safe_load((ROOT / recipe.path).read_text())
    names = {field.name for field in fields(recipe.config)}
    assert written and set(written) <= names
    for key, value in written.items():
        if not isinstance(value, dict):
            assert getattr(config, key) == value, key
    if isinstance(config, EvalConfig):
        check(config)
    if isinstance(config, TrainConfig) and config.draft_config is not None:
        shape = read_shape(config.draft_config)
        assert config.max_length <= shape.max_position_embeddings


# The published sizes: 68 M and 160 M; the nano pair's are our own.
PARAMETERS = {
    "llama-68m": 68_030_208,
    "llama-160m": 162_417_408,
    "target": 3_443_136,
    "base": 405_360,
}


@pytest.mark.parametrize("path", SHAPES, ids=lambda path: path.name)
def test_shape_builds_at_its_true_size(path: Path) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(read_shape(str(path)))
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[path.name.removesuffix(".config.json")]
    if path.parent.name == "models":
        config = model.config
        layers = {"llama-68m": 2, "llama-160m": 12}[path.name.removesuffix(".config.json")]
        assert (config.hidden_size, config.num_attention_heads, config.num_hidden_layers) == (768, 12, layers)
        assert (config.intermediate_size, config.vocab_size) == (3072, 32_000)
        assert config.max_position_embeddings == 2048


def test_shipped_pair_is_small_and_says_how_it_was_made() -> None:
    files = [path for member in ("target", "base") for path in (CONFIGS / "demo" / member).iterdir()]
    assert sum(path.stat().st_size for path in files) <= 8_000_000
    for member in ("target", "base"):
        record = json.loads((CONFIGS / "demo" / member / "draftsmith.json").read_text())
        assert set(record["heldout_perplexity"]) == {"prose", "code", "unicode"}
        assert (CONFIGS / "demo" / record["recipe"]).is_file()
