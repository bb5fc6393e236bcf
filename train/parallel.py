"""A trainee in the hands of the processes: a copy each (DDP), or parts (DeepSpeed ZeRO, FSDP2).

accelerate wraps DDP and DeepSpeed. FSDP2 is torch's own `fully_shard`, put on here: accelerate applies it on GPUs only
and elsewhere trains unsynchronised copies without a word; so the same code runs on CPUs (gloo), where it is tested, and
on GPUs. Weights and optimizer states leave here whole and by name, so that a checkpoint does not say how many processes
wrote it, nor how they shared.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith_core.errors import RunError
from train.config import TrainConfig
from train.data import Batch
from train.loss_sums import Sums
from train.world import World, silent

# Moments of AdamW, as torch names them; SGD without momentum has none.
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Engine:
    """A trainee in the hands of the processes. `wrapped(batch)` is its forward; `trainee.draft` has the weights."""

    world: World
    trainee: nn.Module
    wrapped: Any
    optimizer: Any


class _Forward(nn.Module):
    """The trainee's forward under autocast, with tensors only as its result: that is where wrappers look for them."""

    def __init__(self, trainee: nn.Module, device: str, bf16: bool) -> None:
        super().__init__()
        self.trainee = trainee
        self.device = device
        self.bf16 = bf16

    def forward(self, batch: Batch) -> tuple[Tensor, ...]:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.bf16):
            # Past the trainee's hooks: ZeRO-3 ties what is read outside its own module (an output projection) to the
            # innermost module whose hooks ran, and there it must find the tensors of the result.
            sums: Sums = self.trainee.forward(batch)
        there = (sums.loss, sums.tokens, sums.alpha, sums.depth_alpha_D, sums.depth_tokens_D)
        return there if sums.missing is None else (*there, sums.missing)


def wrap(world: World, trainee: nn.Module, optim: Any, config: TrainConfig) -> Engine:
    """Hand the trainee to the processes. `optim`: parameters -> optimizer, called when the parameters are final."""
    trainee.to(world.device)
    forward = _Forward(trainee, world.device.type, world.bf16)
    accelerator = world.accelerator
    if world.kind == "fsdp":
        return _sharded(world, trainee, forward, optim)
    if world.kind in ("single", "ddp"):
        wrapped, optimizer = accelerator.prepare(forward, optim(trainee))
        _check_wrapped(world, wrapped, "DistributedDataParallel" if world.kind == "ddp" else "_Forward")
        return Engine(world, trainee, wrapped, optimizer.optimizer)
    options = accelerator.state.deepspeed_plugin.deepspeed_config
    for name in ("fp16", "bf16"):
        if options.get(name, {}).get("enabled") is True:
            raise RunError(f"the DeepSpeed config enables {name}; leave it out and set `precision` instead")
    options["train_micro_batch_size_per_gpu"] = config.batch_size
    options["gradient_clipping"] = config.optim.clip_norm
    with silent(deepspeed=True):
        wrapped, optimizer = accelerator.prepare(forward, optim(trainee))
    _check_wrapped(world, wrapped, "DeepSpeedEngine")
    return Engine(world, trainee, wrapped, optimizer.optimizer)


def _check_wrapped(world: World, wrapped: nn.Module, expected: str) -> None:
    if type(wrapped).__name__ != expected:
        raise RunError(f"{world.kind} was asked for and accelerate gave {type(wrapped).__name__}, not {expected}")


def _sharded(world: World, trainee: nn.Module, forward: nn.Module, optim: Any) -> Engine:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh(world.device.type, (world.size,))
    for layer in repeated_layers(trainee.draft):
        fully_shard(layer, mesh=mesh, reshard_after_forward=world.reshard)
    fully_shard(forward, mesh=mesh)
    if not all(isinstance(parameter, DTensor) for parameter in trainee.parameters()):
        raise RunError("FSDP was asked for and not all weights were divided")
    return Engine(world, trainee, forward, optim(trainee))


def repeated_layers(draft: Any) -> list[nn.Module]:
    """The layers of a draft that are alike, one after another (its decoder layers); empty when there are none."""
    lists = [module for module in draft.modules() if isinstance(module, nn.ModuleList) and module is not draft]
    largest = max(lists, key=lambda found: sum(p.numel() for p in found.parameters()), default=None)
    return [] if largest is None else list(largest)


def compile_layers(draft: nn.Module) -> None:
    """torch.compile, in place: every repeated layer, or the whole draft when it has none."""
    for module in repeated_layers(draft) or [draft]:
        module.compile(dynamic=True)


def forward(engine: Engine, batch: Batch) -> Sums:
    """The trainee's sums over a batch, through the wrapper."""
    return Sums(*engine.wrapped(batch))


@contextmanager
def accumulating(engine: Engine, last: bool) -> Iterator[None]:
    """Around a forward and its backward; gradients meet those of the other processes in the last one of a step."""
    kind = engine.world.kind
    if kind == "fsdp":
        engine.wrapped.set_requires_gradient_sync(last)
    elif kind.startswith("zero"):
        engine.wrapped.set_gradient_accumulation_boundary(is_boundary=last)
    with engine.wrapped.no_sync() if kind == "ddp" and not last else nullcontext():
        yield


def backward(engine: Engine, loss: Tensor) -> None:
    """Add the gradient of `loss`, averaged over the processes."""
    if engine.world.kind.startswith("zero"):
        engine.wrapped.backward(loss)
    else:
        loss.backward()


def step(engine: Engine, clip_norm: float) -> float:
    """Clip (0: not at all), update the weights, forget the gradients; the gradient norm before clipping.

    Where that is not finite the weights are not updated (under DeepSpeed they are; the run must end either way).
    """
    if engine.world.kind.startswith("zero"):
        engine.wrapped.step()
        return float(engine.wrapped.get_global_grad_norm())
    parameters = [parameter for parameter in engine.trainee.parameters() if parameter.requires_grad]
    found: Any = torch.nn.utils.clip_grad_norm_(parameters, clip_norm or math.inf)
    norm = float(found.full_tensor() if hasattr(found, "full_tensor") else found)
    if math.isfinite(norm):
        engine.optimizer.step()
    engine.optimizer.zero_grad(set_to_none=True)
    return norm


def set_rate(engine: Engine, rate: float) -> None:
    """The learning rate of the next step."""
    for group in engine.optimizer.param_groups:
        group["lr"] = rate


@torch.no_grad()
def gather_weights(engine: Engine) -> dict[str, Tensor]:
    """Parameters and saved buffers of the draft by name, whole, on the CPU of the main process; empty elsewhere.

    Every process calls it. Tied parameters stand there once.
    """
    draft = engine.trainee.draft
    assert isinstance(draft, nn.Module)
    main = engine.world.accelerator.is_main_process
    found: dict[str, Tensor] = {}
    if engine.world.kind == "fsdp":
        # After an evaluation the outermost weights are still whole, as plain tensors.
        for module in engine.wrapped.modules():
            if hasattr(module, "reshard"):
                module.reshard()
    for name, parameter in draft.named_parameters():
        with _whole(engine, parameter) as value:
            if main:
                found[name] = value.detach().to("cpu", copy=True).contiguous()
    if main:
        saved = _saved_names(draft)
        found |= {name: b.detach().cpu().contiguous() for name, b in draft.named_buffers() if name in saved}
    return found


def _saved_names(draft: nn.Module) -> set[str]:
    """Names of a module's buffers that belong to its state."""
    transient = {
        (f"{path}." if path else "") + name
        for path, module in draft.named_modules()
        for name in module._non_persistent_buffers_set
    }
    return {name for name, _ in draft.named_buffers()} - transient


@contextmanager
def _whole(engine: Engine, parameter: Any) -> Iterator[Tensor]:
    if engine.world.kind == "zero3":
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            yield parameter
    elif engine.world.kind == "fsdp":
        yield parameter.full_tensor()
    else:
        yield parameter


@torch.no_grad()
def load_weights(draft: nn.Module, values: dict[str, Tensor]) -> None:
    """Put what `gather_weights` gave into a draft that is not wrapped yet."""
    places = dict(draft.named_parameters()) | dict(draft.named_buffers())
    for name, value in values.items():
        places[name].copy_(value)


def _trained(engine: Engine) -> list[tuple[str, Any]]:
    return [(name, p) for name, p in engine.trainee.named_parameters() if p.requires_grad]


@torch.no_grad()
def gather_optimizer(engine: Engine) -> dict[str, Tensor]:
    """The optimizer's state by `key/parameter`, whole, on the CPU of the main process. Every process calls it."""
    main = engine.world.accelerator.is_main_process
    found: dict[str, Tensor] = {}
    if engine.world.kind.startswith("zero"):
        from deepspeed.utils import safe_get_full_optimizer_state

        partitions = _partitions(engine)
        states = engine.optimizer.optimizer.state
        if not any("step" in states.get(partition, {}) for partition in partitions):
            return {}
        found["step"] = next(states[p]["step"] for p in partitions if "step" in states.get(p, {})).cpu()
        for name, parameter in _trained(engine):
            for key in _MOMENTS:
                value = safe_get_full_optimizer_state(parameter, key)
                if main:
                    found[f"{key}/{name}"] = value.to("cpu", copy=True).reshape(_shape(parameter)).contiguous()
        return found if main else {}
    for name, parameter in _trained(engine):
        state = engine.optimizer.state.get(parameter, {})
        for key in _MOMENTS:
            if key in state:
                value = state[key].full_tensor() if engine.world.kind == "fsdp" else state[key]
                if main:
                    found[f"{key}/{name}"] = value.to("cpu", copy=True).contiguous()
        if "step" in state:
            found["step"] = state["step"].cpu()
    return found if main else {}


@torch.no_grad()
def load_optimizer(engine: Engine, values: dict[str, Tensor]) -> None:
    """Put back what `gather_optimizer` gave, however many processes it came from. Every process calls it."""
    if not values:
        return
    if engine.world.kind.startswith("zero"):
        from deepspeed.utils import safe_set_full_optimizer_state

        for partition in _partitions(engine):
            moments = {key: torch.zeros_like(partition) for key in _MOMENTS}
            engine.optimizer.optimizer.state[partition] = {"step": values["step"].clone(), **moments}
        _partitions(engine)
        for name, parameter in _trained(engine):
            for key in _MOMENTS:
                value = values[f"{key}/{name}"].to(engine.world.device)
                safe_set_full_optimizer_state(parameter, value, key)
        return
    for name, parameter in _trained(engine):
        state = {key: values[f"{key}/{name}"].to(engine.world.device) for key in _MOMENTS}
        if engine.world.kind == "fsdp":
            from torch.distributed.tensor import distribute_tensor

            mesh, places = parameter.device_mesh, parameter.placements
            state = {key: distribute_tensor(value, mesh, places) for key, value in state.items()}
        engine.optimizer.state[parameter] = {"step": values["step"].clone(), **state}


def _partitions(engine: Engine) -> list[Tensor]:
    """This process's flat pieces that DeepSpeed's inner optimizer works on, tied to the parameters they are of."""
    optimizer = engine.optimizer
    if engine.world.kind == "zero3":
        return list(optimizer.fp32_partitioned_groups_flat)
    from deepspeed.utils import lazy_init_hp_params_optimizer_state

    pieces = list(optimizer.single_partition_of_fp32_groups)
    # DeepSpeed ties them once, after the first group's first step, when the other groups have no state yet.
    for parameters, piece in zip(optimizer.bit16_groups, pieces, strict=True):
        if optimizer.optimizer.state.get(piece):
            lazy_init_hp_params_optimizer_state(parameters, piece, optimizer.optimizer.state)
    return pieces


def _shape(parameter: Any) -> torch.Size:
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape
