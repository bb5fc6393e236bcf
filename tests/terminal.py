"""A command in a pseudo-terminal."""

import os
import pty
import subprocess
import sys
import termios
import time


def longest_silence_s(program: str) -> float:
    """Run Python in a terminal; return the longest time without output behind `print("begins")`."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 120))
    with subprocess.Popen([sys.executable, "-c", program], stdout=theirs, stderr=theirs) as child:
        os.close(theirs)
        heard: list[float] = []
        try:
            while said := os.read(ours, 1 << 16):
                heard = [] if b"begins" in said else heard
                heard.append(time.monotonic())
        except OSError:  # the other end is closed
            pass
        os.close(ours)
    assert child.returncode == 0
    return max(after - before for before, after in zip(heard, heard[1:], strict=False))
