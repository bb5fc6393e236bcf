"""Layouts of EAGLE-3 heads."""

from draftsmith.core.errors import InputError
from draftsmith.core.io import JsonObject
from draftsmith.drafts.layouts.eagle import authors_config, biases, count_layers
from draftsmith.drafts.layouts.layout import EMBEDDING, ExportedHead, Functions, HeadFiles, Names
from draftsmith.drafts.layouts.speculators import TARGET_COPIES, speculators_config

# Variants with norms of their own, and one of them.
_NORMS = {"norm_before_fc": "input_norm.weight", "fc_norm": "fc_norm.0.weight"}
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def _is_eagle3(values: JsonObject, names: Names) -> bool:
    if "draft_vocab_size" in values or "Eagle3" in str(values.get("architectures")):
        return True
    one_layer = values.get("num_hidden_layers", 1) == 1
    return one_layer and any(name.endswith("midlayer.hidden_norm.weight") for name in names())


def _read_eagle3(files: HeadFiles) -> None:
    """Fill what a file leaves out as the engines do: `t2d` from `d2t`, `lm_head` where the config
    says that it is shared.
    """
    tensors = files.tensors
    values = files.values
    for name in TARGET_COPIES:
        tensors.pop(name, None)
    values["held_layers"] = count_layers(files)
    width = values.get("target_hidden_size") or files.lm_head_VH.shape[-1]
    if "fc.weight" in tensors:
        values["fused_states"] = tensors["fc.weight"].shape[-1] // width
    inner = values.get("eagle_config") or {}
    if inner.get("use_aux_hidden_state") is False:
        raise InputError(
            "'use_aux_hidden_state' is false; only heads that read several of the target's "
            "layers can run"
        )
    for key in inner.keys() & set(_FLAGS):
        values.setdefault(key, inner[key])
    size = values.get("vocab_size") or len(files.lm_head_VH)
    drafted = tensors.get("d2t", tensors.get("lm_head.weight"))
    # SGLang shares the target's where no draft vocabulary is named.
    shared = values.get("draft_vocab_size") is None
    if shared:
        values["draft_vocab_size"] = size if drafted is None else len(drafted)
    ids_D = files.read_draft_vocabulary(size)
    if "lm_head.weight" not in tensors:
        tied = values.get("tie_word_embeddings") is True
        if not shared and not tied:
            raise InputError(
                "the file holds no 'lm_head.weight', and neither does 'tie_word_embeddings' share "
                "one nor is 'draft_vocab_size' left out; copy it again"
            )
        own_VH = tensors.get(EMBEDDING) if tied else None
        tensors["lm_head.weight"] = files.target_rows(ids_D) if own_VH is None else own_VH[ids_D]
    values |= biases(files, "midlayer.")
    values["qk_norm"] = "midlayer.self_attn.q_norm.weight" in tensors
    for key, name in _NORMS.items():
        if values.get(key) and name not in tensors:
            raise InputError(f"'{key}' is true and the file holds no '{name}'; copy it again")
        values[key] = name in tensors
    trained = values.get("embed_requires_grad") is True
    embedding = tensors.get(EMBEDDING)
    values["embed_requires_grad"] = embedding is not None and (
        trained or embedding.shape[-1] != files.lm_head_VH.shape[-1]
    )


def _sglang_config(head: ExportedHead) -> JsonObject:
    # SGLang names a layer by its output, which is the state that enters the next one. vLLM prefers
    # our own key.
    ids = [layer - 1 for layer in head.hidden_layers]
    inner = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
    return head.values | {"eagle_config": inner}


def _read_speculators(files: HeadFiles) -> None:
    layer = files.values.pop("transformer_layer_config")
    window = layer.get("sliding_window") if layer.get("use_sliding_window", True) else None
    kinds = layer.get("layer_types") or ["sliding_attention" if window else "full_attention"]
    if "sliding_attention" in kinds:
        raise InputError("its layer attends to a window; only full attention can be run")
    # The library's defaults.
    files.values = {"norm_before_residual": False, "num_hidden_layers": 1} | layer | files.values
    _read_eagle3(files)


def _speculators_config(head: ExportedHead) -> JsonObject:
    keys = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")
    beside = {key: head.values[key] for key in keys}
    beside |= {key: head.values.get(key, False) for key in _FLAGS}
    return speculators_config(head, architecture="Eagle3Speculator", tokens=3, beside=beside)


FUNCTIONS = {
    "speculators-eagle3": Functions(read=_read_speculators, config=_speculators_config),
    "eagle3": Functions(known=_is_eagle3, read=_read_eagle3, config=authors_config),
    "sglang-eagle3": Functions(config=_sglang_config),
}
