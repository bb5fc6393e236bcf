"""One golden text of what commands refuse and say: `golden.txt`, by test. `pytest --golden TESTS`
writes what these tests say now.
"""

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from filelock import FileLock

from draftsmith.core.errors import InputError

FILE = Path(__file__).with_suffix(".txt")
ROOT = str(FILE.parents[1])


def read_golden() -> dict[str, list[str]]:
    """The texts of each test, in the order in which it says them."""
    texts: dict[str, list[str]] = {}
    for section in FILE.read_text(encoding="utf-8").split("\n== ")[1:]:
        name, _, rest = section.partition("\n")
        texts[name] = rest.removesuffix("\n").split("\n--\n")
    return texts


def write_golden(said: dict[str, list[str]]) -> None:
    """Replace the texts of these tests, and leave out those of tests that are no more."""
    with FileLock(Path(tempfile.gettempdir()) / "draftsmith-golden.lock"):
        texts = read_golden() | said
        head = FILE.read_text(encoding="utf-8").partition("\n== ")[0]
        sections = [head]
        for name in sorted(texts):
            file, _, test = name.partition("::")
            source = FILE.parent / file
            if source.exists() and f"def {test.partition('[')[0]}(" in source.read_text():
                sections.append(f"{name}\n" + "\n--\n".join(texts[name]))
        FILE.write_text("\n== ".join(sections) + "\n", encoding="utf-8")


class Golden:
    """`golden(text)` compares the next text of this test with the file; with `--golden` it keeps
    the text to be written.
    """

    def __init__(self, test: str, kept: dict[str, list[str]] | None, temporary: Path) -> None:
        shared = temporary.parent if temporary.name.startswith("popen-") else temporary
        # Of a temporary directory, the part that differs from run to run.
        place = rf"{re.escape(str(shared))}(/popen-gw\d+)?(/[^/\s'\",:;)`\]]+)?"
        self._masks = {
            place: "TMP",
            re.escape(ROOT): "REPOSITORY",
            r"(127\.0\.0\.1|localhost):\d+": "HOST",
            r"\b[0-9a-f]{12,}\b": "HEX",
            r"process \d+ on \S+": "PROCESS",
            r"-tmp\d+": "-tmp",
            r"\A(\$ [^\n]{120})[^\n]*": r"\1",  # the beginning of a command
            r"\b\d+\.\d{3,}": "#",  # a figure, which versions of libraries round in their own ways
            r"[^\n]*\d%\|[^\n]*": "",  # a bar of progress
        }
        self._test = test
        self._kept = kept
        self._expected = read_golden().get(test, [])

    @contextmanager
    def raises(
        self, error: type[BaseException] = InputError
    ) -> Iterator[pytest.ExceptionInfo[BaseException]]:
        """Like `pytest.raises`, with its words compared."""
        with pytest.raises(error) as caught:
            yield caught
        self(f"{error.__name__}: {caught.value}")

    def __call__(self, text: object, having: str = "") -> None:
        """Compare a text, or its lines that have a word."""
        lines = [line for line in str(text).splitlines() if having in line]
        assert lines or not having, f"no line has {having!r}: {text}"
        self._compare("\n".join(lines))

    def _compare(self, text: str) -> None:
        for pattern, name in self._masks.items():
            text = re.sub(pattern, name, text)
        text = "\n".join(line.rstrip() for line in text.split("\n") if line.strip())
        expected = self._expected.pop(0) if self._expected else ""
        # A person may write … for what differs between machines and versions.
        parts = (re.escape(part) for part in expected.split("\N{HORIZONTAL ELLIPSIS}"))
        same = re.fullmatch(".*".join(parts), text, re.DOTALL)
        if self._kept is not None:
            self._kept.setdefault(self._test, []).append(expected if same else text)
        else:
            assert same, f"{text}\nis not what golden.txt has: {expected}\n{HOW}"


HOW = "if the new text is right, run the test again with --golden, and review the difference"
