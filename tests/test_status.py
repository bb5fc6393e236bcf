"""`draftsmith status DIR`: what a directory holds, finished or not, and how to go on."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch

import draftsmith as ds
from draftsmith.core.launcher import as_typed
from draftsmith.core.record import RECORD
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


def test_what_is_finished_names_its_command_and_the_next(door, out):
    printed, _ = door.ok("status", out, "--json")
    draft, made = json.loads(printed.splitlines()[-1])["held"]
    assert (made["holds"], made["state"]) == ("a distilled set", "finished")
    assert made["facts"].startswith("6 rows, ")
    assert made["made_by"].startswith("draftsmith distill ")
    assert made["following"].startswith(f"draftsmith train --data {out}/set ")
    assert (draft["holds"], draft["state"]) == ("a draft (lm)", "finished")
    assert "trained for 2 steps" in draft["facts"]
    assert f"--draft {out}/draft" in draft["following"]
    assert f"{out}/set: a distilled set, finished; 6 rows" in printed


def test_what_a_kill_left_says_how_far_it_came_and_what_continues_it(out, tmp_path):
    shutil.copytree(out / "draft", tmp_path / "draft")
    (tmp_path / "draft" / RECORD).unlink()
    (held,) = status(directory=str(tmp_path))["held"]
    assert (held["state"], held["facts"]) == (
        "unfinished",
        "its newest checkpoint is of step 2 of 2",
    )
    assert held["following"].startswith("draftsmith train ") and "--steps 2" in held["following"]
    with hold(tmp_path / "draft"):
        assert status(directory=str(tmp_path))["held"][0]["state"] == "running"


def test_a_loss_of_ones_own_is_named_and_no_command_is_made_up(out, target_dir, tmp_path):
    def own_loss(draft_NV, target_NV, tokens_N):
        return torch.nn.functional.cross_entropy(draft_NV, tokens_N, reduction="none")

    begun = {"data": [str(out / "set")], "target": target_dir, "draft": str(out / "draft")}
    ds.train(**begun, out=tmp_path / "own", steps=1, max_length=64, loss=own_loss)
    (held,) = status(directory=str(tmp_path))["held"]
    assert held["made_by"].startswith("draftsmith.train in Python, with the loss custom:")
    (tmp_path / "own" / RECORD).unlink()
    (held,) = status(directory=str(tmp_path))["held"]
    assert (held["state"], held["made_by"]) == ("unfinished", None)


def test_a_moved_run_shows_where_its_files_are_now(out, tmp_path):
    shutil.copytree(out, tmp_path / "begun")
    (tmp_path / "begun" / "draft" / RECORD).unlink()
    record = tmp_path / "begun" / "draft" / "run" / "run.json"
    begun = json.loads(record.read_text())
    assert begun["places"]["out"] == str(out / "draft")
    (tmp_path / "begun").rename(tmp_path / "moved")
    draft, made = status(directory=str(tmp_path / "moved"))["held"]
    data, old = f"--data {tmp_path}/moved/set", str(out)
    assert data in draft["following"] and data in made["following"]
    assert old not in draft["following"] and f"--out {tmp_path}/moved/draft" in draft["following"]


def test_a_run_that_goes_on_elsewhere_records_its_new_places(tmp_path):
    begun, moved = tmp_path / "begun", tmp_path / "moved"
    assert not claim(begun, {"steps": 2}, by_content={"data": "old"})
    begun.rename(moved)
    assert claim(moved, {"steps": 2}, by_content={"data": "new"})
    record = json.loads((moved / "run.json").read_text())
    assert record["places"] == {"data": "new", "out": str(moved)}


ALIGN = "draftsmith align --target t"


def begin_alignment(directory: Path) -> None:
    (directory / "distill.yaml").write_text("target: t\n")
    claim(directory, {"config": {}}, by_content={}, command=ALIGN)


def test_an_alignment_goes_on_by_its_command(tmp_path):
    begin_alignment(tmp_path)
    (held,) = status(directory=str(tmp_path))["held"]
    assert (held["state"], held["following"]) == ("unfinished", ALIGN)


def test_parts_of_an_alignment_go_on_with_it(out, tmp_path):
    begin_alignment(tmp_path)
    shutil.copytree(out / "draft", tmp_path / "plain")
    (tmp_path / "plain" / RECORD).unlink()
    whole, draft = status(directory=str(tmp_path))["held"]
    assert draft["state"] == "unfinished" and draft["following"] == whole["following"]
    with hold(tmp_path / "plain"):
        whole, draft = status(directory=str(tmp_path))["held"]
    assert whole["state"] == draft["state"] == "running"
    assert whole["following"] == draft["following"] == "wait for it"


def test_a_finished_part_of_an_alignment_says_which_and_what_that_does_next(out, tmp_path):
    begin_alignment(tmp_path)
    shutil.copytree(out / "set", tmp_path / "distilled")
    again = ALIGN
    (made,) = status(directory=str(tmp_path / "distilled"))["held"]
    assert (made["state"], made["made_by"], made["following"]) == ("finished", again, again)
    assert made["facts"].endswith(f"; part of the alignment {tmp_path}")
    report = tmp_path / "eval" / "report.html"
    report.parent.mkdir()
    report.write_text("")
    (made,) = status(directory=str(tmp_path / "distilled"))["held"]
    assert (made["made_by"], made["following"]) == (again, f"open {report}")
    assert status(directory=str(tmp_path))["held"][1] == made


def test_an_export_is_named_and_hides_nothing_beside_it(out, tmp_path):
    shutil.copytree(out / "draft", tmp_path / "draft")
    for kind in ("eagle", "draft"):
        record = {"export": {"kind": kind, "format": "hf"}, "target": "t", "command": "c"}
        record |= {"source": {"name": f"my {kind}"}} | (
            {"kind": "draft-lm"} if kind == "draft" else {}
        )
        (tmp_path / "exported" / kind).mkdir(parents=True)
        (tmp_path / "exported" / kind / RECORD).write_text(json.dumps(record))
    held = {each["path"]: each for each in status(directory=str(tmp_path))["held"]}
    assert f"{tmp_path}/draft" in held
    eagle, model = (held[f"{tmp_path}/exported/{kind}"] for kind in ("eagle", "draft"))
    assert (eagle["holds"], model["holds"]) == (
        "an export (eagle as hf)",
        "an export (draft as hf)",
    )
    assert eagle["following"] == "draftsmith doctor --target t --draft 'my eagle'"


def test_what_continues_a_run_is_what_was_typed(door, out, target_dir, draft_dir, tmp_path):
    """The options that do not decide the result too: other steps, another batch, a tracker."""
    words = ["--data", out / "set", "--draft", draft_dir, "--target", target_dir, "--steps", 1]
    words += ["--batch_size", 2, "--tracker", "none", "--max_length", 64]
    door.ok("train", *words, "--out", tmp_path / "draft", "--heldout_fraction=.3")
    (tmp_path / "draft" / RECORD).unlink()
    (tmp_path / "draft").rename(tmp_path / "moved")
    (held,) = status(directory=str(tmp_path))["held"]
    typed = shlex.join(map(str, ["draftsmith", "train", *words]))
    assert held["following"] == f"{typed} --out {tmp_path}/moved --heldout_fraction=.3"


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
    assert "which directory? draftsmith status DIRECTORY" in door.refused("status")


def test_a_directory_of_others_is_refused(door, tmp_path):
    assert "holds nothing that draftsmith made" in door.refused("status", tmp_path)
    assert "is no directory" in door.refused("status", tmp_path / "none")
