"""What an evaluation tells a tracker: every figure under a name of its own, and nothing that is not defined."""

from pathlib import Path

import pytest

from draftsmith_core.errors import InputError
from eval.config import EvalConfig
from eval.evaluate import evaluate
from eval.tracking import figures
from tests.results_made_up import BASE, BOTH, view


def test_every_defined_figure_has_one_flat_name() -> None:
    results = view({"base": BASE, "mine": {"id": 0.2, "ood": 0.1}}, BOTH)
    named = figures(results)
    assert named["alpha/mine/prose/T0"] == results.alpha("mine", "prose", 0.0)["value"]
    assert named["tau/mine/ood/T1/chain:2/speculative"] == results.tau("mine", "ood")["value"]
    assert {name.partition("/")[0] for name in named} == {"alpha", "gain", "tau", "speedup", "transfer"}
    # 2 drafts on 2 sets and both kinds at 2 temperatures; gain and transfer are of the aligned one.
    assert len(named) == 3 * 16 + 8 + 4
    for row in results.rows("transfer"):
        row["value"] = None
    assert len(figures(results)) == len(named) - 4


def test_a_missing_tracker_is_told_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = EvalConfig(
        target="t", draft=["a=b"], id=["c=d"], out=str(tmp_path / "out"), tracker="wandb", project="mine"
    )
    with pytest.raises(
        InputError, match=r"^tracker: needs wandb, which is not installed; pip install 'draftsmith\[wandb\]'$"
    ):
        evaluate(config)
    assert not list(tmp_path.iterdir())
