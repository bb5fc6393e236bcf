"""A distilled set in a store that fsspec knows: copied there when it is finished, or made there part by part."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

Door = Callable[..., tuple[int, str, str]]
Spawn = Callable[..., Any]


@pytest.fixture
def words(target_dir: str, prompts_file: str, tmp_path: Path) -> list[str]:
    return f"distill --target {target_dir} --prompts {prompts_file} --out {tmp_path}/set --max_new_tokens 4".split()


def test_the_finished_set_is_copied_and_loads_from_there(words: list[str], door: Door, tmp_path: Path) -> None:
    code, out, err = door(*words, "--copy_to", "memory://bucket/set", "--json")
    assert code == 0, err
    assert json.loads(out.splitlines()[-1])["copied_to"] == "memory://bucket/set"
    store = fsspec.filesystem("memory")
    there = {path.rsplit("/", 1)[1]: store.cat(path) for path in store.ls("/bucket/set", detail=False)}
    assert there == {path.name: path.read_bytes() for path in (tmp_path / "set").iterdir()}
    assert {"part-00000.parquet", "manifest.json"} < set(there)
    # The manifest is last; the same command copies again.
    created = {path["name"].rsplit("/", 1)[1]: path["created"] for path in store.ls("/bucket/set")}
    assert max(created, key=lambda name: created[name]) == "manifest.json"
    assert door(*words, "--copy_to", "memory://bucket/set")[0] == 0


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("somewhere", "copy_to: 'somewhere' is no URL of a store; write one such as s3://BUCKET/DIR"),
        (
            "nonsense://bucket/set",
            "copy_to: nonsense://bucket/set: Protocol not known: nonsense; stores are s3://, gs://, abfs://, file://",
        ),
        ("https://host/set", "copy_to: https://host/set: the web can be read only; name a directory, or a store"),
    ],
)
def test_what_is_no_store_is_refused_before_any_work(
    words: list[str], door: Door, tmp_path: Path, url: str, said: str
) -> None:
    code, _, err = door(*words, "--copy_to", url)
    assert code == 2 and said in err and len(err.strip().splitlines()) == 1
    assert not (tmp_path / "set").exists()


def test_a_store_that_fails_keeps_the_set(
    words: list[str], door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*words: object, **options: object) -> None:
        raise PermissionError("bucket is\nread-only")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "put_file", refuse)
    code, _, err = door(*words, "--copy_to", "memory://bucket/other")
    assert code == 1
    assert f"copy_to memory://bucket/other: bucket is read-only; {tmp_path}/set is complete" in err
    assert (tmp_path / "set" / "manifest.json").exists()


@pytest.fixture
def stored(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command with `--out` in a store, `.../bucket/set` in the directory of the test."""
    monkeypatch.setattr("draftsmith_core.stores.HF_HOME", str(tmp_path / "home"))
    words[words.index("--out") + 1] = f"file://{tmp_path}/bucket/set"
    return [*words, "--part_rows", "3"]


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def test_a_set_that_is_made_in_a_store_is_the_set_of_a_directory(
    words: list[str], stored: list[str], door: Door, tmp_path: Path
) -> None:
    code, out, err = door(*stored, "--json")
    assert code == 0, err
    assert json.loads(out.splitlines()[-1])["out"] == f"file://{tmp_path}/bucket/set"
    local = [*stored, "--out", str(tmp_path / "local")]
    assert door(*local)[0] == 0
    there, here = files(tmp_path / "bucket/set"), files(tmp_path / "local")
    assert {name: there[name] for name in there if name.startswith("part-")} == {
        name: here[name] for name in here if name.startswith("part-")
    }
    assert there.keys() == here.keys() and len([name for name in there if name.startswith("part-")]) == 3
    # Nothing stays on this machine, and the same command finds everything made.
    assert not list((tmp_path / "home/draftsmith").iterdir())
    written = (tmp_path / "bucket/set/part-00000.parquet").stat().st_mtime_ns
    assert door(*stored, "--json")[0] == 0
    assert files(tmp_path / "bucket/set") == there
    assert (tmp_path / "bucket/set/part-00000.parquet").stat().st_mtime_ns == written
    code, _, err = door(*stored, "--seed", 5)
    said = f"--out file://{tmp_path}/bucket/set: holds another distilled set: its seed is 0, now it is 5"
    assert code == 2 and said in err
    assert files(tmp_path / "bucket/set") == there


def test_a_store_that_fails_in_the_middle_is_continued_also_elsewhere(
    stored: list[str], door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second part cannot be sent. A machine that has only what is in the store makes the rest of the same set."""
    local = type(fsspec.filesystem("file"))
    put = local.put_file

    def full(self: Any, here: str, there: str, *rest: Any, **options: Any) -> None:
        if there.endswith("part-00001.parquet"):
            raise PermissionError("quota\nexceeded")
        put(self, here, there, *rest, **options)

    assert door(*stored, "--out", f"file://{tmp_path}/bucket/whole")[0] == 0
    with monkeypatch.context() as patch:
        patch.setattr(local, "put_file", full)
        code, _, err = door(*stored)
    assert code == 1 and len(err.strip().splitlines()[-1].split("draftsmith distill: ")) == 2
    assert f"--out file://{tmp_path}/bucket/set: quota exceeded; {tmp_path}/home/draftsmith/set-" in err
    assert err.strip().endswith(" keeps what was made, and the same command continues")
    assert set(files(tmp_path / "bucket/set")) == {"run.json", "part-00000.parquet"}
    monkeypatch.setattr("draftsmith_core.stores.HF_HOME", str(tmp_path / "elsewhere"))
    made = (tmp_path / "bucket/set/part-00000.parquet").stat().st_mtime_ns
    code, _, err = door(*stored)
    assert code == 0, err
    whole, there = files(tmp_path / "bucket/whole"), files(tmp_path / "bucket/set")
    assert {name for name in whole if whole[name] != there.get(name)} <= {"manifest.json"}
    assert whole.keys() == there.keys()
    assert (tmp_path / "bucket/set/part-00000.parquet").stat().st_mtime_ns == made


def test_a_second_run_into_a_store_is_refused(stored: list[str], door: Door, tmp_path: Path) -> None:
    lock = tmp_path / "bucket/set/.lock"
    lock.parent.mkdir(parents=True)
    holder = {"host": "another", "pid": 7, "started": "2026-01-01 00:00:00"}
    lock.write_text(json.dumps(holder))
    code, _, err = door(*stored)
    assert code == 2
    assert err.strip().splitlines()[-1] == (
        f"draftsmith distill: --out file://{tmp_path}/bucket/set: process 7 on another has been writing it since "
        f"2026-01-01 00:00:00; wait for it, or if it was killed delete file://{tmp_path}/bucket/set/.lock"
    )
    assert json.loads(lock.read_text()) == holder and list(lock.parent.iterdir()) == [lock]
    lock.unlink()
    assert door(*stored)[0] == 0
    assert not lock.exists()


def test_a_store_that_cannot_be_reached(stored: list[str], door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*words: object, **options: object) -> None:
        raise OSError("no such\nbucket")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "makedirs", refuse)
    for out, said in (
        ("memory://bucket/none", "--out memory://bucket/none: no such bucket"),
        (
            "nonsense://b/set",
            "--out: nonsense://b/set: Protocol not known: nonsense; "
            "stores are s3://, gs://, abfs://, file:// and others of fsspec",
        ),
    ):
        code, _, err = door(*stored, "--out", out)
        assert code == 2 and err.strip().splitlines()[-1] == f"draftsmith distill: {said}"


@pytest.mark.slow
def test_a_killed_run_into_a_store_continues(stored: list[str], tmp_path: Path, spawn: Spawn) -> None:
    """By SIGKILL as the second part is written; the lock file that it leaves in the store is this machine's own."""
    from tests.test_distill_generate import KILL_IN_PART

    place = f"import draftsmith_core.stores as stores\nstores.HF_HOME = {str(tmp_path / 'home')!r}\n"
    assert spawn(*stored, cwd=tmp_path, patch=place + KILL_IN_PART.format(count=2)).wait()[0] == -9
    assert {"run.json", "part-00000.parquet", ".lock"} == set(files(tmp_path / "bucket/set"))
    code, _, err = spawn(*stored, cwd=tmp_path, patch=place).wait()
    assert code == 0, err
    assert "manifest.json" in files(tmp_path / "bucket/set")
    assert not (tmp_path / "bucket/set/.lock").exists()


def test_a_scored_set_in_a_store(
    words: list[str], stored: list[str], door: Door, tmp_path: Path, target_dir: str
) -> None:
    assert door(*stored, "--out", str(tmp_path / "set"))[0] == 0
    score = ["distill", "--score", tmp_path / "set", "--target", target_dir, "--teacher_top_k", 4]
    for out in (f"file://{tmp_path}/bucket/scored", str(tmp_path / "scored")):
        code, _, err = door(*score, "--out", out)
        assert code == 0, err
    assert files(tmp_path / "bucket/scored").keys() == files(tmp_path / "scored").keys()
    name = "part-00001.parquet"
    assert files(tmp_path / "bucket/scored")[name] == files(tmp_path / "scored")[name]
