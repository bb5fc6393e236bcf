"""What belongs to a set that is finished or not: its parts, its options, its inputs."""

import json
import shutil
from pathlib import Path

import pytest

from draftsmith.core.tokenization import load_tokenizer
from tests.distilled import files, write_rows


@pytest.fixture
def words(target_dir, prompts_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return (
        f"distill --target {target_dir} --prompts {prompts_file} --out set --max_new_tokens 5 "
        "--part_rows 4"
    ).split()


def test_a_set_is_whole_or_asks_to_be_made_whole(words, door, draft_dir):
    """A finished one is left as it is, and a lost part is made again."""
    door.ok(*words)
    whole = files()
    kept, lost = (Path(f"set/part-0000{part}.parquet") for part in (0, 1))
    written = kept.stat().st_mtime_ns
    lost.unlink()
    door.ok(*words)
    assert files() == whole and kept.stat().st_mtime_ns == written
    door.refused(*words, "--temperature", 0.5)
    Path("set/manifest.json").unlink()
    door.refused("train", "--out", "o", "--data", "set", "--draft", draft_dir)


def test_a_tokenizer_that_was_replaced_is_another_set(words, door, target_dir):
    shutil.copytree(target_dir, "target")
    words[2] = "target"
    door.ok(*words)
    Path("set/part-00001.parquet").unlink()
    # As another machine has it: the same tokenizer, saved again.
    load_tokenizer(target_dir).save_pretrained("again")
    shutil.copy("again/tokenizer.json", "target/tokenizer.json")
    door.ok(*words)
    file = Path("target/tokenizer.json")
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    file.write_text(json.dumps(content))
    door.refused(*words)


def test_prompts_that_have_become_fewer_are_another_set(words, door, prompts_file, golden):
    """What was made of the rows that are gone would stay in the directory, and be read with the
    rest.
    """
    rows = Path(prompts_file).read_text().splitlines()
    for kept in (4, 8, 9):  # as many parts as before, and one that has no rows
        words[4] = write_rows("rows.jsonl", *rows[:8], "{}", "{}", "{}", "{}")
        door.ok(*words)
        write_rows("rows.jsonl", *rows[:kept])
        before = Path("set/manifest.json").read_bytes()
        code, _, err = door(*words)
        assert code == 2
        golden(err)
        assert ("the prompts have fewer rows now" in err) == (kept < 9)
        assert Path("set/manifest.json").read_bytes() == before
        shutil.rmtree("set")
