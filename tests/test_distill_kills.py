"""A set is the same bytes whenever its run was killed; what disturbs a run is one line that says
what was kept.
"""

import json
import os
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from draftsmith.core.io import write_sealed
from draftsmith.core.records import provenance
from draftsmith.core.tokenization import load_tokenizer
from draftsmith.distill import manifest
from tests.distilled import KILL_IN_PART, files, rows_of, write_rows

# A signal arrives before the next wave of answers is kept.
STOP_BEFORE_WAVE = """
import os, signal, time
import draftsmith.core.runs as module
append, kept = module.Journal.append, []
def stopping(self, row):
    if len(kept) == {waves}:
        os.kill(os.getpid(), signal.{name})
        time.sleep(60)
    append(self, row)
    kept.append(row)
module.Journal.append = stopping
"""


@pytest.fixture
def words(target_dir, prompts_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return (
        f"distill --target {target_dir} --prompts {prompts_file} --out set --max_new_tokens 5 "
        "--part_rows 4"
    ).split()


@pytest.mark.slow
def test_a_run_killed_while_it_writes_a_part_goes_on_with_the_next(words, door, spawn):
    assert door(*words)[0] == 0
    shutil.move("set", "whole")
    whole = files("whole")
    spawn(*words, cwd=Path.cwd(), patch=KILL_IN_PART.format(part=2)).wait(-9)
    assert {"part-00000.parquet", ".part-00001.answers.jsonl", "run.json"} < set(files())
    assert not {"part-00001.parquet", "manifest.json"} & set(files())
    # Training on an unfinished set is refused.
    code, _, err = door(
        "train", "--out", "o", "--data", "set", "--draft", words[2], "--max_length", 64
    )
    assert code == 2 and "manifest" in err
    code, _, err = door(*words)
    assert code == 0 and files() == whole, err
    # A finished set is left as it is; a lost part is made again; other options are refused by name.
    times = {path: path.stat().st_mtime_ns for path in Path("set").glob("part-*")}
    Path("set/part-00001.parquet").unlink()
    assert door(*words)[0] == 0 and files() == whole
    assert (
        Path("set/part-00000.parquet").stat().st_mtime_ns == times[Path("set/part-00000.parquet")]
    )
    assert files() == whole
    door.refused(*words, "--temperature", "0.5")


def test_a_finished_set_says_what_made_it(words, door, monkeypatch):
    assert door(*words)[0] == 0
    before = files()
    another = {"git_commit": "another"}
    monkeypatch.setattr(manifest, "provenance", lambda *words: provenance(*words) | another)
    assert door(*words)[0] == 0 and files() == before
    # With other counts it is another set.
    kept = Path("set/manifest.json")
    record = json.loads(kept.read_text())
    del record["checksum"]
    write_sealed(kept, record | {"response_tokens": 0})
    assert door(*words)[0] == 0
    assert json.loads(kept.read_text())["git_commit"] == "another"


@pytest.mark.parametrize(
    "name, code, line, waves",
    [
        ("SIGINT", 130, "interrupted", 0),
        ("SIGINT", 130, "interrupted", 2),
        ("SIGINT", 130, "interrupted", 3),
        ("SIGTERM", 143, "stopped by SIGTERM", 1),
        ("SIGHUP", 129, "stopped by SIGHUP", 1),
    ],
)
def test_a_stopped_run_goes_on_with_the_answers_that_it_kept(
    words, door, spawn, name, code, line, waves
):
    """The waves of a first part are 1, 2, 4 and 8 batches. The last one completes the part."""
    words += ["--part_rows", "9", "--batch_size", "1"]
    patch = STOP_BEFORE_WAVE.format(name=name, waves=waves)
    out, err = spawn(*words, cwd=Path.cwd(), patch=patch).wait(code)
    note = "run the same command again to resume"
    assert (out, err.splitlines()[-1]) == ("", f"draftsmith distill: {line}; {note}")
    assert {".part-00000.answers.jsonl", "run.json"} <= set(files())
    assert door(*words)[0] == 0
    resumed = rows_of()
    assert door(*words, "--out", "whole")[0] == 0 and resumed == rows_of("whole")
    assert not list(Path("set").glob(".*"))


def test_a_tokenizer_that_was_replaced_is_another_set(words, door, spawn, target_dir):
    shutil.copytree(target_dir, "target")
    words[2] = "target"
    spawn(*words, cwd=Path.cwd(), patch=KILL_IN_PART.format(part=2)).wait(-9)
    # As another machine has it: the same tokenizer, saved again.
    load_tokenizer(target_dir).save_pretrained("again")
    shutil.copy("again/tokenizer.json", "target/tokenizer.json")
    shutil.copytree("set", "same")
    assert door(*words, "--out", "same")[0] == 0
    file = Path("target/tokenizer.json")
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    file.write_text(json.dumps(content))
    door.refused(*words)


def test_a_full_disk_names_the_file_and_what_to_do(words, door, monkeypatch, golden):
    write = pq.write_table

    def full(table, path):
        if "00001" in str(path):
            path.write_bytes(b"PAR1 half")
            raise OSError(
                28, "Error writing bytes to file. Detail: [errno 28] No space left on device"
            )
        write(table, path)

    with monkeypatch.context() as patch:
        patch.setattr(pq, "write_table", full)
        code, out, err = door(*words)
    assert (code, out) == (1, "")
    golden(err.strip().splitlines()[-1])
    assert sorted(os.listdir("set")) == [
        ".part-00000.parquet.sha256",
        ".part-00001.answers.jsonl",
        "part-00000.parquet",
        "run.json",
    ]
    assert door(*words)[0] == 0


def test_what_is_not_a_distilled_set_is_not_written_into(words, door):
    Path("set").mkdir()
    Path("set/config.json").write_text("mine")
    door.refused(*words)
    assert os.listdir("set") == ["config.json"]


def test_prompts_that_have_become_fewer_are_another_set(words, door, prompts_file, golden):
    """What was made of the rows that are gone would stay in the directory, and be read with the
    rest.
    """
    rows = Path(prompts_file).read_text().splitlines()
    for kept in (4, 8, 9):  # as many parts as before, and one that has no rows
        words[4] = write_rows("rows.jsonl", *rows[:8], "{}", "{}", "{}", "{}")
        assert door(*words)[0] == 0
        write_rows("rows.jsonl", *rows[:kept])
        before = Path("set/manifest.json").read_bytes()
        code, _, err = door(*words)
        assert code == 2
        golden(err)
        assert ("the prompts have fewer rows now" in err) == (kept < 9)
        assert Path("set/manifest.json").read_bytes() == before
        shutil.rmtree("set")
