"""The methods that an evaluation decodes with, and how `decode` is told of one."""

from collections.abc import Sequence

from draftsmith.decode.method import OWN_TREE as OWN_TREE, Method as Method
from draftsmith.drafts.draft_sources import JOINED, is_lookahead
from draftsmith.eval.schema import ModelRow


def methods_of(source: str, methods: Sequence[Method]) -> list[Method]:
    """Return the methods that a draft is decoded with, of those that are asked for: lookahead
    drafts its own tree only.
    """
    if is_lookahead(source) and methods:
        return [Method.of(OWN_TREE, "exact")]
    return list(methods)


def decode_options(model: ModelRow, tree: str, recorded: object) -> list[str]:
    """Return the options of `decode` that draft this tree as a draft of an evaluation or a plan
    does. recorded: whether its steps were.
    """
    source = model["name"]
    if not model["parameters"]:
        source = f"retrieval:{source}" if model["kind"] == "retrieval" else model["kind"]
    elif model["kind"].startswith(JOINED):
        source = JOINED + source
    options = ["--draft", source]
    if tree != OWN_TREE:
        options += ["--tree", tree]
    return [*options, "--compile"] if recorded else options
