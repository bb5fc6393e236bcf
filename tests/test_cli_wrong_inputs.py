"""Law 8: what a stranger may type wrongly, by command: one line that says what to do, exit code 2,
nothing written.
"""

import re
from pathlib import Path

import pytest

# A command a line, the first without a word.
CASES = Path(__file__).with_name("wrong_commands.txt").read_text().splitlines()


@pytest.fixture(scope="module")
def files(tmp_path_factory, target_dir, draft_dir, prompts_file, donor_dir):
    """Every file that a command line may name, by what stands for it in braces."""
    root = tmp_path_factory.mktemp("wrong")
    texts = {
        "unknown.yaml": "out: a\nobjectiv: ce\n",
        "empty.jsonl": "",
        "keyless.jsonl": '{"question": "Why?"}\n',
        "torn_rows.jsonl": '{"prompt": \n',
        "one.jsonl": '{"prompt": "a single prompt"}\n',
        "long.jsonl": "".join(f'{{"prompt": "{number} {"dog " * 100}"}}\n' for number in range(9)),
    }
    for name, text in texts.items():
        (root / name).write_text(text)
    models = {"target": target_dir, "draft": draft_dir, "prompts": prompts_file, "other": donor_dir}
    models["pair"] = str(Path(draft_dir).parent)
    return (
        models | {name.partition(".")[0]: str(root / name) for name in texts} | {"here": str(root)}
    )


@pytest.mark.parametrize("words", CASES, ids=[re.sub(r"{\w+}", "X", words) for words in CASES])
def test_one_line_exit_code_2_and_nothing_written(door, files, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    err = door.refused(*words.format(**files).split())
    if words:
        (line,) = err.strip().splitlines()
        assert line.startswith("draftsmith") and len(line) < 600
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == set(), left


@pytest.mark.parametrize(
    "words",
    ["align --epochs", "align --distil.max_prompts", "align --max_prompts", "decode --url"],
)
def test_an_unknown_option_names_the_nearest(door, words):
    door.refused(*words.split(), 3)
