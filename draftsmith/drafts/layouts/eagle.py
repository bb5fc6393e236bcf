"""Layouts of EAGLE-1/2 heads."""

from draftsmith.core.io import JsonObject
from draftsmith.drafts.layouts.layout import EMBEDDING, ExportedHead, HeadFiles, Layout, Names

# Heads for Mixtral and Qwen 2 carry those families' model_type; the layer is a LLaMA layer all the
# same.
_FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3")
_SHAPES = {
    "layers.0.self_attn.q_proj.weight": "Q H",
    "layers.0.self_attn.k_proj.weight": "K H",
    "layers.0.self_attn.v_proj.weight": "K H",
    "layers.0.self_attn.o_proj.weight": "H Q",
    "layers.0.mlp.gate_proj.weight": "F H",
    "layers.0.mlp.up_proj.weight": "F H",
    "layers.0.mlp.down_proj.weight": "H F",
    "layers.0.post_attention_layernorm.weight": "H",
    EMBEDDING: "V H",
    "fc.weight": "H 2H",
    "fc.bias": "H if bias",
}


def _is_eagle(values: JsonObject, names: Names) -> bool:
    if "Eagle" in str(values.get("architectures")):
        return True
    family = values.get("model_type", "llama")
    one_layer = values.get("num_hidden_layers") == 1 and family in _FAMILIES
    return one_layer and ("bias" in values or "fc.weight" in names())


def _read_eagle(files: HeadFiles) -> None:
    # From the tensors: the authors' code draws biases that a file lacks at random.
    files.values |= biases(files, "layers.0.") | {"bias": "fc.bias" in files.tensors}


def biases(files: HeadFiles, prefix: str) -> dict[str, bool]:
    """Whether the attention of the layer at `prefix` has biases, as keys of config.json."""
    return {
        "qkv_bias": f"{prefix}self_attn.q_proj.bias" in files.tensors,
        "attention_bias": f"{prefix}self_attn.o_proj.bias" in files.tensors,
    }


def authors_config(head: ExportedHead) -> JsonObject:
    """config.json as the authors' code of EAGLE and EAGLE-3 reads it."""
    scaling = head.values["rope_scaling"]
    if scaling is not None:
        # The authors' code asks for the older key.
        scaling = scaling | {"type": scaling["rope_type"]}
    return head.values | {"architectures": ["LlamaForCausalLM"], "rope_scaling": scaling}


def _sglang_config(head: ExportedHead) -> JsonObject:
    # SGLang's `fc` always has a bias, and one that is not in the file stays as it was drawn.
    return head.values | {"architectures": ["LlamaForCausalLMEagle"], "bias": True}


# eagle/model/cnets1.py of github.com/SafeAILab/EAGLE; llama_eagle.py of SGLang and of vLLM.
EAGLE = Layout(
    title="EAGLE-1/2 of its authors",
    kind="eagle",
    shapes=_SHAPES,
    format="eagle",
    proven_in="vllm 0.32.0",
    embedding="always",
    known=_is_eagle,
    read=_read_eagle,
    config=authors_config,
)
SGLANG_EAGLE = Layout(
    title="EAGLE-1/2 as SGLang reads it",
    kind="eagle",
    shapes=_SHAPES,
    format="sglang",
    embedding="always",
    config=_sglang_config,
)
