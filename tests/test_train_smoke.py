"""Every recipe of configs/train in small, from its own file to a draft that decodes, on nothing but what is here."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

import train.smoke
from drafts.heads.eagle3 import Eagle3Head
from drafts.heads.hydra import HydraHeads
from drafts.heads.medusa import MedusaHeads
from drafts.load import draft_fingerprint, draft_kind, load_draft
from draftsmith_core.models import load_model

Door = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "configs" / "train").glob("*.yaml"))
FAMILIES = {
    "llama": "llama",
    "vicuna": "llama",
    "opt": "opt",
    "gemma": "gemma2",
    "pythia": "gpt_neox",
    "qwen3": "qwen3",
}


def model_type(directory: Path) -> str:
    found = json.loads((directory / "config.json").read_text())["model_type"]
    assert isinstance(found, str)
    return found


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_runs_in_small(recipe: Path, tmp_path: Path, door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # recipes name shapes in configs/models
    written = yaml.safe_load(recipe.read_text())
    kind = written.get("kind", "lm")
    code, text, err = door(
        *("train", "--config", recipe, "--out", tmp_path / "out", "--smoke", "--device", "cpu", "--json")
    )
    assert code == 0, err
    summary = json.loads(text.splitlines()[-1])
    made = tmp_path / "out-smoke"
    assert summary["checkpoint"] == str(made)
    assert summary["steps"] == 4
    # Nothing is written beside it, neither features nor anything where the recipe's own paths point.
    assert {path.name for path in tmp_path.iterdir()} == {"out-smoke"}
    assert (made / "features").is_dir() == ("features" in written.get("head", {}))

    # The recipe's own families, and a draft of its kind, as it was saved.
    for role, source in (("target", written["target"]), ("draft", written.get("draft_config"))):
        if source is not None:
            wanted = next(family for name, family in FAMILIES.items() if Path(source).name.lower().startswith(name))
            assert model_type(made / "inputs" / role) == wanted
    target = load_model(str(made / "inputs" / "target"), device="cpu")
    rope = getattr(target.config, "rope_parameters", None) or {}
    assert rope.get("rope_type") == (
        "llama3" if "llama-3" in recipe.name else None if "opt" in recipe.name else "default"
    )
    draft = load_draft(str(made), target, device="cpu", dtype="auto")
    record = json.loads((made / "draftsmith.json").read_text())
    assert draft_kind(str(made)) == ("draft" if kind == "lm" else kind)
    assert draft_fingerprint(draft) == record["fingerprint"]
    assert all(bool(torch.isfinite(weight).all()) for weight in draft.parameters())
    options = written.get("head", {})
    if isinstance(draft, Eagle3Head):
        assert draft.config.draft_vocab_size == 64 < draft.vocab_size
    if isinstance(draft, MedusaHeads):
        assert (len(draft), draft.config.num_layers) == (options["num_heads"], options["num_layers"])
    if isinstance(draft, HydraHeads):
        assert len(draft.heads) == options["num_heads"]

    alone = ("decode", "--target", made / "inputs" / "target", "--prompt", "The", "--max_new_tokens", 8, "--json")
    answers = []
    for words in (alone, (*alone, "--draft", made)):
        code, text, err = door(*words)
        assert code == 0, err
        answers.append(json.loads(text.splitlines()[-1])["outputs"][0]["output_ids"])
    assert answers[0] == answers[1]


def test_again_is_anew_and_what_is_not_from_a_smoke_is_left_alone(
    tmp_path: Path, door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    words = (
        "train",
        "--config",
        ROOT / "configs/train/llama-68m_vicuna-7b_alpaca_fkl.yaml",
        "--out",
        tmp_path / "out",
        "--smoke",
        "--device",
        "cpu",
    )
    assert door(*words)[0] == 0
    assert door(*words)[0] == 0
    (tmp_path / "out-smoke" / "inputs" / "smoke.json").unlink()
    code, _, err = door(*words)
    assert code == 2
    assert "is not from an earlier --smoke" in err


def test_a_pair_that_is_padded_differently_is_so_in_small(
    tmp_path: Path, door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    words = ("--out", tmp_path / "o", "--data", "d", "--objective", "ce", "--smoke", "--device", "cpu")
    sizes = []
    for pair in (
        ("EleutherAI/pythia-70m", "EleutherAI/pythia-12b"),
        ("EleutherAI/pythia-12b", "EleutherAI/pythia-70m"),
        ("someone/pythia-1b", "EleutherAI/pythia-12b"),
    ):
        code, _, err = door("train", "--draft", pair[0], "--target", pair[1], *words)
        assert code == 0, err
        inputs = tmp_path / "o-smoke" / "inputs"
        both = [json.loads((inputs / role / "config.json").read_text())["vocab_size"] for role in ("draft", "target")]
        sizes.append(tuple(both))
    assert sizes == [(320, 384), (384, 320), (320, 320)]


def test_a_head_in_small_starts_fresh(tmp_path: Path, door: Door) -> None:
    words = ("--kind", "eagle", "--draft", "out/eagle-vicuna", "--target", "lmsys/vicuna-7b-v1.5", "--objective", "fkl")
    code, _, err = door("train", "--out", tmp_path / "o", "--data", "d", *words, "--smoke", "--device", "cpu")
    assert code == 0, err
    assert not (tmp_path / "o-smoke" / "inputs" / "draft").exists()


@pytest.mark.parametrize(
    ("target", "family"),
    [
        ("facebook/opt-6.7b", "opt"),
        ("google/gemma-2-27b-it", "gemma2"),
        ("EleutherAI/pythia-6.9b", "gpt_neox"),
        ("Qwen/Qwen3-32B", "qwen3"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral"),
    ],
)
def test_families_of_models_whose_shape_is_not_here(target: str, family: str, tmp_path: Path, door: Door) -> None:
    words = ("train", "--out", tmp_path / "o", "--data", "d", "--draft", target, "--target", target)
    code, _, err = door(*words, "--objective", "fkl", "--smoke", "--device", "cpu")
    assert code == 0, err
    for path in ("inputs/draft", "inputs/target", "."):
        assert model_type(tmp_path / "o-smoke" / path) == family


def test_a_name_that_tells_nothing_is_refused(tmp_path: Path, door: Door) -> None:
    code, _, err = door("train", "--out", tmp_path / "o", "--data", "d", "--draft", "someone/thing", "--smoke")
    assert code == 2
    assert "someone/thing: which family it is of cannot be told" in err
    assert not (tmp_path / "o-smoke").exists()


def test_a_shape_that_is_not_there_is_refused(tmp_path: Path, door: Door) -> None:
    words = ("--data", "d", "--draft_config", "configs/nowhere/llama-68m.config.json", "--smoke")
    code, _, err = door("train", "--out", tmp_path / "o", *words)
    assert code == 2
    assert "draft_config: configs/nowhere/llama-68m.config.json: no such file" in err


def test_without_the_shapes_of_a_clone_it_says_what_is_not_tried(
    tmp_path: Path, door: Door, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(train.smoke, "_SHIPPED", tmp_path / "nowhere")
    words = ("train", "--out", tmp_path / "o", "--data", "d", "--draft", "JackFram/llama-68m", "--smoke")
    assert door(*words, "--device", "cpu")[0] == 0
    assert "rotary scaling and padded vocabularies are not tried" in caplog.text
