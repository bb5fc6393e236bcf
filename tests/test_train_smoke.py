"""Every recipe of configs/train in small, from its own file to a draft that decodes, on nothing but what is here."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Door = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "configs" / "train").glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_runs_in_small(recipe: Path, tmp_path: Path, door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # recipes name shapes in configs/models
    out = tmp_path / "out"
    words = ("train", "--config", recipe, "--out", out, "--smoke", "--device", "cpu", "--json")
    code, text, err = door(*words)
    assert code == 0, err
    summary = json.loads(text.splitlines()[-1])
    made = tmp_path / "out-smoke"
    assert summary["checkpoint"] == str(made)
    assert summary["steps"] == 4
    assert {path.name for path in tmp_path.iterdir()} == {"out-smoke"}
    code, _, err = door(
        *("decode", "--target", made / "inputs" / "target", "--draft", made, "--prompt", "The", "--max_new_tokens", 8)
    )
    assert code == 0, err
    # Again is anew, and what is not from a smoke is left alone.
    assert door(*words)[0] == 0
    (made / "inputs" / "smoke.json").unlink()
    code, _, err = door(*words)
    assert code == 2
    assert "is not from an earlier --smoke" in err


@pytest.mark.parametrize(
    ("target", "family"),
    [
        ("facebook/opt-13b", "opt"),
        ("google/gemma-2-9b-it", "gemma2"),
        ("EleutherAI/pythia-12b", "gpt_neox"),
        ("Qwen/Qwen3-8B", "qwen3"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama"),
        ("lmsys/vicuna-13b-v1.5", "llama"),
    ],
)
def test_families_of_published_models(target: str, family: str, tmp_path: Path, door: Door) -> None:
    words = ("train", "--out", tmp_path / "o", "--data", "d", "--draft", target, "--target", target)
    code, _, err = door(*words, "--objective", "fkl", "--smoke", "--device", "cpu")
    assert code == 0, err
    for role in ("draft", "target"):
        config = json.loads((tmp_path / "o-smoke" / "inputs" / role / "config.json").read_text())
        assert config["model_type"] == family
    assert json.loads((tmp_path / "o-smoke" / "config.json").read_text())["model_type"] == family


def test_a_name_that_tells_nothing_is_refused(tmp_path: Path, door: Door) -> None:
    code, _, err = door("train", "--out", tmp_path / "o", "--data", "d", "--draft", "someone/thing", "--smoke")
    assert code == 2
    assert "someone/thing: which family it is of cannot be told" in err
    assert not (tmp_path / "o-smoke").exists()
