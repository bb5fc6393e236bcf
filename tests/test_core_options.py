"""The door and its options: what is wrong is said in one line with the place, the key and the
nearest right one.
"""

import shlex
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import yaml

from draftsmith.alignment.config import AlignConfig
from draftsmith.cli.commands import COMMANDS, SHELLS
from draftsmith.cli.examples import EXAMPLES
from draftsmith.core.command_line import parse
from draftsmith.core.errors import InputError
from draftsmith.core.options import (
    AtLeast1,
    ModelOptions,
    NotIdentity,
    Positive,
    Rare,
    configured,
    identity,
    options,
    options_of,
)
from draftsmith.train.config import TrainConfig


@options
class Inner:
    """A group."""

    rate: Positive = 0.5
    """How fast."""


@options
class Options(ModelOptions):
    """What the test command takes."""

    name: str
    """Who it is for."""
    note: NotIdentity[str | None] = None
    words: list[str] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)
    count: int = 1
    limit: AtLeast1 | None = None
    loud: Rare[bool] = False
    """Whether to shout."""
    colour: Literal["red", "green"] = "red"
    inner: Inner = field(default_factory=Inner)

    def __post_init__(self):
        if self.count < 0:
            raise InputError(f"count: {self.count} must not be negative")


def read(*words):
    return parse(Options, "test", list(words))[0]


def refusal(*words):
    with pytest.raises(InputError) as caught:
        read(*words)
    text = str(caught.value)
    assert "\n" not in text
    assert "Traceback" not in text
    return text


def test_every_spelling_of_a_value():
    typed = "--name=a=b --count -0 --loud --colour green --inner.rate 1e-3 --words x y --words z"
    found = read(*typed.split(), *"--numbers=1 --numbers 2.5 1e2 --limit 3".split())
    assert found == Options(
        name="a=b",
        colour="green",
        loud=True,
        words=["x", "y", "z"],
        numbers=[1, 2.5, 100],
        limit=3,
        count=0,
        inner=Inner(rate=1e-3),
    )
    assert read("--name", "a", "--loud", "false").loud is False
    assert read("--name", "a", "--limit", "3", "--limit", "4").limit == 4
    assert read("--name", "a", "--name", "b").name == "b"
    assert read("--name", "a", "--words", "1", "null", "[x]").words == ["1", "null", "[x]"]
    assert [parse(Options, "test", ["--name", "a", *more])[1] for more in ((), ("--json",))] == [
        False,
        True,
    ]


@pytest.mark.parametrize(
    "text", ["5", "a: b", "[1]", "# heading", "", "{", "'", "true", "- x", "--a-b c", "a\nb\t", "é"]
)
def test_text_is_taken_as_it_is_typed(text):
    assert read("--name", text, "--note", text, "--words", text) == Options(
        name=text, note=text, words=[text]
    )


def test_the_single_value_of_an_option_may_begin_with_a_dash(golden):
    assert read("--name", "-x", "--note", "--foo-bar", "--loud") == Options(
        name="-x", note="--foo-bar", loud=True
    )
    assert read("--name", "--foo=a-b") == Options(name="--foo=a-b")
    golden(refusal("--name", "a", "--inner.rate", "-1e-3"))
    golden(refusal("--name", "--note", "b"))


WRONG_FILES = [
    "name: a\ncount: x\n",
    "name: a\ninner:\n  rat: 1\n",
    "name: a\ninner:\n  rate: 0\n",
    "name: a\ninner: 3\n",
    "name: a\ncount: 1\ncount: 2\n",
    "name: a\ncount: -1\n",
    "name: a\ncolour: blue\n",
    "name: a\n  count: 1\n",
    "- a\n- b\n",
    "name: !!python/object/apply:os.getcwd []\n",
]


def test_a_wrong_file_is_named_with_its_line(tmp_path, golden):
    for text in WRONG_FILES:
        (tmp_path / "c.yaml").write_text(text)
        golden(refusal("--config", str(tmp_path / "c.yaml")))


def test_the_command_line_wins_over_files_and_later_files_over_earlier(tmp_path):
    (tmp_path / "a.yaml").write_text("name: a\ncount: 1\nwords: [x]\ninner:\n  rate: 1e-4\n")
    (tmp_path / "b.yaml").write_text("count: 2\n")
    files = ["--config", str(tmp_path / "a.yaml"), "--config", str(tmp_path / "b.yaml")]
    assert read(*files) == Options(name="a", count=2, words=["x"], inner=Inner(rate=1e-4))
    assert read("--count", "5", *files).count == 5
    assert read(*files, "--count", "5", "--words", "y").words == ["y"]


def test_print_config_goes_back_in(tmp_path, door):
    words = ["--data", "a b", "c", *"--out o --draft d --optim.lr 3e-5 --steps 7".split()]
    out, _ = door.ok("train", *words, "--print_config")
    assert yaml.safe_load(out)["optim"]["lr"] == 3e-5
    (tmp_path / "c.yaml").write_text(out)
    again = parse(TrainConfig, "train", ["--config", str(tmp_path / "c.yaml")])
    assert again == parse(TrainConfig, "train", words)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_lists_every_option_with_its_sentence(command, door):
    code, out, _ = door(command, "--help=all")
    flat = " ".join(out.split())
    assert code == 0 and "--config" in out and "--print_config" in out
    for option in options_of(COMMANDS[command].options):
        if option.part:
            assert f"--{option.part}.KEY " in flat
            continue
        assert (
            f"--{option.key} " in flat and option.help and not option.help.startswith("Default")
        ), option.key
    headings = [
        line for line in out.splitlines() if line.endswith(":") and not line.startswith(" ")
    ]
    assert headings[0] in ("Required:", "Options:") and not [
        line for line in headings if line.count("`") % 2
    ]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_one_screen_and_ends_with_an_example(command, door, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    lines = door.ok(command, "--help")[0].splitlines()
    assert len(lines) <= 50 and lines[-1] == f"  {EXAMPLES[command]}"
    _, named, *words = shlex.split(EXAMPLES[command])
    alone = COMMANDS[command].alone
    parse(COMMANDS[command].options, named, [f"--{alone}", *words] if alone else words)


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_knows_every_command(door, shell):
    pytest.importorskip("shtab")
    script, _ = door.ok("--print_shtab", shell)
    assert all(command in script for command in COMMANDS) and "max_new_tokens" in script


def test_python_callers_get_the_same_checks(golden):
    config = Options(name=Path("a"), words=(Path("b"),), limit=np.int64(3))  # type: ignore[arg-type]
    assert (config.name, config.words, config.limit, type(config.limit)) == ("a", ["b"], 3, int)
    wrong: list[dict[str, Any]] = [
        {"limit": 0},
        {"words": "b"},
        {"words": "b", "name": ...},
        {"name": ...},
        {"colour": "blue"},
        {"count": float("nan")},
        {"colours": "red"},
        {"nam": "a", "name": ...},
        {"inner": {"rat": 1}},
        {"zz": 1},
        {"inner": {"rate": -1}},
        {"count": -1},
        {"name": None},
    ]
    for values in wrong:
        given = {"name": "a"} | values
        with golden.raises():
            Options(**{key: value for key, value in given.items() if value is not ...})
    with golden.raises():
        replace(config, limit=0)


def test_identity_leaves_out_what_changes_nothing():
    values = identity(Options(name="a", note="x", device="cpu"))
    assert values["name"] == "a" and values["inner"] == {"rate": 0.5}
    assert not {"note", "device"} & set(values)


def test_options_are_laid_over_the_configuration_of_a_call(golden):
    given = TrainConfig(out="a", data=["d"], draft="d")
    assert configured(TrainConfig, given, {}) is given
    assert configured(TrainConfig, given, {"out": "b"}) == replace(given, out="b")
    assert configured(TrainConfig, None, {"out": "a", "data": ["d"], "draft": "d"}) == given
    for config, named in ((None, {"out": "a", "data": ["d"]}), (given, {})):
        with golden.raises():
            configured(TrainConfig, config, {**named, "stepz": 3})
    with golden.raises(TypeError):
        configured(TrainConfig, {"data": ["d"]}, {})
    with golden.raises():
        AlignConfig(target="t", out="o", prompts="p", train={"optim": {"lrr": 1}})
