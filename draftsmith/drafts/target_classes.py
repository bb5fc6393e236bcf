"""Which classes of models an engine takes as a target, by what its own sources say.

`engine_classes.yaml` is printed by `tests/workers/engine_classes.py`, but for the engines whose
sources name them in one place. Nothing is said of a class that is not there.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

_FILE = Path(__file__).with_name("engine_classes.yaml")
# Names of lists, by engine and kind of draft; `text` for the others.
_LISTS = {
    "vllm": {
        "eagle": "eagle",
        "eagle3": "eagle3",
        "dflash": "eagle3",
        "jetspec": "eagle3",
        "dspark": "eagle3",
    },
    "sglang": {"eagle": "eagle", "eagle3": "eagle3", "dflash": "dflash"},
}
# What a class must have; an engine that does not ask for it may take others too.
_ASKED = {
    ("vllm", "eagle3"): "SupportsEagle3",
    ("sglang", "eagle"): "get_embed_and_head",
    ("sglang", "eagle3"): "set_eagle3_layers_to_capture",
    ("sglang", "dflash"): "set_dflash_layers_to_capture",
}


@dataclass(frozen=True)
class Objection:
    """Why an engine does not take a class, or why that is not `known`."""

    reason: str
    known: bool


@cache
def engine_classes() -> dict[str, dict[str, Any]]:
    """By engine: its `version`, and lists of names of classes, or of model types."""
    return dict(yaml.safe_load(_FILE.read_text(encoding="utf-8")))


def objection(engine: str, kind: str, names: tuple[str, ...]) -> Objection | None:
    """What speaks against a target with this kind of draft on an engine; None if nothing does.

    names: of the target's class, and of its model type.
    """
    classes = engine_classes().get(engine)
    if classes is None:
        return None
    key = _LISTS.get(engine, {}).get(kind, "text")
    if set(names) & set(classes[key]):
        return None
    version = f"{engine} {classes['version']}"
    asked = _ASKED.get((engine, key))
    if asked is not None and set(names) & set(classes["text"]):
        return Objection(f"{names[0]} has no {asked} in {version}", known=True)
    return Objection(f"the sources of {version} do not say so of {names[0]}", known=False)
