"""Where a section of `device_check.py` runs, how long it may take, and how it measures time and
memory.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from benchmarks.lib.timing import synchronise
from draftsmith.core.devices import peak_memory, reset_peak_memory


@dataclass(frozen=True)
class Check:
    """Where and how long: `until` is when the section's time is up, by `time.monotonic`; `report`
    keeps a figure.
    """

    device: torch.device
    tiny: bool
    until: float
    report: Callable[[str, object], None]

    @property
    def dtype(self) -> torch.dtype:
        """bf16 on an accelerator, fp32 on a CPU."""
        return torch.float32 if self.device.type == "cpu" else torch.bfloat16

    @property
    def backend(self) -> bool | str:
        """What `compile` is: CUDA graphs, or where there are none torch.compile's tracing alone."""
        return True if self.device.type == "cuda" else "eager"

    def late(self) -> bool:
        """Whether no time is left for something else."""
        return time.monotonic() > self.until

    def seconds(self, function: Callable[[], object], repeats: int = 5) -> float:
        """The median time of a function after one call that is not counted."""
        function()
        times = []
        for _ in range(1 if self.tiny else repeats):
            synchronise(self.device)
            began = time.perf_counter()
            function()
            synchronise(self.device)
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    @contextmanager
    def memory(self) -> Iterator[dict[str, float]]:
        """Fills in `GB` at the end."""
        found: dict[str, float] = {}
        reset_peak_memory(self.device)
        yield found
        most, _ = peak_memory(self.device)
        found["GB"] = round(most / 1e9, 3)
