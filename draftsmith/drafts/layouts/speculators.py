"""What all layouts of the speculators library have in common."""

from pathlib import Path

from draftsmith.core.io import JsonObject
from draftsmith.drafts.layouts.layout import ExportedHead

# Training checkpoints of speculators hold copies of the target's own.
TARGET_COPIES = ("verifier_norm.weight", "verifier_lm_head.weight")


def speculators_config(
    head: ExportedHead, *, architecture: str, tokens: int, beside: JsonObject
) -> JsonObject:
    """config.json of a speculator that drafts `tokens` tokens; `beside` stands beside its layers'
    config.
    """
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    path = Path(head.target_name)
    inner = {key: value for key, value in head.values.items() if key not in beside}
    inner.pop("architectures", None)
    return {
        "architectures": [architecture],
        "speculators_model_type": head.kind,
        # Later versions add flags that must stay off for heads of the original form.
        "speculators_version": "0.7.0",
        "speculators_config": {
            "algorithm": head.kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy],
            "verifier": {
                # vLLM loads the target by this name from wherever it is started.
                "name_or_path": str(path.resolve()) if path.is_dir() else head.target_name,
                "architectures": head.target_architectures,
            },
        },
        "transformer_layer_config": inner,
        **beside,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "torch_dtype": head.dtype,
    }
