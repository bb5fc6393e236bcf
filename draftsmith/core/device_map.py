"""A target whose layers one process has on several devices, in memory and on disk: accelerate's
offloading.

The embedding and the output projection, which drafts read, stay on the device of the run. Layers
on disk, and beside a GPU those in memory, are copied to a device for each forward.
"""

import atexit
import logging
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from accelerate import infer_auto_device_map
from accelerate.utils import get_balanced_memory, get_max_memory
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.accelerate import load_offloaded_parameter

from draftsmith.core.divided_target import is_divided
from draftsmith.core.errors import InputError
from draftsmith.core.io import read_json
from draftsmith.core.ranks import launched, say
from draftsmith.core.shapes import Loading, read_config, without_values

# A device has a number if it is a GPU, else it is "cpu" or "disk".
DeviceMap = dict[str, int | str]
Written = str | Mapping[str, int | str]
# Of what a device has free; the rest is for activations.
_USED = 0.9
# It warns of weights on the meta device, which `spread` says in words.
logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)


def spread(name: str, written: Written, device: torch.device, options: Loading) -> Loading:
    """Return what `from_pretrained` is given to spread the target `name`, beside `options`."""
    if launched() > 1:
        raise InputError(
            "--target_device_map: is for one process; --target_parallel N divides a target over N"
        )
    if "quantization_config" in options:
        raise InputError("--target_device_map: a target in 4 bits stays on one device")
    config = read_config(name, **options)
    model = without_values(config, options["dtype"], options["trust_remote_code"])
    places = device_map(written, model, device)
    say(f"target: {_in_words(places, model, device)}")
    # For weights on disk that a model has in another form than its checkpoint.
    folder = TemporaryDirectory(prefix="draftsmith-target-")
    atexit.register(folder.cleanup)
    return {"device_map": places, "offload_folder": folder.name}


def place_of(device: torch.device) -> int | str:
    """A device as a map names it."""
    return "cpu" if device.type == "cpu" else device.index or 0


def device_map(written: Written, model: PreTrainedModel, device: torch.device) -> DeviceMap:
    """Return the device of each module of a model without values.

    written: auto, balanced, balanced_low_0 or sequential, with `:GIB` for that much of every GPU
    (without one, of memory); a JSON file; or its content. device: of the run.
    """
    main = place_of(device)
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    borrowed = [name for name, module in model.named_modules() if module in tables]
    if isinstance(written, Mapping) or written.endswith(".json"):
        return _checked(written, model, main, borrowed)
    strategy, _, gib = written.partition(":")
    most = get_max_memory()
    gpus = [] if main == "cpu" else [key for key in most if key != "cpu"]
    limits = {key: int(_USED * most[key]) for key in sorted(gpus, key=lambda key: key != main)}
    limits["cpu"] = int(_USED * most["cpu"])
    for key in gpus or ["cpu"]:
        limits[key] = min(limits[key], int(float(gib) * 2**30)) if gib else limits[key]
    whole = model._no_split_modules
    if strategy != "sequential":
        limits = get_balanced_memory(model, limits, whole, low_zero=strategy == "balanced_low_0")
    output = model.get_output_embeddings().weight
    limits[main] = max(0, limits[main] - output.nbytes)
    found = infer_auto_device_map(model, limits, whole, clean_result=False)
    return dict(found) | dict.fromkeys(borrowed, main)


def _checked(
    written: Written, model: PreTrainedModel, main: int | str, borrowed: list[str]
) -> DeviceMap:
    """Read a map that a user wrote; raise InputError if it does not place this model."""
    where = written if isinstance(written, str) else "target_device_map"
    given = read_json(Path(written), "a device map") if isinstance(written, str) else written
    places: DeviceMap = {}
    modules = dict(model.named_modules())
    for name, place in given.items():
        if name not in modules:
            raise InputError(f"{where}: the target has no module {name!r}")
        number = str(place).removeprefix("cuda:")
        if not re.fullmatch(r"cpu|disk|\d+", number):
            raise InputError(f"{where}: {name}: {place!r} is not cpu, disk or the number of a GPU")
        if number.isdecimal() and (main == "cpu" or int(number) >= torch.cuda.device_count()):
            raise InputError(f"{where}: {name}: this run has no GPU {number}")
        places[name] = int(number) if number.isdecimal() else number
    for name, _ in model.named_parameters():
        place = _place(places, name)
        if place is None:
            raise InputError(f"{where}: leaves out {name}")
        if name.rpartition(".")[0] in borrowed and place != main:
            raise InputError(f"{where}: {name} must be on {main}, where drafts read it")
    return places


def _place(places: DeviceMap, name: str) -> int | str | None:
    """The device of a parameter: that of the innermost module with one."""
    while name and name not in places:
        name = name.rpartition(".")[0]
    return places.get(name)


def bytes_by_place(places: DeviceMap, model: PreTrainedModel) -> Counter[int | str | None]:
    """How much of a model each device has."""
    sizes: Counter[int | str | None] = Counter()
    for name, weight in model.named_parameters():
        sizes[_place(places, name)] += weight.nbytes
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
