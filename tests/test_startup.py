"""Nobody waits for torch to see a help text, a version or a mistyped option, or to import the
package.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith.cli.commands import COMMANDS
from tests.conftest import ROOT
from tests.small_recipes import small_recipe

HEAVY = (
    "torch",
    "transformers",
    "datasets",
    "accelerate",
    "matplotlib",
    "numpy",
    "pandas",
    "pyarrow",
)
# Processor seconds, not those of the clock: other programs may keep the cores busy. The goal is
# 0.5; a slow machine gets three times that, and importing torch alone takes longer.
MOST_S = 1.5
MEASURE = """
import contextlib, io, json, sys, time
began = time.process_time()
words = json.loads(sys.argv[1])
out, err = io.StringIO(), io.StringIO()
with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    try:
        if words is None:
            import draftsmith
            code = 0
        else:
            from draftsmith.__main__ import main
            code = main(words)
    except SystemExit as leaving:
        code = leaving.code or 0
seconds = time.process_time() - began
modules = sorted({name.partition(".")[0] for name in sys.modules})
print(json.dumps([code, seconds, modules, err.getvalue()]))
"""


def measured(words):
    """(exit code, processor seconds, top-level modules that were imported, standard error) of a
    command.
    """
    done = subprocess.check_output(
        [sys.executable, "-c", MEASURE, json.dumps(words)], cwd=ROOT, text=True
    )
    code, seconds, modules, err = json.loads(done)
    return code, seconds, set(modules), err


def test_import_is_light():
    code, seconds, modules, _ = measured(None)
    assert (code, modules & {*HEAVY, "pydantic"}) == (0, set()) and seconds < 0.3


HELP = [
    ["--help"],
    ["--version"],
    ["help", "export"],
    ["--help", "export"],
    *([name, "--help"] for name in COMMANDS),
]


@pytest.mark.parametrize("words", HELP, ids=" ".join)
def test_help_is_light(words):
    code, seconds, modules, _ = measured(words)
    assert (code, modules & {*HEAVY}) == (0, set()) and seconds < MOST_S


# In the name of an option, and in values that only the code behind them knows.
MISTAKES = [["trian"], *([name, "--lrr", "3"] for name in COMMANDS)]
MISTAKES += [
    "align --target t --prompts p --out o --objective jsdd".split(),
    "decode --target t --prompt p --verifier specinfr".split(),
    "eval --target t --draft a=b --id c=d --out o --tree chian:3".split(),
    # Names of models and files.
    "decode --target no-such-model --prompt p".split(),
    "decode --target some/model-GGUF --prompt p".split(),
    "distill --target draftsmith/demo/pair/target --prompts none.jsonl --out o".split(),
    "train --draft no/draft --data none --out o".split(),
    "eval --target draftsmith/demo/pair/target --draft a=prompt_lookup --id c=d --out o".split(),
]


@pytest.mark.parametrize("words", MISTAKES, ids=" ".join)
def test_mistakes_are_told_at_once(words):
    code, seconds, modules, err = measured(words)
    assert (code, modules & {*HEAVY}) == (2, set()), err
    assert len(err.strip().splitlines()) == 1 and seconds < MOST_S


@pytest.mark.parametrize(
    "words", [["--version"], ["--help"], ["decode", "--help"], ["decode", "--print_config"]]
)
def test_output_that_cannot_be_written_is_one_line(words):
    """Python buffers what goes to a file, so a full disk shows when that is flushed, at the latest
    at its end.
    """
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "draftsmith", *words]
        done = subprocess.run(
            command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, env=environment
        )
    assert (done.returncode, done.stderr) == (
        1,
        f"draftsmith {words[0]}: No space left on device\n",
    )


@pytest.mark.slow
def test_libraries_print_nothing(tmp_path):
    """Neither bars of transformers nor the warning of DeepSpeed."""
    recipe = small_recipe(ROOT / "configs/train/eagle_vicuna-7b_sharegpt.yaml", tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "draftsmith", "train", "--config", str(recipe)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(f"{tmp_path}/out: ") and done.stdout.count("\n") == 1
    lines = [line for line in done.stderr.replace("\r", "\n").splitlines() if line]
    assert [line for line in lines if not line.startswith("train")] == []
