"""Rebuilding the shipped pair, on a corpus and recipes cut down to seconds."""

import json
import random
from pathlib import Path

import pytest
import yaml

from benchmarks.studies import rebuild_pair
from draftsmith.core.models import eos_ids, load_model
from draftsmith.core.tokenization import load_tokenizer
from draftsmith.demo import corpus
from draftsmith.demo.corpus import Document

RECIPES = Path(__file__).parents[1] / "draftsmith" / "demo" / "recipes"
WORDS = (
    "the value of an expression is returned when name lookup fails in scope and error raised "
    "by caller"
).split()


def documents(domain):
    """Forty documents of a hundred random words, no two alike."""
    drawn = {f"{domain} {number}": random.Random(f"{domain} {number}") for number in range(40)}
    words = {
        name: [f"{draw.choice(WORDS)}{draw.randrange(90)}" for _ in range(100)]
        for name, draw in drawn.items()
    }
    return [Document(name, " ".join(text)) for name, text in words.items()]


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The recipes with three steps, and the corpus replaced."""
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    for member in rebuild_pair.MEMBERS:
        recipe = yaml.safe_load((RECIPES / f"{member}.yaml").read_text())
        recipe |= {"steps": 3, "eval_every": 3, "batch_size": 2, "accumulation": 1}
        (recipes / f"{member}.yaml").write_text(yaml.safe_dump(recipe))
        shape = json.loads((RECIPES / f"{member}.config.json").read_text()) | {
            "num_hidden_layers": 1
        }
        (recipes / f"{member}.config.json").write_text(json.dumps(shape))
    domains = {name: lambda name=name: documents(name) for name in ("prose", "code")}
    monkeypatch.setattr(corpus, "DOMAINS", domains)
    for cached in (corpus.split, corpus._train_shingles):
        cached.cache_clear()
    yield recipes
    for cached in (corpus.split, corpus._train_shingles):
        cached.cache_clear()


@pytest.mark.slow
def test_one_command_makes_the_pair(small, tmp_path):
    made = rebuild_pair.rebuild(small, tmp_path / "out", "cpu")
    for member in rebuild_pair.MEMBERS:
        record = json.loads((made / member / "draftsmith.json").read_text())
        assert set(record["heldout_perplexity"]) == {"prose", "code"}
        model, tokenizer = load_model(str(made / member)), load_tokenizer(str(made / member))
        assert eos_ids(model) == (tokenizer.eos_token_id,)
    before = (made / "target" / "model.safetensors").read_bytes()
    assert rebuild_pair.rebuild(small, tmp_path / "out", "cpu") == made
    assert (made / "target" / "model.safetensors").read_bytes() == before
