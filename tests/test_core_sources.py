"""What cannot be a model is refused in one line that says what it is instead and what to do."""

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from draftsmith.core.errors import InputError
from draftsmith.core.models import fingerprint, load_model
from draftsmith.core.tokenization import load_tokenizer

CONFIG, MODELING = "configuration_mine.py", "modeling_mine.py"


def set_keys(file, **keys):
    return file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def change_weights(directory, change):
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def spoil(key, value):
    return lambda d: change_weights(d, lambda weights: weights[key].view(-1)[3:5].fill_(value))


def with_remote_code(directory):
    set_keys(
        directory / "config.json",
        model_type="mine",
        auto_map={
            "AutoConfig": "configuration_mine.Config",
            "AutoModelForCausalLM": "modeling_mine.Model",
        },
    )
    (directory / CONFIG).write_text(
        "from transformers import LlamaConfig\nclass Config(LlamaConfig):\n    model_type = "
        "'mine'\n"
    )
    (directory / MODELING).write_text(
        "from transformers import LlamaForCausalLM\n"
        "from .configuration_mine import Config\n"
        "class Model(LlamaForCausalLM):\n    config_class = Config\n"
    )


class Evil:
    """Runs a command when it is read as Python's pickle would (law 9)."""

    def __reduce__(self):
        return os.system, ("false",)


def as_pickle(directory, **more):
    torch.save(load_file(directory / "model.safetensors") | more, directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()


def sharded(directory):
    """As a download that was stopped leaves a checkpoint in several files."""
    model = load_on_cpu(str(directory))
    (directory / "model.safetensors").unlink()
    model.save_pretrained(directory, max_shard_size="20KB")
    sorted(directory.glob("model-0*"))[1].unlink()


def cut(name, size):
    return lambda d: (d / name).write_bytes((d / name).read_bytes()[:size])


def without_tokenizer(d):
    for file in d.glob("tokenizer*"):
        file.unlink()


def tokenizer_with_code(d):
    set_keys(
        d / "tokenizer_config.json",
        tokenizer_class="T",
        auto_map={"AutoTokenizer": ["mine.T", None]},
    )
    (d / "mine.py").write_text("raise SystemExit('ran')")


def load_on_cpu(name):
    return load_model(name, device="cpu")


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
# What is done to a good directory, by what then does not load it.
MODELS: list[Callable[[Path], Any]] = [
    spoil("model.layers.1.mlp.up_proj.weight", float("nan")),
    spoil("lm_head.weight", float("inf")),
    lambda d: set_keys(d / "config.json", vocab_size=300),
    lambda d: change_weights(d, lambda weights: weights.pop("lm_head.weight")),
    cut("model.safetensors", 1000),
    lambda d: (d / "model.safetensors").unlink(),
    lambda d: (d / "config.json").unlink(),
    sharded,
    lambda d: (d / "model.safetensors").write_text(LFS),
    lambda d: as_pickle(d, evil=Evil()),
    lambda d: set_keys(d / "config.json", model_type="nonesuch"),
    with_remote_code,
]


def only(name):
    def change(d):
        for file in d.iterdir():
            if file.name != name:
                file.unlink()

    return change


ADAPTER = ("adapter_config.json", "adapter_model.bin")
BOTH: list[Callable[[Path], Any]] = [
    lambda d: (d / "config.json").write_text("{"),
    lambda d: (d / "generation_config.json").write_text("{"),
    lambda d: [(d / name).write_text("{}") for name in ADAPTER],
    only(None),
    only("config.json"),
]
TOKENIZERS: list[Callable[[Path], Any]] = [
    without_tokenizer,
    cut("tokenizer.json", 500),
    tokenizer_with_code,
]
LOADERS = [(load_on_cpu, [*MODELS, *BOTH]), (load_tokenizer, [*TOKENIZERS, *BOTH])]


@pytest.fixture
def copy(tmp_path, target_dir):
    return shutil.copytree(target_dir, tmp_path / "copy")


def refusal(load, name):
    with pytest.raises(InputError) as refused:
        load(name)
    assert "\n" not in str(refused.value) and str(refused.value).startswith(name)
    return str(refused.value)


@pytest.mark.parametrize(("load", "changes"), LOADERS, ids=["model", "tokenizer"])
def test_a_directory_that_cannot_be_loaded(load, changes, target_dir, tmp_path, golden):
    for number, change in enumerate(changes):
        place = shutil.copytree(target_dir, tmp_path / str(number))
        change(place)
        golden(refusal(load, str(place)))


def test_an_adapter_is_told_apart_from_what_was_merged(copy, golden):
    (copy / "adapter_config.json").write_text("{}")
    # A merge leaves the config behind.
    assert load_on_cpu(str(copy)).num_parameters()
    (copy / "model.safetensors").rename(copy / "adapter_model.safetensors")
    for load in (load_on_cpu, load_tokenizer):
        golden(refusal(load, str(copy)))


def test_a_path_that_does_not_exist_is_compared_with_its_neighbours(copy):
    for load in (load_on_cpu, load_tokenizer):
        assert f"did you mean {copy}?" in refusal(load, f"{copy}2")


@pytest.mark.parametrize(
    "name", ["/no/such/place", "~/model", "a/b/c", "a=b", "", "owner/never-made", "a--b", "a/b."]
)
@pytest.mark.parametrize("load", [load_on_cpu, load_tokenizer])
def test_a_name_that_is_no_model(name, load):
    refusal(load, name)


def test_weights_without_a_place_are_named(copy, caplog, golden):
    change_weights(copy, lambda weights: weights.update({"vision.weight": torch.ones(2)}))
    with caplog.at_level(logging.WARNING):
        load_on_cpu(str(copy))
    golden("\n".join(caplog.messages), having="does not use")


def test_a_model_that_is_too_large_names_what_makes_it_fit(copy, monkeypatch, golden):
    def full(*words, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nand more")

    monkeypatch.setattr(PreTrainedModel, "to", full)
    golden(refusal(load_on_cpu, str(copy)))


def test_logits_that_overflow_name_the_dtype(copy, golden):
    change_weights(copy, lambda weights: weights["lm_head.weight"].sign_().mul_(6e4))
    load_on_cpu(str(copy))
    with golden.raises():
        load_model(str(copy), device="cpu", dtype="float16")


def test_code_that_comes_with_a_model_runs_if_it_is_allowed(copy):
    with_remote_code(copy)
    assert type(load_model(str(copy), device="cpu", trust_remote_code=True)).__name__ == "Model"


def test_a_pickle_of_tensors_is_the_same_model(copy, target_dir):
    """As LLaMA-68M is published."""
    as_pickle(copy)
    assert fingerprint(load_on_cpu(str(copy))) == fingerprint(load_on_cpu(target_dir))
