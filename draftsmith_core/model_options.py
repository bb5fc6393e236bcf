"""Options about models, without torch, so that a command can check its options before it loads anything."""

from typing import Any, Literal, TypedDict

Quantize = Literal["none", "nf4"]


class LoadingOptions(TypedDict):
    """Where and in what dtype a model is loaded, and whether code that comes with it may run."""

    device: str
    dtype: str
    trust_remote_code: bool


def loading(config: Any) -> LoadingOptions:
    """Of the options of a command, those that `load_model` and `load_pair` take."""
    return {"device": config.device, "dtype": config.dtype, "trust_remote_code": config.trust_remote_code}
