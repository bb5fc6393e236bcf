"""The processes of a run: one, or those that a launcher started, and how they share the weights.

accelerate connects them. What a launcher's configuration asks for and would not get is refused here, in one line.
"""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Literal

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs

from draftsmith_core.errors import RunError, one_line
from draftsmith_core.models import resolve_device
from draftsmith_core.packages import require_package
from draftsmith_core.processes import (
    LauncherRequest,
    check_process_count,
    launcher_request,
    process_group_options,
    telling_who_is_waited_for,
)
from train.config import TrainConfig

Sharing = Literal["single", "ddp", "zero1", "zero2", "zero3", "fsdp"]

# Options of an FSDP configuration that have one possible value here; any other would be ignored, so it is refused.
_FSDP_FIXED = {
    "FSDP_VERSION": ("2", "fsdp_version"),
    "FSDP_ACTIVATION_CHECKPOINTING": ("false", "fsdp_activation_checkpointing (set `gradient_checkpointing` instead)"),
    "FSDP_OFFLOAD_PARAMS": ("false", "fsdp_offload_params"),
}


@dataclass(frozen=True)
class World:
    """The processes: accelerate's handle, how they share the weights, and the precision of the forward.

    reshard: whether FSDP2 frees gathered weights after each layer's forward.
    """

    accelerator: Accelerator
    sharing: Sharing
    bf16: bool
    reshard: bool = True

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        device: torch.device = self.accelerator.device
        return device

    @property
    def size(self) -> int:
        """How many processes there are."""
        return int(self.accelerator.num_processes)


def make_world(config: TrainConfig) -> World:
    """One process, or as many as the launcher started; RunError when what came up is not what was asked for."""
    device = resolve_device(config.device)
    on_cpu = device.type == "cpu"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    bf16 = config.precision == "bf16"
    if config.precision == "auto" and not on_cpu:
        bf16 = torch.cuda.is_bf16_supported()
    wanted = launcher_request()
    if wanted.kind == "zero":
        require_package(
            "deepspeed", "the launcher's DeepSpeed configuration", "launch with configs/accelerate/ddp.yaml"
        )
    _check_launcher(wanted, bf16)
    options = process_group_options(on_cpu)
    if on_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        with silent(wanted.kind == "zero"), telling_who_is_waited_for():
            accelerator = Accelerator(
                # With cpu=True accelerate would silently drop DeepSpeed and train plain copies.
                cpu=on_cpu and wanted.kind != "zero",
                mixed_precision="no",
                kwargs_handlers=[InitProcessGroupKwargs(**options)] if options else [],
                log_with=None if config.tracker == "none" else config.tracker,
                project_dir=config.out + "/run" if config.tracker == "tensorboard" else None,
            )
    except ValueError as error:
        raise RunError(f"accelerate could not bring the processes together: {one_line(error)}") from None
    check_process_count(accelerator.num_processes)
    if accelerator.device.type != device.type:
        raise RunError(
            f"device {device.type} was asked for and accelerate came up on {accelerator.device.type}; "
            f"to stay off the GPUs of this machine set CUDA_VISIBLE_DEVICES= as well"
        )
    if wanted.kind == "zero":
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        # Else transformers would shard every model while it is created, also one that only the main process creates.
        unset_hf_deepspeed_config()
    return World(accelerator, _sharing(wanted, accelerator), bf16, _reshards())


def _check_launcher(wanted: LauncherRequest, bf16: bool) -> None:
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision not in ("no", "bf16" if bf16 else "no"):
        raise RunError(f"the launcher asks for mixed_precision {precision}; leave it `no` and set `precision` instead")
    if os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1") not in ("1", "auto"):
        raise RunError("the launcher sets gradient_accumulation_steps; leave it at 1 and set `accumulation` instead")
    if os.environ.get("ACCELERATE_DEEPSPEED_ZERO3_INIT", "false").lower() == "true":
        raise RunError("the launcher sets zero3_init_flag; leave it false, weights are divided after they are loaded")
    if wanted.kind == "fsdp":
        for variable, (value, option) in _FSDP_FIXED.items():
            found = os.environ.get(variable, value).lower()
            if found != value:
                raise RunError(f"the launcher sets {option} to {found}; only {value} is done here")


def _reshards() -> bool:
    return os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() not in ("false", "0", "no")


def _sharing(wanted: LauncherRequest, accelerator: Accelerator) -> Sharing:
    """How the weights are shared; RunError when accelerate came up as something else than was asked for."""
    found = accelerator.distributed_type
    if wanted.kind == "zero":
        if found != DistributedType.DEEPSPEED:
            raise RunError(f"DeepSpeed was asked for and accelerate came up as {found.value}")
        stage = accelerator.state.deepspeed_plugin.zero_stage
        stages: dict[int, Sharing] = {1: "zero1", 2: "zero2", 3: "zero3"}
        if stage not in stages:
            raise RunError(f"DeepSpeed with zero_stage {stage} shares nothing; set it to 1, 2 or 3, or use ddp.yaml")
        return stages[stage]
    copies = (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.MULTI_XPU)
    if wanted.processes > 1 and found not in copies:
        raise RunError(f"{wanted.processes} processes were launched and accelerate came up as {found.value}")
    if wanted.kind == "fsdp" and wanted.processes == 1:
        raise RunError("FSDP was asked for with one process, which has none to share with; launch more, or without it")
    return wanted.kind


@contextmanager
def silent(deepspeed: bool) -> Iterator[None]:
    """Send what DeepSpeed prints to standard error: standard output is for the command's own result."""
    if not deepspeed:
        yield
        return
    with redirect_stdout(sys.stderr):
        yield
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
