"""What a model consists of, family by family: the table that the kernel's forward follows."""

from dataclasses import dataclass, replace

# Numbers of the kernel's activations (`native/activation.h`), by the name in config.json.
ACTIVATIONS = {
    "silu": 0,
    "swish": 0,
    "gelu_pytorch_tanh": 1,
    "gelu_new": 1,
    "gelu_fast": 1,
    "gelu": 2,
    "relu": 3,
}


@dataclass(frozen=True)
class Family:
    """Where a family keeps what a forward reads. The defaults are LLaMA's.

    by_torch: whether `LeanForward` computes it by torch too. body: of the model; embedding, places
    (learned positions) and last_norm: of the body; the names from `norm` to `down_norm`: of a
    layer. query_norm, key_norm: of heads, in models that have them. One name in `qkv`: a query, a
    key and a value head by head. up: with a gate, or without. out_norm, down_norm: of what `out`
    and `down` add to the state. norm_offset: added to the weight of a norm. The rest are options of
    config.json.
    """

    by_torch: bool = False
    body: str = "model"
    embedding: str = "embed_tokens"
    places: str | None = None
    last_norm: str = "norm"
    norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    out: str = "self_attn.o_proj"
    out_norm: str | None = None
    ffn_norm: str = "post_attention_layernorm"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    down_norm: str | None = None
    norm_offset: float = 0.0
    activation: str = "hidden_act"
    parallel: str | None = None
    attention_cap: str | None = None
    logit_cap: str | None = None


LLAMA = Family(by_torch=True)
GEMMA2 = Family(
    out_norm="post_attention_layernorm",
    ffn_norm="pre_feedforward_layernorm",
    down_norm="post_feedforward_layernorm",
    norm_offset=1.0,
    activation="hidden_activation",
    attention_cap="attn_logit_softcapping",
    logit_cap="final_logit_softcapping",
)
# By the name of the model's class.
FAMILIES = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": LLAMA,
    "Qwen2ForCausalLM": LLAMA,
    "Qwen3ForCausalLM": LLAMA,
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": replace(GEMMA2, attention_cap=None),
    "OPTForCausalLM": Family(
        body="model.decoder",
        places="embed_positions",
        last_norm="final_layer_norm",
        norm="self_attn_layer_norm",
        out="self_attn.out_proj",
        ffn_norm="final_layer_norm",
        up=("fc1",),
        down="fc2",
        activation="activation_function",
    ),
    "GPTNeoXForCausalLM": Family(
        body="gpt_neox",
        embedding="embed_in",
        last_norm="final_layer_norm",
        qkv=("attention.query_key_value",),
        out="attention.dense",
        up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
        parallel="use_parallel_residual",
    ),
}


def family_of(model: object) -> Family | None:
    """The family of a model; None for a class that is not transformers' own."""
    kind = type(model)
    is_theirs = kind.__module__.startswith("transformers.models.")
    return FAMILIES.get(kind.__name__) if is_theirs else None
