"""What lies in --out and is not of this project is neither changed nor deleted."""

import os

import pytest

from draftsmith.core.errors import RunError
from draftsmith.core.io import atomic_dir, atomic_file, check_out
from draftsmith.core.runs import Run, claim, hold


def content(directory):
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_only_temporary_names_of_this_project_are_cleaned_up(tmp_path):
    (tmp_path / ".thesis.tmp12").mkdir()
    for name in (".notes.tmp", ".x.tmp123", ".run.json.tmp4", ".thesis.tmp12/chapter"):
        (tmp_path / name).write_text("of a person")
    others = content(tmp_path)
    with atomic_file(tmp_path / "part") as temporary:
        temporary.touch()
        (tmp_path / temporary.name.replace("part", "killed")).write_text("left by a killed run")
    (tmp_path / "part").unlink()
    with hold(tmp_path):
        claim(tmp_path, "set", {"seed": 1}, "", {})
    left = content(tmp_path)
    del left["run.json"]
    assert left == others


@pytest.mark.parametrize("content", ['{"identity', "no JSON", "[1]"])
def test_a_damaged_record_of_a_run_says_what_to_do(tmp_path, content, golden):
    (tmp_path / "run.json").write_text(content)
    with golden.raises():
        claim(tmp_path, "set", {"seed": 1}, "", {})
    assert (tmp_path / "run.json").read_text() == content


def test_a_directory_that_cannot_be_written_is_named_and_not_its_lock(
    tmp_path, monkeypatch, golden
):
    def read_only(*_):
        raise OSError(30, os.strerror(30), "somewhere/.lock")

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(RunError) as refused, hold(tmp_path):
        pass
    golden(str(refused.value))


@pytest.mark.parametrize("writer", [atomic_file, atomic_dir])
def test_a_full_disk_names_the_file_and_says_that_the_command_goes_on(tmp_path, writer, golden):
    with pytest.raises(RunError) as failed, writer(tmp_path / "part") as temporary:
        (temporary / "half" if temporary.is_dir() else temporary).touch()
        raise OSError(28, os.strerror(28))
    golden(str(failed.value))
    assert list(tmp_path.iterdir()) == []


def test_names_that_cannot_be_written_are_refused_before_the_work(tmp_path, golden):
    for name in ("a" * 246, "caf\udce9"):
        for first_key in (None, "id"):
            with golden.raises() as refused:
                check_out(tmp_path / name, first_key=first_key)
            str(refused.value).encode()
    check_out(tmp_path / ("a" * 220))
    with golden.raises():
        Run(tmp_path / "caf\udce9")


@pytest.mark.parametrize("foreign", ["notes", '{"idea": 1}', "[]", '{"a": 1}\n{"id": 2}'])
@pytest.mark.parametrize(
    "command", ["decode --prompt a", "plan --draft {draft} --prompts {prompts}"]
)
def test_a_file_of_something_else_is_not_replaced(
    command, foreign, door, tmp_path, target_dir, draft_dir, prompts_file
):
    out = tmp_path / "notes"
    out.write_text(foreign)
    words = command.format(draft=draft_dir, prompts=prompts_file).split()
    door.refused(*words, "--target", target_dir, "--out", out)
    assert content(tmp_path) == {"notes": foreign.encode()}


COMMANDS = {
    "eval --draft d={draft} --id s={prompts}": ["results.json", "report.html", "plots/alpha.png"],
    "distill --prompts {prompts} --max_new_tokens 4": [
        "errors.jsonl",
        "README.md",
        "part-1.parquet",
        "config.json",
    ],
    "train --data {data} --draft {draft} --max_length 64": [
        "README.md",
        "model.safetensors",
        "draftsmith.json",
    ],
}


@pytest.mark.parametrize(
    ("command", "name"), [(command, name) for command in COMMANDS for name in COMMANDS[command]]
)
def test_a_directory_with_files_of_something_else_is_refused(
    command, name, door, tmp_path, target_dir, draft_dir, prompts_file, distilled
):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("{}")
    words = command.format(draft=draft_dir, prompts=prompts_file, data=distilled).split()
    door.refused(*words, "--target", target_dir, "--out", tmp_path)
    assert content(tmp_path) == {name: b"{}"}
