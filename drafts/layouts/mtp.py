"""Layouts of MTP heads."""

from drafts.layouts.layout import Layout, Names
from draftsmith_core.io import JsonObject


def _is_ours(values: JsonObject, names: Names) -> bool:
    return values.get("architectures") == ["MtpHead"]


# Our own: tensors under Qwen3-Next's names without `mtp.`, the layer's as transformers has them.
MTP = Layout(title="draftsmith's MTP head", kind="mtp", known=_is_ours)
