"""The processes a launcher started: who this one is, what was asked of them, waiting for the others, being stopped."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from safetensors import SafetensorError

from draftsmith_core.errors import InputError, RunError

if TYPE_CHECKING:
    from accelerate import PartialState

TIMEOUT = timedelta(hours=12)
# What a shell says of a program that SIGTERM ended.
TERMINATED = 143


@dataclass(frozen=True)
class LauncherRequest:
    """What a launcher asked for: how the processes share the weights, and how many there are.

    kind: `single`, `ddp` (a copy each), `zero` (DeepSpeed, its stage in its config), `fsdp`.
    """

    kind: Literal["single", "ddp", "zero", "fsdp"]
    processes: int


class Terminated(SystemExit):
    """SIGTERM came, and what had been done is kept. The exit code is 143."""

    def __init__(self) -> None:
        super().__init__(TERMINATED)


@dataclass
class StopSignal:
    """Whether SIGTERM or Ctrl-C came. While `held` it only sets `asked`, else the program ends there and then.

    asked: the signal that came to this process. agreed: whether all processes know by now that one was asked. A second
    Ctrl-C is not held.
    """

    held: bool = False
    asked: int = 0
    agreed: bool = False

    def leaving(self) -> BaseException:
        """What to raise when the time has come."""
        return KeyboardInterrupt() if self.asked == signal.SIGINT else Terminated()


def launched() -> int:
    """How many processes the launcher says there are."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main() -> bool:
    """Whether this process speaks for all."""
    return int(os.environ.get("RANK", "0")) == 0


def require_single_process(command: str) -> None:
    """InputError when a command that works in one process was launched in several."""
    if launched() > 1:
        raise InputError(f"runs in one process, and {launched()} were launched; call `draftsmith {command}` as it is")


def launcher_request() -> LauncherRequest:
    """What the launcher's environment asks for; RunError for what nothing here can do."""
    for variable, what, instead in (
        ("ACCELERATE_USE_MEGATRON_LM", "Megatron-LM", "use FSDP or DeepSpeed"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "a parallelism_config", "use FSDP or DeepSpeed without it"),
    ):
        if _true(variable):
            raise RunError(f"the launcher asks for {what}, which nothing here does; {instead}")
    dynamo = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    if dynamo != "no":
        raise RunError(f"the launcher asks for dynamo_backend {dynamo}; leave it out and set `compile` instead")
    if _true("ACCELERATE_USE_DEEPSPEED"):
        return LauncherRequest("zero", launched())
    if _true("ACCELERATE_USE_FSDP"):
        return LauncherRequest("fsdp", launched())
    return LauncherRequest("ddp" if launched() > 1 else "single", launched())


def _true(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true", "yes")


def process_group_options(on_cpu: bool) -> dict[str, Any]:
    """What accelerate must be told about the processes a launcher started; empty for one.

    Without a named backend launched CPU processes can each come up believing that they are alone. The time limit is
    long because one process may generate or tokenise while the others wait.
    """
    if launched() == 1 and not _true("ACCELERATE_USE_DEEPSPEED"):
        return {}
    return {"timeout": TIMEOUT} | ({"backend": "gloo"} if on_cpu else {})


def join_processes(device: str) -> "PartialState":
    """Meet the other processes; RunError when not all of them came."""
    from accelerate import PartialState

    from draftsmith_core.models import resolve_device

    on_cpu = resolve_device(device).type == "cpu"
    state = PartialState(cpu=on_cpu, **process_group_options(on_cpu))
    check_process_count(state.num_processes)
    return state


def on_main(work: Callable[[], None]) -> None:
    """Run `work` on the main process while the others wait; what it fails with, they all fail with, in one line.

    InputError stays one; RunError, an operating system's refusal and a file that cannot be read become RunError.
    """
    failure: list[tuple[bool, str] | None] = [None]
    if is_main():
        try:
            work()
        except InputError as error:
            failure = [(True, str(error))]
        except OSError as error:
            place = f"{error.filename}: " if error.filename else ""
            failure = [(False, f"{place}{error.strerror or error}")]
        except (RunError, SafetensorError) as error:
            failure = [(False, str(error))]
    if launched() > 1:
        from accelerate.utils import broadcast_object_list

        broadcast_object_list(failure)
    if failure[0] is not None:
        by_user, message = failure[0]
        raise (InputError if by_user else RunError)(" ".join(message.split()))


def check_process_count(found: int) -> None:
    """RunError unless as many processes found each other as were launched."""
    # For several processes on CPUs `accelerate launch` sets their address, and then starts one process alone.
    from draftsmith_core.models import resolve_device

    several = {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR"} <= os.environ.keys() and "WORLD_SIZE" not in os.environ
    if several and resolve_device("auto").type == "cpu":
        raise RunError(
            "accelerate was asked for several processes and started only one, as it does on CPUs; "
            "launch with --multi_gpu (it means several, and works on CPUs too), or with a file of configs/accelerate"
        )
    if found != launched():
        raise RunError(
            f"{launched()} processes were launched but only {found} found each other; check the accelerate config"
        )


@contextmanager
def terminable() -> Iterator[StopSignal]:
    """SIGTERM raises Terminated in the block and Ctrl-C KeyboardInterrupt; `stop.held` leaves them to the block."""
    stop = StopSignal()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # signals are the main thread's
        return

    def arrived(number: int, frame: FrameType | None) -> None:
        again = number == stop.asked == signal.SIGINT
        stop.asked = number
        if again or not stop.held:
            raise stop.leaving()
        if number == signal.SIGINT and is_main():
            # Not print: the signal may have come in the middle of one.
            os.write(2, b"\ninterrupted: keeping what is done (Ctrl-C again: stop at once)\n")

    # What started this program may have set Ctrl-C aside (`nohup`, `&` in a script), and then it stays so.
    numbers = [signal.SIGTERM] + [signal.SIGINT] * (signal.getsignal(signal.SIGINT) is not signal.SIG_IGN)
    before = {number: signal.signal(number, arrived) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
