"""What disturbs a distillation is said in one line: a second run, a full disk, a broken target, a signal."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from safetensors.torch import load_file, save_file

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
def test_a_stopped_run_says_whether_anything_was_kept(
    words: list[str], tmp_path: Path, spawn: Spawn, name: str, code: int, said: str
) -> None:
    for part, kept in ((1, "nothing was kept"), (2, "the same command continues where it was")):
        patch = STOP_IN_PART.format(part=part, signal=name)
        ended, out, err = spawn(*words, cwd=tmp_path, patch=patch).wait()
        assert (ended, out) == (code, "")
        assert last_line(err) == f"draftsmith distill: {said}; {kept}"
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
    assert "wait for it, stop it, or choose another" in err
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


@pytest.mark.slow
def test_what_pyarrow_cannot_write_is_said_alike(words: list[str], tmp_path: Path, spawn: Spawn) -> None:
    """A limit on the size of files stands for a full disk: pyarrow meets a real error of the system."""
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))\n"
    code, out, err = spawn(*words, cwd=tmp_path, patch=limit).wait()
    assert (code, out) == (1, "")
    assert last_line(err) == (
        "draftsmith distill: set/part-00000.parquet: cannot be written (File too large); "
        "make room, and the same command continues"
    )
    assert os.listdir(tmp_path / "set") == ["run.json"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written(words: list[str], door: Door) -> None:
    Path("set").mkdir(mode=0o500)
    code, _, err = door(*words)
    assert code == 2
    assert last_line(err) == "draftsmith distill: --out set: cannot be written (Permission denied)"


def test_a_target_with_nan_fails_in_one_line(words: list[str], tmp_path: Path, target_dir: str, door: Door) -> None:
    broken = shutil.copytree(target_dir, tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.1.self_attn.q_proj.weight"][0, 0] = float("nan")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    words[2] = str(broken)
    code, out, err = door(*words)
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert f"{broken}: its weight model.layers.1.self_attn.q_proj.weight holds NaN" in err
    assert not Path("set").exists()


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
    assert "its temperature is 0.5, now it is 1.0" in err


def test_every_reason_for_skipping_is_a_line(words: list[str], tmp_path: Path, door: Door) -> None:
    rows = [{"prompt": "The quick"}, {"prompt": ""}, {"prompt": " "}, {"prompt": "dog " * 100}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words[4] = "rows.jsonl"
    code, out, err = door(*words, "--json")
    assert code == 0, err
    summary = json.loads(out.splitlines()[-1])
    assert summary["skipped_because"] == out.splitlines()[1:3]
    assert summary["skipped_because"][0] == "2 skipped: key 'prompt' is empty (row 2, the first)"
    assert summary["skipped_because"][1].startswith("1 skipped: ")
    assert summary["skipped_because"][1].endswith(" tokens, more than the 91 that fit (row 4)")


@pytest.mark.parametrize("kind", ["file", "large", "stream"])
def test_two_rows_of_one_id_are_refused_with_both_lines(
    words: list[str], door: Door, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would draw from one seed, and nothing that is written would tell them apart."""
    rows: list[dict[str, Any]] = [
        {"prompt": "The quick", "id": "x"},
        {"prompt": "dog"},
        {"prompt": "A", "id": 7},
        {"prompt": "The", "id": "7"},
    ]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words[4] = "rows.jsonl"
    if kind == "stream":
        memory = fsspec.filesystem("memory")
        memory.pipe("/rows.jsonl", Path("rows.jsonl").read_bytes())
        words[4] = "memory://rows.jsonl"
    if kind == "large":
        monkeypatch.setattr("distill.generate._READ_AHEAD_BYTES", 100)
    code, _, err = door(*words)
    assert (code, last_line(err)) == (
        2,
        f"draftsmith distill: {words[4]}:4: key 'id': '7' is row 3's already; make ids unique",
    )
    # A file that is not large is read to its end before anything is written.
    assert Path("set").exists() == (kind != "file")
    assert door(*words, "--max_prompts", "3", "--out", "fewer")[0] == 0


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


@pytest.mark.parametrize("out, why", [("", "'': is empty"), ("a\0b", r"'a\x00b' cannot be made a directory")])
def test_an_out_that_can_be_no_directory(words: list[str], door: Door, out: str, why: str) -> None:
    code, _, err = door(*words, "--out", out)
    assert code == 2
    assert why in last_line(err)


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
        assert code == 2 and "choose another --out or delete the directory" in last_line(err)
        assert ("is beyond the rows that rows.jsonl has now" in err) == (kept < 9)
        assert Path("set/manifest.json").read_bytes() == before
        shutil.rmtree("set")
