"""The processes of a run, and a draft trained on them: copies of the weights (DDP), or shards
(ZeRO, FSDP2).

accelerate connects the processes and wraps DDP and DeepSpeed. FSDP2 is torch's `fully_shard`,
applied here because accelerate applies it on GPUs only and elsewhere silently trains unsynchronised
copies. Weights and optimizer states are gathered whole and by name, so that a checkpoint does not
depend on the processes that wrote it.
"""

import logging
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from draftsmith_core.devices import resolve_device
from draftsmith_core.errors import RunError, one_line, require_package
from draftsmith_core.launcher import check_process_count, launcher_request, process_group_options
from draftsmith_core.signals import interruptible
from train.config import TrainConfig

# Moments of AdamW, as torch names them; SGD without momentum has none.
_MOMENTS = ("exp_avg", "exp_avg_sq")
# Settings of a launcher that are decided elsewhere: variable, the values that agree, and what to
# set instead. The last three are read under FSDP only.
_LAUNCHER = (
    (
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        "1 auto",
        "gradient_accumulation_steps: set `accumulation` instead",
    ),
    (
        "ACCELERATE_DEEPSPEED_ZERO3_INIT",
        "false",
        "zero3_init_flag: weights are sharded after they are loaded",
    ),
    ("FSDP_VERSION", "2", "fsdp_version: only 2 is supported"),
    (
        "FSDP_ACTIVATION_CHECKPOINTING",
        "false",
        "fsdp_activation_checkpointing: set `gradient_checkpointing` instead",
    ),
    ("FSDP_OFFLOAD_PARAMS", "false", "fsdp_offload_params: is not supported"),
)


@dataclass(frozen=True)
class World:
    """The processes. sharing: single, ddp, zero1, zero2, zero3 or fsdp. bf16: whether the forward
    uses autocast.
    """

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
    def zero(self) -> bool:
        """Whether DeepSpeed shares the weights."""
        return self.sharing.startswith("zero")


def make_world(config: TrainConfig) -> World:
    """Connect the launched processes. Raise RunError if the launcher asks for something that would
    be ignored.
    """
    device = resolve_device(config.device)
    on_cpu = device.type == "cpu"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    bf16 = config.precision == "bf16" or (
        config.precision == "auto" and not on_cpu and torch.cuda.is_bf16_supported()
    )
    sharing: str = launcher_request()
    zero = sharing == "zero"
    if zero:
        advice = "launch with configs/accelerate/ddp.yaml"
        require_package("deepspeed", "the launcher's DeepSpeed configuration", advice)
    precision = (
        "ACCELERATE_MIXED_PRECISION",
        "no bf16" if bf16 else "no",
        "mixed_precision: set `precision`",
    )
    for variable, agreeing, advice in (precision, *_LAUNCHER):
        value = os.environ.get(variable, agreeing.split()[0]).lower()
        if value not in agreeing.split() and (sharing == "fsdp" or not variable.startswith("FSDP")):
            raise RunError(f"the launcher sets {value} for {advice}")
    group = process_group_options(on_cpu)
    if on_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        with _silent(zero), interruptible():
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
    if zero:
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        # Else transformers would shard every model while it is created, also one that only the main
        # process creates.
        unset_hf_deepspeed_config()
        sharing = f"zero{accelerator.state.deepspeed_plugin.zero_stage}"
    return World(accelerator, sharing, bf16)


@contextmanager
def _silent(deepspeed: bool) -> Iterator[None]:
    """Send what DeepSpeed prints to standard error: standard output is for the command's own
    result.
    """
    with redirect_stdout(sys.stderr) if deepspeed else nullcontext():
        yield
    if deepspeed:
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)


@dataclass(frozen=True)
class WrappedTrainee:
    """A trainee and its wrapper. `module(batch)` is its forward; `trainee.draft` holds the
    weights.
    """

    world: World
    trainee: nn.Module
    module: Any
    optimizer: Any


def wrap(world: World, trainee: nn.Module, optim: Any, config: TrainConfig) -> WrappedTrainee:
    """Wrap the trainee as `world.sharing` says. `optim`: trainee -> optimizer, called when the
    parameters are final.
    """
    trainee.to(world.device)
    if world.bf16:
        # The method itself, because DeepSpeed switches off an autocast around its engine.
        trainee.forward = torch.autocast(world.device.type, torch.bfloat16)(trainee.forward)
    accelerator = world.accelerator
    if world.sharing == "fsdp":
        mesh = init_device_mesh(world.device.type, (world.size,))
        # Whether gathered weights are freed after each layer's forward.
        reshard = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() not in (
            "false",
            "0",
            "no",
        )
        for layer in repeated_layers(trainee.draft):
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(trainee, mesh=mesh)
        return WrappedTrainee(world, trainee, trainee, optim(trainee))
    if world.zero:
        options = accelerator.state.deepspeed_plugin.deepspeed_config
        for name in ("fp16", "bf16"):
            if options.get(name, {}).get("enabled") is True:
                raise RunError(
                    f"the DeepSpeed config enables {name}; leave it out and set `precision` instead"
                )
        options["train_micro_batch_size_per_gpu"] = config.batch_size
        options["gradient_clipping"] = config.optim.clip_norm
    with _silent(world.zero):
        module, optimizer = accelerator.prepare(trainee, optim(trainee))
    wrappers = {"ddp": "DistributedDataParallel", "single": type(trainee).__name__}
    expected = wrappers.get(world.sharing, "DeepSpeedEngine")
    if type(module).__name__ != expected:
        raise RunError(
            f"accelerate gave {type(module).__name__} instead of {expected}; weights would not "
            "be shared"
        )
    return WrappedTrainee(world, trainee, module, optimizer.optimizer)


def repeated_layers(draft: Any) -> list[nn.Module]:
    """The decoder layers of a draft, in order; empty if there are none."""
    lists = [
        module
        for module in draft.modules()
        if isinstance(module, nn.ModuleList) and module is not draft
    ]
    return list(
        max(lists, key=lambda layers: sum(p.numel() for p in layers.parameters()), default=[])
    )


@contextmanager
def accumulating(wrapped: WrappedTrainee, last: bool) -> Iterator[None]:
    """Around a forward and its backward: gradients are averaged over processes only after the
    `last` one of a step.
    """
    sharing = wrapped.world.sharing
    if sharing == "fsdp":
        wrapped.module.set_requires_gradient_sync(last)
    elif wrapped.world.zero:
        wrapped.module.set_gradient_accumulation_boundary(is_boundary=last)
    with wrapped.module.no_sync() if sharing == "ddp" and not last else nullcontext():
        yield


def backward(wrapped: WrappedTrainee, loss: Tensor) -> None:
    """Add the gradient of `loss`, averaged over the processes."""
    if wrapped.world.zero:
        wrapped.module.backward(loss)
    else:
        loss.backward()


def step(wrapped: WrappedTrainee, clip_norm: float) -> float:
    """Clip the gradients (0: not at all), update the weights, clear the gradients. Return the norm
    before clipping.

    If the norm is not finite, the weights are not updated (DeepSpeed updates them; the run must end
    either way).
    """
    if wrapped.world.zero:
        wrapped.module.step()
        return float(wrapped.module.get_global_grad_norm())
    parameters = [parameter for _, parameter in _trained(wrapped)]
    norms: Any = torch.nn.utils.clip_grad_norm_(parameters, clip_norm or math.inf)
    norm = float(_whole(norms))
    if math.isfinite(norm):
        wrapped.optimizer.step()
    wrapped.optimizer.zero_grad(set_to_none=True)
    return norm


@torch.no_grad()
def gather_weights(wrapped: WrappedTrainee) -> dict[str, Tensor]:
    """Parameters and saved buffers of the draft by name, whole, on the CPU of the main process;
    empty elsewhere.
    """
    draft = wrapped.trainee.draft
    assert isinstance(draft, nn.Module)
    main = wrapped.world.accelerator.is_main_process
    weights: dict[str, Tensor] = {}
    if wrapped.world.sharing == "fsdp":
        # After an evaluation FSDP2 leaves the outermost weights gathered, as plain tensors without
        # `full_tensor`.
        for module in wrapped.module.modules():
            if hasattr(module, "reshard"):
                module.reshard()
    gathered: Any = nullcontext
    if wrapped.world.sharing == "zero3":
        import deepspeed

        gathered = deepspeed.zero.GatheredParameters
    for name, parameter in draft.named_parameters():
        with gathered([parameter]):
            value = _whole(parameter)
            if main:
                weights[name] = value.detach().to("cpu", copy=True).contiguous()
    saved = draft.state_dict().keys()
    buffers = {
        name: buffer.detach().cpu().contiguous()
        for name, buffer in draft.named_buffers()
        if name in saved
    }
    return weights | buffers if main else {}


def _whole(value: Any) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


@torch.no_grad()
def load_weights(draft: nn.Module, values: dict[str, Tensor]) -> None:
    """Put the result of `gather_weights` into a draft that is not wrapped yet."""
    places = dict(draft.named_parameters()) | dict(draft.named_buffers())
    for name, value in values.items():
        places[name].copy_(value)


def _trained(wrapped: WrappedTrainee) -> list[tuple[str, Any]]:
    return [(name, p) for name, p in wrapped.trainee.named_parameters() if p.requires_grad]


@torch.no_grad()
def gather_optimizer(wrapped: WrappedTrainee) -> dict[str, Tensor]:
    """The optimizer's state by `key/parameter`, whole, on the CPU of the main process. Every
    process calls it.
    """
    main = wrapped.world.accelerator.is_main_process
    if wrapped.world.zero:
        from deepspeed.utils import safe_get_full_optimizer_state

        _partitions(wrapped)
    states = wrapped.optimizer.optimizer.state if wrapped.world.zero else wrapped.optimizer.state
    steps = [state["step"] for state in states.values() if "step" in state]
    if not steps:
        return {}
    values: dict[str, Tensor] = {"step": steps[0].cpu()}
    for name, parameter in _trained(wrapped):
        for key in _MOMENTS:
            if wrapped.world.zero:
                value = safe_get_full_optimizer_state(parameter, key)
                shape = getattr(parameter, "ds_shape", parameter.shape)
            else:
                value = _whole(states[parameter][key])
                shape = value.shape
            if main:
                values[f"{key}/{name}"] = value.to("cpu", copy=True).reshape(shape).contiguous()
    return values if main else {}


@torch.no_grad()
def load_optimizer(wrapped: WrappedTrainee, values: dict[str, Tensor]) -> None:
    """Restore the result of `gather_optimizer`, from however many processes it came. Every process
    calls it.
    """
    if not values:
        return
    if wrapped.world.zero:
        from deepspeed.utils import safe_set_full_optimizer_state

        for partition in _partitions(wrapped):
            moments = {key: torch.zeros_like(partition) for key in _MOMENTS}
            wrapped.optimizer.optimizer.state[partition] = {
                "step": values["step"].clone(),
                **moments,
            }
        _partitions(wrapped)
    for name, parameter in _trained(wrapped):
        state = {key: values[f"{key}/{name}"].to(wrapped.world.device) for key in _MOMENTS}
        if wrapped.world.zero:
            for key, value in state.items():
                safe_set_full_optimizer_state(parameter, value, key)
            continue
        if wrapped.world.sharing == "fsdp":
            mesh, places = parameter.device_mesh, parameter.placements
            state = {key: distribute_tensor(value, mesh, places) for key, value in state.items()}
        wrapped.optimizer.state[parameter] = {"step": values["step"].clone(), **state}


def _partitions(wrapped: WrappedTrainee) -> list[Tensor]:
    """This process's flat pieces that DeepSpeed's inner optimizer works on, linked to their
    parameters.
    """
    optimizer = wrapped.optimizer
    if wrapped.world.sharing == "zero3":
        return list(optimizer.fp32_partitioned_groups_flat)
    from deepspeed.utils import lazy_init_hp_params_optimizer_state

    pieces = list(optimizer.single_partition_of_fp32_groups)
    # DeepSpeed links them once, after the first group's first step, when the other groups have no
    # state yet; the states of those could not be read without this.
    for parameters, piece in zip(optimizer.bit16_groups, pieces, strict=True):
        if optimizer.optimizer.state.get(piece):
            lazy_init_hp_params_optimizer_state(parameters, piece, optimizer.optimizer.state)
    return pieces
