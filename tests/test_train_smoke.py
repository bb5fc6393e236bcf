"""Every recipe of configs/train in small, from its own file to a draft that decodes, on nothing but what is here."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from drafts.load import draft_fingerprint, draft_kind, load_draft
from draftsmith_core.models import load_model

Door = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "configs" / "train").glob("*.yaml"))
FAMILIES = {
    "llama": "llama", "vicuna": "llama", "opt": "opt", "gemma": "gemma2", "pythia": "gpt_neox", "qwen3": "qwen3",
}  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_runs_in_small(recipe: Path, tmp_path: Path, door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # recipes name shapes in configs/models
    written = yaml.safe_load(recipe.read_text())
    kind = written.get("kind", "lm")
    code, text, err = door(
        "train", "--config", recipe, "--out", tmp_path / "out", "--smoke", "--device", "cpu", "--json"
    )
    assert code == 0, err
    summary = json.loads(text.splitlines()[-1])
    out = tmp_path / "out-smoke"
    assert (summary["checkpoint"], summary["steps"]) == (str(out), 4)
    # Nothing is written beside it, neither features nor anything where the recipe's own paths point.
    assert {path.name for path in tmp_path.iterdir()} == {"out-smoke"}
    assert (out / "features").is_dir() == ("features" in written.get("head", {}))
    for role, source in (("target", written["target"]), ("draft", written.get("draft_config"))):
        if source is not None:
            family = next(family for name, family in FAMILIES.items() if Path(source).name.lower().startswith(name))
            assert json.loads((out / "inputs" / role / "config.json").read_text())["model_type"] == family
    target = load_model(str(out / "inputs" / "target"), device="cpu")
    draft = load_draft(str(out), target, device="cpu", dtype="auto")
    assert draft_kind(str(out)) == ("draft" if kind == "lm" else kind)
    assert draft_fingerprint(draft) == json.loads((out / "draftsmith.json").read_text())["fingerprint"]
    assert all(bool(torch.isfinite(weight).all()) for weight in draft.parameters())
    alone = ("decode", "--target", out / "inputs" / "target", "--prompt", "The", "--max_new_tokens", 8, "--json")
    answers = []
    for words in (alone, (*alone, "--draft", out)):
        code, text, err = door(*words)
        assert code == 0, err
        answers.append(json.loads(text.splitlines()[-1])["outputs"][0]["output_ids"])
    assert answers[0] == answers[1]


def test_again_is_anew_and_what_is_not_from_a_smoke_is_left_alone(tmp_path: Path, door: Door) -> None:
    words = ("train", "--out", tmp_path / "o", "--data", "d", "--smoke", "--device", "cpu")
    # A family is known by a published model's name.
    pair = ("--draft", "someone/pythia-1b", "--target", "google/gemma-2-27b-it")
    assert door(*words, *pair)[0] == door(*words, *pair)[0] == 0
    assert json.loads((tmp_path / "o-smoke/config.json").read_text())["model_type"] == "gpt_neox"
    (tmp_path / "o-smoke/inputs/text.jsonl").unlink()
    code, _, err = door(*words, *pair)
    assert code == 2 and "is not from an earlier --smoke" in err
    code, _, err = door("train", "--out", tmp_path / "p", "--data", "d", "--draft", "someone/thing", "--smoke")
    assert code == 2 and "someone/thing: no such file, and no family of models is in its name" in err
