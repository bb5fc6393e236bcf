"""Every recipe is read by the command it is for, says what is so, and has models that build at
their true size.
"""

import json
import re
import shlex
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftsmith.alignment.config import AlignConfig
from draftsmith.core.command_line import parse
from draftsmith.core.models import (
    context_length,
    load_model,
    parameter_count,
    vocabulary_size,
)
from draftsmith.core.tokenization import load_tokenizer
from draftsmith.distill.config import DistillConfig
from draftsmith.drafts.load import draft_fingerprint, draft_kind, load_draft
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.request import check
from draftsmith.train.config import TrainConfig
from draftsmith.train.draft_setup import read_shape
from tests.conftest import ROOT
from tests.small_recipes import small_recipe

CONFIGS = ROOT / "configs"
DEMO = ROOT / "draftsmith" / "demo"
TRAIN = sorted(CONFIGS.glob("train/*.yaml"))
DISTILL = sorted(CONFIGS.glob("distill/*.yaml"))
SHAPES = sorted([*CONFIGS.glob("**/*.config.json"), *DEMO.glob("**/*.config.json")])


TRAINS = ("--out=o", "--data=d")
# By path: the command, its options, and what the file leaves open.
RECIPES: dict[str, tuple[str, type[Any], tuple[str, ...]]] = {
    **{str(path.relative_to(ROOT)): ("train", TrainConfig, ()) for path in TRAIN},
    **{
        str(path.relative_to(ROOT)): ("distill", DistillConfig, ("--out=o", "--target=t"))
        for path in DISTILL
    },
    "configs/bench/draft.yaml": ("train", TrainConfig, (*TRAINS, "--draft=b", "--target=t")),
    "draftsmith/demo/recipes/target.yaml": ("train", TrainConfig, TRAINS),
    "draftsmith/demo/recipes/base.yaml": ("train", TrainConfig, TRAINS),
    "draftsmith/demo/recipes/jsd.yaml": (
        "train",
        TrainConfig,
        (*TRAINS, "--draft=b", "--target=t"),
    ),
    "draftsmith/demo/recipes/demo.yaml": (
        *("align", AlignConfig),
        ("--out=o", "--target=t", "--draft=d", "--prompts=p"),
    ),
    "draftsmith/demo/recipes/demo_short.yaml": (
        "align",
        AlignConfig,
        ("--out=o", "--target=t", "--prompts=p"),
    ),
    "draftsmith/demo/recipes/large.yaml": (
        "eval",
        EvalConfig,
        ("--out=o", "--target=t", "--draft=a=b", "--id=c=d"),
    ),
    "configs/eval/gemma2-9b-2b-nf4.yaml": ("eval", EvalConfig, ("--out=o", "--id=c=d")),
    "configs/eval/model_card.yaml": (
        "eval",
        EvalConfig,
        ("--out=o", "--target=t", "--draft=d", "--id=@redhat-question", "--ood=@speed-bench"),
    ),
    "configs/eval/id_ood.yaml": (
        "eval",
        EvalConfig,
        ("--out=o", "--target=t", "--draft=a=b", "--id=c=d"),
    ),
}


def test_no_recipe_is_left_out():
    files = [*CONFIGS.rglob("*.yaml"), *DEMO.rglob("*.yaml")]
    there = {
        str(p.relative_to(ROOT)) for p in files if p.parent.name not in ("accelerate", "prompts")
    }
    assert there == set(RECIPES)
    # What there must be a recipe for, by the beginning of its name.
    pairs = """llama-68m_vicuna-7b_alpaca llama-68m_vicuna-13b llama-68m_llama2-7b-chat_sharegpt
        llama-160m_vicuna-7b_sharegpt llama-160m_vicuna-13b llama-160m_llama2-7b-chat_alpaca
        opt-125m_opt-13b gemma-2-2b_gemma-2-9b pythia-70m_pythia-12b eagle_vicuna-7b
        eagle3_llama-3.1-8b eagle3_qwen3-8b medusa_vicuna-7b hydra_vicuna-7b dflash_qwen3-8b
        dspark_qwen3-8b jetspec_qwen3-8b"""
    for pair in pairs.split():
        assert any(path.name.startswith(f"{pair}_") for path in TRAIN), pair


@pytest.mark.parametrize("path", RECIPES)
def test_recipe_is_read_by_its_command(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    command, options, missing = RECIPES[path]
    config, _ = parse(options, command, ["--config", path, *missing])
    written = yaml.safe_load((ROOT / path).read_text())
    assert written and set(written) <= {field.name for field in fields(options)}
    for key, value in written.items():
        given = getattr(config, key)
        if isinstance(value, dict):
            group = given if isinstance(given, dict) else asdict(given)
            given = {name: group[name] for name in value}
        assert given == value, key
    if isinstance(config, EvalConfig):
        check(config)


# The published sizes; the nano pair's are our own.
PARAMETERS = {
    "llama-68m": 68_030_208,
    "llama-160m": 162_417_408,
    "vicuna-7b-v1.5": 6_738_415_616,
    "vicuna-13b-v1.5": 13_015_864_320,
    "llama-2-7b-chat-hf": 6_738_415_616,
    "llama-3.1-8b-instruct": 8_030_261_248,
    "qwen3-8b": 8_190_735_360,
    "gemma-2-2b-it": 2_614_341_888,
    "gemma-2-9b-it": 9_241_705_984,
    "opt-125m": 125_239_296,
    "opt-13b": 12_853_473_280,
    "pythia-70m": 70_426_624,
    "pythia-12b": 11_846_072_320,
    "target": 3_443_136,
    "base": 405_360,
}


def build(path):
    """A model of a shape, without memory for its weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(read_shape(str(path)))
    assert isinstance(model, PreTrainedModel)
    return model


def shape_of(name):
    """The shape of a published model."""
    return CONFIGS / "models" / f"{Path(name).name.lower()}.config.json"


@pytest.mark.parametrize("path", SHAPES, ids=lambda path: path.name)
def test_shape_builds_at_its_true_size(path):
    model = build(path)
    assert parameter_count(model) == PARAMETERS[path.name.removesuffix(".config.json")]
    # A key that the family does not have would be kept and do nothing.
    known = set(type(model.config)().to_dict())
    assert set(json.loads(path.read_text())) <= known | {"model_type", "architectures"}


def _read(path):
    config, _ = parse(TrainConfig, "train", ["--config", str(path)])
    # What is said of the whole recipe, in one line; comments on options of sections are indented.
    lines = (line[1:].strip() for line in path.read_text().splitlines() if line.startswith("#"))
    return config, " ".join(lines)


OUTS = {_read(path)[0].out: path for path in TRAIN}


@pytest.mark.parametrize("path", TRAIN, ids=lambda path: path.stem)
def test_recipe_can_be_built(path):
    config, _ = _read(path)
    assert OUTS[config.out] == path
    assert config.target is not None
    target = build(shape_of(config.target))
    models = [target]
    if config.kind == "lm":
        assert config.draft is not None and config.draft_config is not None
        draft = build(ROOT / config.draft_config)
        models.append(draft)
        for key in ("bos_token_id", "eos_token_id"):
            assert getattr(draft.config, key) == getattr(target.config, key)
        same = vocabulary_size(draft) == vocabulary_size(target)
        assert same or "pythia" in path.name
    for model in models:
        limit = context_length(model)
        assert limit is not None and config.max_length <= limit


@pytest.mark.parametrize("path", TRAIN, ids=lambda path: path.stem)
def test_recipe_says_how_its_data_are_made(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    config, said = _read(path)
    assert config.draft is None or config.draft in OUTS or not config.draft.startswith("out/")
    made = {}
    for text in re.findall(r"draftsmith distill (.*?--out \S+)", said):
        words = shlex.split(text.replace("\\", ""))
        distilled, _ = parse(DistillConfig, "distill", words)
        assert distilled.target == config.target
        assert distilled.max_new_tokens < config.max_length
        name = words[1].removeprefix("configs/distill/").removesuffix(".yaml")
        assert name in path.name or (name == "general" and distilled.out in config.replay)
        made[distilled.out] = distilled
    assert set(made) == {*config.data, *config.replay}


def test_vicuna_is_asked_as_it_was_trained(target_dir, monkeypatch, golden):
    monkeypatch.chdir(ROOT)
    comment = (CONFIGS / "distill" / "alpaca.yaml").read_text()
    (template,) = re.findall(r"--chat_template (\S+)", comment)
    tokenizer = load_tokenizer(target_dir, chat_template=template)

    def rendered(*messages):
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
        assert isinstance(text, str)
        return text

    user, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}
    golden(rendered(user))
    golden(rendered(user, answer, user))
    golden(rendered({"role": "system", "content": "Be brief."}, user))


def small_runs():
    """Every recipe; slow are those of a kind that an earlier one has."""
    seen = set()
    for recipe in TRAIN:
        kind = yaml.safe_load(recipe.read_text()).get("kind")
        marks = [pytest.mark.slow] if kind in seen else []
        seen.add(kind)
        yield pytest.param(recipe, marks=marks, id=recipe.stem)


@pytest.mark.parametrize("recipe", small_runs())
def test_recipe_runs_in_small(recipe, tmp_path, door):
    written = yaml.safe_load(recipe.read_text())
    kind = written.get("kind", "lm")
    summary = door.summary("train", "--config", small_recipe(recipe, tmp_path))
    out, target = tmp_path / "out", tmp_path / "target"
    assert (summary["checkpoint"], summary["steps"]) == (str(out), 2)
    draft = load_draft(str(out), load_model(str(target), device="cpu"), device="cpu", dtype="auto")
    assert draft_kind(str(out)) == ("draft" if kind == "lm" else kind)
    assert (
        draft_fingerprint(draft) == json.loads((out / "draftsmith.json").read_text())["fingerprint"]
    )
    assert all(bool(torch.isfinite(weight).all()) for weight in draft.parameters())
    alone = ("decode", "--target", target, "--prompt", "The", "--max_new_tokens", 8)
    one, other = (
        door.summary(*words)["outputs"][0]["output_ids"]
        for words in (alone, (*alone, "--draft", out))
    )
    assert one == other
