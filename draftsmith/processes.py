"""The processes a launcher started: who this one is, and waiting for the others."""

import os

from accelerate import PartialState
from accelerate.utils import InitProcessGroupKwargs

from draftsmith.errors import RunError
from draftsmith.models import resolve_device


def launched() -> int:
    """How many processes the launcher says there are."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main() -> bool:
    """Whether this process speaks for all."""
    return int(os.environ.get("RANK", "0")) == 0


def process_group_options(on_cpu: bool) -> list[InitProcessGroupKwargs]:
    """What accelerate must be told so that launched CPU processes find each other.

    Without a named backend each of them can come up believing that it is alone.
    """
    return [InitProcessGroupKwargs(backend="gloo")] if on_cpu and launched() > 1 else []


def join(device: str) -> PartialState:
    """Meet the other processes; RunError when not all of them came."""
    on_cpu = resolve_device(device).type == "cpu"
    options = {"backend": "gloo"} if process_group_options(on_cpu) else {}
    state = PartialState(cpu=on_cpu, **options)
    check(state.num_processes)
    return state


def check(found: int) -> None:
    """RunError unless as many processes found each other as were launched."""
    # For several processes on CPUs `accelerate launch` sets their address, and then starts one process alone.
    if {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR"} <= os.environ.keys() and "WORLD_SIZE" not in os.environ:
        raise RunError(
            "accelerate was asked for several processes and started only one, as it does on CPUs; "
            "launch with --multi_gpu (it means several, and works on CPUs too)"
        )
    if found != launched():
        raise RunError(
            f"{launched()} processes were launched but only {found} found each other; check the accelerate config"
        )
