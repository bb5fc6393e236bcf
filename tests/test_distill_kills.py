"""A set is the same bytes whenever its run was killed, and its rows are done, failed or skipped."""

import json
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from draftsmith_core.tokenization import load_tokenizer
from tests.serving import serving

Spawn = Callable[..., Any]
KILLS = 3
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'judge' %}{{ raise_exception('no judges') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}model:"
)
BAD = ["{broken", '{"other": 1}', '{"prompt": ""}', json.dumps({"prompt": "dog " * 200})]
BAD.append('{"messages": [{"role": "judge", "content": "guilty"}]}')
REFUSED = "The server refuses this"

# Counts the calls and returns of functions from the moment on at which the set is claimed; dies at one of them.
KILL_AT_CALL = """
import atexit, os, signal, sys
import distill.generate as module
claim, left = module.check_empty, [{calls}]
def counted(frame, event, arg):
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
def claiming(*words):
    sys.setprofile(counted)
    return claim(*words)
def told():
    sys.setprofile(None)
    open("calls", "w").write(str(-left[0]))
module.check_empty = claiming
atexit.register(told)
"""


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def prompts() -> Iterator[str]:
    turn = [{"role": "user", "content": "Who jumps?"}, {"role": "assistant", "content": "-"}]
    for number in range(16):
        yield json.dumps({"prompt": f"The quick brown {number} " * (1 + number % 3)})
        if number % 3 == 2:
            yield BAD[number // 3]
        if number % 4 == 0:
            yield json.dumps({"messages": [*turn, {"role": "user", "content": f"Number {number}"}]})
    yield json.dumps({"prompt": REFUSED})


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["hf", "openai"])
def test_killed_at_random_instants(engine: str, target_dir: str, tmp_path: Path, spawn: Spawn) -> None:
    lines = list(prompts())
    (tmp_path / "p.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    command = f"distill --target {target_dir} --prompts ../p.jsonl --chat_template ../chat.jinja --out set --seed 3"
    words = [*command.split(), *"--num_samples 2 --max_new_tokens 6 --batch_size 3 --part_rows 6".split()]
    words += ["--engine", engine]
    refused = 0
    serve: Any = nullcontext()
    server: Any
    if engine == "openai":
        tokenizer, refused = load_tokenizer(target_dir), 1
        ids = tokenizer(REFUSED)["input_ids"]
        serve = serving(
            "vllm", tokenizer, misbehave=lambda number: 422 if server.bodies[number]["prompt"] == ids else None
        )
    with serve as server:
        if engine == "openai":
            words += ["--endpoint", server.url]

        def run(name: str, calls: int) -> int:
            (tmp_path / name).mkdir(exist_ok=True)
            child = spawn(*words, cwd=tmp_path / name, patch=KILL_AT_CALL.format(calls=calls))
            code, _, err = child.wait()
            assert code in (0, -signal.SIGKILL), err
            return int(code)

        assert run("whole", 0) == 0
        whole, total = files(tmp_path / "whole/set"), int((tmp_path / "whole/calls").read_text())
        draw, kills = random.Random(engine), 0
        while kills < KILLS:
            if run("killed", draw.randrange(1, total)) == 0:
                assert files(tmp_path / "killed/set") == whole
                shutil.rmtree(tmp_path / "killed/set")
            else:
                kills += 1
        assert run("killed", 0) == 0
        assert files(tmp_path / "killed/set") == whole
    manifest = json.loads(whole["manifest.json"])
    counts = manifest["counts"]
    assert (counts["prompts_read"], counts["prompts_skipped"], counts["prompts_failed"]) == (len(lines), 5, refused)
    assert counts["prompts_done"] == len(lines) - 5 - refused
    table = [row for part in sorted((tmp_path / "whole/set").glob("part-*")) for row in pq.read_table(part).to_pylist()]
    # Two samples of each prompt, and the two turns of the four chats are a row each.
    assert len(table) == counts["rows"] == 2 * (counts["prompts_done"] + 4)
    assert len({row["id"] for row in table}) == len(table)
    errors = [json.loads(line) for line in whole["errors.jsonl"].decode().splitlines()]
    assert {line["row"] for line in errors} == {
        number for number, line in enumerate(lines, 1) if line in BAD or (refused and REFUSED in line)
    }
    assert [line["outcome"] for line in errors] == ["skipped"] * 5 + ["failed"] * refused
