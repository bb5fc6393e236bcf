"""Checksums of the records that a later run trusts: JSON objects and the lines of a journal.

A JSON object carries the sha256 of its own text under its last key; a line begins with its CRC-32.
What older versions wrote has neither.
"""

import hashlib
import json
import re
import zlib
from collections.abc import Mapping
from typing import Any

CHECKSUM = "checksum"
_BLANK = "0" * 64
# The end of a sealed text, whose checksum is of the text with zeros in its place.
_END = re.compile(rb'"checksum": "sha256:([0-9a-f]{64})"\s*\}\s*$')


class Damaged(ValueError):
    """A record is not what was written."""


def sealed_json(record: Mapping[str, object]) -> str:
    """Indented JSON of an object, with its checksum."""
    blank = {**record, CHECKSUM: f"sha256:{_BLANK}"}
    text = json.dumps(blank, indent=2, ensure_ascii=False) + "\n"
    start, _, end = text.rpartition(_BLANK)
    return start + hashlib.sha256(text.encode()).hexdigest() + end


def parse_json(content: bytes) -> Any:
    """Parse JSON; check and remove the checksum of an object that has one. Raise Damaged if it
    differs, ValueError for other text.
    """
    value = json.loads(content.decode())
    # A damaged end has lost one of the two words at most.
    if isinstance(value, dict) and (CHECKSUM in value or b"sha256:" in content[-80:]):
        end = _END.search(content)
        if end is None:
            raise Damaged
        blank = content[: end.start(1)] + _BLANK.encode() + content[end.end(1) :]
        if hashlib.sha256(blank).hexdigest() != end[1].decode():
            raise Damaged
        del value[CHECKSUM]
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
