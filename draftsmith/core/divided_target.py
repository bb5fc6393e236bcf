"""One target that several neighbouring processes hold together: transformers' tensor parallelism.

Each has its share of every layer, and the whole embedding and output projection, which heads
borrow. All must call the target at the same time with the same batch.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

from draftsmith.core.errors import InputError
from draftsmith.core.ranks import launched
from draftsmith.core.shapes import Loading, read_config, without_values

INSTEAD = "in one process use --target_device_map auto, or let an engine hold it (--states)"


class _Groups(DistributedConfig):
    """Groups of processes with a whole target each, which exchange nothing."""

    @property
    def dp_size(self) -> int:
        """Groups that transformers would divide weights over."""
        return 1


def divided(name: str, count: int, options: Loading) -> DistributedConfig:
    """Return how `from_pretrained` divides the target `name` over `count` processes; options: what
    it is given beside. Raise InputError if it cannot be divided.
    """
    where = f"--target_parallel {count}: "
    if launched() % count or launched() == 1:
        raise InputError(f"{where}{launched()} processes do not make groups of {count}")
    if "quantization_config" in options:
        raise InputError(f"{where}a target in 4 bits stays on one device; {INSTEAD}")
    config = read_config(name, **options)
    text = config.get_text_config(decoder=True)
    for key in ("num_key_value_heads", "num_attention_heads"):
        heads = getattr(text, key, None) or count
        if any(each % count for each in (heads if isinstance(heads, list) else [heads])):
            raise InputError(f"{where}does not divide {heads} ({key} of {name}); {INSTEAD}")
    model = without_values(config, trust_remote_code=options["trust_remote_code"])
    if not model.tp_plan:
        raise InputError(f"{where}transformers cannot divide a {type(model).__name__}; {INSTEAD}")
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    whole = [name for name, module in model.named_modules() if module in tables]
    return _Groups(
        tp_size=count,
        tp_plan=dict.fromkeys(whole, "replicate"),
        dp_replicate_size=launched() // count,
    )


def is_divided(model: nn.Module) -> bool:
    """Whether processes hold this model together."""
    return isinstance(model, PreTrainedModel) and model._device_mesh is not None


def own_share(weight: torch.Tensor) -> torch.Tensor:
    """What this process has of a weight."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def whole(weight: torch.Tensor) -> torch.Tensor:
    """A weight from its shares; the processes of a group call it together."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def all_have(model: nn.Module, found: bool) -> bool:
    """Whether every process that holds this model with this one has found something."""
    if not is_divided(model):
        return found
    target: Any = model
    flag = torch.tensor(int(found), device=target.device)
    mesh = target._device_mesh
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MIN, mesh.get_group("tp"))
    return bool(flag)
