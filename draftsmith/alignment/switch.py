"""Two directories change places in one rename, so that whoever opens the path finds the one or the other, whole."""

import ctypes
import errno
import os
from pathlib import Path

from draftsmith_core.io import hash_json, sha256_file
from draftsmith_core.processes import say

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
# What a system or file system that cannot exchange answers with.
_CANNOT = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)


def exchange(first: Path, second: Path) -> None:
    """Exchange two directories of one file system; where it cannot be done at once, by renames, and that is said."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        done = libc.renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
        if done == 0:
            return
        if (number := ctypes.get_errno()) not in _CANNOT:
            raise OSError(number, os.strerror(number), str(second))
    say(f"{second}: its file system exchanges no directories; for an instant it is not there")
    second.rename(_aside(second))
    first.rename(second)
    _aside(second).rename(first)


def recover(path: Path) -> None:
    """Put back what an exchange by renames had moved away when it was killed."""
    aside = _aside(path)
    if aside.exists():
        aside.rename(path if not path.exists() else path.with_name(f".{path.name}.next"))


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.aside")


def weights_mark(draft: Path) -> str:
    """What tells the weights of one draft from another's: a hash of their files."""
    files = sorted([*draft.glob("*.safetensors"), *draft.glob("*.bin")])
    return hash_json([[file.name, sha256_file(file)] for file in files])[:16]
