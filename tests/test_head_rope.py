"""Heads on targets with every kind of rope: drafted as trained, and no text's rotation depends on
another.
"""

from typing import Any

import pytest
import torch

from draftsmith.core.hidden_states import forward_with_states
from draftsmith.drafts.heads import HEADS
from draftsmith.drafts.heads.eagle import EagleConfig, EagleHead, Rotary
from draftsmith.drafts.heads.eagle3 import Eagle3Config
from draftsmith.drafts.layouts.read_back import head_logits
from tests.tiny_models import stirred
from tests.train_laws import tiny_family

SCALED = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    "yarn": SCALED | {"rope_type": "yarn"},
    "llama3": SCALED | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": SCALED
    | {"rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [3.0, 4.0]},
}
KINDS: dict[str, dict[str, Any]] = {
    "eagle": {},
    "eagle3": {},
    "mtp": {},
    "dflash": {"num_layers": 1, "block_size": 3},
    "dspark": {"num_layers": 1, "block_size": 3},
}


def target_of(rope):
    sizes = {"num_attention_heads": 4, "max_position_embeddings": 64}
    return tiny_family("llama", rope_parameters=ROPES[rope], **sizes)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "dflash"])
@torch.no_grad()
def test_what_is_drafted_early_does_not_depend_on_the_length(kind, rope):
    """Law 5: training reads a whole text, decoding what is there. The text is longer than the
    context.
    """
    target = target_of(rope)
    fresh: Any = HEADS[kind].fresh
    head = stirred(fresh(target, **KINDS[kind]).eval())
    ids_1T = torch.randint(3, 61, (1, 80), generator=torch.Generator().manual_seed(1))
    _, states = forward_with_states(target, head.hidden_layers, input_ids=ids_1T)
    whole = head_logits(head, ids_1T, list(states))
    part = head_logits(head, ids_1T[:, :12], [state[:, :12] for state in states])
    torch.testing.assert_close(whole[: len(part)], part, atol=1e-4, rtol=0)


def test_dynamic_rope_is_plain_within_the_context_and_written_so():
    """As transformers rotates there; vLLM scales from the first token on."""
    target = target_of("dynamic")
    config = EagleConfig.like(target)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    head = EagleHead(config, target)
    positions = torch.arange(64)[None]
    states = torch.zeros(1, 64, 16)
    for own, its in zip(
        head.rotary(states, positions), target.model.rotary_emb(states, positions), strict=True
    ):
        torch.testing.assert_close(own, its)


def test_longrope_of_a_published_head_has_the_factors_of_its_context():
    target = target_of("longrope")
    values = Eagle3Config.like(
        target,
        draft_vocab_size=61,
        eagle_aux_hidden_state_layer_ids=(0, 1, 2),
        target_hidden_size=16,
    ).to_json()
    values["rope_parameters"] = ROPES["longrope"]
    config = Eagle3Config.from_json(values, target)
    rotary = Rotary(config.llama())
    states = torch.zeros(1, 64, 16)
    whole = rotary(states, torch.arange(64)[None])
    own, _ = target.model.rotary_emb(states, torch.arange(12)[None])
    torch.testing.assert_close(whole[0][:, :12], own)
