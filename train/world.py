"""The processes of a training run, connected by accelerate as the launcher asks."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

from draftsmith.core.devices import resolve_device
from draftsmith.core.environment import environment
from draftsmith.core.errors import InputError, RunError, one_line, require_package
from draftsmith.core.launcher import (
    agree_on,
    check_process_count,
    launcher_request,
    process_group_options,
    wait_for_all,
)
from draftsmith.core.ranks import leads_group
from draftsmith.core.signals import interruptible
from draftsmith.train.config import TrainConfig

# Settings of the launcher that are decided elsewhere: variable -> its values that change nothing,
# the default first, and what to set instead.
_SETTINGS: dict[str, tuple[tuple[str, ...], str]] = {
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (
        ("1", "auto"),
        "gradient_accumulation_steps: set `accumulation` instead",
    ),
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": (
        ("false",),
        "zero3_init_flag: weights are sharded after they are loaded",
    ),
    # Those of FSDP count under FSDP only.
    "FSDP_VERSION": (("2",), "fsdp_version: only 2 is supported"),
    "FSDP_ACTIVATION_CHECKPOINTING": (
        ("false",),
        "fsdp_activation_checkpointing: set `gradient_checkpointing` instead",
    ),
    "FSDP_OFFLOAD_PARAMS": (("false",), "fsdp_offload_params: is not supported"),
}


@dataclass(frozen=True)
class World:
    """The processes. sharing: single, ddp, zero1, zero2, zero3 or fsdp. bf16: use autocast."""

    accelerator: Accelerator
    sharing: str
    bf16: bool

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def size(self) -> int:
        return int(self.accelerator.num_processes)

    @property
    def rank(self) -> int:
        return int(self.accelerator.process_index)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all processes; those that hold a target together count once."""
        return self.summed(values if leads_group() else torch.zeros_like(values))

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all processes, on the device; of a single one where the values are."""
        if self.size == 1:
            return values
        summed: torch.Tensor = self.accelerator.reduce(values.to(self.device), reduction="sum")
        return summed

    @property
    def is_main(self) -> bool:
        return bool(self.accelerator.is_main_process)

    @property
    def zero(self) -> bool:
        """Whether DeepSpeed shares the weights."""
        return self.sharing.startswith("zero")


def make_world(config: TrainConfig) -> World:
    """Connect the launched processes. Raise RunError if the launcher asks for what we ignore,
    InputError if the processes do not have the same options.
    """
    device = resolve_device(config.device)
    on_cpu = device.type == "cpu"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    can_bf16 = not on_cpu and torch.cuda.is_bf16_supported()
    bf16 = config.precision == "bf16" or (config.precision == "auto" and can_bf16)
    sharing: str = launcher_request()
    zero = sharing == "zero"
    if zero:
        advice = "launch with configs/accelerate/ddp.yaml"
        require_package("deepspeed", "the launcher's DeepSpeed configuration", advice)
        if config.optim.name == "muon":
            raise InputError(
                "optim.name: muon needs whole matrices, and DeepSpeed shares them in pieces; "
                f"{advice} or fsdp2.yaml"
            )
    _check_launcher(sharing, bf16)
    group = process_group_options(on_cpu)
    accelerator_of_deepspeed = {"DS_ACCELERATOR": "cpu"} if on_cpu else {}
    wait_for_all()
    try:
        with silent(zero), interruptible(), environment(**accelerator_of_deepspeed):
            accelerator = Accelerator(
                # With cpu=True accelerate would silently drop DeepSpeed and train plain copies.
                cpu=on_cpu and not zero,
                mixed_precision="no",
                kwargs_handlers=[InitProcessGroupKwargs(**group)] if group else [],
                log_with=None if config.tracker == "none" else config.tracker,
                project_dir=config.out + "/run" if config.tracker == "tensorboard" else None,
            )
    except ValueError as error:
        raise RunError(f"accelerate could not connect the processes: {one_line(error)}") from None
    check_process_count(accelerator.num_processes)
    agree_on(config)
    if zero:
        from draftsmith.core.transformers_api import unset_hf_deepspeed_config

        # Else transformers would shard every model while it is created, also one that only the main
        # process creates.
        unset_hf_deepspeed_config()
        sharing = f"zero{accelerator.state.deepspeed_plugin.zero_stage}"
    return World(accelerator, sharing, bf16)


def _check_launcher(sharing: str, bf16: bool) -> None:
    precisions = ("no", "bf16") if bf16 else ("no",)
    precision = {"ACCELERATE_MIXED_PRECISION": (precisions, "mixed_precision: set `precision`")}
    for variable, (agreeing, advice) in (precision | _SETTINGS).items():
        if variable.startswith("FSDP") and sharing != "fsdp":
            continue
        value = os.environ.get(variable, agreeing[0]).lower()
        if value not in agreeing:
            raise RunError(f"the launcher sets {value} for {advice}")


@contextmanager
def silent(deepspeed: bool) -> Iterator[None]:
    """Send what DeepSpeed prints to standard error: standard output has the command's result."""
    with redirect_stdout(sys.stderr) if deepspeed else nullcontext():
        yield
    if deepspeed:
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
