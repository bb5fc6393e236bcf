"""What an evaluation tells a tracker: every figure under a name of its own, and nothing that is not defined."""

from pathlib import Path
from typing import Any

import pytest

from draftsmith_core.errors import InputError
from eval.config import EvalConfig
from eval.evaluate import evaluate
from eval.tracking import figures


def estimate(value: float | None) -> dict[str, Any]:
    return {"value": value, "low": None, "high": None}


def test_every_defined_figure_has_one_flat_name() -> None:
    def cell(draft: str | None, domain: str | None, kind: str, temperature: float, **more: Any) -> dict[str, Any]:
        return {"draft": draft, "domain": domain, "kind": kind, "temperature": temperature, **more}

    method = {"tree": "chain:4", "verifier": "speculative"}
    document: Any = {
        "alpha": [
            cell("base", "prose", "id", 0.0, alpha=estimate(0.5), gain=None),
            cell("mine", "prose", "id", 0.0, alpha=estimate(0.7), gain=estimate(0.2)),
            cell("mine", "prose", "id", 0.7, alpha=estimate(0.6), gain=estimate(0.1)),
        ],
        "overall_alpha": [cell("mine", None, "ood", 0.0, alpha=estimate(0.4), gain=estimate(None))],
        "decoding": [cell("mine", "prose", "id", 1.0, tau=estimate(2.5), **method)],
        "overall_decoding": [],
        "speed": {
            "domains": [
                cell(None, "prose", "id", 1.0, speedup=None, tree=None, verifier=None),
                cell("mine", "prose", "id", 1.0, speedup=estimate(1.5), **method),
            ],
            "overall": [cell("mine", None, "id", 1.0, speedup=estimate(None), **method)],
        },
        "transfer": [
            {"draft": "mine", "domain": "code", "temperature": 1.0, "value": 0.8},
            {"draft": "mine", "domain": None, "temperature": 1.0, "value": None},
        ],
    }
    assert figures(document) == {
        "alpha/base/prose/T0": 0.5,
        "alpha/mine/prose/T0": 0.7,
        "gain/mine/prose/T0": 0.2,
        "alpha/mine/prose/T0.7": 0.6,
        "gain/mine/prose/T0.7": 0.1,
        "alpha/mine/all ood/T0": 0.4,
        "tau/mine/prose/T1/chain:4/speculative": 2.5,
        "speedup/mine/prose/T1/chain:4/speculative": 1.5,
        "transfer/mine/code/T1": 0.8,
    }


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
