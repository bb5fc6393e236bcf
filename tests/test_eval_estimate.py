"""alpha: against a computation by hand, against itself in chunks, and against what decoding
measures.
"""

import pytest
import torch
from transformers import LlamaForCausalLM

from draftsmith.core.errors import RunError
from draftsmith.core.sampling import Sampling, acceptance, generator, probs, uniforms
from draftsmith.eval.acceptance import Continuation
from draftsmith.eval.diagnosis.root_step import RootStep, root_acceptance
from draftsmith.eval.method import Method
from tests.tiny_models import alpha_sums, near, tiny_llama

VOCAB = 17
SAMPLINGS = [
    Sampling(temperature=0.0),
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_k=5, top_p=0.9),
]


Models = tuple[LlamaForCausalLM, LlamaForCausalLM]


@pytest.fixture(scope="module")
def pair():
    target = tiny_llama(0, VOCAB)
    return target, near(target, 0.25, 5)


def _rows(count: int, seed: int) -> list[Continuation]:
    g = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(count):
        sizes = torch.randint(1, 9, (2,), generator=g).tolist()
        tokens = torch.randint(3, VOCAB, (sum(sizes),), generator=g).tolist()
        rows.append(Continuation(f"p{index}", tokens[: sizes[0]], tokens[sizes[0] :]))
    return rows


def _by_hand(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, row: Continuation, sampling: Sampling
) -> float:
    total = 0.0
    with torch.inference_mode():
        for done in range(len(row.output_ids)):
            ids = torch.tensor([[*row.prompt_ids, *row.output_ids[:done]]])
            p, q = (
                probs(model(input_ids=ids).logits[0, -1], sampling) for model in (target, draft)
            )
            total += float(acceptance(p, q))
    return total


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_equals_a_computation_by_hand(pair: Models, sampling):
    rows = _rows(5, 1)
    cell = alpha_sums(*pair, rows, sampling, batch_size=3)
    assert cell["count"] == [len(row.output_ids) for row in rows]
    assert cell["sum"] == pytest.approx([_by_hand(*pair, row, sampling) for row in rows], abs=1e-4)


@pytest.mark.parametrize("max_logits", [1, 3 * VOCAB * 2, 10**9])
def test_chunks_of_positions_change_nothing(pair: Models, max_logits):
    rows, sampling = _rows(6, 4), Sampling(temperature=1.0)
    whole = alpha_sums(*pair, rows, sampling, batch_size=6)
    parts = alpha_sums(*pair, rows, sampling, batch_size=3, max_logits=max_logits)
    assert (
        parts["sum"] == pytest.approx(whole["sum"], abs=1e-4) and parts["count"] == whole["count"]
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", [0, 1])
def test_logits_that_are_not_finite_stop_the_run_and_name_model_and_prompt(
    pair, temperature, broken
):
    models = [pair[0], pair[1]]
    models[broken] = near(models[broken], 0.0, 9)
    with torch.no_grad():
        # Tokens from 14 on: at temperature 0 a NaN wins the argmax like any other maximum.
        models[broken].lm_head.weight[14:].fill_(torch.nan)
    with pytest.raises(
        RunError, match=f"^{('mine', 'its')[broken]}: non-finite logits on prompt p0"
    ):
        names = {"": "mine", "draft": "its"}
        alpha_sums(
            models[0],
            models[1],
            _rows(2, 5),
            Sampling(temperature=temperature),
            batch_size=2,
            names=names,
        )


@pytest.mark.parametrize(
    ("tree", "verifier", "optimal"),
    [
        ("chain:3", "speculative", True),
        ("kary:3", "naive", True),
        ("kary:3", "greedy", True),
        ("kary:3", "mcsd", False),
        ("kary:3", "specinfer", False),
        ("kary:3", "exact", False),
    ],
)
def test_a_root_step_accepts_as_often_as_its_bound_where_the_rule_is_optimal(
    tree, verifier, optimal
):
    step = RootStep.of(Method.of(tree, verifier))
    assert step is not None and step.candidates == (1 if tree == "chain:3" else 3)
    trials = 20_000
    logits, noise = torch.randn(2, VOCAB, generator=generator(3))
    p, q = (1.2 * logits).softmax(-1), (logits + noise).softmax(-1)
    # The bound of one position is enough, 20,000 times the same.
    bound, _ = root_acceptance(step, p[None], q[None], torch.full((1, 1, step.uniforms), 0.5))
    u = uniforms([generator(8)], trials * step.uniforms).view(trials, 1, step.uniforms)
    _, reached = root_acceptance(step, p.expand(trials, -1), q.expand(trials, -1), u)
    error = 4 * (0.25 / trials) ** 0.5
    assert 0.2 < float(bound) < 0.99 and set(reached.tolist()) == {0.0, 1.0}
    if optimal:
        assert float(reached.mean()) == pytest.approx(float(bound), abs=error)
    else:
        assert float(reached.mean()) < float(bound) + error
    if verifier == "speculative":
        assert float(bound) == pytest.approx(float(acceptance(p, q)), abs=1e-6)


def test_root_steps_are_taken_at_the_same_positions_however_rows_come(pair: Models):
    rows, sampling = _rows(6, 4), Sampling(temperature=1.0)
    roots = [
        step
        for spec in ("chain:2", "kary:3")
        if (step := RootStep.of(Method.of(spec, "exact"))) is not None
    ]
    assert [step.name for step in roots] == ["exact/1", "exact/3"]
    whole = alpha_sums(*pair, rows, sampling, batch_size=6, roots=roots, seed=1)
    parts = alpha_sums(
        *pair, rows, sampling, batch_size=2, max_logits=2 * VOCAB, roots=roots, seed=1
    )
    for step in roots:
        ours, theirs = whole["roots"][step.name], parts["roots"][step.name]
        # Answers of fewer than 16 tokens are looked at as a whole.
        assert ours["count"] == theirs["count"] == whole["count"]
        assert ours["reached"] == theirs["reached"] and ours["bound"] == pytest.approx(
            theirs["bound"], abs=1e-4
        )
    assert sum(whole["roots"]["exact/3"]["bound"]) > sum(whole["roots"]["exact/1"]["bound"])


def test_a_text_without_response_tokens_counts_nothing(pair: Models):
    rows, step = _rows(3, 2), RootStep.of(Method.of("kary:3", "exact"))
    rows[1] = Continuation("p1", rows[1].prompt_ids, [])
    assert step is not None
    alone, together = (
        alpha_sums(*pair, rows, SAMPLINGS[1], batch_size=size, roots=[step], diagnose=True)
        for size in (1, 3)
    )
    assert alone["count"][1] == alone["sum"][1] == alone["roots"][step.name]["count"][1] == 0
    assert alone["sum"] == pytest.approx(together["sum"], abs=1e-4)
    assert alone["roots"][step.name]["count"] == together["roots"][step.name]["count"]
