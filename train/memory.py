"""The memory that a training run takes on each device, forecast before anything is loaded: the
models are built without values.
"""

import os
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import get_max_memory
from transformers import PretrainedConfig, PreTrainedModel

from draftsmith.core.device_map import bytes_by_place, device_map, place_of
from draftsmith.core.devices import resolve_device
from draftsmith.core.launcher import launcher_request
from draftsmith.core.models import experts_per_token, memory_bytes, parameter_count, weights_dtype
from draftsmith.core.ranks import launched
from draftsmith.core.shapes import read_config, without_values
from draftsmith.drafts.config import BLOCK_KINDS
from draftsmith.drafts.heads import HEADS
from draftsmith.train.chunked import chunk_size
from draftsmith.train.config import TrainConfig
from draftsmith.train.draft_setup import fresh_options, is_untrained, read_shape
from draftsmith.train.optimizer import hidden_matrices
from draftsmith.train.parallel import repeated_layers
from draftsmith.train.trainees import TRAINEES

_FP32 = 4
# A container's limit, and what of memory.stat is held, in versions 2 and 1.
_CGROUP = Path("/sys/fs/cgroup")
_LIMITS = (("memory.max", "anon"), ("memory/memory.limit_in_bytes", "total_rss"))
# Logits of a chunk: draft's, target's, their gradient, and one more while they are made.
_LOGITS = 4


@dataclass(frozen=True)
class Memory:
    """Bytes on each device. optimizer: with the gradients. logits: of a chunk. free: what the
    device has left.
    """

    target: int
    draft: int
    optimizer: int
    activations: int
    logits: int
    free: int

    @property
    def total(self) -> int:
        return self.target + self.draft + self.optimizer + self.activations + self.logits

    @property
    def fits(self) -> bool:
        return self.total <= self.free


def forecast(config: TrainConfig) -> Memory:
    """Return what training with these options takes; activations within a factor of two."""
    device = resolve_device(config.device)
    target = None
    with torch.device("meta"):
        if config.target is not None:
            target = _without_values(_read(config, config.target), config, device)
        draft = _draft(config, target)
    parameters = [each for each in draft.parameters() if each.requires_grad]
    trained = sum(map(torch.numel, parameters))
    moments = 2 * trained
    name = config.optim.name or ("muon" if is_untrained(config.draft) else "adamw")
    if name == "muon":
        moments -= sum(map(torch.numel, hidden_matrices(draft)))
    weights = _FP32 * parameter_count(draft)
    optimizer = _FP32 * (trained + (0 if name == "sgd" else moments))
    if launcher_request() in ("fsdp", "zero"):
        optimizer //= launched()
    if launcher_request() == "fsdp":
        weights //= launched()
    return Memory(
        target=0 if target is None else _held(config, target),
        draft=weights,
        optimizer=optimizer,
        activations=_activations(config, target, draft),
        logits=_logits(config, draft if target is None else target),
        free=_free(device),
    )


def in_words(config: TrainConfig) -> list[str]:
    """Return a line with the forecast, and one with the option that makes it fit if it does not;
    none for models that cannot be read, which is told where they are loaded.
    """
    try:
        memory = forecast(config)
    except Exception:
        return []
    gib = {key: f"{value / 2**30:.2f}" for key, value in vars(memory).items()}
    line = (
        f"memory: {memory.total / 2**30:.2f} GiB on each device: target {gib['target']}, draft "
        f"{gib['draft']}, gradients and optimizer {gib['optimizer']}, activations about "
        f"{gib['activations']}, logits {gib['logits']}; {gib['free']} are free"
    )
    return [line] if memory.fits else [line, f"memory: does not fit; {_fix(config, memory)}"]


def _held(config: TrainConfig, target: PreTrainedModel) -> int:
    """Bytes of the target: its layers, of which a process may have a share, or none where their
    states are in files or other devices have them; and its tables.
    """
    if config.target_device_map is not None:
        device = resolve_device(config.device)
        places = device_map(config.target_device_map, target, device)
        return bytes_by_place(places, target)[place_of(device)]
    layers = sum(map(memory_bytes, repeated_layers(target)))
    tables = memory_bytes(target) - layers
    return tables + (0 if config.states else layers // config.target_parallel)


def _fix(config: TrainConfig, memory: Memory) -> str:
    for batch in (config.batch_size // 2**power for power in range(1, 16)):
        if batch and forecast(replace(config, batch_size=batch)).fits:
            return f"lower batch_size to {batch} and raise accumulation as much"
    shared = memory.total - (memory.draft + memory.optimizer) * (launched() - 1) // launched()
    if launched() > 1 and launcher_request() != "fsdp" and shared <= memory.free:
        return "launch with configs/accelerate/fsdp2.yaml, which divides draft and optimizer"
    halved = config.dtype == "auto" and forecast(replace(config, dtype="bfloat16")).fits
    if halved:
        return "halve the target by --dtype bfloat16"
    for count in (2, 4, 8):
        if launched() % count == 0 and forecast(replace(config, target_parallel=count)).fits:
            return f"divide the target by --target_parallel {count}"
    rest = (memory.free - memory.total + memory.target) / 2**30
    if launched() == 1 and config.target and rest > 0:
        return f"leave a part of the target elsewhere by --target_device_map auto:{rest:.2g}"
    return "read the target's states from files (distill --states), or take a smaller pair"


def _read(config: TrainConfig, name: str) -> PretrainedConfig:
    revision = config.revision if name == config.target else None
    return read_config(name, trust_remote_code=config.trust_remote_code, revision=revision)


def _without_values(
    shape: PretrainedConfig, config: TrainConfig, device: torch.device | None
) -> PreTrainedModel:
    """Build a model in the dtype that it is loaded in; a draft is trained in fp32."""
    dtype = torch.float32 if device is None else weights_dtype(config.dtype, device)
    return without_values(shape, dtype, config.trust_remote_code)


def _draft(config: TrainConfig, target: PreTrainedModel | None) -> Any:
    if config.kind != "lm":
        assert target is not None
        given = fresh_options(config)
        if config.draft_vocab_size is not None:
            given["draft_vocab"] = list(range(config.draft_vocab_size))
        if config.kind in BLOCK_KINDS:
            given["mask_token_id"] = 0
        return HEADS[config.kind].fresh(target, **given)
    if config.draft is not None:
        return _without_values(_read(config, config.draft), config, None)
    assert config.draft_config is not None
    shape = read_shape(config.draft_config, None if target is None else target.config)
    return _without_values(shape, config, None)


def _activations(config: TrainConfig, target: PreTrainedModel | None, draft: Any) -> int:
    """Bytes that a forward keeps for its backward: what the draft's matrices read and write, at
    every depth; and the states of one layer of the target.
    """
    tokens = config.batch_size * config.max_length
    widths = _widths(draft)
    kept = sum(widths)
    if config.gradient_checkpointing:
        kept = 2 * max(widths)
    usual: int = getattr(TRAINEES[config.kind], "usual_steps", 1)
    total = tokens * kept * _FP32 * (config.head.test_steps or usual)
    if target is not None:
        total += 2 * tokens * max(_widths(target)) * target.dtype.itemsize
    return total


def _logits(config: TrainConfig, model: Any) -> int:
    weight = model.get_output_embeddings().weight
    chunk = chunk_size(weight, None, None, resolve_device(config.device).type)
    return _LOGITS * _FP32 * len(weight) * min(config.batch_size * config.max_length, chunk)


def _widths(model: Any) -> list[int]:
    """How many values each matrix of the layers reads and writes for one token; of a mixture, those
    of the experts that a token has.
    """
    widths = [sum(weight.shape) for weight in hidden_matrices(model)]
    stacked = [each for each in model.parameters() if each.ndim == 3]
    return widths + [experts_per_token(model) * sum(each.shape[1:]) for each in stacked]


def _free(device: torch.device) -> int:
    """Memory of a device that is not in use; of the machine's, the share of one process."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    free = min(int(get_max_memory()["cpu"]), _of_container()) // processes
    # What `ulimit -v` and `ulimit -d` leave; only Linux says what is taken.
    with suppress(OSError):
        pages = Path("/proc/self/statm").read_text().split()
        for limit, taken in ((resource.RLIMIT_AS, pages[0]), (resource.RLIMIT_DATA, pages[5])):
            most = resource.getrlimit(limit)[0]
            if most != resource.RLIM_INFINITY:
                free = min(free, most - int(taken) * resource.getpagesize())
    return free


def _of_container() -> int:
    """What the limit of a container leaves; files in its cache can go."""
    for limit, taken in _LIMITS:
        with suppress(OSError, ValueError):
            most = int((_CGROUP / limit).read_text())
            stat = (_CGROUP / limit).with_name("memory.stat").read_text()
            counts = dict(line.split() for line in stat.splitlines())
            return most - int(counts[taken])
    return sys.maxsize
