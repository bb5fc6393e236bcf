"""Peak memory: of tensors on a CUDA device, else of the whole process."""

import contextlib
import resource
import sys
from pathlib import Path
from typing import Literal

import torch

MemoryKind = Literal["cuda", "process_rss"]


def peak_memory(device: torch.device | str) -> tuple[int, MemoryKind]:
    """The most bytes held at once since the process began or `reset_peak_memory`, and what they were measured of.

    "cuda": PyTorch's tensors on that device. "process_rss": resident memory of the process, for any other device.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), "cuda"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024, "process_rss"  # macOS counts bytes, Linux KiB


def reset_peak_memory(device: torch.device | str) -> None:
    """Count the peak from what is held now. Outside Linux the peak of a process cannot be reset and stays."""
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):  # no /proc (macOS), or one that is mounted read-only (some containers)
            Path("/proc/self/clear_refs").write_text("5")
