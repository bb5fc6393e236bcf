"""Layouts of block drafters: DFlash, DSpark and JetSpec."""

from draftsmith.core.errors import InputError
from draftsmith.core.io import JsonObject
from draftsmith.drafts.layouts.layout import (
    EMBEDDING,
    ExportedHead,
    Functions,
    HeadFiles,
    Names,
    target_layers,
)
from draftsmith.drafts.layouts.speculators import TARGET_COPIES, speculators_config


def _is_dflash(values: JsonObject, names: Names) -> bool:
    return "dflash_config" in values or "DFlash" in str(values.get("architectures"))


def _is_jetspec(values: JsonObject, names: Names) -> bool:
    causal = (values.get("dflash_config") or values).get("causal", values.get("causal_head"))
    return _is_dflash(values, names) and bool(causal)


def _read_block(files: HeadFiles) -> None:
    """Check what stands for the target's own: a reduced output projection must be rows of the
    target's.
    """
    values = files.values
    if (fc := files.tensors.get("fc.weight")) is not None:
        fused = fc.shape[-1] // files.lm_head_VH.shape[-1]
        named = target_layers(values)
        if fused != len(named):
            raise InputError(
                f"'fc.weight' reads {fused} layers of the target and 'target_layer_ids' names "
                f"{len(named)}; fetch the config.json that names them"
            )
    kinds = set(values.get("layer_types") or ())
    if len(kinds) > 1:
        raise InputError(
            "some of its layers attend to a window and some do not; only layers that are alike "
            "can run"
        )
    if kinds == {"sliding_attention"}:
        window = {"use_swa": True, "swa_window_size": values["sliding_window"]}
        # By default engines make layers with a window causal.
        inner = values.get("dflash_config") or {}
        values["dflash_config"] = {"causal": True} | window | inner
    size = values.get("vocab_size") or len(files.lm_head_VH)
    values["draft_vocab_size"] = values.get("draft_vocab_size") or size
    ids_D = files.read_draft_vocabulary(size)
    rows_DH = files.tensors.pop("lm_head.weight", None)
    if rows_DH is None:
        return
    own_DH = files.target_rows(ids_D).float()
    # Rounding to bf16 changes it by 0.4 %.
    if rows_DH.shape != own_DH.shape or (rows_DH.float() - own_DH).norm() > 0.01 * own_DH.norm():
        raise InputError(
            "'lm_head.weight' is not the target's own; use the target it was trained for"
        )


def _block_config(head: ExportedHead) -> JsonObject:
    inner = head.values["dflash_config"]
    # DeepSpec keeps these two outside.
    beside = {key: inner[key] for key in ("mask_token_id", "target_layer_ids")}
    return head.values | beside | {"dtype": head.dtype}


def _read_speculators(files: HeadFiles) -> None:
    layer = files.values.pop("transformer_layer_config")
    # The library makes only layers with a window causal, and those unless told otherwise.
    windowed = "sliding_attention" in (layer.get("layer_types") or ())
    inner = {
        "mask_token_id": files.values["mask_token_id"],
        "target_layer_ids": list(target_layers(files.values)),
        "causal": windowed and not files.values.get("sliding_window_non_causal", False),
    }
    dspark = files.values["speculators_model_type"] == "dspark"
    architecture = "Qwen3DSparkModel" if dspark else "DFlashDraftModel"
    defaults = {"sample_from_anchor": dspark}
    given = {"dflash_config": inner, "architectures": [architecture]}
    files.values = layer | defaults | files.values | given
    for name in (*TARGET_COPIES, EMBEDDING):
        files.tensors.pop(name, None)
    _read_block(files)


_BESIDE = (
    "draft_vocab_size",
    "block_size",
    "sample_from_anchor",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
)
_ARCHITECTURES = {"dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator"}


def _speculators_config(head: ExportedHead) -> JsonObject:
    assert head.depths is not None
    beside = {key: head.values[key] for key in _BESIDE if key in head.values}
    beside["mask_token_id"] = head.values["dflash_config"]["mask_token_id"]
    beside["aux_hidden_state_layer_ids"] = list(head.hidden_layers)
    # vLLM makes all layers causal where this is false, the library only those with a window.
    beside["sliding_window_non_causal"] = True
    architecture = _ARCHITECTURES[head.kind]
    return speculators_config(head, architecture=architecture, tokens=head.depths, beside=beside)


_SPECULATORS = Functions(read=_read_speculators, config=_speculators_config)
FUNCTIONS = {
    "speculators-dflash": _SPECULATORS,
    "speculators-dspark": _SPECULATORS,
    "dspark": Functions(
        known=lambda values, _: "DSpark" in str(values.get("architectures")),
        read=_read_block,
        config=_block_config,
    ),
    "jetspec": Functions(known=_is_jetspec, read=_read_block, config=_block_config),
    "dflash": Functions(known=_is_dflash, read=_read_block, config=_block_config),
}
