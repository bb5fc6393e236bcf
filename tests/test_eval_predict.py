"""Predictions of decoding from one forward against decoding itself, by rule, tree and kind of draft
(law 10).
"""

import json
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from draftsmith.core.models import load_model
from draftsmith.core.prompts import Prompt
from draftsmith.core.sampling import Sampling
from draftsmith.decode import parse_tree
from draftsmith.decode.method import Method
from draftsmith.decode.stats import independent_tau
from draftsmith.drafts.heads import save_head
from draftsmith.drafts.heads.eagle import EagleHead
from draftsmith.drafts.heads.medusa import MedusaHeads
from draftsmith.eval import timing
from draftsmith.eval.alpha import measure_alphas
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.counts import Count, of_method
from draftsmith.eval.predict import predictable
from draftsmith.eval.run import evaluate
from tests.tiny_models import HEADS, at_depth, near, stirred_head, tiny_llama

PROMPTS = [Prompt(f"p{i}", "d", (1, 3 + i % 13, 3 + i // 13 % 20)) for i in range(300)]
HOT, WARM, COLD = (
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_p=0.9),
    Sampling(temperature=0.0),
)
PENALISED = Sampling(repetition_penalty=1.4, presence_penalty=0.2, frequency_penalty=0.3)
CASES = {
    HOT: [
        ("chain:1", "speculative"),
        ("chain:4", "speculative"),
        ("chain:4", "block"),
        ("chain:4", "exact"),
        ("kary:3,2,1", "mcsd"),
        ("kary:2,2,stop=0.2", "mcsd"),
        ("kary:3,2", "specinfer"),
        ("kary:3,2", "exact"),
        ("kary:3,2", "naive"),
        ("chain:4", "coupled"),
        ("kary:3,2", "coupled"),
    ],
    WARM: [("chain:5,stop=0.3", "speculative"), ("kary:3,2,1", "mcsd"), ("chain:4", "coupled")],
    COLD: [
        ("chain:4", "speculative"),
        ("chain:5,stop=0.1", "speculative"),
        ("kary:3,2,1", "mcsd"),
    ],
}


Models = tuple[LlamaForCausalLM, LlamaForCausalLM]


@pytest.fixture(scope="module")
def pair():
    target = tiny_llama(0)
    return target, near(target, 0.25, 5)


@pytest.fixture(scope="module")
def texts():
    """`texts(target, sampling, count)`: the task of decoding as many prompts, and the target's own
    texts, once for all methods.
    """
    made = {}

    def of(target: LlamaForCausalLM, sampling: Sampling, count: int) -> tuple[timing.Task, Any]:
        key = (id(target), sampling, count)
        if key not in made:
            task = timing.Task(
                target,
                PROMPTS[:count],
                sampling,
                (2,),
                max_new_tokens=14,
                batch_size=100,
                seed=3,
            )
            made[key] = task, task.baseline()
        return made[key]

    return of


def _compare(
    texts: Any,
    target: LlamaForCausalLM,
    draft: object,
    methods: list[Method],
    sampling: Sampling,
    count: int = 300,
) -> None:
    """Expected and decoded counts, from separate texts of the same prompts: within five standard
    errors of each. Methods are predicted from one forward.
    """
    task, ours = texts(target, sampling, count)
    rows = timing.continuations(PROMPTS[:count], ours)
    cell = measure_alphas(target, {"d": draft}, rows, sampling, methods, batch_size=64)["d"]  # type: ignore[dict-item]
    for method in methods:
        _agree(cell, task.decoding(draft, method, ours)["counts"], method, sampling, count)


def _agree(
    predicted: list[Count], decoded: list[Count], method: Method, sampling: Sampling, count: int
) -> None:
    found, ran = of_method(predicted, method), of_method(decoded, method)
    if sampling.greedy:
        assert found["expected_calls"] == pytest.approx(ran["calls"], abs=1e-9)
        assert max(found["calls_variance"]) < 1e-9
    for one, other in (("expected_accepted", "accepted_here"), ("expected_reached", "reached")):
        both = (at_depth(predicted, one, method), at_depth(decoded, other, method))
        for depth, pair in enumerate(zip(*both, strict=True)):
            expected, counted = (torch.tensor(values, dtype=torch.double) for values in pair)
            error = float((expected.var() + counted.var() + 1e-6) / count) ** 0.5
            assert abs(float(expected.mean() - counted.mean())) < 4 * error + 1e-6, (one, depth)
    calls, counted = torch.tensor(found["expected_calls"]), torch.tensor(ran["calls"]).double()
    assert (
        abs(float(calls.mean() - counted.mean()))
        <= 4 * float((calls.var() + counted.var()) / count) ** 0.5 + 1e-6
    )


@pytest.mark.parametrize("sampling", CASES, ids=["T=1", "T=0.7", "T=0"])
def test_expected_counts_are_those_of_decoding(pair: Models, texts, sampling):
    methods = [Method.of(tree, verifier) for tree, verifier in CASES[sampling]]
    _compare(texts, *pair, methods, sampling)


@pytest.fixture(scope="module")
def deep_target():
    return tiny_llama(0, layers=3)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("sampling", [HOT, COLD], ids=["T=1", "T=0"])
def test_expected_counts_of_a_head_are_those_of_decoding_at_every_depth(
    deep_target, texts, name, sampling
):
    methods = [
        Method.of("chain:3", "speculative"),
        Method.of("chain:3,stop=0.2", "speculative"),
        Method.of("kary:2,2,1", "mcsd"),
    ]
    _compare(texts, deep_target, stirred_head(name, deep_target, 0.1), methods, sampling, 150)


def test_three_rules_from_one_forward_coincide_at_temperature_zero(pair):
    for sampling in (COLD, HOT):
        ours = timing.Task(
            pair[0], PROMPTS[:20], sampling, (), max_new_tokens=8, batch_size=20, seed=1
        ).baseline()
        rows = timing.continuations(PROMPTS[:20], ours)
        both = measure_alphas(
            pair[0], {"a": pair[1], "b": near(pair[0], 0.1, 7)}, rows, sampling, batch_size=8
        )
        for name, draft in (("a", pair[1]), ("b", near(pair[0], 0.1, 7))):
            alone = measure_alphas(pair[0], {name: draft}, rows, sampling, batch_size=8)[name]
            assert alone == both[name]
            sums = of_method(alone)
            if sampling.greedy:
                assert sums["alpha"] == sums["greedy"] == sums["match"]
            else:
                assert sum(sums["match"]) < sum(sums["alpha"]) != sum(sums["greedy"])


def test_trees_that_grow_and_lossy_rules_are_not_predicted():
    tree = parse_tree("kary:2,2")
    assert not predictable(parse_tree("eagle2:depth=2,beam=2,nodes=4"), "exact", HOT)
    assert not predictable(tree, "greedy", HOT) and predictable(tree, "greedy", COLD)
    assert not predictable(tree, "typical", COLD)


@pytest.fixture(scope="module")
def cells(target_dir, draft_dir, tmp_path_factory):
    """Predictions beside what was decoded: two pairs, two heads, five domains, two temperatures,
    four methods.
    """
    root = tmp_path_factory.mktemp("cells")
    model = load_model(target_dir, device="cpu")
    save_head(EagleHead.fresh(model, seed=1), root / "eagle")
    save_head(MedusaHeads.fresh(model, num_heads=4), root / "medusa")
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.12 * parameter.std() * torch.randn(parameter.shape, generator=random))
    model.save_pretrained(root / "near")
    starts = {
        "dogs": "The quick dog",
        "models": "A draft",
        "sums": "12 +",
        "names": "import",
        "unicode": "\u6f22 \u00e9",
    }
    for name, start in starts.items():
        rows = []
        for i in range(16):
            # Far enough apart: prompts that differ in a few tokens are one group.
            numbers = " ".join(str((37 * i + 91 * k) ** 2 % 997) for k in range(1, 5))
            rows.append({"id": f"{name}{i}", "prompt": f"{start} {numbers}"})
        (root / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
        )
    config = EvalConfig(
        target=target_dir,
        draft=[
            f"far={draft_dir}",
            f"near={root / 'near'}",
            f"eagle={root / 'eagle'}",
            f"medusa={root / 'medusa'}",
        ],
        id=[f"{name}={root / name}.jsonl" for name in starts],
        out=str(root / "out"),
        tree=["chain:2", "chain:4", "kary:2,2", "kary:3,1,1"],
        temperature=[0.7, 1.0],
        max_new_tokens=16,
        speed_prompts=0,
        batch_size=16,
        bootstrap=500,
        device="cpu",
        seed=5,
    )
    with pytest.MonkeyPatch.context() as patch:
        # The report is tested elsewhere.
        patch.setattr("draftsmith.eval.run.write_report", lambda results: results.directory)
        results = evaluate(config)
    cells = []
    for tau in results.select("tau"):
        if tau["set"] is None:
            continue
        where = (tau["draft"], tau["set"], tau["temperature"])
        how = (tau["tree"], tau["rule"])
        predicted, run = (
            results.figure(f"tau_{key}", *where, *how) for key in ("predicted", "run")
        )
        alpha = results.alpha(*where)["value"]
        assert predicted and run and alpha is not None
        inside = run["low"] <= tau["value"] <= run["high"]
        method = Method.of(*how)
        formula = independent_tau([alpha] * method.shape.depth) if method.is_chain else None
        cells.append((predicted["value"], tau["value"], inside, formula))
    return cells


@pytest.mark.slow
def test_the_measured_figure_lies_in_the_interval_of_its_prediction(cells, record_property):
    """Law 10, counted: of the cells that were decoded too, at least 93 in 100 hold what was
    measured. The prediction is nearer than the formula of independent tokens.
    """
    held = sum(inside for _, _, inside, _ in cells)
    record_property("cells", f"{held} of {len(cells)} hold the measured tau")
    assert len(cells) == 160 and held >= 0.93 * len(cells)
    errors = [
        (abs(tau - measured), abs(formula - measured))
        for tau, measured, _, formula in cells
        if formula
    ]
    ours, theirs = (sum(column) / len(errors) for column in zip(*errors, strict=True))
    record_property("mean error", f"prediction {ours:.4f}, formula {theirs:.4f}")
    assert ours < theirs
