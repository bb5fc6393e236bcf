"""`examples/adapt.py`: the served link moves to a draft that meets the requirements, and stays
otherwise.
"""

import importlib.util
import json
import random
from pathlib import Path

import pytest

import draftsmith as ds
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def adapt():
    spec = importlib.util.spec_from_file_location("adapt", ROOT / "examples" / "adapt.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_round_switches_the_link_only_for_a_draft_that_meets_the_requirements(
    adapt, target_dir, draft_dir, tmp_path, capsys, golden
):
    answer = " over the lazy dog and the dog does not mind"
    rows = []
    vocabulary = "the quick brown fox jumps over a lazy dog and numbers such as one".split()
    prompts = [" ".join(random.Random(number).sample(vocabulary, 9)) for number in range(23)]
    for number in range(20):
        request = {"prompt": prompts[number]}
        body = {
            "choices": [
                {"text": answer[: 9 + number], "finish_reason": "stop" if number % 2 else "length"}
            ]
        }
        rows.append(
            {"request": request, "response": body}
            if number % 3
            else {**request, "response": answer[:12]}
        )
    log, keep = tmp_path / "log.jsonl", tmp_path / "keep.jsonl"
    log.write_text(
        "".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": "no answer"}]) + "not JSON\n"
    )
    keep.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts[20:]))
    served = tmp_path / "served"
    served.symlink_to(draft_dir)
    words = f"--log {log} --target {target_dir} --served {served} --out {tmp_path}/rounds".split()
    words += f"--keep keep={keep} --steps 8 --lr 0.01 --max_new_tokens 6".split()

    assert not adapt.main([*words, "--require", "gain[recent] > 0.99"])
    assert served.resolve() == Path(draft_dir)
    printed = capsys.readouterr()
    golden(printed.err, having="rows")
    golden(printed.out, having="required")
    # The same call continues: nothing is trained again, and a requirement that holds switches the
    # link.
    (made,) = (tmp_path / "rounds").iterdir()
    trained = (made / "new" / "model.safetensors").stat().st_mtime_ns
    for _ in range(2):
        assert adapt.main([*words, "--require", "gain[recent] > -1"])
        assert served.resolve() == (made / "new").resolve()
    assert (made / "new" / "model.safetensors").stat().st_mtime_ns == trained
    record = json.loads((made / "new" / "draftsmith.json").read_text())["config"]
    assert (record["draft"], record["replay_fraction"], record["steps"]) == (
        str(made / "old"),
        0.5,
        8,
    )
    recent = [
        json.loads(line)["prompt"] for line in (made / "recent.jsonl").read_text().splitlines()
    ]
    assert recent == prompts[16:20]
    results = ds.Results.load(made / "eval")
    assert {suite["name"]: suite["kind"] for suite in results.document["suites"]} == {
        "recent": "id",
        "keep": "ood",
    }
