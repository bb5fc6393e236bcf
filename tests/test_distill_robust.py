"""What disturbs a distillation is said in one line: a second run, a full disk, a broken target, a signal."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Door = Callable[..., tuple[int, str, str]]
Spawn = Callable[..., Any]

# The second part is written only once a signal has come; the first at once.
STOP_IN_PART = """
import os, signal, time
import distill.parts as module
write, written = module.pq.write_table, []
def stopping(table, path):
    written.append(path)
    if len(written) == {part}:
        os.kill(os.getpid(), signal.{signal})
        time.sleep(60)
    write(table, path)
module.pq.write_table = stopping
"""
WAIT_IN_PART = STOP_IN_PART.replace("os.kill(os.getpid(), signal.{signal})", "hold()")
FULL_DISK = """
import errno
import distill.parts as module
write, written = module.pq.write_table, []
def full(table, path):
    written.append(path)
    if len(written) == 2:
        path.write_bytes(b"PAR1 half")
        raise OSError(errno.ENOSPC, "Error writing bytes to file. Detail: [errno 28] No space left on device")
    write(table, path)
module.pq.write_table = full
"""


@pytest.fixture
def words(target_dir: str, prompts_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    return f"distill --target {target_dir} --prompts {prompts_file} --out set --max_new_tokens 5 --part_rows 3".split()


def last_line(err: str) -> str:
    assert "Traceback" not in err
    return err.strip().splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("name, code, said", [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "stopped by SIGTERM")])
def test_a_stopped_run_says_how_to_go_on(
    words: list[str], tmp_path: Path, spawn: Spawn, name: str, code: int, said: str
) -> None:
    for part in (1, 2):
        patch = STOP_IN_PART.format(part=part, signal=name)
        ended, out, err = spawn(*words, cwd=tmp_path, patch=patch).wait()
        assert (ended, out) == (code, "")
        assert last_line(err) == f"draftsmith distill: {said}; run the same command again to resume"
        assert sorted(path.name for path in (tmp_path / "set").iterdir()) == [
            *(["part-00000.parquet"] if part == 2 else []),
            "run.json",
        ]
    assert spawn(*words, cwd=tmp_path).wait()[0] == 0
    assert not (tmp_path / "set" / ".lock").exists()


@pytest.mark.slow
def test_two_runs_do_not_write_one_set(words: list[str], tmp_path: Path, spawn: Spawn, door: Door) -> None:
    first = spawn(*words, cwd=tmp_path, patch=WAIT_IN_PART.format(part=2))
    while not (tmp_path / "set" / "part-00000.parquet").exists() and not first.ended:
        time.sleep(0.01)
    code, out, err = door(*words)
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert "draftsmith distill: --out set: process " in err
    assert "wait for it, or choose another" in err
    first.send(signal.SIGKILL)
    assert first.wait()[0] == -9
    code, _, err = door(*words)
    assert code == 0, err


def test_a_full_disk_names_the_file_and_what_to_do(
    words: list[str], door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow.parquet as pq

    with monkeypatch.context() as patch:
        patch.setattr(pq, "write_table", pq.write_table)  # put back what FULL_DISK replaces
        exec(FULL_DISK, {})
        code, out, err = door(*words)
    assert (code, out) == (1, "")
    assert err.strip().splitlines()[-1] == (
        "draftsmith distill: set/part-00001.parquet: cannot be written (No space left on device); "
        "make room, and the same command continues"
    )
    assert sorted(os.listdir("set")) == ["part-00000.parquet", "run.json"]
    assert door(*words)[0] == 0


def test_the_sampling_that_the_target_asks_for_is_used_and_said(
    words: list[str], tmp_path: Path, target_dir: str, door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    model = shutil.copytree(target_dir, tmp_path / "sampling")
    file = model / "generation_config.json"
    keys = {"do_sample": True, "temperature": 0.5, "top_k": 7, "min_p": 0.05, "repetition_penalty": 1.2}
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))
    words[2] = str(model)
    code, out, err = door(*words)
    assert code == 0, err
    assert out.splitlines()[-1] == (
        "sampling: temperature 0.5, top_k 7, min_p 0.05 from the target's generation_config.json"
    )
    assert f"{model}: its generation_config.json sets repetition_penalty=1.2; this is ignored here" in caplog.text
    recorded = json.loads(Path("set/manifest.json").read_text())["identity"]["config"]
    assert {key: recorded[key] for key in ("temperature", "top_k", "top_p", "min_p")} == {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 1.0,
        "min_p": 0.05,
    }
    # The same, asked for by name, is the same set: nothing is made again.
    before = Path("set/part-00000.parquet").stat().st_mtime_ns
    asked = ["--temperature", "0.5", "--top_k", "7", "--top_p", "1", "--min_p", "0.05"]
    assert door(*words, *asked)[0] == 0
    assert Path("set/part-00000.parquet").stat().st_mtime_ns == before
    code, _, err = door(*words, "--temperature", "1")
    assert code == 2
    assert "with other options: temperature is 0.5, now it is 1.0" in err


@pytest.mark.parametrize("there", ["README.md", "config.json", "part-00009.parquet"])
def test_what_is_not_a_distilled_set_is_not_written_into(words: list[str], door: Door, there: str) -> None:
    Path("set").mkdir()
    (Path("set") / there).write_text("mine")
    code, _, err = door(*words)
    assert (code, last_line(err)) == (
        2,
        f"draftsmith distill: --out set: holds {there} of something else; choose another --out",
    )
    assert os.listdir("set") == [there]


def test_prompts_that_have_become_fewer_are_another_set(words: list[str], door: Door, prompts_file: str) -> None:
    """What was made of the rows that are gone would stay in the directory, and be read with the rest."""
    rows = Path(prompts_file).read_text().splitlines(keepends=True)
    words[4] = "rows.jsonl"
    for kept in (3, 6, 9):  # as many parts as before, and one that has no rows
        Path("rows.jsonl").write_text("".join(rows[:6] + ["{}\n"] * 3))
        assert door(*words)[0] == 0
        Path("rows.jsonl").write_text("".join(rows[:kept]))
        before = Path("set/manifest.json").read_bytes()
        code, _, err = door(*words)
        assert code == 2 and "choose another --out or delete" in last_line(err)
        assert ("the prompts have fewer rows now" in err) == (kept < 9)
        assert Path("set/manifest.json").read_bytes() == before
        shutil.rmtree("set")
