"""Text that every Python carries, in three domains.

- `prose`: the language reference behind `help()` (`pydoc_data.topics`) and the docstrings of the
  standard library;
- `code`: the standard library's source without its docstrings;
- `unicode`: the names of characters (`unicodedata`), block by block: a list, not language.

A document is a help topic, a module or a run of 128 code points. The hash of its name decides
whether it is trained on or held out: the same on every machine, and for a module's docstrings and
source. Held-out documents that mostly repeat training text are dropped. Documents are cut at blank
lines into passages, one row `{"id", "domain", "text"}` each.
"""

import ast
import hashlib
import importlib
import re
import sysconfig
import tokenize
import unicodedata
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

HELDOUT_PERCENT = 10
PASSAGE_CHARACTERS = 1200
# Drop a held-out document if more than this share of its 8-word runs is in training documents.
DUPLICATE_SHARE = 0.2
SHINGLE_WORDS = 8

_SKIPPED_PARTS = frozenset(
    {
        "test",
        "tests",
        "idle_test",
        "site-packages",
        "dist-packages",
        "__pycache__",
        "encodings",
        "pydoc_data",
    }
)
# Skip tens of thousands of names that follow from the code point by a rule.
_SYSTEMATIC_NAMES = re.compile(r"CJK |HANGUL SYLLABLE|TANGUT|NUSHU|KHITAN|VARIATION SELECTOR")


class Document(NamedTuple):
    """A text with the name that decides whether it is trained on or held out."""

    name: str
    text: str


class Split(NamedTuple):
    """The two sides of a domain."""

    train: tuple[Document, ...]
    heldout: tuple[Document, ...]


def _tidy(text: str) -> str:
    lines = [line.rstrip() for line in text.expandtabs(8).splitlines()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Module(NamedTuple):
    """A module of the standard library.

    name: dotted. prose: its docstrings under their titles. code: its source without them.
    """

    name: str
    prose: str
    code: str


@cache
def _modules() -> tuple[Module, ...]:
    """Return every module that parses."""
    root = Path(sysconfig.get_paths()["stdlib"])
    modules = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if _SKIPPED_PARTS.intersection(parts) or parts[0].startswith(("config-", "_sysconfigdata")):
            continue
        try:
            with tokenize.open(path) as file:
                source = file.read()
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):
            continue  # lib2to3 and friends ship files that are wrong on purpose
        name = ".".join(parts)
        entries = []
        lines = source.splitlines()
        for node in sorted(_documented(tree), key=lambda node: getattr(node, "lineno", 0)):
            docstring = ast.get_docstring(node)
            if docstring is not None:
                title = name if isinstance(node, ast.Module) else node.name
                entries.append(f"{title}\n\n{_tidy(docstring)}")
                first = node.body[0].lineno
                last = node.body[0].end_lineno or 0
                lines[first - 1 : last] = [""] * (last - first + 1)
        code = _tidy("\n".join(lines))
        modules.append(Module(name, "\n\n".join(entries), code))
    return tuple(modules)


def _documented(tree: ast.Module) -> Iterator[_Documented]:
    """Yield the module, classes and functions of a tree. Only statements are visited: expressions
    are most of a tree, and define nothing.
    """
    waiting = deque[ast.AST]([tree])
    while waiting:
        node = waiting.popleft()
        if isinstance(node, _Documented):
            yield node
        for name in ("body", "handlers", "orelse", "finalbody", "cases"):
            waiting.extend(getattr(node, name, ()))


def _prose() -> list[Document]:
    topics = importlib.import_module("pydoc_data.topics").topics
    documents = [Document(f"topic {name}", _tidy(text)) for name, text in sorted(topics.items())]
    for module in _modules():
        if module.prose:
            documents.append(Document(f"module {module.name}", module.prose))
    return documents


def _code() -> list[Document]:
    return [Document(f"module {module.name}", module.code) for module in _modules()]


def _unicode() -> list[Document]:
    """Return blocks of 128 code points: lines "U+NUMBER NAME", a paragraph per 16."""
    documents = []
    for start in range(0, 0x20000, 128):
        lines = ""
        for point in range(start, start + 128):
            name = unicodedata.name(chr(point), "")
            if name and not _SYSTEMATIC_NAMES.match(name):
                lines += f"U+{point:04X} {name}\n" + "\n" * (point % 16 == 15)
        if lines:
            documents.append(Document(f"block {start:05X}", lines.strip()))
    return documents


DOMAINS: dict[str, Callable[[], list[Document]]] = {
    "prose": _prose,
    "code": _code,
    "unicode": _unicode,
}


def is_heldout(name: str) -> bool:
    """Return whether the document of this name is held out."""
    first = hashlib.sha256(name.encode()).digest()[0]
    return first * 100 < 256 * HELDOUT_PERCENT


def shingles(text: str) -> set[int]:
    """Return hashes of all runs of 8 words, which hold in this process only. Near-duplicates share
    most of them.
    """
    words = re.findall(r"\w+", text.lower())
    runs = zip(*(words[start:] for start in range(SHINGLE_WORDS)), strict=False)
    return {hash(run) for run in runs} or {hash(tuple(words))}


@cache
def _train_shingles() -> frozenset[int]:
    found: set[int] = set()
    for documents in DOMAINS.values():
        for document in documents():
            if not is_heldout(document.name):
                found |= shingles(document.text)
    return frozenset(found)


@cache
def split(domain: str) -> Split:
    """Divide a domain. Drop held-out documents that nearly repeat training documents."""
    train = []
    heldout = []
    for document in DOMAINS[domain]():
        if not is_heldout(document.name):
            train.append(document)
            continue
        runs = shingles(document.text)
        if len(runs & _train_shingles()) <= DUPLICATE_SHARE * len(runs):
            heldout.append(document)
    return Split(tuple(train), tuple(heldout))


def passages(
    domain: str, documents: tuple[Document, ...], characters: int = PASSAGE_CHARACTERS
) -> list[dict[str, str]]:
    """Cut documents at blank lines into rows of about `characters` or more.

    The order of the rows does not depend on that of the documents.
    """
    rows = []
    for document in documents:
        pieces: list[str] = []
        for paragraph in document.text.split("\n\n"):
            if not pieces or len(pieces[-1]) >= characters:
                pieces.append(paragraph)
            else:
                pieces[-1] += "\n\n" + paragraph
        for i, piece in enumerate(pieces):
            if piece.strip():
                name = f"{document.name} #{i}"
                rows.append({"id": name, "domain": domain, "text": piece.strip("\n")})

    def order(row: dict[str, str]) -> bytes:
        return hashlib.sha256(f"{domain} {row['id']}".encode()).digest()

    return sorted(rows, key=order)
