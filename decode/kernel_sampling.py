"""Tokens chosen from logits and distributions: by the kernel on a CPU, where torch takes as long
for them as a small draft for a forward.

The definitions are those of `draftsmith.core.sampling`, which chooses wherever the kernel cannot.

Legend: K tokens, V vocabulary; `...` any leading shape.
"""

import torch
from torch import Tensor

from draftsmith.core import sampling
from draftsmith.core.sampling import Largest
from draftsmith.decode.expected import expect
from draftsmith.decode.native import Kernel, kernel

# Above, the kernel compares each value with too many that it found before.
_MOST = 64


def largest(values: Tensor, count: int) -> Largest:
    """The `count` largest of values `[..., V]`; of equal values, the first come first. A row with
    NaN has NaN as its largest values.
    """
    functions = _kernel_for(values, count)
    if functions is None or count > values.shape[-1]:
        return sampling.largest(values, count)
    values = values.contiguous()
    shape = (*values.shape[:-1], count)
    found = Largest(values.new_empty(shape), values.new_empty(shape, dtype=torch.long))
    width = values.shape[-1]
    functions.largest(
        values.data_ptr(),
        values.numel() // width,
        width,
        count,
        found.values.data_ptr(),
        found.indices.data_ptr(),
    )
    return found


def draw(p: Tensor, u: Tensor) -> Tensor:
    """`sampling.draw`: one token per distribution `[..., V]` from a uniform `[...]`."""
    functions = _kernel_for(p, 1)
    if functions is None:
        return sampling.draw(p, u)
    return _draws(functions, p, u.unsqueeze(-1)).squeeze(-1).clamp_(min=0)


def draw_without_replacement(p: Tensor, u: Tensor) -> Tensor:
    """`sampling.draw_without_replacement`: distinct tokens `[..., K]` in drawing order from `p`
    `[..., V]` and uniforms `u` `[..., K]`; -1 beyond the support.
    """
    functions = _kernel_for(p, u.shape[-1])
    if functions is None:
        return sampling.draw_without_replacement(p, u)
    return _draws(functions, p, u)


def try_siblings(
    p_BV: Tensor, q_BV: Tensor, offer_BK: Tensor, u_BK: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Try siblings drawn from q without replacement in turn (`mcsd`): the rank accepted `[B]`, -1
    for none, and what is left of p `[B, V]`, not normalised. None where the kernel cannot.

    q_BV is overwritten. offer_BK: tokens, -1 for none.
    """
    functions = _kernel_for(p_BV, offer_BK.shape[1])
    if functions is None or q_BV.dtype != torch.float32 or not q_BV.is_contiguous():
        return None
    left_BV = p_BV.clone(memory_format=torch.contiguous_format)
    offer_BK = offer_BK.contiguous()
    u_BK = u_BK.to(torch.double).contiguous()
    rows, width = p_BV.shape
    count = offer_BK.shape[1]
    expect("q_BV", q_BV, (rows, width), torch.float32)
    expect("offer_BK", offer_BK, (rows, count), torch.long)
    expect("u_BK", u_BK, (rows, count), torch.double)
    rank_B = offer_BK.new_empty(rows)
    strange = functions.siblings(
        left_BV.data_ptr(),
        q_BV.data_ptr(),
        offer_BK.data_ptr(),
        u_BK.data_ptr(),
        rows,
        width,
        count,
        rank_B.data_ptr(),
    )
    if strange:
        raise IndexError(f"offer_BK: a token outside the vocabulary, 0 to {width - 1}")
    return rank_B, left_BV


def _draws(functions: Kernel, p: Tensor, u: Tensor) -> Tensor:
    p = p.contiguous()
    u = u.to(device=p.device, dtype=torch.double).contiguous()
    expect("u", u, (*p.shape[:-1], u.shape[-1]), torch.double)
    tokens = u.new_empty(u.shape, dtype=torch.long)
    width = p.shape[-1]
    rows = p.numel() // width
    functions.draws(p.data_ptr(), u.data_ptr(), rows, width, u.shape[-1], tokens.data_ptr())
    return tokens


def _kernel_for(values: Tensor, count: int) -> Kernel | None:
    on_cpu = values.device.type == "cpu" and not torch.compiler.is_compiling()
    plain = values.dtype == torch.float32 and values.numel() > 0
    return kernel() if on_cpu and plain and count <= _MOST else None
