"""All layouts of heads on disk.

To add a layout, write it in the file of its family and enter it here.
"""

from draftsmith.core.io import JsonObject
from draftsmith.drafts.layouts.block import (
    DFLASH,
    DSPARK,
    JETSPEC,
    SPECULATORS_DFLASH,
    SPECULATORS_DSPARK,
)
from draftsmith.drafts.layouts.eagle import EAGLE, SGLANG_EAGLE
from draftsmith.drafts.layouts.eagle3 import EAGLE3, SGLANG_EAGLE3, SPECULATORS_EAGLE3
from draftsmith.drafts.layouts.layout import Layout, Names
from draftsmith.drafts.layouts.medusa import HYDRA, MEDUSA, VLLM_MEDUSA
from draftsmith.drafts.layouts.mtp import MTP, NATIVE_MTP

# The first layout that knows a directory reads it.
LAYOUTS: dict[str, Layout] = {
    "speculators": SPECULATORS_EAGLE3,
    "speculators-dflash": SPECULATORS_DFLASH,
    "speculators-dspark": SPECULATORS_DSPARK,
    "mtp": MTP,
    "native-mtp": NATIVE_MTP,
    "vllm-medusa": VLLM_MEDUSA,
    "medusa": MEDUSA,
    "hydra": HYDRA,
    "dspark": DSPARK,
    "jetspec": JETSPEC,
    "dflash": DFLASH,
    "eagle3": EAGLE3,
    "sglang-eagle3": SGLANG_EAGLE3,
    "eagle": EAGLE,
    "sglang-eagle": SGLANG_EAGLE,
}


def layout_of(values: JsonObject, names: Names) -> Layout | None:
    """The layout of a directory with these values in config.json; None for a language model."""
    library_only = "speculators_model_type" in values
    for name, layout in LAYOUTS.items():
        of_library = name.startswith("speculators")
        if (of_library or not library_only) and layout.known(values, names):
            return layout
    return None


def may_be_head(values: JsonObject) -> bool:
    """Whether a config.json can be that of a head, before its tensors are downloaded."""
    if values.get("num_hidden_layers") == 1:
        return True
    return any(layout.known(values, set) for layout in LAYOUTS.values())
