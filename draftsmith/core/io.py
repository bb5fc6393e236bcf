"""Write files whole or not at all (temporary name, fsync, rename), read JSON, and hash what tells
artifacts apart.

What a later run trusts has a checksum: a JSON object carries the sha256 of its own text under its
last key; a line of a journal begins with its CRC-32.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from safetensors import SafetensorError

from draftsmith.core.errors import InputError, RunError, fault, one_line

log = logging.getLogger(__name__)
# What `json` makes of an object.
JsonObject: TypeAlias = dict[str, Any]
CHECKSUM = "checksum"
_BLANK = "0" * 64
# No other program's file has this in its name.
_TEMPORARY = ".draftsmith-tmp"
# Leaves room for what `_temporary` adds to a name; file systems take 255 bytes.
_LONGEST_NAME = 220


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


def canonical_json(value: object) -> str:
    """JSON with sorted keys and no spaces, so that equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def hash_json(value: object) -> str:
    """sha256 of the canonical JSON of `value`, as 64 hex digits."""
    content = canonical_json(value).encode()
    return hashlib.sha256(content).hexdigest()


def hash_64(content: bytes) -> int:
    """The first 64 bits of a sha256."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big")


def sha256_file(path: Path) -> str:
    """sha256 of a file's bytes, as 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def _temporary(path: Path, mark: str = "") -> Path:
    name = f".{path.name}{mark}{_TEMPORARY}{os.getpid()}"
    return path.with_name(name)


def remove_leftovers(directory: Path) -> None:
    """Delete what killed runs left under temporary names directly in `directory`."""
    for stale in directory.glob(f".*{_TEMPORARY}*"):
        _remove(stale)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def check_out(
    out: Path | str, inputs: Iterable[str | None] = (), first_key: str | None = None
) -> None:
    """Raise InputError, before the work, if `out` cannot be written or is an input.

    first_key: what the JSON in a file begins with, None for a directory. Another file is refused.
    """
    path = Path(out)
    check_spelling(path)
    if len(os.fsencode(path.name)) > _LONGEST_NAME:
        raise InputError(f"--out {out}: its name is longer than {_LONGEST_NAME} bytes; shorten it")
    parents = path.absolute().parents
    above = next(parent for parent in parents if parent.exists())
    for wrong, reason in (
        # A rename by root would replace a device such as /dev/null.
        (
            first_key is not None and path.exists() and not path.is_file(),
            "is not a regular file; name a file",
        ),
        (
            any(name is not None and Path(name).resolve() == path.resolve() for name in inputs),
            "is read as well, and would be overwritten; name another file",
        ),
        (
            Path.cwd().is_relative_to(path.resolve()),
            "is where this command runs; name a directory in it",
        ),
        (
            not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)),
            f"{above} is not a writable directory; choose another",
        ),
        (
            first_key is not None and path.is_file() and not _begins(path, first_key),
            "holds something else; name another file, or remove it",
        ),
    ):
        if wrong:
            raise InputError(f"--out {out}: {reason}")


def _begins(file: Path, key: str) -> bool:
    with file.open("rb") as content:
        head = content.read(99)
    return not head or re.match(rb'\{\s*"%b"' % key.encode(), head) is not None


def check_spelling(out: Path) -> None:
    """Raise InputError if the locale, or UTF-8 in the files that name it, cannot spell a path."""
    try:
        os.fsencode(out)
        str(out).encode()
    except UnicodeEncodeError:
        raise InputError(f"--out {str(out)!a}: this locale cannot spell it; rename it") from None


def refuse_foreign(out: Path, patterns: Iterable[str]) -> None:
    """Raise InputError if `out` holds a file that a run, which did not begin there, would
    overwrite.
    """
    for pattern in patterns:
        foreign = next(out.glob(pattern), None)
        if foreign is not None:
            raise InputError(
                f"--out {out}: holds {foreign.name} of something else; choose another --out"
            )


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn errors of writing in the block (a full disk, no permission) into one line that names
    `path`.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = getattr(error, "errno", None)
        # pyarrow sets the number and a sentence of its own; safetensors has the sentence alone.
        reason = os.strerror(number) if number else one_line(error)
        raise RunError(
            f"{path}: cannot be written ({reason}); fix that and run the same command again"
        ) from None


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A temporary path to write to. It is renamed to `path` when the block succeeds, and deleted
    when it fails. Errors of writing are as in `writing`.
    """
    with _written_beside(path) as temporary:
        yield temporary
        _fsync(temporary)
        temporary.replace(path)


@contextmanager
def _written_beside(path: Path) -> Iterator[Path]:
    """A temporary path, of which nothing stays; the block renames it to `path`."""
    temporary = _temporary(path)
    with writing(path):
        made = _made(path.parent)
        try:
            yield temporary
            _fsync(path.parent)
        finally:
            _remove(temporary)
            remove_empty(made)


@contextmanager
def sealed_file(path: Path) -> Iterator[Path]:
    """`atomic_file`, with the sha256 of the file in a hidden file beside it."""
    with atomic_file(path) as temporary:
        yield temporary
        write_text_atomic(checksum_file(path), sha256_file(temporary))


def checksum_file(path: Path) -> Path:
    """Where `sealed_file` keeps the sha256 of `path`, as 64 hex digits."""
    return path.with_name(f".{path.name}.sha256")


def is_whole(path: Path) -> bool:
    """Whether a file is what was written, by the sha256 that `sealed_file` kept. Delete one that is
    not, with a warning.
    """
    if not path.exists():
        return False
    kept = checksum_file(path)
    if kept.exists() and kept.read_bytes() == sha256_file(path).encode():
        return True
    log.warning("%s: is damaged; making it again", path)
    path.unlink()
    return False


def checksums(directory: Path) -> dict[str, str]:
    """The sha256 of each file in a directory, by name."""
    return {file.name: sha256_file(file) for file in sorted(directory.iterdir())}


def first_damaged(directory: Path, digests: Mapping[str, str]) -> str | None:
    """The first of these files that is missing or has another sha256; None if all are whole."""
    for name, digest in digests.items():
        file = directory / name
        if not file.is_file() or sha256_file(file) != digest:
            return name
    return None


@contextmanager
def atomic_dir(path: Path) -> Iterator[Path]:
    """A temporary directory to fill. It is renamed to `path`, replacing what was there, when the
    block succeeds. Errors of writing are as in `writing`.
    """
    with _written_beside(path) as temporary:
        _remove(temporary)
        temporary.mkdir()
        yield temporary
        # safetensors creates files with mode 0600 and ignores the umask; give them the mode of
        # other new files.
        mode = temporary.stat().st_mode & 0o666
        for file in sorted(temporary.rglob("*")):
            if file.is_file():
                file.chmod(mode)
            _fsync(file)
        _fsync(temporary)
        # A rename cannot replace a directory that is not empty, so the old one is renamed away
        # first.
        retired = _temporary(path, ".old")
        if path.is_dir():
            path.rename(retired)
        temporary.rename(path)
        _remove(retired)


def make_dir(path: Path, option: str = "--out") -> list[Path]:
    """Make a directory for results; return those that were missing, the outermost last. Raise
    InputError, beginning with `option`, if it cannot be made.
    """
    try:
        return _made(path)
    except OSError as error:
        raise InputError(f"{option} {path}: cannot be created ({error.strerror})") from None


def _made(path: Path) -> list[Path]:
    """Make a directory; return those that were missing, the outermost last."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    return missing


def remove_empty(directories: Iterable[Path]) -> None:
    """Remove those of these directories that hold nothing, in this order."""
    for directory in directories:
        if directory.is_dir() and not any(directory.iterdir()):
            directory.rmdir()


def write_text_atomic(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json_atomic(path: Path, value: object) -> None:
    """Write indented JSON whole or not at all."""
    write_text_atomic(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_sealed(path: Path, record: Mapping[str, object]) -> None:
    """Write a JSON object with its checksum, whole or not at all."""
    write_text_atomic(path, sealed_json(record))


def jsonl(rows: Iterable[Mapping[str, object]]) -> str:
    """One JSON object per line; dates and decimals (from Parquet) as text."""
    lines = [json.dumps(row, ensure_ascii=False, default=str) for row in rows]
    return "".join(f"{line}\n" for line in lines)


def write_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write rows to a .jsonl file, whole or not at all."""
    write_text_atomic(path, jsonl(rows))


def read_json(path: Path, what: str, keys: Iterable[str] = ()) -> JsonObject:
    """Read a JSON object from a file. Raise InputError, which names the file, the line and `what`
    was expected, if it cannot be read, is not what was written or lacks one of `keys`.
    """
    value = read_json_value(path, what)
    if not isinstance(value, dict):
        raise InputError(
            f"{path}: holds a JSON {type(value).__name__}, not an object; expected {what}"
        )
    return require_keys(value, keys, path)


def read_manifest(directory: Path) -> JsonObject:
    """Read the manifest of a finished distilled set; InputError as `read_json`."""
    file = directory / "manifest.json"
    manifest = read_json(file, "the manifest of a finished distilled set")
    if not manifest.get("complete"):
        raise InputError(
            f"{directory}: the distilled set is not finished; run the same distill command again"
        )
    for part in require_keys(manifest, ["parts"], file)["parts"]:
        require_keys(part, ["file", "rows", "sha256"], file)
    return manifest


def kept_json(path: Path, what: str, keys: Iterable[str] = ()) -> JsonObject | None:
    """Read the object that a run kept; None without one. Delete a damaged file, with a warning."""
    try:
        return read_json(path, what, keys) if path.exists() else None
    except InputError as error:
        log.warning("%s; making it again", fault(error))
        path.unlink()
        return None


def require_keys(record: JsonObject, keys: Iterable[str], path: Path) -> JsonObject:
    """Return a record of the file `path`; InputError if it lacks one of `keys`."""
    for key in keys:
        if key not in record:
            raise _unusable(path, f"lacks {key!r}")
    return record


def _unusable(path: Path, reason: str) -> InputError:
    again = f"copy it again, or delete {path.parent} and run its command again"
    return InputError(f"{path}: {reason}; {again}")


def read_json_value(path: Path, what: str) -> Any:
    """Read JSON of any kind from a file; InputError as `read_json`."""
    try:
        return parse_json(path.read_bytes())
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; expected {what}") from None
    except Damaged:
        raise _unusable(path, "is damaged") from None
    except (OSError, ValueError, RecursionError) as error:
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise InputError(
            f"{path}{line}: not valid JSON ({one_line(error)}); expected {what}"
        ) from None


@cache
def read_words(module: str) -> JsonObject:
    """The names and words of a module, from the YAML file beside it."""
    import yaml

    text = Path(module).with_suffix(".yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)


def read_tree_file(path: str) -> object:
    """The JSON of a file that a tree spec names: an object, or a list of paths as Medusa and EAGLE
    write them.
    """
    return read_json_value(Path(path), 'a tree, such as {"parents": [-1, -1, 0]}')
