"""Plans: what they choose among, against sums by hand; costs fitted from steps; and `draftsmith
plan` itself.
"""

import json
import shutil
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.core.errors import RunError
from draftsmith.core.sampling import Sampling
from draftsmith.decode import Tree, parse_tree
from draftsmith.decode.method import Method
from draftsmith.decode.propose.sources import CopyingDraft
from draftsmith.decode.tree import DynamicTree
from draftsmith.eval.bootstrap import PromptSums, quotient, resamples
from draftsmith.eval.plan import Planner, _pays, plan
from draftsmith.eval.timing import Task, records_steps
from tests.tiny_models import tiny_llama


@pytest.mark.parametrize(
    ("value", "low", "high", "pays"),
    [
        (1.2, 1.1, 1.3, True),
        (0.8, 0.7, 0.9, False),
        (0.95, 0.8, 1.1, False),  # not faster is no reason to draft, whatever the interval holds
        (0.95, None, None, False),
        (1.1, 0.9, 1.3, None),
        (1.1, None, None, None),
    ],
)
def test_whether_it_pays_is_judged_on_the_interval(value, low, high, pays):
    assert _pays([{"value": value, "low": low, "high": high, "n": 8}], 0) is pays


def test_the_luckiest_of_three_that_are_no_faster_is_seldom_said_to_pay():
    """Judged by its own interval alone, on eight prompts, it is in 7 % of plans."""
    rng = np.random.default_rng(0)
    said = 0
    for trial in range(250):
        tokens = rng.integers(30, 64, size=8).astype(float)
        alone = PromptSums(tokens, 0.01 * tokens * np.exp(rng.normal(0, 0.03, 8)))
        runs = [
            PromptSums(tokens, 0.01 * tokens * np.exp(rng.normal(0, 0.15, 8))) for _ in range(3)
        ]
        speedups: list[Any] = [
            quotient(run, alone, resamples(range(8), 400, trial)) for run in runs
        ]
        said += _pays(speedups, int(np.argmax([each["value"] for each in speedups]))) is True
    assert said / 250 <= 0.045


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(("temperature", "busy"), [(0, True), (1, False)])
def test_a_plan_is_written_beside_the_draft_and_used(
    temperature, busy, door, target_dir, draft_dir, prompts_file, tmp_path, monkeypatch
):
    """The busy machine's plan has one tree to try."""
    monkeypatch.setattr("os.getloadavg", lambda: (99.0 if busy else 0.0, 0.0, 0.0))
    monkeypatch.setattr(
        "draftsmith.eval.remarks.SPREAD", 1e9
    )  # the machine of the tests may be busy or not
    if busy:
        monkeypatch.setattr(Planner, "tried", lambda _: ["chain:2"])
    draft = shutil.copytree(draft_dir, tmp_path / "draft")
    words = [
        "--target",
        target_dir,
        "--draft",
        draft,
        "--prompts",
        prompts_file,
        "--temperature",
        temperature,
    ]
    words += ["--max_new_tokens", 6, "--prompt_tokens", 8]
    out, _ = door.ok("plan", *words, *"--confirm_prompts 4 --json".split())
    plan = draft / "plan.json"
    summary, found = json.loads(out.splitlines()[-1]), json.loads(plan.read_text())
    assert summary["plan"] == str(plan) and summary["tree"] == found["tree"]
    assert len(found["confirmed"]) == (2 if busy else 4)
    assert [row["tree"] for row in found["confirmed"]][0] == "the target alone"
    rates = [row["tokens_per_s"] for row in found["confirmed"][1:]]
    assert found["name"] == found["confirmed"][1 + rates.index(max(rates))]["tree"]
    assert ("the machine was busy" in out) == found["conditions"]["busy"] == busy
    assert found["not_tried"] == []
    assert found["costs"]["target"]["1"] > 0
    parsed = parse_tree(f"auto:{plan}", lambda path: json.loads(Path(path).read_text()))
    assert isinstance(parsed, Tree | DynamicTree) and parsed.size >= 1
    summary = door.summary("decode", *words, "--tree", f"auto:{plan}")
    assert summary["tree"] == (None if found["pays"] is False else f"auto:{plan}")
    other = shutil.copytree(draft_dir, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    save_file({key: 2 * weight for key, weight in weights.items()}, other / "model.safetensors")
    words[words.index(draft)] = other
    door.refused("decode", *words, "--tree", f"auto:{plan}")
    words[words.index(other)] = draft
    words = [
        "--target",
        target_dir,
        "--draft",
        f"d={draft}",
        "--id",
        f"a={prompts_file}",
        "--temperature",
        temperature,
    ]
    words += (
        "--max_new_tokens 6 --max_prompts 4 --speed_prompts 0 --bootstrap 100 --tree chain:1"
    ).split()
    words.append(f"auto:{plan}")
    door.ok("eval", *words, "--out", tmp_path / "out")
    trees = [
        method["tree"]
        for method in json.loads((tmp_path / "out" / "results.json").read_text())["methods"]
    ]
    assert trees == ["chain:1", f"auto:{plan}"]


@pytest.mark.parametrize(
    ("source", "options", "trees"),
    [
        ("prompt_lookup", "--draft prompt_lookup", 2),
        ("prompt_lookup+{draft}", "--draft prompt_lookup+{draft}", 2),
        ("retrieval:{store}", "--draft retrieval:{store}", 2),
        ("lookahead", "--draft lookahead", 1),
    ],
)
def test_what_copies_is_timed_not_predicted(
    source,
    options,
    trees,
    door,
    target_dir,
    draft_dir,
    prompts_file,
    tmp_path,
    monkeypatch,
    golden,
):
    trials = "draftsmith.eval.plan"
    monkeypatch.setattr(f"{trials}.LARGER", ())
    monkeypatch.setattr(f"{trials}.menu", lambda *_, **__: [])
    monkeypatch.setattr(f"{trials}.STOPPING", ("chain:2", "chain:3"))
    monkeypatch.setattr(f"{trials}.GROWING", ())
    common = ["--target", target_dir, "--prompts", prompts_file, "--prompt_tokens", 8]
    common += ["--max_new_tokens", 6, "--temperature", 0]
    names = {"draft": draft_dir, "store": prompts_file}
    options = options.format(**names)
    words = ["--draft", source.format(**names), "--max_prompts", 3, "--confirm_prompts", 3]
    door.refused("plan", *common, *words)
    plan = tmp_path / "plan.json"
    out, _ = door.ok("plan", *common, *words, "--out", plan)
    golden(out, having="--tree")
    found = json.loads(plan.read_text())
    assert len(found["candidates"]) == trees and len(found["confirmed"]) == 1 + trees
    assert found["not_tried"] == []
    golden(out, having="few prompts")
    door.ok("decode", *common, *options.split(), "--tree", f"auto:{plan}")


@pytest.mark.parametrize(
    ("device", "asked", "fails", "recorded"),
    [
        ("cpu", None, False, False),
        ("cuda", None, False, True),
        ("cuda", None, True, False),
        ("cuda", False, False, False),
        ("cuda", True, True, True),
    ],
)
def test_a_gpu_times_recorded_steps_by_default(device, asked, fails, recorded, monkeypatch, capsys):
    """Unless the draft cannot be recorded."""
    tried: list[object] = []

    class Recording:
        def __init__(self, target, proposer, *, compile):  # noqa: A002
            tried.append(proposer)

        def generate(self, *_, **__):
            if fails and tried[-1] is not None:
                raise RunError("compile: a step cannot be recorded")

    monkeypatch.setattr("draftsmith.eval.timing.SpeculativeDecoder", Recording)
    target = cast(Any, torch.nn.Module())
    target.device = torch.device(device)
    assert records_steps(asked, target, [CopyingDraft("prompt_lookup")]) == recorded
    said = "compile: a step cannot be recorded" in capsys.readouterr().err
    assert said == (fails and asked is None)
    assert len(tried) == (2 if asked is None and device == "cuda" else 0)


def test_a_plan_times_the_steps_that_are_served(
    target_dir, draft_dir, prompts_file, tmp_path, golden
):
    pair: dict[str, Any] = {
        "target": str(target_dir),
        "draft": str(draft_dir),
        "prompts": str(prompts_file),
    }
    with golden.raises():
        plan(**pair, out=str(tmp_path / "plan.json"), compile=True, device="cpu")
    task = Task(
        target=tiny_llama(1, 32),
        prompts=[],
        sampling=Sampling(temperature=0.0),
        eos=(),
        max_new_tokens=4,
        seed=0,
        compile="eager",
    )
    draft = tiny_llama(1, 32)
    timed = [task.contender(draft, method) for method in (None, Method.of("kary:2,1"))]
    assert [contender.decoder.compile for contender in timed] == ["eager", "eager"]
