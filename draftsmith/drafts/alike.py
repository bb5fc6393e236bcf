"""Whether drafts can be merged: they must compute alike, draft the same tokens, and serve one
target.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from draftsmith.core.errors import InputError
from draftsmith.core.io import JsonObject
from draftsmith.core.models import architecture
from draftsmith.core.runs import read_record
from draftsmith.drafts.draft_vocabulary import FILE, read_draft_vocabulary

# Calibrated after training, so that drafts may differ in it.
_CALIBRATED = "confidence_temperatures"


def check_alike(configs: Mapping[str, JsonObject]) -> None:
    """Raise InputError if drafts read other layers, or have other masks, windows, rope or sizes.

    configs: config.json of every draft, by its source.
    """
    first, *others = configs
    known = architecture(configs[first])
    for source in others:
        values = architecture(configs[source])
        for key in sorted((known.keys() | values.keys()) - {_CALIBRATED}):
            if known.get(key) != values.get(key):
                raise InputError(
                    f"{source}: '{key}' is {values.get(key)}, and {known.get(key)} in {first}; "
                    "only drafts that compute alike can be merged"
                )


def shared_target(sources: Sequence[str], kind: str) -> JsonObject:
    """Return `target` and `target_fingerprint` for the record of a merged draft; None if the
    records differ or have none.

    Raise InputError for heads that were trained for different targets.
    """
    records = [read_record(Path(source)) for source in sources]
    targets = {each.get("target_fingerprint"): each.get("target") for each in records}
    targets.pop(None, None)
    if len(targets) > 1 and kind != "draft-lm":
        names = ", ".join(f"{target} ({found})" for found, target in targets.items())
        raise InputError(f"--draft: the heads were trained for different targets: {names}")
    found, target = targets.popitem() if len(targets) == 1 else (None, None)
    return {"target": target, "target_fingerprint": found}


def shared_vocabulary(sources: Sequence[str], base: str | None, size: int) -> Tensor | None:
    """Return the tokens that language models draft, None for all.

    A base may draft all tokens: the drafts were trained in rows of its own. Raise InputError if
    other drafts differ.
    """
    vocabularies = {source: read_draft_vocabulary(source, size) for source in sources}
    ids_D = vocabularies[sources[0]]
    wanted = None if ids_D is None else ids_D.tolist()
    for source, other in vocabularies.items():
        if source == base and other is None:
            continue
        if (None if other is None else other.tolist()) != wanted:
            raise InputError(
                f"{source}: drafts other tokens than {sources[0]} ({FILE}); merge ones of the same"
            )
    return ids_D
