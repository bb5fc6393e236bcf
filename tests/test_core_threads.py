"""What is set for OpenMP before torch starts its threads, and what is left alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith_core.processes import settle_threads

OPENMP = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS")


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OPENMP:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)


def groups(directory: Path, **files: str) -> Path:
    for name, text in files.items():
        file = directory / name.replace("__", "/").replace("_max", ".max").replace("cpu_cfs", "cpu.cfs")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return directory


@pytest.mark.parametrize(
    ("command", "name"), [("train", "OMP_WAIT_POLICY"), ("eval", "GOMP_SPINCOUNT"), ("decode", None), ("plan", None)]
)
def test_how_threads_wait_depends_on_the_command(command: str, name: str | None, tmp_path: Path) -> None:
    settle_threads(command, tmp_path)
    assert [each for each in OPENMP if each in os.environ] == ([name] if name else [])


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_what_the_user_has_set_stays(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "7")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    settle_threads("train", groups(tmp_path, cpu_max="200000 100000\n"))
    assert {each: os.environ[each] for each in OPENMP if each in os.environ} == {name: "7", "OMP_NUM_THREADS": "5"}


@pytest.mark.parametrize(
    ("files", "threads"),
    [
        ({"cpu_max": "250000 100000\n"}, "2"),
        ({"cpu_max": "50000 100000\n"}, "1"),
        ({"cpu_max": "max 100000\n"}, None),
        ({"cpu_max": "1600000 100000\n"}, None),
        ({}, None),
    ],
)
def test_a_container_gets_the_threads_of_its_share(files: dict[str, str], threads: str | None, tmp_path: Path) -> None:
    settle_threads("decode", groups(tmp_path, **files))
    assert os.environ.get("OMP_NUM_THREADS") == threads


def test_commands_settle_it_before_torch_is_imported() -> None:
    program = (
        "import os, sys, draftsmith.__main__ as door\n"
        "door.run = lambda name, argv: print('torch' in sys.modules, os.environ['OMP_WAIT_POLICY'])\n"
        "door.main(['train'])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "PASSIVE"]
