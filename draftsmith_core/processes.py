"""The processes that a launcher started: which one this is, work for one of them, SIGTERM and Ctrl-C, and threads.

Nothing heavy is imported until processes meet, so that commands can ask who they are before they load torch.
"""

import contextlib
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from safetensors import SafetensorError

from draftsmith_core.errors import InputError, RunError, one_line

if TYPE_CHECKING:
    from accelerate import PartialState

T = TypeVar("T")
# `ddp`: every process has a whole copy of the weights. `zero`: DeepSpeed, whose config names the stage.
Sharing = Literal["single", "ddp", "zero", "fsdp"]
TIMEOUT = timedelta(hours=12)
# The exit code that a shell reports for a program that SIGTERM ended: 128 + 15.
TERMINATED = 143
# Whether the launcher asked for FSDP and `without_fsdp_variable` hides it; whether `on_main` is at work.
_fsdp_asked = False
_others_wait = False


class Terminated(SystemExit):
    """SIGTERM arrived; the command has kept what it could and exits with code 143."""

    def __init__(self) -> None:
        super().__init__(TERMINATED)


@dataclass
class StopSignal:
    """Whether SIGTERM or Ctrl-C arrived. While `held` is true it only sets `asked`; otherwise the program ends at once.

    asked: number of the signal that this process received, 0 for none. agreed: whether all processes have learned that
    one of them received a signal. A second Ctrl-C ends the program at once even while `held`.
    """

    held: bool = False
    asked: int = 0
    agreed: bool = False

    def leaving(self) -> BaseException:
        """The exception to raise once the work that was held for has been saved."""
        return KeyboardInterrupt() if self.asked == signal.SIGINT else Terminated()


def launched() -> int:
    """How many processes the launcher started, by its environment variable WORLD_SIZE."""
    return max(1, int(os.environ.get("WORLD_SIZE") or 1))


def _rank() -> int:
    return int(os.environ.get("RANK") or 0)


def is_main() -> bool:
    """Whether this is the process of rank 0, which writes files and messages for all."""
    return _rank() == 0


def say(line: str) -> None:
    """Write to standard error, once however many processes there are."""
    if is_main():
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


def require_single_process(command: str) -> None:
    """Raise InputError if a command that runs in one process was launched in several."""
    if launched() > 1:
        raise InputError(f"runs in one process, and {launched()} were launched; call `draftsmith {command}` as it is")


def launcher_request() -> Sharing:
    """How processes share weights, by the environment variables of accelerate; RunError for what is not supported."""
    dynamo = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    for wrong, what, instead in (
        (_true("ACCELERATE_USE_MEGATRON_LM"), "Megatron-LM", "use FSDP or DeepSpeed"),
        (_true("ACCELERATE_USE_PARALLELISM_CONFIG"), "a parallelism_config", "use FSDP or DeepSpeed without it"),
        (dynamo != "no", f"dynamo_backend {dynamo}", "leave it out and set `compile` instead"),
    ):
        if wrong:
            raise RunError(f"the launcher asks for {what}, which draftsmith does not support; {instead}")
    if _true("ACCELERATE_USE_DEEPSPEED"):
        return "zero"
    if _fsdp_asked or _true("ACCELERATE_USE_FSDP"):
        return "fsdp"
    return "ddp" if launched() > 1 else "single"


def _true(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true", "yes")


@contextmanager
def without_fsdp_variable() -> Iterator[None]:
    """Hide the launcher's wish for FSDP from transformers and accelerate in the block; `launcher_request` remembers it.

    With the variable set, transformers loads weights on the first process of a machine only, and accelerate applies
    parts of FSDP by itself. `train.parallel` applies all of it instead.
    """
    global _fsdp_asked
    before, variable = _fsdp_asked, os.environ.pop("ACCELERATE_USE_FSDP", None)
    _fsdp_asked = before or str(variable).lower() in ("1", "true")
    try:
        yield
    finally:
        _fsdp_asked = before
        if variable is not None:
            os.environ["ACCELERATE_USE_FSDP"] = variable


def process_group_options(on_cpu: bool) -> dict[str, Any]:
    """Arguments for accelerate's process group; empty for one process.

    backend: without it, CPU processes that were launched together can each start as a group of one. timeout: long,
    because one process may generate or tokenise for hours while the others wait at a barrier.
    """
    if launched() == 1 and not _true("ACCELERATE_USE_DEEPSPEED"):
        return {}
    return {"timeout": TIMEOUT} | ({"backend": "gloo"} if on_cpu else {})


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end a process that waits for others. torch would block until its timeout of 12 hours."""
    before = {}
    if launched() > 1 and threading.current_thread() is threading.main_thread():
        numbers = [number for number in _signals() if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _signals() -> list[signal.Signals]:
    # Programs started with `nohup`, or with `&` in a script, ignore Ctrl-C; keep it ignored for them.
    return [signal.SIGTERM] + [signal.SIGINT] * (signal.getsignal(signal.SIGINT) is not signal.SIG_IGN)


def join_processes(device: str) -> "PartialState":
    """Join the process group and return its state; RunError if not all processes that were launched are in it."""
    from accelerate import PartialState

    from draftsmith_core.models import resolve_device

    on_cpu = resolve_device(device).type == "cpu"
    with interruptible():
        state = PartialState(cpu=on_cpu, **process_group_options(on_cpu))
    check_process_count(state.num_processes)
    return state


def leave_processes() -> None:
    """Leave the process group, if there is one: one that outlives the interpreter aborts the process."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def on_main(work: Callable[[], object]) -> None:
    """Run `work` on the main process while the others wait. If it fails, every process raises the same one-line error.

    InputError stays InputError; RunError, OSError and SafetensorError (a file that cannot be read) become RunError.
    Within `work` it just runs what it is given: the other processes wait already.
    """
    global _others_wait
    if _others_wait:
        work()
        return
    failure: list[tuple[bool, str] | None] = [None]
    if is_main():
        _others_wait = True
        try:
            work()
        except InputError as error:
            failure = [(True, one_line(error))]
        except OSError as error:
            place = f"{error.filename}: " if error.filename else ""
            failure = [(False, f"{place}{error.strerror or error}")]
        except (RunError, SafetensorError) as error:
            failure = [(False, one_line(error))]
        finally:
            _others_wait = False
    if launched() > 1:
        from accelerate.utils import broadcast_object_list

        broadcast_object_list(failure)
    _raise(failure[0])


def _raise(failure: tuple[bool, str] | None) -> None:
    if failure is not None:
        raise (InputError if failure[0] else RunError)(failure[1])


def from_main(work: Callable[[], T]) -> T:
    """As `on_main`, and return in every process what `work` returned in the main one."""
    result: list[Any] = []
    on_main(lambda: result.append(work()))
    if launched() > 1 and not _others_wait:
        from accelerate.utils import broadcast_object_list

        result = broadcast_object_list(result or [None])
    value: T = result[0]
    return value


def divided(count: int, work: Callable[[int], T]) -> list[T]:
    """`[work(0), ..., work(count - 1)]` in every process: each index is worked on by one of them, in turn.

    All processes must call it with the same `count`; it waits for the slowest. What `work` raises as InputError or
    RunError in one process is raised in all. Within `on_main`, where the others wait, the main process does it all.
    """
    if launched() == 1 or _others_wait:
        return [work(index) for index in range(count)]
    from accelerate.utils import gather_object

    values: dict[int, T] = {}
    failure: tuple[bool, str] | None = None
    try:
        for index in range(_rank(), count, launched()):
            values[index] = work(index)
    except (InputError, RunError) as error:
        failure = (isinstance(error, InputError), str(error))
    merged: dict[int, T] = {}
    for part, failed in gather_object([(values, failure)]):
        _raise(failed)
        merged |= part
    return [merged[index] for index in range(count)]


def check_process_count(count: int) -> None:
    """Raise RunError unless as many processes found each other as were launched."""
    if count != launched():
        raise RunError(
            f"{launched()} processes were launched but only {count} found each other; check the accelerate config"
        )
    # Asked for several CPU processes without --multi_gpu, `accelerate launch` sets their address but starts only one.
    if {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR"} <= os.environ.keys() and "WORLD_SIZE" not in os.environ:
        raise RunError(
            "accelerate was asked for several processes and started only one; launch with --multi_gpu (it works on "
            "CPUs too), or with a file of configs/accelerate"
        )


@contextmanager
def terminable() -> Iterator[StopSignal]:
    """SIGTERM raises Terminated in the block and Ctrl-C KeyboardInterrupt; `stop.held` leaves them to the block."""
    stop = StopSignal()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # Python lets only the main thread handle signals
        return

    def arrived(number: int, frame: FrameType | None) -> None:
        again = number == stop.asked == signal.SIGINT
        stop.asked = number
        if again or not stop.held:
            raise stop.leaving()
        if number == signal.SIGINT and is_main():
            # os.write, because the signal may have interrupted a print, which is not reentrant.
            os.write(2, b"\ninterrupted: keeping what is done (Ctrl-C again: stop at once)\n")

    before = {number: signal.signal(number, arrived) for number in _signals()}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# By command, the variable that is set, unless the user has set one of `_WAITING`.
_WAITS = {
    "train": ("OMP_WAIT_POLICY", "PASSIVE"),
    "distill": ("OMP_WAIT_POLICY", "PASSIVE"),
    "align": ("GOMP_SPINCOUNT", "2000"),
    "demo": ("GOMP_SPINCOUNT", "2000"),
    "eval": ("GOMP_SPINCOUNT", "2000"),
}
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def settle_threads(command: str, control_groups: Path = Path("/sys/fs/cgroup")) -> None:
    """Set the variables of OpenMP that suit a command, unless the user has set them. Torch reads them once.

    Waiting threads of GNU OpenMP spin for milliseconds, on cores that other threads need. Training and distillation
    wait seldom and sleep at once; timed decoding spins for microseconds. The number of threads is that of the cores,
    and in a container that of its share; it does not follow the load, because another number rounds otherwise.
    """
    if command in _WAITS and not any(name in os.environ for name in _WAITING):
        name, value = _WAITS[command]
        os.environ[name] = value
    with contextlib.suppress(OSError, ValueError):  # no control groups, or no limit
        quota, period = (control_groups / "cpu.max").read_text().split()
        share = math.floor(float(quota) / float(period))
        if share < (os.cpu_count() or 1):
            os.environ.setdefault("OMP_NUM_THREADS", str(max(1, share)))
