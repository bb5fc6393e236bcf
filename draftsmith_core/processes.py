"""The processes that a launcher started: which one this is, work for one of them, SIGTERM and
Ctrl-C, and threads.

Nothing heavy is imported until processes meet, so that commands can ask who they are before they
load torch.
"""

import contextlib
import ctypes
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

from draftsmith_core.errors import DraftsmithError, InputError, RunError, one_line, without_secrets

if TYPE_CHECKING:
    from accelerate import PartialState

T = TypeVar("T")
# `ddp`: every process has a whole copy of the weights. `zero`: DeepSpeed, whose config names the
# stage.
Sharing = Literal["single", "ddp", "zero", "fsdp"]
_FSDP, _HIDDEN_FSDP = "ACCELERATE_USE_FSDP", "DRAFTSMITH_USE_FSDP"
# Whether the main process is in `from_main`.
_others_wait = False


class Terminated(SystemExit):
    """SIGTERM arrived; the command has kept what it could. Exit code 128 + 15, as a shell reports
    it.
    """

    def __init__(self) -> None:
        super().__init__(143)


@dataclass
class StopSignal:
    """Whether SIGTERM or Ctrl-C arrived. While `held` is true it only sets `asked`; otherwise the
    program ends at once.

    asked: number of the signal that this process received, 0 for none. agreed: whether all
    processes know that one of them received a signal. A second Ctrl-C ends the program at once even
    while `held`.
    """

    held: bool = False
    asked: int = 0
    agreed: bool = False

    def leaving(self) -> BaseException:
        """The exception to raise once the held work has been saved."""
        return KeyboardInterrupt() if self.asked == signal.SIGINT else Terminated()


def launched() -> int:
    """Number of processes that the launcher started (environment variable WORLD_SIZE)."""
    return max(1, int(os.environ.get("WORLD_SIZE") or 1))


def _rank() -> int:
    return int(os.environ.get("RANK") or 0)


def is_main() -> bool:
    """Whether this is the process of rank 0, which writes files and messages for all."""
    return _rank() == 0


def say(line: str) -> None:
    """Print to standard error, in the main process only."""
    if is_main():
        sys.stderr.write(without_secrets(line) + "\n")
        sys.stderr.flush()


def require_single_process(command: str) -> None:
    """Raise InputError if a command that runs in one process was launched in several."""
    if launched() > 1:
        raise InputError(
            f"runs in one process, but {launched()} were launched; call `draftsmith {command}` "
            "directly"
        )


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


# Variables with which accelerate would compile twice, or fail.
_UNSUPPORTED = {
    "ACCELERATE_DYNAMO_BACKEND": "dynamo_backend; set `compile` instead",
    "ACCELERATE_USE_MEGATRON_LM": "megatron_lm_config; use DDP, DeepSpeed or FSDP instead",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "parallelism_config; use DDP, DeepSpeed or FSDP instead",
}


def _true(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true", "yes")


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
    return {"timeout": timedelta(hours=12)} | ({"backend": "gloo"} if on_cpu else {})


def interruptible() -> contextlib.AbstractContextManager[None]:
    """Let Ctrl-C and SIGTERM end a process that waits for others. torch would block until its
    timeout of 12 hours.
    """
    return _handled_by(signal.SIG_DFL) if launched() > 1 else contextlib.nullcontext()


@contextmanager
def _handled_by(handler: Any) -> Iterator[None]:
    numbers = (
        [signal.SIGTERM, signal.SIGINT]
        if threading.current_thread() is threading.main_thread()
        else []
    )
    # Programs started with `nohup`, or with `&` in a script, ignore Ctrl-C; keep it ignored for
    # them.
    numbers = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def join_processes(device: str) -> "PartialState":
    """Join the process group and return its state; RunError if not all processes that were launched
    are in it.
    """
    from accelerate import PartialState

    from draftsmith_core.models import resolve_device

    on_cpu = resolve_device(device).type == "cpu"
    with interruptible():
        state = PartialState(cpu=on_cpu, **process_group_options(on_cpu))
    check_process_count(state.num_processes)
    return state


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
    only_one = {
        "ACCELERATE_MIXED_PRECISION",
        "MASTER_ADDR",
    } <= os.environ.keys() and "WORLD_SIZE" not in os.environ
    if only_one or count != launched():
        raise RunError(
            f"only {count} of the processes found each other; launch with --multi_gpu, on CPUs too"
        )


def on_main(work: Callable[[], object]) -> None:
    """As `from_main`, without a result."""

    def run() -> None:
        work()

    from_main(run)


def from_main(work: Callable[[], T]) -> T:
    """Run `work` on the main process while the others wait; return its result, or raise its error,
    in all of them.

    Raises what the project raises on purpose, OSError, and RunError for safetensors that cannot be
    read. Within `work` it just runs what it is given: the other processes wait already.
    """
    global _others_wait
    if _others_wait:
        return work()
    outcome: list[Any] = [None, None]
    if is_main():
        _others_wait = True
        try:
            outcome[0] = work()
        except (DraftsmithError, OSError) as error:
            outcome[1] = error
        except SafetensorError as error:
            outcome[1] = RunError(one_line(error))
        finally:
            _others_wait = False
    if launched() > 1:
        from accelerate.utils import broadcast_object_list

        broadcast_object_list(outcome)
    result, failure = outcome
    if failure is not None:
        raise failure
    return result


def divided(count: int, work: Callable[[int], T]) -> list[T]:
    """`[work(0), ..., work(count - 1)]` in every process: each index is worked on by one of them,
    in turn.

    All processes must call it with the same `count`; it waits for the slowest. An InputError or
    RunError of one process is raised in all. Within `from_main`, where the others wait, the main
    process does it all.
    """
    if launched() == 1 or _others_wait:
        return [work(index) for index in range(count)]
    from accelerate.utils import gather_object

    values: dict[int, T] = {}
    failure: DraftsmithError | None = None
    try:
        for index in range(_rank(), count, launched()):
            values[index] = work(index)
    except DraftsmithError as error:
        failure = error
    merged: dict[int, T] = {}
    for part, failed in gather_object([(values, failure)]):
        if failed is not None:
            raise failed
        merged |= part
    return [merged[index] for index in range(count)]


@contextmanager
def terminable() -> Iterator[StopSignal]:
    """SIGTERM raises Terminated in the block and Ctrl-C KeyboardInterrupt; `stop.held` leaves them
    to the block.
    """
    stop = StopSignal()

    def arrived(number: int, frame: FrameType | None) -> None:
        again = number == stop.asked == signal.SIGINT
        stop.asked = number
        if again or not stop.held:
            raise stop.leaving()
        if number == signal.SIGINT and is_main():
            # os.write, because the signal may have interrupted a print, which is not reentrant.
            os.write(2, b"\ninterrupted: keeping what is done (Ctrl-C again: stop at once)\n")

    with _handled_by(arrived):
        yield stop


# By command, the variable of OpenMP to set, unless the user has set one of `_WAITING`.
_PASSIVE, _SPIN = ("OMP_WAIT_POLICY", "PASSIVE"), ("GOMP_SPINCOUNT", "2000")
_WAITS = {"train": _PASSIVE, "distill": _PASSIVE, "align": _SPIN, "demo": _SPIN, "eval": _SPIN}
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


_MMAP_MAX, _TRIM_THRESHOLD = -4, -1  # of malloc.h


def keep_freed_memory() -> None:
    """Let glibc keep freed blocks of any size for the next tensors, until the process ends.

    By default it maps each large block anew, and the kernel clears its pages again: a fifth of an
    evaluation's time.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_MAX, 0)
        libc.mallopt(_TRIM_THRESHOLD, -1)


def settle_threads(command: str, control_groups: Path = Path("/sys/fs/cgroup")) -> None:
    """Set the variables of OpenMP that suit a command, unless the user has set them. Torch reads
    them once.

    Waiting threads of GNU OpenMP spin for milliseconds, on cores that other threads need. Training
    and distillation wait seldom and sleep at once; timed decoding spins for microseconds. The
    number of threads is that of the cores or of the container's share; it does not follow the load,
    because another number rounds otherwise.
    """
    if command in _WAITS and not any(name in os.environ for name in _WAITING):
        name, value = _WAITS[command]
        os.environ[name] = value
    with contextlib.suppress(OSError, ValueError):  # no control groups, or no limit
        quota, period = (control_groups / "cpu.max").read_text().split()
        share = math.floor(float(quota) / float(period))
        if share < (os.cpu_count() or 1):
            os.environ.setdefault("OMP_NUM_THREADS", str(max(1, share)))
