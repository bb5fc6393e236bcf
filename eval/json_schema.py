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
_NESTED: dict[str, type[Any]] = {"object": dict, "array": list, "null": type(None)}
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


def first_gap(document: Any) -> str | None:
    """The first place at which a document has no row or list where one must be, or a row lacks a key; None where all
    are there. Numbers and texts are not looked at.
    """
    schema = results_schema()
    return _gap(document, schema, schema["$defs"], "")


def _gap(value: Any, schema: dict[str, Any], rows: dict[str, Any], where: str) -> str | None:
    schema = rows[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    if "anyOf" in schema:
        gaps = [_gap(value, each, rows, where) for each in schema["anyOf"]]
        return None if None in gaps else gaps[0]
    kind = _NESTED.get(schema.get("type", ""))
    if kind is not None and not isinstance(value, kind):
        return f"{where} is no {schema['type']}"
    parts: list[tuple[str, Any, dict[str, Any]]] = []
    if kind is list and schema["items"].get("type") not in _PLAIN.values():
        parts = [(f"{where}[{index}]", each, schema["items"]) for index, each in enumerate(value)]
    elif kind is dict:
        for key in schema.get("required", ()):
            if key not in value:
                return f"{where} lacks the key {key!r}".strip()
        known, others = schema.get("properties", {}), schema["additionalProperties"] or {}
        parts = [(f"{where}.{key}".strip("."), each, known.get(key, others)) for key, each in value.items()]
    return next((gap for name, each, of in parts if (gap := _gap(each, of, rows, name))), None)


if __name__ == "__main__":
    Path("docs/results.schema.json").write_text(results_schema_text(), encoding="utf-8")
