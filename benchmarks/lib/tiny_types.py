"""A tiny random model of each causal architecture of transformers' registry.

Sizes are set by the name of the option (tiny_types.yaml): what many configs share, and what one
type needs beside it. Windows, chunks and numbers of selected tokens are smaller than the texts that
the models are tried on, so that they count.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from draftsmith.core.io import JsonObject

# A class of configs; their fields differ.
Config = Any
CONFIGS: Mapping[str, Config] = CONFIG_MAPPING
VOCABULARY = 64
LAYERS = 4
# Tokens of padding, begin and end; texts avoid them.
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_OPTIONS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
OVERRIDES: dict[str, JsonObject] = _OPTIONS["overrides"]
SIZES: JsonObject = SPECIAL | {"tie_word_embeddings": False}
for _size, _names in _OPTIONS["sizes"].items():
    SIZES |= dict.fromkeys(_names, _size)


def tiny_config(name: str) -> PreTrainedConfig:
    """Return the configuration of a tiny model of this type."""
    return _shrunk(CONFIGS[name], OVERRIDES.get(name, {}))


def _shrunk(kind: Config, overrides: JsonObject) -> PreTrainedConfig:
    names = {field.name for field in dataclasses.fields(kind)}
    values = {name: size for name, size in SIZES.items() if name in names}
    if "is_decoder" in names:
        values["is_decoder"] = True
    if "kv_lora_rank" in names:
        # Multi-head latent attention has no grouped heads.
        values["num_key_value_heads"] = LAYERS
    for part, spec in _parts(kind).items():
        if part in names:
            values[part] = _shrunk(spec, overrides.get(part, {}))
    plain = {name: value for name, value in overrides.items() if name not in _parts(kind)}
    config: PreTrainedConfig = kind(**values | plain)
    if "layer_types" in names and "layer_types" not in plain:
        usual = kind().layer_types or ()
        kinds = sorted(set(usual))
        if not set(config.layer_types or ()).issuperset(kinds):
            # The pattern of the first layers lacks some kinds of layer.
            layers = (kinds * LAYERS)[:LAYERS]
            config = kind(**values | plain | {"layer_types": layers})
    return config


def _parts(kind: Config) -> dict[str, Config]:
    """The classes of the configs inside a config, without optional ones."""
    parts: dict[str, Config] = {}
    for name, spec in getattr(kind, "sub_configs_defaults", {}).items():
        if dataclasses.is_dataclass(spec) and isinstance(spec, type):
            parts[name] = spec
        elif not spec.optional:
            parts[name] = CONFIGS[spec.model_type] if spec.model_type else spec.config_class
    return parts


def causal_types() -> list[str]:
    """The names of all causal language models that transformers registers."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@torch.no_grad()
def randomise(model: PreTrainedModel, spread: float) -> None:
    """Draw the matrices of a model anew, so far apart that its greedy outputs vary."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, spread)


def tiny_model(name: str, seed: int = 0, spread: float = 0.2) -> PreTrainedModel:
    """Return a random model in fp32 and eval mode. Its matrices vary enough that it does not repeat
    one token.
    """
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        tiny_config(name), dtype=torch.float32
    )
    with torch.no_grad():
        randomise(model, spread)
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx].zero_()
    model.eval()
    return model
