"""The forward of Medusa and Hydra heads with packed weights; `head_forward` is that of heads that
have a cache.

A head is a few products of one row. In modules, each rounds to the head's dtype and back, and a
Hydra block multiplies its input twice. It equals the head's own forward within rounding.

Legend: X rows, I inputs, H hidden size, V vocabulary; `...` any leading shape.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from draftsmith.decode.head_forward import has_own_forward, packed_projection, worth_packing
from draftsmith.decode.kernel_forward import LayerMaker
from draftsmith.decode.packed_weights import FusedLinear, Packs
from draftsmith.drafts.heads.medusa import FirstBlock, HydraHeads, MedusaHeads, ResBlock


@dataclass(frozen=True)
class _Block:
    """x + SiLU(Wx + b); with `skips` Sx + SiLU(Wx + b), where `product` has S above W."""

    product: FusedLinear
    skips: bool

    def __call__(self, x_XI: Tensor) -> Tensor:
        inner_XH = self.product(x_XI)
        if self.skips:
            x_XI, inner_XH = inner_XH.chunk(2, dim=1)
        return x_XI + silu(inner_XH)


@dataclass(frozen=True)
class _Part:
    """One of the heads. output: None for the target's, if it is not packed."""

    blocks: list[_Block]
    output: FusedLinear | None

    @property
    def packed(self) -> bool:
        products = [block.product for block in self.blocks]
        if self.output is not None:
            products.append(self.output)
        return all(product.matrix is not None for product in products)


class FeatureForward:
    """Run the heads of `head` one by one. Made for one `generate` call, because it holds their
    weights.
    """

    def __init__(self, head: MedusaHeads | HydraHeads, packs: Packs | None) -> None:
        """packs: `packs_of(head)`; None for the modules' own forward."""
        self.head = head
        self._parts = None if packs is None else _packed_parts(head, packs)

    @property
    def packed(self) -> bool:
        """Whether the kernel multiplies."""
        return self._parts is not None

    def run(self, number: int, inputs: Tensor) -> Tensor:
        """Return logits `[..., V]` of one head, from what it reads, `[..., I]`."""
        if self._parts is None:
            return self.head.logits_of(number, inputs)
        part = self._parts[number]
        states_XH = inputs.reshape(-1, inputs.shape[-1]).float()
        for block in part.blocks:
            states_XH = block(states_XH)
        borrowed = self.head.borrowed
        if part.output is None:
            logits_XV = borrowed.project(states_XH)
        else:
            logits_XV = borrowed.projection.finish(part.output(states_XH))
        return logits_XV.unflatten(0, inputs.shape[:-1])


def _packed_parts(head: MedusaHeads | HydraHeads, packs: Packs) -> list[_Part] | None:
    """None without the kernel, for small heads in fp32, and where something hangs on a module."""
    parts = []
    if worth_packing(head, packs) and not has_own_forward(head):
        maker = LayerMaker(packs, any_size=True, dtype=torch.float32)
        parts = [_part(head, number, maker) for number in range(head.config.num_heads)]
    packed = bool(parts) and all(part.packed for part in parts)
    if packs.owned and not packed:
        packs.prepare(head)
    packs.settle()
    return parts if packed else None


def _part(heads: MedusaHeads | HydraHeads, number: int, maker: LayerMaker) -> _Part:
    outputs = heads.outputs()
    output = packed_projection(heads.borrowed.projection)
    if outputs:
        output = maker.fused(f"{number}.output", [outputs[number]])
        if heads.extra_bias_V is not None:
            output.bias_O = heads.extra_bias_V.float()
    blocks = []
    for index, block in enumerate(heads.blocks(number)):
        name = f"{number}.{index}"
        if isinstance(block, FirstBlock):
            blocks.append(_Block(maker.fused(name, [block.skip, block.linear]), skips=True))
        elif isinstance(block, ResBlock):
            blocks.append(_Block(maker.fused(name, [block.linear]), skips=False))
    return _Part(blocks, output)
