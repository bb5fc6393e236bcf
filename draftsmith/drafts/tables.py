"""The YAML tables of this room: layouts, families, engines. Reading them needs no torch."""

from pathlib import Path
from typing import Any

import yaml


def read_table(name: str) -> Any:
    """The content of a table, such as `layouts.yaml`."""
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return yaml.safe_load(text)
