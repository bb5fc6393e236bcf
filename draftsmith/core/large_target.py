"""A target that is too large for one device.

Several neighbouring processes hold it together, by transformers' tensor parallelism: each has its
share of every layer, and the whole embedding and output projection, which heads borrow. All must
call the target at the same time with the same batch.

Or one process has its layers on several devices, in memory and on disk, by accelerate's offloading.
The embedding and the output projection stay on the device of the run. Layers on disk, and beside a
GPU those in memory, are copied to a device for each forward.
"""

import atexit
import logging
from collections import Counter
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate import infer_auto_device_map
from accelerate.utils import get_balanced_memory, get_max_memory
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from draftsmith.core.errors import InputError
from draftsmith.core.model_configs import Loading, read_config, without_values
from draftsmith.core.ranks import launched, say
from draftsmith.core.transformers_api import DistributedConfig, load_offloaded_parameter

INSTEAD = "in one process use --target_device_map auto, or let an engine hold it (--states)"
# A device has a number if it is a GPU, else it is "cpu" or "disk".
DeviceMap = dict[str, int | str]
# Of what a device has free; the rest is for activations.
_USED = 0.9
# It warns of weights on the meta device, which `spread` says in words.
logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)


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


def own_share(weight: Tensor) -> Tensor:
    """What this process has of a weight."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def whole(weight: Tensor) -> Tensor:
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


def spread(name: str, way: str, device: torch.device, options: Loading) -> Loading:
    """Return what `from_pretrained` is given to spread the target `name`, beside `options`."""
    if launched() > 1:
        raise InputError(
            "--target_device_map: is for one process; --target_parallel N divides a target over N"
        )
    if "quantization_config" in options:
        raise InputError("--target_device_map: a target in 4 bits stays on one device")
    config = read_config(name, **options)
    model = without_values(config, options["dtype"], options["trust_remote_code"])
    places = device_map(way, model, device)
    say(f"target: {_in_words(places, model, device)}")
    # For weights on disk that a model has in another form than its checkpoint.
    folder = TemporaryDirectory(prefix="draftsmith-target-")
    atexit.register(folder.cleanup)
    return {"device_map": places, "offload_folder": folder.name}


def place_of(device: torch.device) -> int | str:
    """A device as a map names it."""
    return "cpu" if device.type == "cpu" else device.index or 0


def device_map(way: str, model: PreTrainedModel, device: torch.device) -> DeviceMap:
    """Return the device of each module of a model without values.

    way: `auto`, with `:GIB` for that much of every GPU (without one, of memory). device: of the
    run.
    """
    main = place_of(device)
    free = get_max_memory()
    gpus = [] if main == "cpu" else [key for key in free if key != "cpu"]
    limits = {key: int(_USED * free[key]) for key in sorted(gpus, key=lambda key: key != main)}
    limits["cpu"] = int(_USED * free["cpu"])
    _, _, gib = way.partition(":")
    for key in gpus or ["cpu"]:
        limits[key] = min(limits[key], int(float(gib) * 2**30)) if gib else limits[key]
    whole = model._no_split_modules
    limits = get_balanced_memory(model, limits, whole)
    limits[main] = max(0, limits[main] - model.get_output_embeddings().weight.nbytes)
    found = infer_auto_device_map(model, limits, whole, clean_result=False)
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    borrowed = [name for name, module in model.named_modules() if module in tables]
    return dict(found) | dict.fromkeys(borrowed, main)


def bytes_by_place(places: DeviceMap, model: PreTrainedModel) -> Counter[int | str]:
    """How much of a model each device has."""
    sizes: Counter[int | str] = Counter()
    for name, weight in model.named_parameters():
        # Of the innermost module with a device.
        while name not in places:
            name = name.rpartition(".")[0]
        sizes[places[name]] += weight.nbytes
    return sizes


def _in_words(places: DeviceMap, model: PreTrainedModel, device: torch.device) -> str:
    """Say what is where, and what each forward copies."""
    sizes = bytes_by_place(places, model)
    names = {place: f"on GPU {place}" for place in sizes} | {"cpu": "in memory", "disk": "on disk"}
    if len(sizes) == 1:
        return f"is whole {names[place_of(device)]}, where it fits"
    parts = [f"{size / 2**30:.2f} GiB {names[place]}" for place, size in sizes.items()]
    copied = sizes.get("disk", 0) + (sizes.get("cpu", 0) if device.type != "cpu" else 0)
    said = f"; each forward copies {copied / 2**30:.2f} GiB" if copied else ""
    return ", ".join(parts) + said


def is_spread(model: nn.Module) -> bool:
    """Whether this model has layers on several devices, or on disk."""
    places = set(getattr(model, "hf_device_map", {}).values())
    return len(places) > 1 or "disk" in places


def in_parts(model: nn.Module) -> bool:
    """Whether no device has the whole model."""
    return is_divided(model) or is_spread(model)


def values_of(model: nn.Module, name: str, weight: Tensor) -> Tensor:
    """The values of a parameter, read from where they are kept."""
    if weight.is_meta and isinstance(model, PreTrainedModel):
        return load_offloaded_parameter(model, name)
    return weight
