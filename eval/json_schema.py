"""The JSON Schema of results.json, made from the types in `eval.schema`; docs/results.schema.json is its text.

`python -m eval.json_schema` in the repository writes it again.
"""

import inspect
import json
import types
import typing
from pathlib import Path
from typing import Any

from eval.schema import ResultsDocument

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def results_schema() -> dict[str, Any]:
    """The schema of a whole results document: every row type under `$defs`, its docstring as the description."""
    rows: dict[str, Any] = {}
    top = _of(ResultsDocument, rows)
    return {"$schema": DIALECT, "title": "results.json of draftsmith eval", **top, "$defs": rows}


def results_schema_text() -> str:
    """That schema as it is published."""
    return json.dumps(results_schema(), indent=1) + "\n"


def _of(kind: Any, rows: dict[str, Any]) -> dict[str, Any]:
    """The schema of one type; a TypedDict goes into `rows` and is referred to."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return {}
    if kind in _PLAIN:
        return {"type": _PLAIN[kind]}
    if origin is typing.Literal:
        return {"enum": list(args)}
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": [_of(arg, rows) for arg in args]}
    if origin is list:
        return {"type": "array", "items": _of(args[0], rows)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _of(args[1], rows)}
    assert typing.is_typeddict(kind), kind
    name = kind.__name__
    if name not in rows:
        rows[name] = {}  # a row that holds rows of its own type would not end otherwise
        hints = typing.get_type_hints(kind)
        rows[name] = {
            "type": "object",
            "description": inspect.cleandoc(kind.__doc__ or ""),
            "properties": {key: _of(value, rows) for key, value in hints.items()},
            "required": list(hints),
            "additionalProperties": False,
        }
    return {"$ref": f"#/$defs/{name}"}


if __name__ == "__main__":
    Path("docs/results.schema.json").write_text(results_schema_text(), encoding="utf-8")
