"""`draftsmith status DIR`: what a directory holds, finished or not, and how to go on."""

import json
import shlex

import pytest
import torch

import draftsmith as ds
from draftsmith.core.launcher import as_typed
from draftsmith.core.records import note, note_progress
from draftsmith.core.runs import claim, hold
from draftsmith.directory_status import status
from tests.distilled import write_rows


@pytest.fixture(scope="module")
def out(tmp_path_factory, target_dir, draft_dir):
    """A distilled set and a draft that was trained on it."""
    root = tmp_path_factory.mktemp("status")
    rows = [{"prompt": f"The quick brown fox jumps {i} times"} for i in range(6)]
    prompts = write_rows(root / "prompts.jsonl", *rows)
    ds.distill(target=target_dir, prompts=str(prompts), out=root / "set", max_new_tokens=6)
    ds.train(
        data=[str(root / "set")],
        draft=draft_dir,
        target=target_dir,
        out=root / "draft",
        steps=2,
        save_every=1,
        batch_size=1,
        heldout_fraction=0.3,
        max_length=64,
    )
    return root


def test_what_is_finished_names_its_command_and_the_next(door, out, golden):
    printed, _ = door.ok("status", out, "--json")
    draft, made = json.loads(printed.splitlines()[-1])["held"]
    assert (made["holds"], made["state"]) == ("distilled set", "finished")
    golden(made["progress"])
    golden(made["made_by"])
    golden(made["following"])
    assert (draft["holds"], draft["state"]) == ("draft (lm)", "finished")
    golden(draft["progress"])
    assert f"--draft {out}/draft" in draft["following"]
    golden(printed)


def test_what_a_kill_left_says_how_far_it_came_and_what_continues_it(tmp_path, golden):
    inputs = {"target": "t", "data": [str(tmp_path / "set")]}
    (tmp_path / "set").mkdir()
    place = tmp_path / "draft"
    command = f"draftsmith train --data {tmp_path}/set --out {place}"
    assert not claim(place, "draft (lm)", {"steps": 8}, command, inputs)
    (held,) = status(directory=str(tmp_path))["held"]
    golden(held["progress"])
    note_progress(place, "steps", 2, 8)
    (held,) = status(directory=str(tmp_path))["held"]
    assert (held["state"], held["progress"]) == ("unfinished", "2 of 8 steps")
    assert held["following"] == held["made_by"] == command
    with hold(place):
        assert status(directory=str(tmp_path))["held"][0]["state"] == "running"
    note(place, finished=True)
    (held,) = status(directory=str(place))["held"]
    golden(held["following"])


def test_a_loss_of_ones_own_is_named(out, target_dir, tmp_path, golden):
    def own_loss(draft_NV, target_NV, tokens_N):
        return torch.nn.functional.cross_entropy(draft_NV, tokens_N, reduction="none")

    begun = {"data": [str(out / "set")], "target": target_dir, "draft": str(out / "draft")}
    ds.train(**begun, out=tmp_path / "own", steps=1, max_length=64, loss=own_loss)
    (held,) = status(directory=str(tmp_path))["held"]
    golden(held["made_by"])


def test_a_moved_run_shows_where_its_files_are_now(tmp_path, golden):
    begun = tmp_path / "begun"
    (begun / "set").mkdir(parents=True)
    inputs = {"data": [str(begun / "set")], "draft": f"a={begun}/set", "target": "owner/name"}
    words = ["draftsmith", "train", "--data", begun / "set", f"--out={begun}/draft"]
    command = shlex.join(map(str, words))
    claim(begun / "draft", "draft (lm)", {}, command, inputs)
    moved = begun.rename(tmp_path / "moved")
    (held,) = status(directory=str(moved))["held"]
    golden(held["following"])


def test_a_run_that_goes_on_elsewhere_records_its_new_places(tmp_path):
    begun, moved = tmp_path / "begun", tmp_path / "moved"
    assert not claim(begun, "set", {"steps": 2}, "old", {"data": "old"})
    begun.rename(moved)
    assert claim(moved, "set", {"steps": 2}, "new", {"data": "new"})
    record = json.loads((moved / "run.json").read_text())
    assert record["inputs"] == {"data": "new", "out": str(moved)}
    assert record["paths"] == {str(moved): "."}
    assert record["command"] == "new" and "torch" in record["versions"]
    # Also once it is finished; one that is made again is not.
    note(moved, finished=True)
    moved.rename(begun)
    assert claim(begun, "set", {"steps": 2}, "newer", {"data": "new"})
    record = json.loads((begun / "run.json").read_text())
    assert (record["finished"], record["paths"]) == (True, {str(begun): "."})
    note_progress(begun, "steps", 1, 2)
    assert not json.loads((begun / "run.json").read_text())["finished"]


def test_a_path_called_like_an_option_and_a_record_of_another_shape(tmp_path, monkeypatch, golden):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "target").mkdir()
    command = "draftsmith distill --target target --out set"
    claim(tmp_path / "set", "unheard of", {}, command, {"target": "target"})
    (held,) = status(directory="set")["held"]
    golden(held["following"])
    note(tmp_path / "set", finished=True)
    (held,) = status(directory=str(tmp_path / "set"))["held"]
    golden(held["made_by"])
    assert held["following"] == f"open {tmp_path}/set"
    (tmp_path / "set" / "run.json").write_text('{"identity": {}}')
    with golden.raises():
        status(directory="set")


def test_an_alignment_is_shown_before_its_parts(tmp_path):
    claim(tmp_path, "alignment", {}, "draftsmith align", {})
    claim(tmp_path / "set", "distilled set", {}, "draftsmith distill", {})
    held = status(directory=str(tmp_path))["held"]
    assert [each["holds"] for each in held] == ["alignment", "distilled set"]


@pytest.mark.parametrize(
    ("parent", "typed"),
    [
        ("/bin/sh", "draftsmith train --steps 1"),
        ("uv run draftsmith train --steps 1", "uv run draftsmith train --steps 1"),
        (
            "python {accelerate} launch --multi_gpu -m draftsmith train --steps 1",
            "accelerate launch --multi_gpu -m draftsmith train --steps 1",
        ),
        (
            "python /none/accelerate launch -m draftsmith train --steps 1",
            "python /none/accelerate launch -m draftsmith train --steps 1",
        ),
    ],
)
def test_a_launcher_is_part_of_what_was_typed(parent, typed, tmp_path, monkeypatch):
    script = tmp_path / "accelerate"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    words = shlex.split(parent.format(accelerate=script))
    monkeypatch.setattr("draftsmith.core.launcher._parent", lambda: words)
    assert as_typed("draftsmith train --steps 1") == typed


def test_without_a_directory_says_what_to_type(door):
    door.refused("status")


def test_a_directory_of_others_is_refused(door, tmp_path):
    door.refused("status", tmp_path)
    door.refused("status", tmp_path / "none")
