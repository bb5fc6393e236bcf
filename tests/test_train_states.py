"""Hidden states of frozen models that are held for later epochs and evaluations: fewer forwards, the same bits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaModel

from train import draft_setup

Door = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("more", [["--packing", "true"], ["--anchor_kl", "0.3"]], ids=["packed", "anchored"])
def test_held_states_save_forwards_and_change_no_bit(
    more: list[str],
    answers: Callable[..., str],
    draft_dir: str,
    target_dir: str,
    tmp_path: Path,
    door: Door,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All held, some, none, and the target's on disk; some three epochs, five evaluations."""
    data = answers("Numbers such as 12, 345 and 6789", 2, 3, 20)
    words = (
        f"train --data {data} --draft {draft_dir} --target {target_dir} --objective fkl --max_length 48 "
        "--steps 16 --batch_size 8 --eval_every 4 --save_every 3 --heldout_fraction 0.2 --optim.lr 0.01 --device cpu"
    ).split()
    forwards: list[tuple[int, ...]] = []
    real = LlamaModel.forward

    def counted(self: LlamaModel, input_ids: Any = None, **options: Any) -> Any:
        if not self.training and input_ids is not None:
            forwards.append(tuple(input_ids.shape))
        return real(self, input_ids=input_ids, **options)

    monkeypatch.setattr(LlamaModel, "forward", counted)
    files, counts = {}, {}
    for name, limit in (("all", 2**31), ("some", 10_000), ("none", 0), ("disk", 0)):
        forwards.clear()
        monkeypatch.setattr(draft_setup, "_MEMORY_BYTES", limit)
        cache = ["--head.features", str(tmp_path / "features")] if name == "disk" else []
        code, _, err = door(*words, *more, *cache, "--out", tmp_path / name)
        assert code == 0, err
        made = [(tmp_path / name / file).read_bytes() for file in ("model.safetensors", "run/metrics.jsonl")]
        files[name], counts[name] = made, len(forwards)
    assert files["some"] == files["all"] == files["none"] == files["disk"]
    assert counts["all"] < counts["some"] < counts["none"]
    assert counts["disk"] < counts["none"]
