"""A model without its weights: its configuration, and its modules on the meta device."""

from typing import Any, TypeAlias

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

# What a model is loaded with: the arguments of `from_pretrained`, by name.
Loading: TypeAlias = dict[str, Any]


def read_config(
    name: str, *, trust_remote_code: bool = False, revision: str | None = None, **_: object
) -> PretrainedConfig:
    """The configuration of a model in a local directory or on the hub; other options of a model are
    not read. Propagate transformers' errors.
    """
    return AutoConfig.from_pretrained(
        name, trust_remote_code=trust_remote_code, revision=revision or "main"
    )


def own_dtype(config: PretrainedConfig) -> torch.dtype:
    """The dtype that a checkpoint says it is in; float32 if it does not say."""
    return getattr(config.get_text_config(decoder=True), "dtype", None) or torch.float32


def without_values(
    config: PretrainedConfig, dtype: torch.dtype | str = "auto", trust_remote_code: bool = False
) -> PreTrainedModel:
    """Build a model on the meta device. dtype: "auto" is the configuration's."""
    known = own_dtype(config) if dtype == "auto" else dtype
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            config, dtype=known, trust_remote_code=trust_remote_code
        )
