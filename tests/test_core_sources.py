"""What cannot be a model is refused in one line that says what it is instead and what to do."""

import json
import logging
import os
import re
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

Tensors = dict[str, torch.Tensor]
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
CODE = (
    r"it needs the Python code that comes with it; read that, and add --trust_remote_code to "
    r"run it$"
)
# By what loads it: what is done to a good directory, and what is said of it.
MODELS: list[tuple[Callable[[Path], Any], str]] = [
    (
        spoil("model.layers.1.mlp.up_proj.weight", float("nan")),
        r": its weight model\.layers\.1\.mlp\.up_proj",
    ),
    (
        spoil("lm_head.weight", float("inf")),
        r": its weight lm_head\.weight holds NaN or inf; .* copy it again$",
    ),
    (
        lambda d: set_keys(d / "config.json", vocab_size=300),
        r": its weights .*\(2, such as lm_head\.weight: \[290, 16\] in the file, \[300, 16\] by "
        r"the config\)",
    ),
    (
        lambda d: change_weights(d, lambda weights: weights.pop("lm_head.weight")),
        r": lacks weights of a LlamaForCausalLM \(1, such as lm_head\.weight\)",
    ),
    (cut("model.safetensors", 1000), r": no causal language model could be loaded: "),
    (
        lambda d: (d / "model.safetensors").unlink(),
        r": holds no model \(no weights, only config\.json, .*\); a model has config\.json, ",
    ),
    (
        lambda d: (d / "config.json").unlink(),
        r": holds no model \(no config\.json, only generation_config\.json, model\.safetensors, ",
    ),
    (sharded, "model-00002"),
    (
        lambda d: (d / "model.safetensors").write_text(LFS),
        r": model\.safetensors is a git-lfs pointer.*; run git lfs",
    ),
    (lambda d: as_pickle(d, evil=Evil()), r"pickle with more in it than tensors, .*would run code"),
    (lambda d: set_keys(d / "config.json", model_type="nonesuch"), "model type `nonesuch`"),
    (with_remote_code, CODE),
]


def only(name):
    def change(d):
        for file in d.iterdir():
            if file.name != name:
                file.unlink()

    return change


ADAPTER = ("adapter_config.json", "adapter_model.bin")
BOTH: list[tuple[Callable[[Path], Any], str]] = [
    (lambda d: (d / "config.json").write_text("{"), r"/config\.json:1: not valid JSON"),
    (
        lambda d: (d / "generation_config.json").write_text("{"),
        r"/generation_config\.json:1: not valid",
    ),
    (
        lambda d: [(d / name).write_text("{}") for name in ADAPTER],
        r": holds a model and a LoRA adapter, which peft would add to it; move adapter_\* away",
    ),
    (only(None), r": holds no model \(it is empty\); a model has config\.json, "),
    (only("config.json"), r": holds no model \(no weights, only config\.json\); a model has "),
]
TOKENIZERS: list[tuple[Callable[[Path], Any], str]] = [
    (without_tokenizer, r"it holds no tokenizer\.json$"),
    (cut("tokenizer.json", 500), r": no tokenizer could be loaded: Unterminated string"),
    (tokenizer_with_code, CODE),
]
LOADERS = ((load_on_cpu, [*MODELS, *BOTH]), (load_tokenizer, [*TOKENIZERS, *BOTH]))


@pytest.fixture
def copy(tmp_path, target_dir):
    return shutil.copytree(target_dir, tmp_path / "copy")


def refusal(load, name):
    with pytest.raises(InputError) as refused:
        load(name)
    assert "\n" not in str(refused.value) and str(refused.value).startswith(name)
    return str(refused.value)


@pytest.mark.parametrize(
    ("load", "change", "message"),
    [(load, *case) for load, cases in LOADERS for case in cases],
    ids=lambda _: "",
)
def test_a_directory_that_cannot_be_loaded(copy, load, change, message):
    change(copy)
    assert re.search(message, refusal(load, str(copy)))


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
    "name", ["/no/such/place", "~/model", "a/b/c", "a=b", "", "owner/never-made"]
)
@pytest.mark.parametrize("load", [load_on_cpu, load_tokenizer])
def test_a_name_that_is_no_model(name, load):
    refusal(load, name)


def test_weights_without_a_place_are_named(copy, caplog):
    change_weights(copy, lambda weights: weights.update({"vision.weight": torch.ones(2)}))
    with caplog.at_level(logging.WARNING):
        load_on_cpu(str(copy))
    warnings = [
        record.getMessage() for record in caplog.records if record.name == "draftsmith.core.models"
    ]
    assert warnings == [
        f"{copy}: holds weights that a LlamaForCausalLM does not use (1, such as vision.weight)"
    ]


def test_a_model_that_is_too_large_names_what_makes_it_fit(copy, monkeypatch):
    def full(*words, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nand more")

    monkeypatch.setattr(PreTrainedModel, "to", full)
    fix = ": does not fit into memory; .* --target_parallel N; .* --target_device_map auto, or "
    assert re.search(fix, refusal(load_on_cpu, str(copy)))


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
