"""Out of memory, on the host or a GPU, as one line that says what to lower and what is held."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from draftsmith_core.errors import RunError
from draftsmith_core.memory import peak_memory
from draftsmith_core.models import memory_bytes

if TYPE_CHECKING:
    from train.loop import TrainingJob
    from train.parallel import WrappedTrainee

# What torch says in a plain RuntimeError: its CPU allocator, a CUDA call outside its allocator, cuBLAS, NCCL.
_MESSAGES = ("can't allocate memory", "out of memory", "ALLOC_FAILED", "failed to allocate")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text.lower() in str(error).lower() for text in _MESSAGES)


@contextmanager
def memory_errors(job: "TrainingJob", wrapped: "WrappedTrainee | None", when: str) -> Iterator[None]:
    """Turn running out of memory in the block into RunError. when: what was being done, as the end of a sentence."""
    try:
        yield
    except RunError:
        raise  # is a RuntimeError too, and already one line
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        config = job.config
        parts = [("draft", job.trainee), *job.frozen.items()]
        sizes = [f"{name} {memory_bytes(model) / 2**30:.2f}" for name, model in parts]
        if wrapped is not None:
            states = wrapped.optimizer.state.values() if hasattr(wrapped.optimizer, "state") else ()
            moments = sum(v.nbytes for state in states for v in state.values() if isinstance(v, torch.Tensor))
            sizes.append(f"optimizer {moments / 2**30:.2f}")
        peak, kind = peak_memory(job.world.device)
        sizes.append(f"peak of the {'device' if kind == 'cuda' else 'process'} {peak / 2**30:.2f}")
        raise RunError(
            f"out of memory on {job.world.device.type} {when}, with batch_size {config.batch_size} and max_length "
            f"{config.max_length} (GiB: {', '.join(sizes)}); lower batch_size and raise accumulation as much, or lower "
            f"max_length; checkpoints are untouched, and the run continues from the newest"
        ) from None
