"""Ways of keeping what the base draft knew, through `align`: replay of general text, anchors, low-rank updates."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import draftsmith as ds
from draftsmith_core.errors import is_installed
from tests.test_align import SMALL

pytestmark = pytest.mark.usefixtures("undrawn")
Door = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("keeping") / "own.jsonl"
    rows = [{"prompt": f"The quick brown fox jumps {i} times over the lazy dog"} for i in range(24)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def aligned(door: Door, prompts: str, target_dir: str, draft_dir: str, tmp_path: Path) -> Callable[..., Path]:
    """`aligned(options...)` aligns the tiny draft and returns OUT."""

    def run(*options: object) -> Path:
        out = tmp_path / "-".join(str(each).strip("-") for each in options)
        words = ["--target", target_dir, "--draft", draft_dir, "--prompts", prompts, "--out", out, *SMALL, *options]
        code, _, err = door("align", *words, "--eval.tree", "chain:1", "--eval.temperature", 1)
        assert code == 0, err
        return out

    return run


def distance(out: Path, base: str) -> float:
    """How far the weights of OUT/jsd are from the base's."""
    before, after = load_file(Path(base) / "model.safetensors"), load_file(out / "jsd" / "model.safetensors")
    return float(sum((after[name] - before[name].float()).square().sum() for name in before))


def test_anchors_hold_a_draft_near_its_base(aligned: Callable[..., Path], draft_dir: str) -> None:
    free = distance(aligned(), draft_dir)
    out = aligned("--train.anchor_kl", 30)
    assert json.loads((out / "jsd" / "draftsmith.json").read_text())["config"]["anchor_kl"] == 30
    assert 0 < distance(out, draft_dir) < 0.9 * free
    # The same command finds it done, and the file of the run is read again.
    marks = (out / "jsd" / "model.safetensors").stat().st_mtime_ns
    assert aligned("--train.anchor_kl", 30) == out
    assert (out / "jsd" / "model.safetensors").stat().st_mtime_ns == marks


@pytest.mark.skipif(not is_installed("peft"), reason="needs peft (pip install 'draftsmith[peft]')")
def test_low_rank_updates(aligned: Callable[..., Path], draft_dir: str) -> None:
    out = aligned("--train.lora.rank", 2, "--train.lora.targets", "q_proj", "up_proj")
    before, after = load_file(Path(draft_dir) / "model.safetensors"), load_file(out / "jsd" / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "q_proj" in name or "up_proj" in name}
    assert all(torch.linalg.matrix_rank(after[name] - before[name], rtol=1e-4) <= 2 for name in changed)
    assert (out / "jsd" / "adapter" / "adapter_model.safetensors").is_file()
    assert aligned("--train.lora.rank", 2, "--train.lora.targets", "q_proj", "up_proj") == out


def test_general_text_is_replayed_and_a_plain_draft_stands_beside_it(aligned: Callable[..., Path]) -> None:
    out = aligned("--policy", "balanced", "--plain", "true")
    kept, plain = (json.loads((out / name / "draftsmith.json").read_text())["config"] for name in ("jsd", "jsd-plain"))
    assert (kept["replay"], kept["replay_fraction"]) == ([str(out / "general")], 0.7)
    assert (plain["replay"], plain["replay_fraction"]) == ([], 0.0)
    differs = {key for key in kept if kept[key] != plain[key]}
    assert differs == {"out", "replay", "replay_fraction"}
    manifest = json.loads((out / "general" / "manifest.json").read_text())
    assert manifest["config"]["prompts"].startswith("token:") and manifest["config"]["temperature"] == 1.0
    # What the replay draft is moved to is offered; the plain one is only compared.
    results = ds.Results.load(out / "eval")
    assert results.drafts == ["base", "jsd-plain", "jsd-balanced"]
    record = json.loads((out / "policy" / "jsd.json").read_text())
    assert record["policy"] == "balanced" and (out / "jsd-balanced" / "model.safetensors").is_file()
