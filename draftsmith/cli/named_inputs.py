"""Models and files that options name are looked for before torch and a tokenizer load."""

from pathlib import Path

from draftsmith.core.errors import InputError, at
from draftsmith.core.io import read_tree_file, read_words
from draftsmith.core.prompt_rows import check_prompts, check_rows
from draftsmith.core.sources import check_source
from draftsmith.decode import parse_tree, tree_spec
from draftsmith.drafts.draft_sources import JOINED, near_weightless


def check_named(config: object) -> None:
    """Raise InputError for a model or file that an option names and that cannot be there."""
    for key, kind in read_words(__file__).items():
        given = getattr(config, key, None) or []
        for value in [given] if isinstance(given, str) else given:
            name, equals, named = value.partition("=")
            is_named = equals and "/" not in name and not Path(value).exists()
            source = named if is_named else value
            if kind == "prompts" and Path(source).is_file():
                check_prompts(source)
            elif kind in ("prompts", "rows") and not Path(source).exists():
                with at(key):
                    check_rows(source)
            elif kind == "tree" and value not in ("auto", "none"):
                _check_tree(value)
            elif kind == "model" and (not near_weightless(source) or source.startswith(JOINED)):
                _check_model(source.removeprefix(JOINED))


def _check_tree(spec: str) -> None:
    try:
        parse_tree(tree_spec(spec), read_tree_file)
    except ValueError as error:
        raise InputError(str(error)) from None


def _check_model(source: str) -> None:
    # `mtp` is the target's own layer, `mtp:DIRECTORY` that of another.
    if source != "mtp":
        check_source(source.removeprefix("mtp:"))
