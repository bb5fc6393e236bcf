"""Files are whole or absent, whatever happens while they are written."""

import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from draftsmith_core.errors import InputError
from draftsmith_core.io import (
    atomic_dir,
    atomic_file,
    check_out,
    make_dir,
    read_json,
    remove_leftovers,
)

Writer = Callable[[Path], AbstractContextManager[Path]]


def fill(temporary: Path, text: str, directory: bool) -> None:
    (temporary / "inner").write_text(text) if directory else temporary.write_text(text)


def content(path: Path) -> str:
    return (path / "inner").read_text() if path.is_dir() else path.read_text()


@pytest.mark.parametrize(("writer", "directory"), [(atomic_file, False), (atomic_dir, True)])
def test_a_block_changes_all_or_nothing(tmp_path: Path, writer: Writer, directory: bool) -> None:
    path = tmp_path / "deep" / "thing"
    with pytest.raises(ZeroDivisionError), writer(path) as temporary:
        fill(temporary, "half", directory)
        raise ZeroDivisionError
    assert list((tmp_path / "deep").iterdir()) == []
    with writer(path) as temporary:
        fill(temporary, "first", directory)
        assert not path.exists()
    with pytest.raises(ZeroDivisionError), writer(path) as temporary:
        fill(temporary, "half", directory)
        raise ZeroDivisionError
    assert content(path) == "first"
    with writer(path) as temporary:
        fill(temporary, "second", directory)
    assert content(path) == "second"
    assert [p.name for p in path.parent.iterdir()] == ["thing"]


@pytest.mark.parametrize("name", ["atomic_file", "atomic_dir"])
def test_a_kill_in_the_block_changes_nothing(tmp_path: Path, name: str) -> None:
    path = tmp_path / "thing"
    code = f"""
import os, signal, sys
from pathlib import Path
from draftsmith_core.io import {name} as writer
with writer(Path(sys.argv[1])) as temporary:
    (temporary / "inner" if temporary.is_dir() else temporary).write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    died = subprocess.run([sys.executable, "-c", code, str(path)], cwd=Path(__file__).parents[1])
    assert died.returncode == -9
    assert not path.exists()
    assert len(list(tmp_path.iterdir())) == 1
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_leftovers_are_told_from_files_that_are_not_ours(tmp_path: Path) -> None:
    for name in ("part.parquet", ".hidden", "a.tmp1"):
        (tmp_path / name).touch()
    (tmp_path / ".best.old.tmp77").mkdir()
    (tmp_path / ".best.old.tmp77" / "model").touch()
    (tmp_path / ".part.parquet.tmp12").touch()
    remove_leftovers(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".hidden", "a.tmp1", "part.parquet"]


def test_reading_json_names_the_place(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file; expected a manifest"):
        read_json(tmp_path / "none.json", "a manifest")
    (tmp_path / "bad.json").write_text('{\n "a": 1,\n "b" 2}')
    with pytest.raises(InputError, match=r"bad\.json:3: not valid JSON"):
        read_json(tmp_path / "bad.json", "a manifest")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(InputError, match=r"list\.json: holds a JSON list, not an object"):
        read_json(tmp_path / "list.json", "a manifest")


def test_where_the_command_runs_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path / "a")
    for out in (".", "..", "b/..", str(tmp_path / "a")):
        with pytest.raises(InputError, match="^--out .*: is where this command runs"):
            check_out(out)
    for path in ("../file/x/y", "../file/x.json"):
        with pytest.raises(InputError, match=f"^--out {path}: .*/file is not a writable directory"):
            check_out(path)
    with pytest.raises(InputError, match="^--out ../file/sub: cannot be created"):
        make_dir(Path("../file/sub"), "--out")
    for out in ("b", "c", "c/d", "../e"):
        check_out(out)
