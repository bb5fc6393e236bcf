"""Medusa and Hydra heads with packed weights give the logits of their own forward, and run when
their depth of the tree is reached.

Legend: B rows, e nodes of a level, d tokens of a path, H hidden size, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.core.sampling import Sampling
from draftsmith.decode import SpeculativeDecoder
from draftsmith.decode.feature_forward import FeatureForward
from draftsmith.decode.native import kernel
from draftsmith.decode.packed_weights import packs_of, take_over
from draftsmith.decode.propose.head_proposers import HeadProposer
from draftsmith.drafts.heads.medusa import HeadsConfig, HydraHeads, MedusaHeads

pytestmark = pytest.mark.skipif(kernel() is None, reason="needs the compiled kernel")

HIDDEN, VOCABULARY, HEADS = 256, 300, 3
PROMPTS = [list(range(5, 45)), list(range(30, 36))]
GREEDY = Sampling(temperature=0.0)


def target(dtype: torch.dtype = torch.float32, bias: bool = False) -> Any:
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


def heads(kind: str, model: Any, **options: Any) -> Any:
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


def inputs(head: Any, number: int, rows: int) -> Tensor:
    random = torch.Generator().manual_seed(3)
    features_BeH = torch.randn(rows, 4, HIDDEN, generator=random)
    if isinstance(head, MedusaHeads):
        return features_BeH[:, :1]
    tokens_Bed = torch.randint(VOCABULARY, (rows, 4, number + 1), generator=random)
    return head.inputs(features_BeH, tokens_Bed)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize(
    ("dtype", "pairs"), [(torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)]
)
@pytest.mark.parametrize("name", KINDS)
@torch.inference_mode()
def test_equals_the_heads_own_forward(monkeypatch, name, dtype, pairs, owned, bias):
    library: Any = kernel()
    pairs = pairs and library.pairs
    monkeypatch.setattr(library, "pairs", pairs)
    with torch.inference_mode(False):
        model = target(dtype, bias)
        head = KINDS[name](model)
        exact = KINDS[name](target(bias=bias))
        if owned:
            take_over(model, head)
            packs_of(model).prepare(model)
    forward = FeatureForward(head, packs_of(head))
    assert forward.packed
    # A target that kept its weights multiplies for itself, and rounds to its dtype, as pairs do.
    borrows = isinstance(head, HydraHeads) and not head.config.own_projection
    rounds = dtype == torch.bfloat16 and (pairs or (borrows and not owned))
    tolerance = 0.02 if rounds else 1e-5
    for number in range(HEADS):
        for rows in (1, 3):
            given = inputs(head, number, rows)
            logits = forward.run(number, given)
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


@pytest.mark.parametrize("kind", ["hook", "patched", "without packs"])
def test_a_head_that_it_does_not_know_runs_its_own_forward(kind):
    head = KINDS["medusa"](target())
    packs = None if kind == "without packs" else packs_of(head)
    if kind == "hook":
        head[0][-1].register_forward_hook(lambda *_: None)
    if kind == "patched":
        head[0][-1].__dict__["forward"] = head[0][-1].forward
    forward = FeatureForward(head, packs)
    assert not forward.packed
    given = inputs(head, 0, 1)
    assert torch.equal(forward.run(0, given), head.logits_of(0, given))


@pytest.mark.parametrize("name", ["medusa", "hydra, two layers"])
@pytest.mark.parametrize("tree", ["chain:2", "kary:3,2"])
def test_heads_run_as_deep_as_the_tree_and_change_nothing(monkeypatch, name, tree):
    calls = []
    plain = FeatureForward.run

    def counted(self: FeatureForward, number: int, inputs: Tensor) -> Tensor:
        assert self.packed
        calls.append((number, inputs.shape[1]))
        return plain(self, number, inputs)

    monkeypatch.setattr(FeatureForward, "run", counted)
    model = target(torch.bfloat16)
    head = KINDS[name](model)
    take_over(model, head)
    alone = SpeculativeDecoder(model, None, None).generate(PROMPTS, GREEDY, 24)
    drafted = SpeculativeDecoder(model, HeadProposer(head), tree).generate(PROMPTS, GREEDY, 24)
    siblings = 3 if tree == "kary:3,2" and name != "medusa" else 1
    assert set(calls) == {(0, 1), (1, siblings)}
    texts = [[row.output_ids for row in output.generations] for output in (alone, drafted)]
    assert texts[0] == texts[1]
