"""Medusa and Hydra heads multiply with packed weights, and run when their depth of the tree is
reached.

Legend: B rows, e nodes of a level, d tokens of a path, H hidden size, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.core.sampling import Sampling
from draftsmith.decode import SpeculativeDecoder
from draftsmith.decode.native import kernel
from draftsmith.decode.packed_weights import PackedLinear, kernel_products, packs_of, take_over
from draftsmith.decode.propose.head_proposers import HeadProposer
from draftsmith.drafts.heads.medusa import HeadsConfig, HydraHeads, MedusaHeads, ParallelHeads

pytestmark = pytest.mark.skipif(kernel() is None, reason="needs the compiled kernel")

HIDDEN, VOCABULARY, HEADS = 256, 300, 3
PROMPTS = [list(range(5, 45)), list(range(30, 36))]
GREEDY = Sampling(temperature=0.0)


def target(dtype=torch.float32, bias=False):
    """A target with weights that bf16 holds."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    model: Any = LlamaForCausalLM(config)
    if bias:
        model.lm_head.bias = nn.Parameter(torch.randn(VOCABULARY))
    return model.bfloat16().to(dtype).eval()


def heads(kind, model, **options):
    """Heads with weights of their own, that bf16 holds. Logits are capped."""
    config = HeadsConfig(
        kind=kind, hidden_size=HIDDEN, vocab_size=VOCABULARY, num_heads=HEADS, **options
    )
    head: Any = (MedusaHeads if kind == "medusa" else HydraHeads)(config, model)
    torch.manual_seed(1)
    for weight in head.parameters():
        nn.init.normal_(weight, 0.0, 0.1)
    projection = replace(head.borrowed.projection, scale=0.5, softcap=4.0)
    head.borrowed = replace(head.borrowed, projection=projection)
    return head.bfloat16().to(model.dtype).eval().requires_grad_(False)


KINDS: dict[str, Callable[[Any], Any]] = {
    "medusa": lambda model: heads("medusa", model),
    "medusa, two layers": lambda model: heads("medusa", model, num_layers=2),
    "hydra": lambda model: heads("hydra", model),
    "hydra, two layers": lambda model: heads("hydra", model, num_layers=2),
    "hydra, own projection": lambda model: heads("hydra", model, own_projection=True),
    "hydra, bias of the map": lambda model: heads("hydra", model, skip_bias=True, num_layers=2),
}


def inputs(head, number, rows):
    random = torch.Generator().manual_seed(3)
    features_BeH = torch.randn(rows, 4, HIDDEN, generator=random)
    if isinstance(head, MedusaHeads):
        return features_BeH[:, :1]
    tokens_Bed = torch.randint(VOCABULARY, (rows, 4, number + 1), generator=random)
    return head.inputs(features_BeH, tokens_Bed)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "pairs"), [(torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)]
)
@pytest.mark.parametrize("name", KINDS)
@torch.inference_mode()
def test_packed_weights_give_the_same_logits(monkeypatch, name, dtype, pairs, bias):
    library: Any = kernel()
    monkeypatch.setattr(library, "pairs", pairs and library.pairs)
    with torch.inference_mode(False):
        model = target(dtype, bias)
        head = KINDS[name](model)
        exact = KINDS[name](target(bias=bias))
        take_over(model, head)
        for owned in (model, head):
            packs_of(owned).prepare(owned)
    tolerance = 0.02 if dtype == torch.bfloat16 else 1e-5
    for number in range(HEADS):
        for rows in (1, 3):
            given = inputs(head, number, rows)
            with kernel_products():
                logits = head.logits_of(number, given)
            wanted = exact.logits_of(number, given.float())
            torch.testing.assert_close(logits.float(), wanted, atol=tolerance, rtol=tolerance)


@torch.inference_mode()
def test_medusas_own_forward_is_that_of_its_heads():
    with torch.inference_mode(False):
        head = KINDS["medusa, two layers"](target(bias=True))
    features_BTH = torch.randn(2, 5, HIDDEN)
    logits_BTKV = head(features_BTH)
    for number in range(HEADS):
        assert torch.equal(head.logits_of(number, features_BTH), logits_BTKV[:, :, number])


@pytest.mark.parametrize("name", ["medusa", "hydra, two layers"])
@pytest.mark.parametrize("tree", ["chain:2", "kary:3,2"])
def test_heads_run_as_deep_as_the_tree_and_change_nothing(monkeypatch, name, tree):
    calls = []
    plain = ParallelHeads.logits_of

    def counted(self, number, inputs):
        packed = [isinstance(each, PackedLinear) for each in self.modules()]
        assert sum(packed) >= HEADS
        calls.append((number, inputs.shape[1]))
        return plain(self, number, inputs)

    monkeypatch.setattr(ParallelHeads, "logits_of", counted)
    model = target(torch.bfloat16)
    head = KINDS[name](model)
    take_over(model, head)
    alone = SpeculativeDecoder(model, None, None).generate(PROMPTS, GREEDY, 24)
    drafted = SpeculativeDecoder(model, HeadProposer(head), tree).generate(PROMPTS, GREEDY, 24)
    siblings = 3 if tree == "kary:3,2" and name != "medusa" else 1
    assert set(calls) == {(0, 1), (1, siblings)}
    texts = [[row.output_ids for row in output.generations] for output in (alone, drafted)]
    assert texts[0] == texts[1]
