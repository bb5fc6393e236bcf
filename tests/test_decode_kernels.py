"""How many kernels a layer of a recorded step launches: none may be added unseen.

Counted on a CPU, at the calls of torch that compute; a GPU runs each of them as one kernel or more.
"""

from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from draftsmith.decode import SpeculativeDecoder
from draftsmith.decode.compiled import steps
from tests.tiny_models import random_llama

# Queries, keys, values, output, gate, up, down.
PRODUCTS = {"mm": 5, "addmm": 2}
OTHERS = {
    "rms_norm": 2,
    "mul": 1,
    "roll": 1,
    "addcmul_": 1,
    "index_copy_": 2,
    "scaled_dot_product_attention": 1,
    "silu": 1,
    "mul_": 1,
}


class Kernels(TorchFunctionMode):
    """Counts calls whose result is neither a view of an argument nor empty."""

    def __init__(self):
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_function__(
        self,
        function,
        types,
        args=(),
        kwargs=None,
    ):
        options = kwargs or {}
        result = function(*args, **options)
        name = function.__name__
        first = (*args, *options.values())[0]
        writes = "out" in options or (name.endswith("_") and not name.endswith("__"))
        if isinstance(result, Tensor) and name != "new_empty":
            given = first if isinstance(first, Tensor) else result.new_empty(1)
            shares = result.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
            self.count[name] += writes or not shares
        return result


def of_a_layer(of_model):
    return dict(of_model(3) - of_model(2))


@pytest.mark.parametrize(
    ("dtype", "more"), [(torch.float32, {}), (torch.bfloat16, {"mul": 3})], ids=["fp32", "bf16"]
)
def test_a_layer_of_a_recorded_step_has_these_kernels(dtype, more, monkeypatch):
    """A norm of bf16 is two: it scales after rounding."""
    counts = []

    def counted(function, *_):
        def step(tensors):
            with Kernels() as kernels:
                outputs = function(tensors)
            counts.append(kernels.count)
            return outputs

        return step

    monkeypatch.setattr(steps, "_compiled", counted)

    def of_model(layers):
        target = random_llama(0, 32, hidden=32, layers=layers).to(dtype)
        decoder = SpeculativeDecoder(target, compile="eager")
        decoder.generate([[1]], max_new_tokens=2, eos_ids=())
        return counts[-1]

    assert of_a_layer(of_model) == PRODUCTS | OTHERS | more
