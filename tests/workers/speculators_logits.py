"""Logits that speculators computes from an exported EAGLE-3 head or block drafter; run in its
environment.

    python speculators_logits.py DIRECTORY INPUTS.safetensors LOGITS.safetensors

INPUTS has `ids` [1, T] and `states` [1, T, kH] of k layers; LOGITS gets `logits`: [1, T, D] of an
EAGLE-3 head, and [1, A * depths, D] of the A = T - slots blocks that begin at the first tokens,
each followed by those of the text.
"""

import importlib.metadata
import json
import os
import sys

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel
from speculators.models.attention import create_float_mask
from speculators.models.dflash import core
from transformers import DynamicCache


def eagle3_logits(model, ids, states):
    """Of every token, with a causal forward."""
    if model.fc_norm is not None:
        chunks = states.chunk(len(model.fc_norm), dim=-1)
        normed = [norm(chunk) for norm, chunk in zip(model.fc_norm, chunks, strict=True)]
        states = torch.cat(normed, dim=-1)
    states = torch.cat([model.embed_tokens(ids), model.fc(states)], dim=-1)
    tokens = states.shape[1]
    positions = torch.arange(tokens)[None]
    mask = torch.full((tokens, tokens), torch.finfo(torch.float32).min).triu(1)[None, None]
    for layer in model.layers:
        states = layer(
            states,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=DynamicCache(),
            position_embeddings=model.rotary_emb(states, positions),
        )
        states = states[0] if isinstance(states, tuple) else states
    return model.lm_head(model.norm(states))


def block_logits(model, ids, states):
    """Of every slot that drafts, by the library's training forward with these anchors."""
    slots = model.block_size
    count = ids.shape[1] - slots
    anchors = torch.arange(count)
    core.select_anchors = lambda *_: (anchors, torch.ones_like(anchors, dtype=torch.bool))
    model._create_mask_fn = create_float_mask
    ones = torch.ones_like(ids)
    last = torch.zeros(1, ids.shape[1], states.shape[2] // len(model.target_layer_ids))
    hidden, logits, *_ = model._backbone_forward(states, ids, ones, last, ones, max_anchors=count)
    hidden, logits = hidden.view(count, slots, -1), logits.view(count, slots, -1)
    first = 0 if model.config.sample_from_anchor else 1
    if getattr(model, "markov_head", None) is not None:
        # The token before the one that a slot drafts; slot 0 drafts nothing where `first` is 1.
        before = (anchors[:, None] + torch.arange(slots) - first).clamp(min=0)
        logits = logits + model.markov_head.block_bias(
            prev_token_ids=ids[0, before], hidden_states=hidden
        )
    return logits[:, first:].flatten(0, 1)[None]


directory, inputs, out = sys.argv[1:]
given = load_file(inputs)
torch.set_grad_enabled(False)
model = SpeculatorModel.from_pretrained(directory).float().eval()
model.config.transformer_layer_config._attn_implementation = "eager"
for layer in model.layers:
    layer.self_attn.config._attn_implementation = "eager"
compute = block_logits if hasattr(model, "block_size") else eagle3_logits
save_file({"logits": compute(model, given["ids"], given["states"]).contiguous()}, out)
version = f"speculators {importlib.metadata.version('speculators')}"
layers = (
    getattr(model.config, "aux_hidden_state_layer_ids", None)
    or model.config.eagle_aux_hidden_state_layer_ids
)
sys.stdout.write("\n" + json.dumps({"engine": version, "aux": layers}) + "\n")
