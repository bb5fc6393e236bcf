"""What `accelerate launch` asks for, and the process group that it makes."""

import os
import shlex
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from draftsmith.core.environment import shared
from draftsmith.core.errors import RunError, first_line
from draftsmith.core.options import for_all
from draftsmith.core.ranks import (
    check_launcher,
    have_met,
    hold_together,
    launched,
    launcher_error,
    meet,
    say,
)
from draftsmith.core.records import agree, versions
from draftsmith.core.signals import interruptible

# `ddp`: every process has a whole copy of the weights. `zero`: DeepSpeed, whose config names the
# stage.
Sharing = Literal["single", "ddp", "zero", "fsdp"]
# Seconds for all processes to meet.
_MEET_S = 60.0
_FSDP = "ACCELERATE_USE_FSDP"
_HIDDEN_FSDP = "DRAFTSMITH_USE_FSDP"
_TWO_ON_CPU = Path(__file__).parents[1] / "configs/accelerate/cpu2.yaml"
# Variables with which accelerate would compile twice, or fail.
_UNSUPPORTED = {
    "ACCELERATE_DYNAMO_BACKEND": "dynamo_backend; set `torch_compile` instead",
    "ACCELERATE_USE_MEGATRON_LM": "megatron_lm_config; use DDP, DeepSpeed or FSDP instead",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "parallelism_config; use DDP, DeepSpeed or FSDP instead",
}


def launcher_request() -> Sharing:
    """How processes share weights, by accelerate's variables. Unset unsupported ones, with a
    warning.
    """
    for variable, advice in _UNSUPPORTED.items():
        if os.environ.pop(variable, "no").lower() not in ("no", "false", ""):
            say(f"warning: ignoring the launcher's {advice}")
    if _true("ACCELERATE_USE_DEEPSPEED"):
        return "zero"
    if _true(_FSDP) or _true(_HIDDEN_FSDP):
        return "fsdp"
    return "ddp" if launched() > 1 else "single"


def as_typed(command: str) -> str:
    """Return a command of ours behind the launcher that it was typed with, if there was one."""
    words = shlex.split(command)[1:]
    parent = _parent()
    if parent[-len(words) :] != words:
        return command
    script = Path(parent[1]).name
    # The kernel puts the interpreter before a script.
    return shlex.join([script, *parent[2:]] if shutil.which(script) == parent[1] else parent)


def _parent() -> list[str]:
    """The words that started the parent process; none if the system does not show them."""
    file = Path(f"/proc/{os.getppid()}/cmdline")
    return file.read_text(errors="replace").split("\0")[:-1] if file.is_file() else []


def _true(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true", "yes")


@shared
@contextmanager
def without_fsdp_variable() -> Iterator[None]:
    """Hide the launcher's request for FSDP from transformers and accelerate, but not from
    `launcher_request`.

    With the variable set, transformers loads weights on the first process of a machine only, and
    accelerate applies parts of FSDP by itself. `train.parallel` applies all of it instead.
    """
    value = os.environ.pop(_FSDP, None)
    if value is not None:
        os.environ[_HIDDEN_FSDP] = value
    try:
        yield
    finally:
        if value is not None:
            os.environ[_FSDP] = os.environ.pop(_HIDDEN_FSDP)


def process_group_options(on_cpu: bool) -> dict[str, Any]:
    """Arguments for accelerate's process group; empty for one process.

    The timeout is long, because one process may generate or tokenise for hours while the others
    wait at a barrier. Without a backend, CPU processes that were launched together can each start
    as a group of one.
    """
    if launched() == 1 and not _true("ACCELERATE_USE_DEEPSPEED"):
        return {}
    timeout = timedelta(hours=12)
    return {"timeout": timeout, "backend": "gloo"} if on_cpu else {"timeout": timeout}


def wait_for_all() -> None:
    """Wait until all launched processes have come. Raise LauncherError, with how many came, after a
    minute.
    """
    check_launcher()
    if launched() == 1 or have_met():
        return
    from torch.distributed.rendezvous import rendezvous

    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    deadline = time.monotonic() + _MEET_S
    with interruptible():
        try:
            timeout = timedelta(seconds=_MEET_S)
            store, _, size = next(rendezvous("env://", timeout=timeout))
        except (RuntimeError, ValueError) as error:
            raise launcher_error(f"MASTER_ADDR {place}: {first_line(error)}") from None
        came = store.add("draftsmith/came", 1)
        while came < size:
            if time.monotonic() > deadline:
                raise launcher_error(f"{came} of {size} processes came to {place} in a minute")
            time.sleep(0.05)
            came = store.add("draftsmith/came", 0)
    meet(store)


def agree_on(config: object) -> None:
    """Raise InputError if the processes have other options, versions or ways to share weights.
    From then on work is divided as the options say.
    """
    hold_together(getattr(config, "target_parallel", 1))
    if launched() > 1:
        agree({"config": for_all(config), "versions": versions(), "sharing": launcher_request()})


def join_processes(device: str, config: object) -> None:
    """Join the process group. Raise RunError if not all processes that were launched are in it,
    InputError if they do not have the same options.
    """
    from accelerate import PartialState

    from draftsmith.core.devices import resolve_device

    wait_for_all()
    on_cpu = resolve_device(device).type == "cpu"
    with interruptible():
        state = PartialState(cpu=on_cpu, **process_group_options(on_cpu))
    check_process_count(state.num_processes)
    agree_on(config)


def leave_processes() -> None:
    """Leave the process group, if there is one: one that outlives the interpreter aborts the
    process.
    """
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def check_process_count(count: int) -> None:
    """Raise RunError unless as many processes found each other as were launched."""
    # Asked for several CPU processes without --multi_gpu, `accelerate launch` sets their address
    # but starts only one.
    has_address = {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR"} <= os.environ.keys()
    only_one = has_address and "WORLD_SIZE" not in os.environ
    if only_one or count != launched():
        raise RunError(
            f"only {count} of the launched processes connected; on CPUs: accelerate launch "
            f"--config_file {_TWO_ON_CPU} --num_processes N"
        )
