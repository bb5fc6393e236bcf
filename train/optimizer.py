"""Optimizers of a run, and the learning rate of each step.

Muon (K. Jordan et al., 2024) makes the update of a matrix orthogonal before it is subtracted. It is
for matrices between hidden states; rows of a vocabulary, norms and biases stay with AdamW.
"""

import math
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from draftsmith.core.errors import InputError
from draftsmith.core.transformers_api import Conv1D
from draftsmith.drafts.load import Draft
from draftsmith.train.config import Optim

# The state of each parameter, by name.
States: TypeAlias = dict[Any, dict[str, Tensor]]
# Share of the steps in which `wsd` lowers the rate, at the end.
_DECAY = 0.2
# Muon keeps this share of its mean gradient at each step.
_MOMENTUM = 0.95
# The quintic that drives singular values towards 1, and how often it is applied (Jordan).
_QUINTIC = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


def usual_rate(parameters: int, taught: bool) -> float:
    """Return the usual peak learning rate for a number of trained parameters.

    taught: whether its loss reads the target's distributions. The rule is a fit through the recipes
    of this repository: 2e-4 at 68 M parameters, 1e-4 at 160 M, 3e-3 at 0.4 M.
    """
    peak = _rounded(min(3e-3, max(1e-5, 2e-4 * math.sqrt(68e6 / parameters))))
    # Cross-entropy on sampled answers is a noisier gradient than a divergence between
    # distributions.
    return peak if taught else _rounded(peak / 3)


def _rounded(value: float) -> float:
    return float(f"{value:.0e}")


def learning_rate(optim: Optim, step: int, steps: int) -> float:
    """Learning rate of optimizer step `step` (from 0) of `steps`.

    After a linear warm-up it falls as a cosine to the final fraction: at once, or with `wsd` over
    the last fifth of the steps.
    """
    assert optim.lr is not None
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    start = optim.warmup_steps
    if optim.schedule == "wsd":
        start = max(start, steps - math.ceil(_DECAY * steps))
    through = (step - start) / max(1, steps - start)
    cosine = 1 + math.cos(math.pi * max(0.0, through))
    fraction = optim.final_lr_fraction
    return optim.lr * (fraction + (1 - fraction) * 0.5 * cosine)


def make_optimizer(draft: Draft, optim: Optim) -> "Optimizers":
    """AdamW with decay on matrices only, plain SGD, or Muon with AdamW for what is no layer's
    matrix.
    """
    assert optim.lr is not None
    trained = [parameter for parameter in draft.parameters() if parameter.requires_grad]
    hidden = hidden_matrices(draft) if optim.name == "muon" else []
    taken = set(map(id, hidden))
    rest = [parameter for parameter in trained if id(parameter) not in taken]
    parts: list[torch.optim.Optimizer] = []
    if rest:
        groups = _decayed(rest, optim.weight_decay)
        if optim.name == "sgd":
            parts.append(torch.optim.SGD(groups, lr=optim.lr))
        else:
            parts.append(torch.optim.AdamW(groups, lr=optim.lr, betas=(0.9, optim.beta2)))
    if hidden:
        parts.append(Muon(hidden, optim))
    return Optimizers(parts)


def _decayed(parameters: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def hidden_matrices(draft: Draft) -> list[nn.Parameter]:
    """Return the trained matrices between hidden states: of linear layers that are neither an
    embedding nor an output projection.

    Raise InputError if there are none.
    """
    if isinstance(draft, PreTrainedModel):
        outputs = [draft.get_output_embeddings()]
    else:
        outputs = draft.outputs()
    tables = {id(module) for module in outputs}
    embeddings = {id(each.weight) for each in draft.modules() if isinstance(each, nn.Embedding)}
    matrices = []
    for module in draft.modules():
        if not isinstance(module, nn.Linear | Conv1D) or id(module) in tables:
            continue
        weight = module.weight
        assert isinstance(weight, nn.Parameter)
        if weight.requires_grad and id(weight) not in embeddings:
            matrices.append(weight)
    if not matrices:
        raise InputError("optim.name: muon is for matrices of layers, and this draft has none")
    return matrices


@dataclass(frozen=True)
class Optimizers:
    """One or two optimizers as one. They share no parameter, and keep their states by parameter in
    one dict.
    """

    parts: list[torch.optim.Optimizer]

    def __post_init__(self) -> None:
        for part in self.parts[1:]:
            part.state = self.parts[0].state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> States:
        """The states by parameter."""
        return cast(States, self.parts[0].state)

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)


class Muon(torch.optim.Optimizer):
    """Muon in the precision of the weights, for whole and for sharded matrices.

    `torch.optim.Muon` multiplies in bf16, which a CPU without such instructions does several
    hundred times slower. The rate is the largest singular value of an update, times the root of a
    matrix's height over its width if that is above 1, as in Jordan's code: one rate fits all sizes.
    """

    def __init__(self, matrices: list[nn.Parameter], optim: Optim) -> None:
        assert optim.lr is not None
        # multiple: of the rate that the schedule gives.
        multiple = optim.muon_lr / optim.lr
        defaults = {"lr": optim.muon_lr, "weight_decay": optim.weight_decay, "multiple": multiple}
        super().__init__(matrices, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["lr"], group["weight_decay"])

    def _update(self, parameter: Any, rate: float, decay: float) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        mean = state["momentum_buffer"]
        mean.lerp_(parameter.grad, 1 - _MOMENTUM)
        ahead = parameter.grad.lerp(mean, _MOMENTUM)
        height, width = parameter.shape
        size = math.sqrt(max(1.0, height / width))
        parameter.mul_(1 - rate * decay)
        # A sharded matrix is gathered for it and sharded again.
        update = orthogonal(ahead.full_tensor() if isinstance(ahead, DTensor) else ahead)
        if isinstance(ahead, DTensor):
            update = distribute_tensor(update, ahead.device_mesh, ahead.placements)
        parameter.add_(update, alpha=-rate * size)


def orthogonal(matrix: Tensor) -> Tensor:
    """Return the matrix with singular values of about 1, by Newton-Schulz iterations.

    bf16 on a GPU, as the authors do; elsewhere fp32.
    """
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    start = wide.bfloat16() if matrix.is_cuda else wide.float()
    start = start / start.norm().clamp(min=1e-7)
    small, large = start.shape
    # From here on, products of small matrices are fewer operations; bf16 has no digits for them.
    fewer = large >= 2 * small and not matrix.is_cuda
    found = _by_gram(start) if fewer else _by_steps(start)
    found = found if matrix.shape[0] <= matrix.shape[1] else found.T
    return found.to(matrix.dtype)


def _by_steps(step: Tensor) -> Tensor:
    linear, cubic, quintic = _QUINTIC
    for _ in range(_ITERATIONS):
        gram = step @ step.T
        polynomial = torch.addmm(gram, gram, gram, beta=cubic, alpha=quintic)
        step = torch.addmm(step, polynomial, step, beta=linear)
    return step


def _by_gram(start: Tensor) -> Tensor:
    """The same iterations on `start @ start.T` alone, whose factors are applied at the end.

    A step multiplies by a polynomial of the Gram matrix, and all of them commute.
    """
    linear, cubic, quintic = _QUINTIC
    gram = start @ start.T
    product: Tensor | None = None
    for _ in range(_ITERATIONS):
        factor = torch.addmm(gram, gram, gram, beta=cubic, alpha=quintic)
        factor.diagonal().add_(linear)
        product = factor if product is None else factor @ product
        gram = factor @ gram @ factor
    assert product is not None
    return product @ start
