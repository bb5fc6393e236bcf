"""`draftsmith doctor`: which engines load a target with a draft, and the commands that serve it.

For language models, only configs and tokenizers are read; a head is loaded with its target; of a
method without weights nothing is read, and torch is not imported.
"""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from draftsmith.core.hub import quiet
from draftsmith.core.io import JsonObject
from draftsmith.core.options import configured
from draftsmith.drafts.config import DoctorConfig
from draftsmith.drafts.engine_commands import DRAFT_TOKENS, SERVING, Support

if TYPE_CHECKING:
    from draftsmith.drafts.load import LoadedModels


@quiet()
def examine(config: DoctorConfig | None = None, **options: Any) -> JsonObject:
    """Return the `Support` of every engine on a target and a draft, as JSON. Raise InputError for a
    directory that holds neither.
    """
    config = configured(DoctorConfig, config, options)
    if config.reads_nothing:
        kind = config.draft.partition(":")[0]
        verdicts = _without_weights(kind, config.target or "TARGET")
    else:
        from draftsmith.drafts.engine_support import judge, read_pair

        pair = read_pair(config)
        kind = pair.kind
        verdicts = judge(pair, config)
    return {
        "target": config.target,
        "draft": config.draft,
        "kind": kind,
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }


def first_engine(config: DoctorConfig, loaded: "LoadedModels", name: str) -> str | None:
    """The first engine that serves the pair of the options on such a device. name: under which the
    draft is loaded.
    """
    from draftsmith.drafts.engine_support import judge, loaded_pair

    if config.reads_nothing:
        verdicts = _without_weights(config.draft.partition(":")[0], loaded.target_name)
    else:
        verdicts = judge(loaded_pair(loaded, name, config), config)
    on_gpu = loaded.target.device.type != "cpu"
    runs = (each.engine for each in verdicts if each.serves and (on_gpu or not each.gpu_only))
    return next(runs, None)


def _without_weights(kind: str, target: str) -> list[Support]:
    """How each engine drafts by a method without weights. Nothing is read."""
    verdicts = []
    for engine, kinds in SERVING.items():
        if kind in kinds:
            exports, command = kinds[kind].commands(kind, target, "", DRAFT_TOKENS)
            verdicts.append(Support(engine, "", True, True, command=command, exports=exports))
        elif "draft" in kinds:
            verdicts.append(Support(engine, f"its documentation names no {kind}"))
    return verdicts
