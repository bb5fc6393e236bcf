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


@torch.no_grad()
def main() -> None:
    """Load, compute, write."""
    directory, inputs, out = sys.argv[1:]
    given = load_file(inputs)
    model = SpeculatorModel.from_pretrained(directory).float().eval()
    layer_config = model.config.transformer_layer_config
    layer_config._attn_implementation = "eager"
    both = torch.cat([model.embed_tokens(given["ids"]), model.fc(given["states"])], dim=-1)
    tokens = both.shape[1]
    positions = torch.arange(tokens)[None]
    mask = torch.full((tokens, tokens), torch.finfo(torch.float32).min).triu(1)[None, None]
    for layer in model.layers:
        layer.self_attn.config._attn_implementation = "eager"
        both = layer(
            both,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=DynamicCache(),
            position_embeddings=model.rotary_emb(both, positions),
        )
        both = both[0] if isinstance(both, tuple) else both
    save_file({"logits": model.lm_head(model.norm(both)).contiguous()}, out)
    report = {
        "engine": f"speculators {importlib.metadata.version('speculators')}",
        "class": type(model).__name__,
        "aux": model.config.eagle_aux_hidden_state_layer_ids,
    }
    sys.stdout.write("\n" + json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
