"""Layouts of MTP heads: our own, and those in which models ship with an MTP layer."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from draftsmith.core.io import JsonObject
from draftsmith.drafts.layouts.layout import Functions, HeadFiles, Names
from draftsmith.drafts.tables import read_table

_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
_WITHOUT_COUNT = "qwen3_next"
_TARGETS_OWN = r"(?:model\.)?(?:language_model\.)?(?:embed_tokens|lm_head)\.weight"


@dataclass(frozen=True, kw_only=True)
class NativeLayer:
    """How the checkpoints of some families name their MTP layer."""

    title: str
    join: str
    """Pattern of the name of `fc`. Group `start` is what all names of the layer begin with, group
    `i` the number of the layer.
    """
    names: Mapping[str, str]
    """Our name -> theirs, for what is not in the decoder layer. A `.weight` follows."""
    block: str = ""
    """What the names of the decoder layer begin with, after `start`."""
    hidden_first: bool = False
    family: str | None = None
    """Family of the decoder layer if it is not the target's."""
    start: str = ""
    """What all names begin with when it is written; `{layers}` is the number of the target's."""
    counts: Mapping[str, str] = field(default_factory=dict)
    """Families of targets for which the layer is written -> the key of config.json that says how
    many such layers there are. vLLM's `mtp` and SGLang's NEXTN serve all of them.
    """


NATIVE_LAYERS = [NativeLayer(**values) for values in read_table("mtp_layers.yaml")]


@dataclass(frozen=True)
class FoundLayers:
    """The MTP layers among the tensors of a checkpoint. starts: what the names of each begin
    with.
    """

    layer: NativeLayer
    starts: tuple[str, ...]

    @property
    def start(self) -> str:
        """Of the first layer."""
        return self.starts[0]

    def first(self, names: Iterable[str]) -> set[str]:
        """The names that belong to the first layer."""
        return {name for name in names if name.startswith(self.start)}

    def every(self, names: Iterable[str]) -> set[str]:
        """The names that belong to any of the layers."""
        return {name for name in names if name.startswith(self.starts)}


def find_layers(names: Iterable[str]) -> FoundLayers | None:
    """The MTP layers among these names of tensors, in their order."""
    names = list(names)
    for layer in NATIVE_LAYERS:
        starts: dict[int, str] = {}
        for name in names:
            if match := re.fullmatch(layer.join, name):
                starts[int(match.groupdict().get("i", 0))] = match["start"]
        if starts:
            numbers = sorted(starts)
            return FoundLayers(layer, tuple(starts[i] for i in numbers))
    return None


def written_for(family: str) -> NativeLayer | None:
    """How the MTP layer of a target of this family is written; None if no engine reads one."""
    for layer in NATIVE_LAYERS:
        if family in layer.counts:
            return layer
    return None


def _is_native(values: JsonObject, names: Names) -> bool:
    """Whether a directory holds an MTP layer and nothing else of its model."""
    text: JsonObject = values.get("text_config") or {}
    counted = any(values.get(key) or text.get(key) for key in _COUNTS)
    if not counted and values.get("model_type") != _WITHOUT_COUNT:
        return False
    found = find_layers(names())
    if found is None:
        return False
    others = names() - found.every(names())
    return all(re.fullmatch(_TARGETS_OWN, name) for name in others)


def _read_native(files: HeadFiles) -> None:
    """Name the layer's tensors as `MtpHead` does; those of the decoder layer keep the checkpoint's
    names behind `layers.0.`.
    """
    found = find_layers(files.tensors)
    assert found is not None
    ours = {f"{theirs}.weight": f"{name}.weight" for name, theirs in found.layer.names.items()}
    tensors = {}
    for name in found.first(files.tensors):
        tensor = files.tensors[name]
        rest = name.removeprefix(found.start)
        in_block = rest.removeprefix(found.layer.block)
        tensors[ours.get(rest) or f"layers.0.{in_block}"] = tensor
    # Copies of the target's own; the head uses the target's. The embedding is compared with it.
    tensors.pop("lm_head.weight", None)
    files.tensors = tensors
    files.values = {"hidden_first": found.layer.hidden_first, "family": found.layer.family}


FUNCTIONS = {
    "mtp": Functions(known=lambda values, _: values.get("architectures") == ["MtpHead"]),
    "native-mtp": Functions(known=_is_native, read=_read_native),
}
