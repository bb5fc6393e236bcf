"""Options from Python: what the command line's parser would refuse is refused by name."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import draftsmith as ds
from distill.config import DistillConfig
from draftsmith.__main__ import main
from draftsmith_core.errors import InputError

TRAIN: dict[str, Any] = {"out": "o", "data": ["d"], "draft": "q"}
EVAL: dict[str, Any] = {"target": "t", "draft": ["a=q"], "id": ["a=p"], "out": "o"}
ALIGN: dict[str, Any] = {"target": "t", "draft": "q", "prompts": "p", "out": "o"}


def test_paths_tuples_and_numbers_of_numpy_are_taken() -> None:
    config = ds.TrainConfig(out=Path("o"), data=(Path("d"),), draft=Path("q"), steps=np.int64(3), epochs=2)  # type: ignore[arg-type]
    assert (config.out, config.data, config.draft, config.steps) == ("o", ["d"], "q", 3)
    assert type(config.steps) is int


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("TrainConfig", TRAIN | {"data": "d"}, "data: expected a list of texts, got 'd'"),
        ("TrainConfig", TRAIN | {"steps": "4"}, "steps: expected a whole number or None, got '4'"),
        ("TrainConfig", TRAIN | {"steps": True}, "steps: expected a whole number or None, got True"),
        ("TrainConfig", TRAIN | {"optim": {"lr": 1e-3}}, "optim: expected a Optim, got {'lr': 0.001}"),
        ("TrainConfig", TRAIN | {"precision": "fp16"}, "precision: expected one of auto, fp32, bf16, got 'fp16'"),
        ("EvalConfig", EVAL | {"draft": {"a": "q"}}, "draft: expected a list of texts, got {'a': 'q'}"),
        ("EvalConfig", EVAL | {"temperature": 1.0}, "temperature: expected a list of numbers, got 1.0"),
        ("AlignConfig", ALIGN | {"ood": "code=x"}, "ood: expected a list of texts, got 'code=x'"),
        (
            "AlignConfig",
            ALIGN | {"policy": "blanced"},
            "policy: expected one of id, balanced, no_loss or None",
        ),
        ("InitConfig", {"target": "t", "out": "o", "method": "cut"}, "method: expected one of prune, transplant, fre"),
        ("ExportConfig", {"draft": "q", "out": "o", "format": "ggml"}, "format: expected one of hf, eagle, sglang"),
        ("DoctorConfig", {"target": 5, "draft": "q"}, "target: expected a text, got 5"),
        ("MergeConfig", {"draft": "q", "out": "o"}, "draft: expected a list of texts, got 'q'"),
        ("DistillConfig", {"target": "t", "prompts": "p", "out": 5}, "out: expected a text, got 5"),
        ("PlanConfig", {"target": "t", "draft": "q", "prompts": ["p"], "out": "o"}, "prompts: expected a text, got"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(kind: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ds.InputError) as caught:
        getattr(ds, kind)(**options)
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)


def test_what_is_wrong_within_a_section_has_its_whole_name() -> None:
    from train.config import Optim

    with pytest.raises(ds.InputError, match="optim.lr: expected a number, got '1e-3'"):
        ds.TrainConfig(**TRAIN, optim=Optim(lr="1e-3"))  # type: ignore[arg-type]


@pytest.mark.parametrize("command", ["decode", "align"])
def test_null_in_a_file_is_refused_where_something_must_stand(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The parser takes null for any type."""
    file = tmp_path / "c.yaml"
    file.write_text("target: t\nprompt: a\nseed: null\n" if command == "decode" else "target: t\nseed: null\n")
    assert (
        main([command, "--config", str(file), *(["--prompts", "p", "--out", "o"] if command == "align" else [])]) == 2
    )
    line = 3 if command == "decode" else 2
    assert f"c.yaml:{line}: seed: expected a whole number, got None" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--prompts"], ["--out"], ["--endpoint", "http://h/v1"]])
def test_bytes_that_are_not_utf8_are_refused_before_anything_is_done(
    door: Callable[..., tuple[int, str, str]], tmp_path: Path, words: list[str]
) -> None:
    """Names of files from a Latin-1 system: what we write could not say them."""
    asked = ["distill", "--target", "t", "--prompts", tmp_path / "p.jsonl", "--out", tmp_path / "out"]
    code, _, err = door(*asked, *words, os.fsdecode(b"caf\xe9"))
    key = words[0].removeprefix("--")
    assert (code, err.count("\n")) == (2, 1)
    assert err.endswith(f"{key}: holds what is not UTF-8; write it in UTF-8, and rename what it names\n")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InputError, match=f"{key}: holds what is not UTF-8"):
        value: Any = [os.fsdecode(b"\xff")] if key == "endpoint" else os.fsdecode(b"\xff")
        DistillConfig(**{"target": "t", "prompts": "p", "out": "o", key: value})
