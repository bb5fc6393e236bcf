"""Every command in README and docs/training.md is run: make's targets against the Makefile, the others for real, in
order.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith.cli.method_table import markdown
from train.losses import LOSSES
from train.trainees import TRAINEES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TRAINING = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
# What `make demo` leaves behind and the README's lines read.
ROWS = {
    "prose.train.jsonl": "If the file {} is not found, an error is raised and the caller must decide what to do. ",
    "prose.jsonl": "The value {} of an expression is returned when the lookup of a name fails in the inner scope. ",
    "code.jsonl": "def close{}(self):\n    self.file.close()\n    for line in self.lines:\n        yield line\n",
}


def commands(text: str = README) -> list[str]:
    """Command lines of a page's code blocks, continuations joined, comments dropped."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line.split("  #")[0].strip() for line in lines if line.strip() and not line.startswith("#")]


def test_readme_has_commands() -> None:
    found = commands()
    assert {"make demo", "make test"} <= set(found)
    for name in ("distill", "train", "eval", "decode"):
        assert any(f"draftsmith {name} " in line for line in found), name


@pytest.mark.parametrize("line", [line for line in commands() if line.startswith("make ")])
def test_make_targets_exist(line: str) -> None:
    done = subprocess.run(["make", "-n", *shlex.split(line)[1:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.slow
def test_commands_work_in_order(tmp_path: Path) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    prompts = tmp_path / "out" / "demo" / "prompts"
    prompts.mkdir(parents=True)
    for name, text in ROWS.items():
        rows = [json.dumps({"text": text.format(i) * 6}) for i in range(12)]
        (prompts / name).write_text("\n".join(rows) + "\n")
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "PET_STANDALONE": "1",  # accelerate finds a port itself: that of the launch file may be taken
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    ours = [line for line in commands() if "draftsmith " in line and not line.startswith("git ")]
    assert len(ours) >= 4
    ours += commands(TRAINING)
    for line in ours:
        done = subprocess.run(line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    assert (tmp_path / "out" / "mine" / "eval" / "report.html").stat().st_size > 10_000


def test_readme_quotes_the_record_of_the_shipped_pair() -> None:
    for member in ("target", "base"):
        record = json.loads((ROOT / "draftsmith" / "demo" / "pair" / member / "draftsmith.json").read_text())
        for value in record["heldout_perplexity"].values():
            assert f"{value:.1f}" in README, f"{member}: perplexity {value}"


def test_training_page_names_what_there_is() -> None:
    """Every kind, objective and launcher file stands in a table of it, and nothing that is not there."""
    first = [match.split(":")[0] for match in re.findall(r"^\| `([^`]+)` \|", TRAINING, flags=re.MULTILINE)]
    launchers = {path.name for path in (ROOT / "configs" / "accelerate").glob("*.yaml")}
    assert len(first) == len(set(first))
    assert {name for name in first if not name.endswith(".yaml")} - {"kind", "objective"} == {*TRAINEES, *LOSSES}
    assert {name for name in re.findall(r"`(\w+\.yaml)`", TRAINING)} == launchers


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_links_of_other_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_readme_pictures_and_links_are_in_the_repository() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)|src(?:set)?=\"([^\"]+)\"", README)
    local = [a or b for a, b in targets if not (a or b).startswith("http")]
    assert any(target.endswith(".png") for target in local)
    for target in local:
        assert (ROOT / target).exists(), target


def test_readme_holds_the_table_of_what_decode_can_do() -> None:
    between = re.findall(r"<!-- ways: begin -->\n(.*?)\n<!-- ways: end -->", README, flags=re.DOTALL)
    assert between == [markdown()], (
        "put `python -c 'from draftsmith.cli.method_table import *; print(markdown())'` there"
    )
