"""The processes a launcher started: who this one is, and waiting for the others."""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from draftsmith.errors import InputError, RunError
from draftsmith.models import resolve_device

TIMEOUT = timedelta(hours=12)


def launched() -> int:
    """How many processes the launcher says there are."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main() -> bool:
    """Whether this process speaks for all."""
    return int(os.environ.get("RANK", "0")) == 0


def alone(command: str) -> None:
    """InputError when a command that works in one process was launched in several."""
    if launched() > 1:
        raise InputError(f"runs in one process, and {launched()} were launched; call `draftsmith {command}` as it is")


def process_group_options(on_cpu: bool) -> dict[str, Any]:
    """What accelerate must be told about the processes a launcher started; empty for one.

    Without a named backend launched CPU processes can each come up believing that they are alone. The time limit is
    long because one process may generate or tokenise while the others wait.
    """
    if launched() == 1:
        return {}
    return {"timeout": TIMEOUT} | ({"backend": "gloo"} if on_cpu else {})


def join(device: str) -> PartialState:
    """Meet the other processes; RunError when not all of them came."""
    on_cpu = resolve_device(device).type == "cpu"
    state = PartialState(cpu=on_cpu, **process_group_options(on_cpu))
    check(state.num_processes)
    return state


def on_main(work: Callable[[], None]) -> None:
    """Run `work` on the main process while the others wait; the InputError it raises is raised by all of them."""
    message: list[str | None] = [None]
    if is_main():
        try:
            work()
        except InputError as error:
            message = [str(error)]
    if launched() > 1:
        broadcast_object_list(message)
    if message[0] is not None:
        raise InputError(message[0])


def check(found: int) -> None:
    """RunError unless as many processes found each other as were launched."""
    # For several processes on CPUs `accelerate launch` sets their address, and then starts one process alone.
    asked = {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR"} <= os.environ.keys() and "WORLD_SIZE" not in os.environ
    if asked and resolve_device("auto").type == "cpu":
        raise RunError(
            "accelerate was asked for several processes and started only one, as it does on CPUs; "
            "launch with --multi_gpu (it means several, and works on CPUs too)"
        )
    if found != launched():
        raise RunError(
            f"{launched()} processes were launched but only {found} found each other; check the accelerate config"
        )
