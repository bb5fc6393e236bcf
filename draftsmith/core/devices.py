"""The device that tensors are on, and the memory that they take there."""

import contextlib
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch

from draftsmith.core.environment import shared
from draftsmith.core.errors import InputError, first_line


def resolve_device(device: str) -> torch.device:
    """The device of an option; `auto` and `cuda` are this process's CUDA device, `auto` the CPU
    without one or if the launcher asks.
    """
    own = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    if device == "auto":
        on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true")
        return torch.device("cpu") if on_cpu or not torch.cuda.is_available() else own
    try:
        resolved = own if device == "cuda" else torch.device(device)
        torch.zeros(1, device=resolved).item()
    except (ValueError, RuntimeError, NotImplementedError, AssertionError) as error:
        raise InputError(
            f"--device {device}: {first_line(error)}; use auto, cpu, cuda or cuda:N"
        ) from None
    return resolved


@shared
@contextlib.contextmanager
def attention_of_any_length() -> Iterator[None]:
    """Leave out cuDNN's attention, which plans its work anew for every length that it meets: 47 to
    147 ms each on an H200, where a call takes 0.05 ms. Decoding and training meet a new length in
    nearly every step. The switch is the process's.
    """
    was_on = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_on)


@shared
@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Give torch's global generators, and the current CUDA device, back as they were."""
    started = torch.cuda.is_initialized()
    devices = range(torch.cuda.device_count()) if started else ()
    current = torch.cuda.current_device() if started else 0
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        if not started:
            # As they would start later with the caller's seed.
            torch.cuda.manual_seed_all(torch.initial_seed())
        if torch.cuda.is_initialized():
            torch.cuda.set_device(current)


MemoryMeasure = Literal["cuda", "process_rss"]


def peak_memory(device: torch.device | str) -> tuple[int, MemoryMeasure]:
    """The most bytes held at once since the process began or `reset_peak_memory`, and what they
    were measured of.

    "cuda": PyTorch's tensors on that device. "process_rss": resident memory of the process, for any
    other device.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), "cuda"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return peak * unit, "process_rss"


def reset_peak_memory(device: torch.device | str) -> None:
    """Count the peak from what is held now. Outside Linux the peak of a process cannot be reset and
    stays.
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        # No /proc (macOS), or one that is mounted read-only (some containers).
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
