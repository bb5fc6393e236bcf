"""Draws the results: the page, its figures and tables, and what they say in words."""

from pathlib import Path
from typing import Any

import yaml

# The sentences and titles of an evaluation.
_WORDS = Path(__file__).parent / "templates" / "words.yaml"
WORDS: dict[str, Any] = yaml.safe_load(_WORDS.read_text(encoding="utf-8"))


def said(*keys: object, **values: object) -> str:
    """Return a sentence, to which the keys lead, with its values."""
    words: Any = WORDS
    for key in keys:
        words = words[key]
    return str(words.format(**values))
