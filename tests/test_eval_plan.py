"""Plans: what they choose among, against sums by hand; costs fitted from steps; and `draftsmith
plan` itself.
"""

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from draftsmith.core.errors import RunError
from draftsmith.core.sampling import Sampling
from draftsmith.decode import SpeculativeDecoder, Tree, parse_tree
from draftsmith.decode.tree import DynamicTree
from draftsmith.decode.tree_spec import kary
from draftsmith.eval.bootstrap import PromptSums, quotient, resamples
from draftsmith.eval.copying import CopyingDraft
from draftsmith.eval.formulas import Continuation
from draftsmith.eval.planning.expected_tokens import JointRuns, kary_space
from draftsmith.eval.planning.plan import _pays, plan
from draftsmith.eval.planning.step_costs import CHAINS, fit, isotonic, shapes, time_shapes
from draftsmith.eval.planning.tree_trials import Planner
from draftsmith.eval.timing import records_steps
from tests.tiny_models import redrawn, tiny_llama


def _runs(chances):
    """One text; `chances[k]` are those of rank k along it."""
    array = np.array(chances)[None, :, None, :]
    return JointRuns(array, np.array([array.shape[3]]))


def test_values_of_nodes_are_means_of_products_along_the_text():
    runs = _runs([[0.5, 1.0, 0.2, 0.4], [0.1, 0.0, 0.3, 0.6]])
    assert runs.value((0,)) == pytest.approx((0.5 + 1.0 + 0.2 + 0.4) / 4)
    # A run that begins at the last token has no second one.
    assert runs.value((0, 0)) == pytest.approx((0.5 * 1.0 + 1.0 * 0.2 + 0.2 * 0.4) / 4)
    assert runs.value((1, 0)) == pytest.approx((0.1 * 1.0 + 0.0 * 0.2 + 0.3 * 0.4) / 4)
    tree = kary((2, 1))
    paths = [(0,), (1,), (0, 0), (1, 0)]
    assert runs.length(tree) == pytest.approx(1 + sum(map(runs.value, paths)))


def test_grown_trees_are_the_best_of_their_size():
    rng = np.random.default_rng(0)
    first = rng.uniform(0.2, 0.9, 40)
    runs = _runs([first.tolist(), ((1 - first) * 0.5).tolist(), ((1 - first) * 0.1).tolist()])
    grown = runs.grow(6, 4)
    assert [tree.size for tree in grown] == [1, 2, 3, 4, 5, 6]
    assert all(a < b for a, b in pairwise(map(runs.length, grown)))
    for tree in grown:
        others = [each for each in kary_space(tree.size, 4, 3).values() if each.size == tree.size]
        others += [kary((1,) * tree.size)] if tree.size <= 4 else []
        assert all(runs.length(tree) >= runs.length(other) - 1e-12 for other in others)


def test_the_space_of_k_ary_trees_is_mcsds():
    space = kary_space(64, 16, 32)
    assert {"kary:2", "kary:4,2,2", "kary:32", "kary:16,2", "kary:1,1,2"} <= space.keys()
    assert "kary:3,2" not in space and "kary:1,1" not in space and "kary:32,2" not in space
    assert all(tree.size <= 64 and not tree.is_chain for tree in space.values())
    assert all(parse_tree(spec) == tree for spec, tree in list(space.items())[:50])
    assert all(max(tree.widths) <= 4 for tree in kary_space(64, 16, 4).values())


def test_costs_come_back_from_steps_that_were_made_of_them():
    def verify(rows):
        return 0.01 + 0.001 * rows

    def step(tree):
        if tree is None:
            return 0.009
        expanded = [0] * (tree.depth + 1)
        for node, below in enumerate(tree.children):
            if below and node:
                expanded[tree.depths[node - 1]] += 1
        return verify(1 + tree.size) + sum(0.002 + 0.0001 * width for width in expanded if width)

    rounds = time_shapes(step, None, lambda: True)
    assert {len(seconds) for seconds in rounds.values()} == {3}
    assert {len(seconds) for seconds in time_shapes(step, None, lambda: False).values()} == {1}
    costs = fit(rounds)
    assert costs.alone == 0.009
    for tree in (kary((1,) * 5), kary((4, 2, 1)), kary((2, 2)), Tree((-1, -1, 0))):
        assert costs.step(tree) == pytest.approx(step(tree), rel=0.02)
    assert costs.step(kary((1,) * 40)) == pytest.approx(step(kary((1,) * 40)), rel=0.02)
    # Medusa's heads draft as deep as there are heads.
    assert [max(tree.depth for tree in shapes(levels).values() if tree) for levels in (1, 2)] == [
        1,
        2,
    ]


def test_a_larger_tree_is_never_taken_to_be_cheaper_nor_a_step_than_the_target_alone():
    assert isotonic({1: 3.0, 2: 1.0, 4: 2.0, 8: 5.0}) == {1: 2.0, 2: 2.0, 4: 2.0, 8: 5.0}
    costs = fit(
        {name: [0.02, 0.03, 0.01] for name in shapes(None)}
        | {"rows:32": [0.001], "rows:64": [0.005]}
    )
    sizes = [costs.alone, *(costs.step(Tree((-1,) * n)) for n in (1, 8, 16, 32, 64, 100))]
    assert sizes == sorted(sizes) and costs.step(kary((1,) * 9)) >= costs.step(kary((1,) * 3))


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
    """On a busy machine, and with no time, the plan is short."""
    monkeypatch.setattr("os.getloadavg", lambda: (99.0 if busy else 0.0, 0.0, 0.0))
    monkeypatch.setattr(
        "draftsmith.eval.remarks.SPREAD", 1e9
    )  # the machine of the tests may be busy or not
    monkeypatch.setattr("draftsmith.eval.planning.tree_trials.LIMIT_S", 0.0 if busy else 900.0)
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
    door.refused("decode", *words, "--tree", "auto")
    out, _ = door.ok("plan", *words, *"--confirm_prompts 4 --json".split())
    plan = draft / "plan.json"
    summary, found = json.loads(out.splitlines()[-1]), json.loads(plan.read_text())
    assert summary["plan"] == str(plan) and summary["tree"] == found["tree"]
    assert len(found["confirmed"]) == 4
    assert [row["tree"] for row in found["confirmed"]][0] == "the target alone"
    rates = [row["tokens_per_s"] for row in found["confirmed"][1:]]
    assert found["name"] == found["confirmed"][1 + rates.index(max(rates))]["tree"]
    assert ("the machine was busy" in out) == found["conditions"]["busy"] == busy
    assert len(found["not_tried"]) == (6 if busy else 0)
    assert {len(found["costs"]["rounds"][name]) for name in ("alone", "rows:8")} == (
        {1} if busy else {3}
    )
    predicted = [row for row in found["candidates"] if row["tau"]]
    assert len(predicted) == 20 and all(1 <= row["tau"]["value"] <= 65 for row in predicted)
    parsed = parse_tree(f"auto:{plan}", lambda path: json.loads(Path(path).read_text()))
    assert isinstance(parsed, Tree | DynamicTree) and parsed.size >= 1
    out, err = door.ok("decode", *words, "--tree", "auto", "--json")
    if found["pays"] is False:
        assert "faster" in err
    else:
        assert json.loads(out.splitlines()[-1])["tree"] == f"auto:{plan}"
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
        "--max_new_tokens 6 --max_prompts 4 --speed_prompts 0 --bootstrap 100 --tree chain:1 auto"
    ).split()
    door.ok("eval", *words, "--out", tmp_path / "out")
    trees = [
        method["tree"]
        for method in json.loads((tmp_path / "out" / "results.json").read_text())["methods"]
    ]
    assert trees == ["chain:1", f"auto:{plan}"]


@pytest.mark.parametrize(
    ("source", "options", "in_time", "trees", "skipped"),
    [
        ("prompt_lookup", "--draft prompt_lookup", True, 3, 0),
        ("prompt_lookup+{draft}", "--draft prompt_lookup+{draft}", False, 1, 13),
        ("retrieval:{store}", "--draft retrieval:{store}", True, 3, 0),
        ("lookahead", "--draft lookahead", True, 1, 0),
    ],
)
def test_what_copies_is_timed_not_predicted(
    source,
    options,
    in_time,
    trees,
    skipped,
    door,
    target_dir,
    draft_dir,
    prompts_file,
    tmp_path,
    monkeypatch,
    golden,
):
    monkeypatch.setattr("draftsmith.eval.planning.tree_trials.LIMIT_S", 900.0 if in_time else 0.0)
    monkeypatch.setattr(
        "draftsmith.eval.planning.tree_trials.COPIED", ("chain:1", "chain:2", "kary:2,1,1")
    )
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
    assert all(row["tau"] is None for row in found["candidates"])
    assert len(found["candidates"]) == trees and len(found["confirmed"]) == 1 + trees
    assert len(found["not_tried"]) == skipped
    golden(out, having="few prompts")
    door.ok("decode", *common, *options.split(), "--tree", f"auto:{plan}")


def test_a_mixture_costs_what_its_steps_took(monkeypatch):
    """By a clock that ticks once for each expert that a forward reads."""
    config = MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=16,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    target = redrawn(MixtralForCausalLM(config), 0.6)
    ticks = [0.0]

    def tick(module, args, output):
        _, chosen, *_ = args
        ticks[0] += len(chosen.unique())

    for layer in target.model.layers:
        layer.mlp.experts.register_forward_hook(tick)
    monkeypatch.setattr(SpeculativeDecoder, "_clock", lambda self: ticks[0])
    planner = Planner(
        target=target,
        draft=tiny_llama(1, 32),
        prompts=[],
        sampling=Sampling(temperature=0.0),
        batch_size=1,
        max_new_tokens=16,
        seed=0,
    )
    text = Continuation("a", list(range(3, 9)), list(range(9, 15)))
    verify_s = fit(planner.time_steps([text])).verify_s
    assert verify_s[1] == 2 * 2  # two of a layer's experts
    assert 1.3 * verify_s[1] < verify_s[2] < verify_s[5] < verify_s[17] <= 2 * 16


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
    planner = Planner(
        target=tiny_llama(1, 32),
        draft=tiny_llama(1, 32),
        prompts=[],
        sampling=Sampling(temperature=0.0),
        batch_size=1,
        max_new_tokens=4,
        seed=0,
        compile=cast(bool, "eager"),
    )
    shapes_timed: list[Tree | None] = [None, kary((2, 1))]
    assert [planner.decoder(shape).compile for shape in shapes_timed] == ["eager", "eager"]


def test_a_pair_that_takes_chains_only_is_timed_on_whole_chains():
    """Their steps hold the drafting, and going back behind what was refused."""
    assert list(shapes(None, trees_fit=False)) == ["alone", *[f"whole:{n}" for n in CHAINS]]
    assert list(shapes(3, trees_fit=False)) == ["alone", "whole:1", "whole:2", "whole:3"]
    seconds = {"alone": [1.0], "whole:1": [1.5], "whole:2": [2.0], "whole:4": [3.5]}
    costs = fit(seconds)
    assert [costs.step(kary((1,) * n)) for n in (1, 2, 3, 4, 6)] == [1.5, 2.0, 2.75, 3.5, 5.0]
