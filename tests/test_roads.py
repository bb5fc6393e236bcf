"""The roads of the docs: every command of every page is one that the command line takes, and small
twins of those of the roads are run.
"""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from draftsmith.cli.commands import COMMANDS
from draftsmith.core.command_line import parse
from draftsmith.core.errors import InputError
from draftsmith.core.models import load_model
from draftsmith.drafts.heads.eagle3 import Eagle3Head
from draftsmith.drafts.heads.store import save_head
from tests.conftest import ROOT

# One for each kind of reader.
ROADS = ["docs/for-serving.md", "docs/for-research.md", "docs/for-measuring.md"]
PAGES = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
# Stands for options that a reader fills in, or for a file of the reader's own.
OPEN = ("...", "eval.yaml", "FILE.yaml", "mine.yaml")


def text_of(page):
    return (ROOT / page).read_text(encoding="utf-8")


def command_lines(page):
    """The words after `draftsmith` of every command in the shell blocks of a page."""
    for block in re.findall(r"^```(?:ba)?sh\n(.*?)^```", text_of(page), re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if "draftsmith" in words and words[0] in ("draftsmith", "accelerate", "torchrun"):
                yield words[words.index("draftsmith") + 1 :]


def words_of(page):
    return len(text_of(page).split())


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_is_taken(page, monkeypatch, golden):
    monkeypatch.chdir(ROOT)
    for words in command_lines(page):
        if not words or words[0].startswith("-") or any(word in OPEN for word in words):
            continue
        name, *argv = words
        command = COMMANDS[name]
        if command.alone is not None and not argv[0].startswith("-"):
            argv = [f"--{command.alone}", *argv]
        try:
            parse(command.chosen(argv).options, name, argv)
        except SystemExit:
            pass  # of help
        except InputError as error:
            # The pages' own files are not here.
            golden(str(error))


@pytest.mark.parametrize("page", ROADS)
def test_a_road_is_short_and_begins_with_a_command(page):
    assert words_of(page) <= 600
    before, _, _ = text_of(page).partition("```sh")
    assert len(before.split()) <= 100


def test_the_readme_is_short_and_shows_its_picture_before_any_command():
    text = text_of("README.md")
    assert words_of("README.md") <= 1100
    assert text.index("<picture>") < text.index("```")


@pytest.fixture
def twins(target_dir, draft_dir, tmp_path):
    """A tiny model for each hub name."""
    head = tmp_path / "head"
    save_head(Eagle3Head.fresh(load_model(target_dir, device="cpu")), head)
    return {
        "meta-llama/Llama-3.1-8B-Instruct": target_dir,
        "lmsys/vicuna-7b-v1.5": target_dir,
        "JackFram/llama-160m": draft_dir,
        "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": str(head),
    }


# Options at the end of a command that keep its twin small.
SHORTER = {
    "distill": "--engine hf --max_new_tokens 8 --num_samples 2",
    "train": "--steps 2 --batch_size 2 --max_length 64 --heldout_fraction 0.3",
    "eval": "--max_prompts 3 --max_new_tokens 8",
}
# A seed of a draft, and prompts, that a road names without making them.
SEEDS = ["out/160m-fkl-0", "out/160m-fkl-1", "out/160m-fkl-2"]


def twin_of(word, twins):
    """A word of a command with a local model or local rows for what is on the hub."""
    key, equals, value = word.rpartition("=")
    if value.startswith("@"):
        name = value.removeprefix("@")
        rows = [{"prompt": f"{name} asks {number}, and then?"} for number in range(4)]
        Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return f"{key or name}={name}.jsonl"
    return f"{key}{equals}{twins.get(value, value)}"


@pytest.mark.slow
@pytest.mark.parametrize("page", ROADS)
def test_small_twins_of_the_commands_of_a_road_work(
    page, door, twins, draft_dir, tmp_path, monkeypatch
):
    """The same commands in their order, with tiny models, local rows and transformers as engine."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for name in ("chats", "heldout"):
        rows = [{"prompt": f"{name}: {number} parcels, where"} for number in range(8)]
        Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for seed in SEEDS:
        shutil.copytree(draft_dir, seed)
    ran = 0
    for name, *words in command_lines(page):
        if "--served" in words:
            continue  # tests/test_served.py has servers
        twin = [twin_of(word, twins) for word in words]
        if name == "distill" and "--prompts" not in words:
            twin += ["--prompts", "chats.jsonl"]
        door.ok(name, *twin, *SHORTER.get(name, "").split())
        ran += 1
    assert ran >= 2
