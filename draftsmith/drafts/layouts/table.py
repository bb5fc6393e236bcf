"""All layouts of heads on disk.

To add a layout, write it in `layouts.yaml`, and its functions in the file of its family.
"""

from draftsmith.core.io import JsonObject
from draftsmith.drafts.layouts import block, eagle, eagle3, medusa, mtp
from draftsmith.drafts.layouts.layout import Layout, Names
from draftsmith.drafts.tables import read_table

_FUNCTIONS = {
    **block.FUNCTIONS,
    **eagle.FUNCTIONS,
    **eagle3.FUNCTIONS,
    **medusa.FUNCTIONS,
    **mtp.FUNCTIONS,
}
# The first layout that knows a directory reads it.
LAYOUTS: dict[str, Layout] = {
    name: Layout(**row, **vars(_FUNCTIONS[name]))
    for name, row in read_table("layouts.yaml").items()
}
NATIVE_MTP = LAYOUTS["native-mtp"]


def layout_of(values: JsonObject, names: Names) -> Layout | None:
    """The layout of a directory with these values in config.json; None for a language model."""
    if "speculators_model_type" in values:
        return LAYOUTS.get(f"speculators-{values['speculators_model_type']}")
    return next((layout for layout in LAYOUTS.values() if layout.known(values, names)), None)


def foreign(values: JsonObject) -> str | None:
    """What the draft is that config.json describes, if no forward here runs it, and what to take
    instead.
    """
    inner = values.get("dflash_config") or {}
    keys = ("architectures", "speculators_model_type", "model_type", "projector_type")
    named = " ".join(str(given.get(key)) for given in (values, inner) for key in keys).lower()
    known = read_table("foreign.yaml").items()
    return next((str(what) for word, what in known if word in named), None)


def may_be_head(values: JsonObject) -> bool:
    """Whether a config.json can be that of a head, before its tensors are downloaded."""
    if values.get("num_hidden_layers") == 1 or "speculators_model_type" in values:
        return True
    if foreign(values):
        return True
    return any(layout.known(values, set) for layout in LAYOUTS.values())
