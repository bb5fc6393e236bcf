"""Logits that speculators computes from an exported EAGLE-3 head; run in its environment.

    python speculators_logits.py DIRECTORY INPUTS.safetensors LOGITS.safetensors

INPUTS has `ids` [1, T] and `states` [1, T, 3H]; LOGITS gets `logits` [1, T, D].
"""

import importlib.metadata
import json
import os
import sys

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel
from transformers import DynamicCache

directory, inputs, out = sys.argv[1:]
given = load_file(inputs)
torch.set_grad_enabled(False)
model = SpeculatorModel.from_pretrained(directory).float().eval()
model.config.transformer_layer_config._attn_implementation = "eager"
states = torch.cat([model.embed_tokens(given["ids"]), model.fc(given["states"])], dim=-1)
tokens = states.shape[1]
positions = torch.arange(tokens)[None]
mask = torch.full((tokens, tokens), torch.finfo(torch.float32).min).triu(1)[None, None]
for layer in model.layers:
    layer.self_attn.config._attn_implementation = "eager"
    states = layer(
        states,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=DynamicCache(),
        position_embeddings=model.rotary_emb(states, positions),
    )
    states = states[0] if isinstance(states, tuple) else states
save_file({"logits": model.lm_head(model.norm(states)).contiguous()}, out)
version = f"speculators {importlib.metadata.version('speculators')}"
sys.stdout.write("\n" + json.dumps({"engine": version, "aux": model.config.eagle_aux_hidden_state_layer_ids}) + "\n")
