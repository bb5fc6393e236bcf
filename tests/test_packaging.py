"""The sdist, the wheel built from it, and the wheel installed somewhere else."""

import ast
import itertools
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from draftsmith.core.errors import EXTRAS
from tests.conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# Rooms at the top of the repository that are packages by a link in draftsmith/.
ROOMS = ("configs", "decode", "distill", "eval", "train")


def run(*words, cwd, **env):
    """Standard output of a command that must succeed, without this test run's PYTHONPATH."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME")
    }
    done = subprocess.run(
        [*map(str, words)], cwd=cwd, env=clean | env, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def tracked(*where):
    """What git tracks (or would track) below the given paths."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout to compare with")
    listed = run(
        "git", "ls-files", "--cached", "--others", "--exclude-standard", *where, cwd=ROOT
    ).splitlines()
    return {name for name in listed if (ROOT / name).is_file()}


def packaged():
    """Every file of the package by its name in the wheel."""
    files = {name: ROOT / name for name in tracked("draftsmith")}
    return files | {f"draftsmith/{name}": ROOT / name for name in tracked(*ROOMS)}


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """(sdist, the wheel built from that sdist), of a copy: setuptools lays the sdist out in the
    tree that it builds.
    """
    out, copy = (tmp_path_factory.mktemp(name) for name in ("dist", "copy"))
    for name in tracked():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    for room in ROOMS:
        (copy / "draftsmith" / room).symlink_to(f"../{room}")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, copy, cwd=out)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


@pytest.mark.engines
def test_wheel_holds_every_file_of_the_packages_and_nothing_else(built):
    with zipfile.ZipFile(built[1]) as wheel:
        found = {name: wheel.read(name) for name in wheel.namelist() if ".dist-info/" not in name}
        (entry,) = (
            name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt")
        )
        assert b"draftsmith = draftsmith.__main__:main" in wheel.read(entry)
    expected = packaged()
    assert set(found) == set(expected)
    assert [name for name, path in expected.items() if found[name] != path.read_bytes()] == []
    assert {name.split("/")[0] for name in found} == {"draftsmith"}
    assert "draftsmith/py.typed" in found
    assert any(name.endswith("linear.c") for name in found)


@pytest.mark.engines
def test_sdist_holds_the_repository(built):
    with tarfile.open(built[0]) as sdist:
        found = {name.partition("/")[2] for name in sdist.getnames()}
    # MANIFEST.in says why the kept answers and heads are left out.
    left_out = ("benchmarks/studies/real/", "heads/")
    expected = {name for name in tracked() if not name.startswith((".", *left_out))}
    assert expected - found == set() and not any(name.startswith(left_out) for name in found)


@pytest.fixture(scope="session")
def installed(built, tmp_path_factory):
    """`bin/` of an environment that holds the wheel, and borrows the dependencies of the one that
    runs the tests.
    """
    environment = tmp_path_factory.mktemp("elsewhere") / "env"
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=environment.parent)
    (packages,) = environment.glob("lib/python*/site-packages")
    # A directory named in a .pth file is put on sys.path, but the .pth files in it are not read:
    # the editable install of this clone is not seen.
    borrowed = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "borrowed.pth").write_text("".join(path + "\n" for path in borrowed))
    pip = [
        environment / "bin" / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
    ]
    run(*pip, "--ignore-installed", built[1], cwd=environment.parent)
    return environment / "bin"


@pytest.fixture
def elsewhere(tmp_path):
    """A directory whose files have the names of our packages."""
    for name in ("train", "eval", "decode", "distill", "drafts"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong file was imported')\n")
    return tmp_path


@pytest.mark.engines
def test_installed_commands_are_those_of_the_wheel(installed, elsewhere):
    version = PROJECT["project"]["version"]
    assert version in run(installed / "draftsmith", "--version", cwd=elsewhere)
    assert version in run(installed / "python", "-m", "draftsmith", "--version", cwd=elsewhere)
    assert "--out" in run(installed / "draftsmith", "eval", "--help", cwd=elsewhere)
    assert "--out" in run(
        installed / "python", "-m", "draftsmith", "train", "--help", cwd=elsewhere
    )
    where = (
        "import draftsmith.train, draftsmith.core.suites as suites; "
        "print(draftsmith.train.__file__, next(iter(suites.DIRECTORY.glob('gsm8k.yaml'))))"
    )
    for file in run(installed / "python", "-c", where, cwd=elsewhere).split():
        assert Path(file).is_relative_to(installed.parent), file


@pytest.mark.engines
def test_installed_demo_runs_from_an_empty_directory_offline(installed, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    short = [installed / "draftsmith", "demo", "--short", "--out", "out"]
    run(*short, cwd=empty, HF_HUB_OFFLINE="1", XDG_CACHE_HOME=str(tmp_path))
    report = (empty / "out" / "eval" / "report.html").read_text()
    assert len(report) > 10_000
    assert sorted(path.name for path in empty.iterdir()) == ["out"]
    assert str(ROOT) not in (empty / "out" / "eval" / "results.json").read_text()


@pytest.mark.engines
def test_an_installed_recipe_is_read_from_an_empty_directory(installed, tmp_path):
    recipe = "configs/train/llama-160m_vicuna-7b_alpaca_fkl.yaml"
    words = [installed / "draftsmith", "train", "--config", recipe, "--print_config"]
    assert "replay_fraction: 0.7" in run(*words, cwd=tmp_path)


def test_a_checkout_without_its_links_says_so_in_one_line(tmp_path):
    copy = tmp_path / "draftsmith"
    links = [path.name for path in (ROOT / "draftsmith").iterdir() if path.is_symlink()]
    shutil.copytree(ROOT / "draftsmith", copy, ignore=shutil.ignore_patterns(*links))
    (copy / "decode").write_text("../decode")
    words = [sys.executable, "-m", "draftsmith", "--version"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "core.symlinks" in done.stderr


def test_every_package_that_is_imported_is_declared():
    project = PROJECT["project"]
    declared = [
        *project["dependencies"],
        *itertools.chain(*project["optional-dependencies"].values()),
    ]
    names = {re.split(r"[^\w-]", line)[0].lower() for line in declared} | {
        "yaml"
    }  # which pyyaml installs
    imported: dict[str, str] = {}
    for name, path in packaged().items():
        if name.endswith(".py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                found = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                found += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                imported |= {module.split(".")[0]: name for module in found}
    assert {"torch", "wandb"} <= imported.keys()
    ours = names | sys.stdlib_module_names | {"draftsmith"}
    assert not {module: name for module, name in imported.items() if module not in ours}


def test_extra_all_is_every_extra_of_the_running_program():
    extras = PROJECT["project"]["optional-dependencies"]
    ((joined,),) = ([text] for text in extras["all"])
    named = joined.removeprefix("draftsmith[").removesuffix("]").split(",")
    assert sorted(named) == sorted(set(extras) - {"all", "test", "docs", "vllm"})


def test_every_extra_that_users_are_told_to_install_exists():
    extras = PROJECT["project"]["optional-dependencies"]
    named: dict[str, str] = {}
    for name in tracked("draftsmith", *ROOMS, "docs", "README.md", "CONTRIBUTING.md"):
        path = ROOT / name
        if path.suffix in (".py", ".md", ".yaml"):
            text = path.read_text(encoding="utf-8")
            for listed in re.findall(r"-e '\.\[([a-z,]+)\]", text):
                named |= dict.fromkeys(listed.split(","), name)
            for package in re.findall(r"require_package\(\s*\"(\w+)\"", text):
                named |= (
                    {EXTRAS[package]: name} if package in EXTRAS else {}
                )  # else it is installed by its name
    assert {"bnb", "deepspeed"} <= set(named), "the search finds nothing"
    assert {extra: name for extra, name in named.items() if extra not in extras} == {}
