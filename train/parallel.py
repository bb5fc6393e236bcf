"""A draft trained on the processes of a run: copies of its weights (DDP), or shards (ZeRO, FSDP2).

accelerate wraps DDP and DeepSpeed. FSDP2 is torch's `fully_shard`, applied here because accelerate
applies it on GPUs only and elsewhere silently trains unsynchronised copies. Weights and optimizer
states are gathered whole and by name, so that a checkpoint does not depend on the processes that
wrote it.
"""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from draftsmith.core.errors import RunError
from draftsmith.drafts.heads.feature_head import FeatureHead
from draftsmith.train.config import TrainConfig
from draftsmith.train.optimizer import Optimizers, States
from draftsmith.train.trainee import Trainee
from draftsmith.train.world import World, silent

MakeOptimizer = Callable[[], Optimizers]
# Moments of AdamW, and those of AdamW and Muon, as torch names them; SGD without momentum has none.
_ADAMW_MOMENTS = ("exp_avg", "exp_avg_sq")
_MOMENTS = (*_ADAMW_MOMENTS, "momentum_buffer")


class Copies:
    """Every process has all weights: one process, or DDP.

    `module(batch)` is the forward; `trainee.draft` holds the weights. Sharded weights override what
    differs. Every process calls every method.
    """

    module: Any
    optimizer: Any

    def __init__(
        self, world: World, trainee: Trainee, make_optimizer: MakeOptimizer, config: TrainConfig
    ) -> None:
        self.world = world
        self.trainee = trainee
        self.wrap(make_optimizer, config)

    def wrap(self, make_optimizer: MakeOptimizer, config: TrainConfig) -> None:
        """Set `module` and `optimizer`."""
        self.module = self.world.accelerator.prepare(self.trainee)
        self.optimizer = make_optimizer()
        self.check_wrapper()

    def check_wrapper(self) -> None:
        """Raise RunError if accelerate did not wrap the trainee as asked."""
        wrappers = {"single": type(self.trainee).__name__, "ddp": "DistributedDataParallel"}
        expected = wrappers.get(self.world.sharing, "DeepSpeedEngine")
        given = type(self.module).__name__
        if given != expected:
            raise RunError(
                f"accelerate gave {given} instead of {expected}; weights would not be shared"
            )

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        """Around a forward and its backward: gradients are averaged over processes only after the
        `last` one of a step.
        """
        if last or self.world.sharing == "single":
            return nullcontext()
        no_sync: AbstractContextManager[None] = self.module.no_sync()
        return no_sync

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss`, averaged over the processes."""
        loss.backward()

    def step(self, clip_norm: float) -> Tensor:
        """Clip the gradients (0: not at all), update the weights, clear the gradients.

        Return the norm before clipping, which the device need not have computed yet. If it is not
        finite, the run must end.
        """
        parameters = [parameter for _, parameter in self.trained()]
        norms = torch.nn.utils.clip_grad_norm_(parameters, clip_norm or math.inf)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return _whole(norms)

    @torch.no_grad()
    def gather_weights(self) -> dict[str, Tensor]:
        """Parameters and saved buffers of the draft by name, whole, on the CPU of the main process;
        empty elsewhere.
        """
        draft: nn.Module = self.trainee.draft
        weights: dict[str, Tensor] = {}
        for name, parameter in draft.named_parameters():
            with self.gathered(parameter):
                value = _whole(parameter)
                if self.world.is_main:
                    weights[name] = value.detach().to("cpu", copy=True).contiguous()
        if not self.world.is_main:
            return {}
        saved = draft.state_dict().keys()
        for name, buffer in draft.named_buffers():
            if name in saved:
                weights[name] = buffer.detach().cpu().contiguous()
        return weights

    def gathered(self, parameter: nn.Parameter) -> AbstractContextManager[None]:
        """While open, this parameter is whole in every process."""
        return nullcontext()

    @torch.no_grad()
    def gather_optimizer(self) -> dict[str, Tensor]:
        """The optimizer's state by `key/parameter`, whole, on the CPU of the main process."""
        steps = [state["step"] for state in self.states().values() if "step" in state]
        values: dict[str, Tensor] = {"step": steps[0].cpu()} if steps else {}
        for name, parameter in self.trained():
            for key in self.moments(parameter):
                value = self.moment(parameter, key)
                if self.world.is_main:
                    shape = getattr(parameter, "ds_shape", parameter.shape)
                    whole = value.to("cpu", copy=True).reshape(shape)
                    values[f"{key}/{name}"] = whole.contiguous()
        return values if self.world.is_main else {}

    @torch.no_grad()
    def load_optimizer(self, values: dict[str, Tensor]) -> None:
        """Restore the result of `gather_optimizer`, from however many processes it came."""
        for name, parameter in self.trained() if values else ():
            moments = {}
            for key in _MOMENTS:
                if f"{key}/{name}" not in values:
                    continue
                moment = values[f"{key}/{name}"].to(self.world.device)
                if isinstance(parameter, DTensor):
                    moment = distribute_tensor(moment, parameter.device_mesh, parameter.placements)
                moments[key] = moment
            step = {"step": values["step"].clone()} if "exp_avg" in moments else {}
            self.set_moments(parameter, {**step, **moments})

    def states(self) -> States:
        """The state of the optimizer by what it works on."""
        return cast(States, self.optimizer.state)

    def moments(self, parameter: nn.Parameter) -> list[str]:
        """Names of the moments that a parameter has."""
        state = self.states().get(parameter, {})
        return [key for key in _MOMENTS if key in state]

    def moment(self, parameter: nn.Parameter, key: str) -> Tensor:
        """One moment of a parameter, whole."""
        return _whole(self.states()[parameter][key])

    def set_moments(self, parameter: nn.Parameter, state: dict[str, Tensor]) -> None:
        """Give a parameter this state, whole or of a shard."""
        self.states()[parameter] = state

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """The trained parameters with their names."""
        named = self.trainee.named_parameters()
        return [(name, parameter) for name, parameter in named if parameter.requires_grad]


class Zero(Copies):
    """DeepSpeed shares optimizer states (zero1, zero2) or weights too (zero3)."""

    def wrap(self, make_optimizer: MakeOptimizer, config: TrainConfig) -> None:
        options = self.world.accelerator.state.deepspeed_plugin.deepspeed_config
        for name in ("fp16", "bf16"):
            if options.get(name, {}).get("enabled") is True:
                raise RunError(
                    f"the DeepSpeed config enables {name}; leave it out and set `precision` instead"
                )
        options["train_micro_batch_size_per_gpu"] = config.batch_size
        options["gradient_clipping"] = config.optim.clip_norm
        (optimizer,) = make_optimizer().parts
        with silent(True):
            self.module, prepared = self.world.accelerator.prepare(self.trainee, optimizer)
        self.optimizer = prepared.optimizer
        self.check_wrapper()

    @contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        self.module.set_gradient_accumulation_boundary(is_boundary=last)
        yield

    def backward(self, loss: Tensor) -> None:
        self.module.backward(loss)

    def step(self, clip_norm: float) -> Tensor:
        self.module.step()
        return torch.as_tensor(self.module.get_global_grad_norm())

    def gathered(self, parameter: nn.Parameter) -> AbstractContextManager[None]:
        if self.world.sharing != "zero3":
            return nullcontext()
        import deepspeed

        whole: AbstractContextManager[None] = deepspeed.zero.GatheredParameters([parameter])
        return whole

    @torch.no_grad()
    def gather_optimizer(self) -> dict[str, Tensor]:
        self.pieces()
        return super().gather_optimizer()

    @torch.no_grad()
    def load_optimizer(self, values: dict[str, Tensor]) -> None:
        if values:
            for piece in self.pieces():
                moments = {key: torch.zeros_like(piece) for key in _ADAMW_MOMENTS}
                self.states()[piece] = {"step": values["step"].clone(), **moments}
            self.pieces()
        super().load_optimizer(values)

    def states(self) -> States:
        return cast(States, self.optimizer.optimizer.state)

    def moments(self, parameter: nn.Parameter) -> list[str]:
        known = {key for state in self.states().values() for key in state}
        return [key for key in _MOMENTS if key in known]

    def moment(self, parameter: nn.Parameter, key: str) -> Tensor:
        from deepspeed.utils import safe_get_full_optimizer_state

        value: Tensor = safe_get_full_optimizer_state(parameter, key)
        return value

    def set_moments(self, parameter: nn.Parameter, state: dict[str, Tensor]) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        for key in _ADAMW_MOMENTS:
            safe_set_full_optimizer_state(parameter, state[key], key)

    def pieces(self) -> list[Tensor]:
        """This process's flat pieces that DeepSpeed's inner optimizer works on, linked to their
        parameters.
        """
        if self.world.sharing == "zero3":
            return list(self.optimizer.fp32_partitioned_groups_flat)
        from deepspeed.utils import lazy_init_hp_params_optimizer_state

        pieces = list(self.optimizer.single_partition_of_fp32_groups)
        # DeepSpeed links them once, after the first group's first step, when the other groups have
        # no state yet; the states of those could not be read without this.
        for parameters, piece in zip(self.optimizer.bit16_groups, pieces, strict=True):
            if self.states().get(piece):
                lazy_init_hp_params_optimizer_state(parameters, piece, self.states())
        return pieces


class Sharded(Copies):
    """FSDP2: every process has a shard of each weight."""

    def wrap(self, make_optimizer: MakeOptimizer, config: TrainConfig) -> None:
        mesh = init_device_mesh(self.world.device.type, (self.world.size,))
        # Whether gathered weights stay after each layer's forward.
        reshard = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower()
        keep = reshard in ("false", "0", "no")
        draft = self.trainee.draft
        # A head runs its layer at every depth, and would gather it for each.
        once = not isinstance(draft, FeatureHead)
        for layer in repeated_layers(draft) if once else ():
            fully_shard(layer, mesh=mesh, reshard_after_forward=not keep)
        fully_shard(self.trainee, mesh=mesh)
        self.module = self.trainee
        self.optimizer = make_optimizer()

    @contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        self.module.set_requires_gradient_sync(last)
        yield

    @torch.no_grad()
    def gather_weights(self) -> dict[str, Tensor]:
        # After an evaluation FSDP2 leaves the outermost weights gathered, as plain tensors without
        # `full_tensor`.
        for module in self.module.modules():
            if hasattr(module, "reshard"):
                module.reshard()
        return super().gather_weights()


def wrap(
    world: World, trainee: Trainee, make_optimizer: MakeOptimizer, config: TrainConfig
) -> Copies:
    """Wrap the trainee as `world.sharing` says.

    make_optimizer: called when the trainee's parameters are final.
    """
    trainee.to(world.device)
    if world.bf16:
        # The method itself, because DeepSpeed switches off an autocast around its engine.
        trainee.forward = torch.autocast(world.device.type, torch.bfloat16)(trainee.forward)  # type: ignore[method-assign]
    wrapper = Zero if world.zero else Sharded if world.sharing == "fsdp" else Copies
    return wrapper(world, trainee, make_optimizer, config)


def repeated_layers(draft: nn.Module) -> list[nn.Module]:
    """The decoder layers of a draft, in order; empty if there are none."""
    inner = [module for module in draft.modules() if module is not draft]
    lists = [module for module in inner if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=_numel, default=()))


def _numel(module: nn.Module) -> int:
    return sum(map(torch.numel, module.parameters()))


@torch.no_grad()
def load_weights(draft: nn.Module, values: dict[str, Tensor]) -> None:
    """Put the result of `gather_weights` into a draft that is not wrapped yet."""
    tensors = dict(draft.named_parameters()) | dict(draft.named_buffers())
    for name, value in values.items():
        tensors[name].copy_(value)


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
