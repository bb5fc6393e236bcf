"""The attention of an unrolled draft is that under the mask which says what each pair sees; and it
needs no such mask.
"""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from draftsmith.drafts.heads.eagle3 import Eagle3Head
from draftsmith.drafts.heads.unrolled_attention import Unrolling, attention

WIDTH = 11
PACKED = torch.tensor([[0] * 4 + [-1] + [1] * 6, [0] * 9 + [-1, 1]])


def attended(attend, mask, parts):
    """The output, and the gradients of some function of it."""
    module = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    out = attend(module, *parts, mask, scaling=0.3, dropout=0.0)[0]
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad((out * weights).sum(), parts)]


@pytest.mark.parametrize("depths", [1, 2, 4])
@pytest.mark.parametrize("texts", [None, PACKED], ids=["rows", "packed"])
@pytest.mark.parametrize("value_width", [8, 6, 12])
def test_outputs_and_gradients_are_those_under_the_mask(depths, texts, value_width):
    torch.manual_seed(0)
    sizes = (4, WIDTH, 8), (2, WIDTH * depths, 8), (2, WIDTH * depths, value_width)
    parts = [torch.randn(2, *size, dtype=torch.float64, requires_grad=True) for size in sizes]
    unrolling = Unrolling(WIDTH, texts)
    ours = attended(attention, unrolling, parts)
    mask = unrolling.mask(depths, torch.device("cpu"))
    theirs = attended(sdpa_attention_forward, mask, parts)
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, atol=1e-12, rtol=1e-12)


class _Largest(TorchDispatchMode):
    """The number of values of the largest tensor that an operation returned."""

    def __init__(self):
        super().__init__()
        self.values = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.values = max(self.values, tensor.numel())
        return out


def tiny_head():
    sizes = {"hidden_size": 16, "intermediate_size": 64, "num_attention_heads": 2}
    config = LlamaConfig(**cast(Any, sizes), vocab_size=16, num_hidden_layers=4)
    return Eagle3Head.fresh(LlamaForCausalLM(config))


def test_recomputed_depths_give_the_same_gradients_and_keep_less():
    head = tiny_head()
    ids_BW, features_BWH = torch.arange(12)[None] % 16, torch.randn(1, 12, 16)
    gradients, kept = [], []
    for recomputed in (False, True):
        head.gradient_checkpointing = recomputed
        seen: dict[int, int] = {}

        def keep(tensor, seen=seen):
            seen[tensor.data_ptr()] = tensor.numel()
            return tensor

        head.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            states = list(head.unroll(ids_BW, features_BWH, 5))
        torch.stack(states).square().sum().backward()
        gradients.append({name: one.grad for name, one in head.named_parameters()})
        kept.append(sum(seen.values()))
    assert all(gradients[0][name] is not None for name in ("midlayer.mlp.up_proj.weight",))
    for name, gradient in gradients[0].items():
        other = gradients[1][name]
        assert gradient is other is None or torch.equal(cast(Any, gradient), cast(Any, other)), name
    assert kept[1] < kept[0] / 3


@pytest.mark.parametrize("packed", [False, True])
def test_no_tensor_grows_with_the_square_of_a_row(packed):
    head = tiny_head()
    largest = {}
    for width in (512, 1024):
        ids_BW = torch.zeros(1, width, dtype=torch.long)
        texts_BW = torch.arange(width)[None] // 200 if packed else None
        with _Largest() as seen:
            states = head.unroll(ids_BW, torch.randn(1, width, 16), 4, texts_BW=texts_BW)
            torch.stack(list(states)).sum().backward()
        largest[width] = seen.values
    assert largest[1024] == 2 * largest[512] < 512 * 512
