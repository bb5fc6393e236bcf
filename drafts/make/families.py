"""Where layers, feed-forward blocks and heads are in a family's modules, and which keys of its config count them."""

from dataclasses import dataclass

from transformers import PreTrainedModel

from draftsmith_core.errors import InputError


@dataclass(frozen=True)
class Family:
    """Module paths of one family. `up` go into a feed-forward block's neurons, `down` comes out of them; `q`, `kv`
    and `o` of attention are empty where the size of a head follows from their number, so that none can be left out.
    """

    layers: str
    up: tuple[str, ...]
    down: str
    q: str = ""
    kv: tuple[str, ...] = ()
    o: str = ""
    depth_key: str = "num_hidden_layers"
    width_key: str = "intermediate_size"


_LLAMA = Family(
    layers="model.layers",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    q="self_attn.q_proj",
    kv=("self_attn.k_proj", "self_attn.v_proj"),
    o="self_attn.o_proj",
)
FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma2": _LLAMA,
    "gemma3_text": _LLAMA,
    "opt": Family(layers="model.decoder.layers", up=("fc1",), down="fc2", width_key="ffn_dim"),
    "gpt_neox": Family(layers="gpt_neox.layers", up=("mlp.dense_h_to_4h",), down="mlp.dense_4h_to_h"),
    "gpt2": Family(
        layers="transformer.h", up=("mlp.c_fc",), down="mlp.c_proj", depth_key="n_layer", width_key="n_inner"
    ),
    "phi": Family(layers="model.layers", up=("mlp.fc1",), down="mlp.fc2"),
}


def family_of(model: PreTrainedModel) -> Family:
    """The family of a model; InputError, one line, for one whose layers are not known here."""
    kind = model.config.model_type
    if kind not in FAMILIES:
        raise InputError(
            f"{model.name_or_path or type(model).__name__}: models of type {kind} cannot be pruned (only "
            f"{', '.join(FAMILIES)}); use --method transplant or fresh"
        )
    return FAMILIES[kind]
