"""What a model consists of, family by family: the table that the kernel's forward follows."""

from dataclasses import dataclass, replace
from types import ModuleType

from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.opt import modeling_opt
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

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

    code: module of transformers that has its classes. by_torch: whether `LeanForward` computes it
    by torch too. body: of the model; embedding, places (learned positions) and last_norm: of the
    body; the names from `norm` to `down_norm`: of a layer. query_norm, key_norm: of heads, in
    models that have them. One name in `qkv`: a query, a key and a value head by head. up: with a
    gate, or without. out_norm, down_norm: of what `out` and `down` add to the state. norm_offset:
    added to the weight of a norm. The rest are options of config.json.
    """

    code: ModuleType
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


LLAMA = Family(modeling_llama, by_torch=True)
GEMMA2 = Family(
    modeling_gemma2,
    out_norm="post_attention_layernorm",
    ffn_norm="pre_feedforward_layernorm",
    down_norm="post_feedforward_layernorm",
    norm_offset=1.0,
    activation="hidden_activation",
    attention_cap="attn_logit_softcapping",
    logit_cap="final_logit_softcapping",
)
# By the class of the model.
FAMILIES: dict[type, Family] = {
    modeling_llama.LlamaForCausalLM: LLAMA,
    modeling_mistral.MistralForCausalLM: replace(LLAMA, code=modeling_mistral),
    modeling_qwen2.Qwen2ForCausalLM: replace(LLAMA, code=modeling_qwen2),
    modeling_qwen3.Qwen3ForCausalLM: replace(LLAMA, code=modeling_qwen3),
    modeling_gemma2.Gemma2ForCausalLM: GEMMA2,
    modeling_gemma3.Gemma3ForCausalLM: replace(GEMMA2, code=modeling_gemma3, attention_cap=None),
    modeling_opt.OPTForCausalLM: Family(
        modeling_opt,
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
    modeling_gpt_neox.GPTNeoXForCausalLM: Family(
        modeling_gpt_neox,
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
