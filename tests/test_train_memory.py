"""The forecast of memory is what is measured."""

from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.core.models import load_model, memory_bytes
from draftsmith.train import loop, memory
from draftsmith.train.config import TrainConfig
from draftsmith.train.parallel import Copies
from draftsmith.train.training_run import train

# How far the forecast of activations may be off.
FACTOR = 2.0


@pytest.fixture(scope="module")
def distilled(answers):
    return answers("The quick brown fox jumps over the lazy dog", 3, 4, 24)


def bytes_of(tensors: dict[int, Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"kind": "lm", "objective": "fkl"},
        {"kind": "lm", "objective": "ce", "optim": {"name": "sgd"}},
        {"kind": "eagle", "objective": "fkl"},
    ],
    ids=lambda options: f"{options['kind']}-{options['objective']}",
)
def test_it_is_what_a_step_takes(
    options, tmp_path, distilled, target_dir, draft_dir, monkeypatch, capsys
):
    if options["kind"] == "lm":
        options = options | {"draft": draft_dir}
    config = TrainConfig(
        out=str(tmp_path / "out"),
        data=[distilled],
        target=target_dir,
        max_length=12,
        batch_size=8,
        steps=1,
        device="cpu",
        **options,
    )
    kept: dict[int, Tensor] = {}
    found: dict[str, int] = {}
    step = loop.training_step

    def measured(job: Any, wrapped: Copies, *given: Any) -> dict[str, float]:
        def pack(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage()._cdata] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            figures = step(job, wrapped, *given)
        weights = {each.untyped_storage()._cdata for each in wrapped.trainee.parameters()}
        found["kept"] = bytes_of({key: kept[key] for key in kept.keys() - weights})
        found["draft"] = sum(each.nbytes for each in wrapped.trainee.parameters())
        states = wrapped.states().values()
        moments = [each for state in states for key, each in state.items() if key != "step"]
        gradients = sum(each.nbytes for _, each in wrapped.trained())
        found["optimizer"] = gradients + sum(each.nbytes for each in moments)
        return figures

    monkeypatch.setattr(loop, "training_step", measured)
    forecast = memory.forecast(config)
    train(config)
    said = capsys.readouterr().err.splitlines()[0]
    assert said.startswith("train: memory: ") and "does not fit" not in said
    assert forecast.target == memory_bytes(load_model(target_dir, device="cpu"))
    assert (forecast.draft, forecast.optimizer) == (found["draft"], found["optimizer"])
    assert found["kept"] / FACTOR < forecast.activations < FACTOR * found["kept"]


def of_nothing_loaded(target: str, draft: str, **more: Any) -> TrainConfig:
    return TrainConfig(
        out="out", data=["x"], target=target, draft=draft, objective="fkl", device="cpu", **more
    )


@pytest.mark.parametrize(
    ("options", "needed", "fix"),
    [
        ({"batch_size": 64}, {"batch_size": 16}, "lower batch_size to 16 and raise accumulation"),
        ({"batch_size": 1}, {"batch_size": 1, "dtype": "bfloat16"}, "by --dtype bfloat16"),
    ],
)
def test_it_names_what_makes_it_fit(options, needed, fix, target_dir, draft_dir, monkeypatch):
    least = memory.forecast(of_nothing_loaded(target_dir, draft_dir, **needed)).total
    monkeypatch.setattr(memory, "_free", lambda device: least)
    first, second = memory.in_words(of_nothing_loaded(target_dir, draft_dir, **options))
    assert first.startswith("memory: ") and fix in second


def test_print_config_ends_with_it(target_dir, draft_dir, door):
    words = ["--out", "o", "--data", "d", "--draft", draft_dir, "--print_config"]
    assert "# memory: " in door("train", *words)[1].splitlines()[-1]
    # Options that are not complete have none.
    assert "memory:" not in door("train", "--out", "o", "--print_config")[1]


@pytest.mark.parametrize(
    "place, limit, held", [("", "max", "anon"), ("memory", "limit_in_bytes", "total_rss")]
)
def test_a_container_has_what_its_limit_leaves(place, limit, held, tmp_path, monkeypatch):
    """Of both versions of cgroups; without a limit, or outside of a container, the machine's."""
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    machine = memory._free(torch.device("cpu"))
    (tmp_path / place).mkdir(exist_ok=True)
    (tmp_path / place / "memory.stat").write_text(f"file 4096\n{held} 1000\n")
    (tmp_path / place / f"memory.{limit}").write_text("5000\n")
    assert memory._free(torch.device("cpu")) == 4000
    (tmp_path / place / f"memory.{limit}").write_text("max\n")
    assert memory._free(torch.device("cpu")) == pytest.approx(machine, rel=0.5)
