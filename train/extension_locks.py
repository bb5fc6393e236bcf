"""The locks of extensions that torch compiles when they are first used, as those of DeepSpeed are."""

import fcntl
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

log = logging.getLogger(__name__)

# The process that builds closes its lock an instant before it removes it.
_INSTANT_S = 0.5


def remove_dead_locks() -> None:
    """Remove the locks of builds whose process is dead, and say so.

    torch marks a build, and every look whether there is something to build, by a file `lock` that it holds open. A
    process that is killed meanwhile leaves the file behind, and every later one waits for it without end or a word.
    Only for launches on one machine: who holds a file open on another one cannot be seen.
    """
    if os.environ.get("WORLD_SIZE", "1") != os.environ.get("LOCAL_WORLD_SIZE", "1"):
        return
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    if not _unheld(_locks(root)):
        return
    # One process at a time: what another has removed may be there again, and held, a moment later.
    with (root / "draftsmith.lock").open("w") as turn:
        fcntl.lockf(turn, fcntl.LOCK_EX)
        before = {path: _inode(path) for path in _unheld(_locks(root))}
        time.sleep(_INSTANT_S)
        for path in _unheld(before):
            if (inode := _inode(path)) is not None and inode == before[path]:
                path.unlink(missing_ok=True)
                log.warning("removed %s: the process that was building there is dead", path)


def _locks(root: Path) -> list[Path]:
    return [*root.glob("*/lock"), *root.glob("*/*/lock")]


def _inode(path: Path) -> int | None:
    """Which file has this name; None where there is none, as when its process has removed it meanwhile."""
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def _unheld(locks: Iterable[Path]) -> list[Path]:
    """Those that no process of this user on this machine holds open."""
    left = {path.resolve(): path for path in locks}
    for process in psutil.process_iter() if left else ():
        try:
            for file in process.open_files():
                left.pop(Path(file.path), None)
        except psutil.Error:  # it has ended, or is another user's
            continue
    return list(left.values())
