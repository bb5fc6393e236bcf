"""Layouts of EAGLE-1/2 heads."""

from draftsmith.core.errors import InputError
from draftsmith.core.io import JsonObject
from draftsmith.drafts.layouts.layout import ExportedHead, Functions, HeadFiles, Names

# Heads for Mixtral and Qwen 2 carry those families' model_type; the layer is a LLaMA layer all the
# same.
_FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3")


def _is_eagle(values: JsonObject, names: Names) -> bool:
    if "Eagle" in str(values.get("architectures")):
        return True
    family = values.get("model_type", "llama")
    one_layer = values.get("num_hidden_layers") == 1 and family in _FAMILIES
    return one_layer and ("bias" in values or "fc.weight" in names())


def _read_eagle(files: HeadFiles) -> None:
    check_one_layer(files)
    # From the tensors: the authors' code draws biases that a file lacks at random.
    files.values |= biases(files, "layers.0.") | {"bias": "fc.bias" in files.tensors}


def check_one_layer(files: HeadFiles) -> None:
    """Raise InputError unless the file has one layer, whatever its config.json says."""
    count = count_layers(files)
    if count != 1:
        declared = files.values.get("num_hidden_layers")
        raise InputError(
            f"the file holds {count} layers and 'num_hidden_layers' is {declared}; only heads of "
            "one layer can run; fetch such a head, or all files of this one"
        )


def count_layers(files: HeadFiles) -> int:
    """The number of decoder layers in the file."""
    return sum(name.endswith("self_attn.q_proj.weight") for name in files.tensors)


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


FUNCTIONS = {
    "eagle": Functions(known=_is_eagle, read=_read_eagle, config=authors_config),
    "sglang-eagle": Functions(config=_sglang_config),
}
