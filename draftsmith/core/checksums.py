"""Checksums of the records that a later run trusts: JSON objects and the lines of a journal.

A JSON object carries the sha256 of its own text under its last key; a line begins with its CRC-32.
What older versions wrote has neither.
"""

import hashlib
import json
import zlib
from collections.abc import Mapping
from typing import Any

CHECKSUM = "checksum"
_BLANK = "0" * 64


class Damaged(ValueError):
    """A record is not what was written."""


def sealed_json(record: Mapping[str, object]) -> str:
    """Indented JSON of an object, with the checksum of the text that has zeros in its place."""
    blank = {**record, CHECKSUM: f"sha256:{_BLANK}"}
    text = json.dumps(blank, indent=2, ensure_ascii=False) + "\n"
    start, _, end = text.rpartition(_BLANK)
    return start + hashlib.sha256(text.encode()).hexdigest() + end


def parse_json(content: bytes) -> Any:
    """Parse JSON; check and remove the checksum of an object that has one. Raise Damaged if it
    differs, ValueError for other text.
    """
    text = content.decode()
    value = json.loads(text)
    # A damaged end has lost one of the two words at most.
    if isinstance(value, dict) and (CHECKSUM in value or "sha256:" in text[-80:]):
        value.pop(CHECKSUM, None)
        if sealed_json(value).strip() != text.strip():
            raise Damaged
    return value


def sealed_line(content: bytes) -> bytes:
    """A line of a journal, with its checksum."""
    return b"%08x %b\n" % (zlib.crc32(content), content)


def parse_line(line: bytes) -> Any:
    """Parse the JSON in a sealed line. Raise Damaged if it is not what was written."""
    content = line[9:-1]
    if line != sealed_line(content):
        raise Damaged
    return json.loads(content)
