"""alpha: against a computation by hand, against itself in chunks, and against what decoding
measures.
"""

import pytest
import torch
from transformers import LlamaForCausalLM

from draftsmith.core.errors import RunError
from draftsmith.core.sampling import Sampling, acceptance, probs
from draftsmith.eval.formulas import Continuation
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
    assert cell["positions"] == [len(row.output_ids) for row in rows]
    assert cell["alpha"] == pytest.approx(
        [_by_hand(*pair, row, sampling) for row in rows], abs=1e-4
    )


@pytest.mark.parametrize("max_logits", [1, 3 * VOCAB * 2, 10**9])
def test_chunks_of_positions_change_nothing(pair: Models, max_logits):
    rows, sampling = _rows(6, 4), Sampling(temperature=1.0)
    whole = alpha_sums(*pair, rows, sampling, batch_size=6)
    parts = alpha_sums(*pair, rows, sampling, batch_size=3, max_logits=max_logits)
    assert (
        parts["alpha"] == pytest.approx(whole["alpha"], abs=1e-4)
        and parts["positions"] == whole["positions"]
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
        RunError, match=f"^{('the target', 'draft draft')[broken]}: non-finite logits on prompt p0"
    ):
        alpha_sums(
            models[0],
            models[1],
            _rows(2, 5),
            Sampling(temperature=temperature),
            batch_size=2,
        )


def test_a_text_without_response_tokens_counts_nothing(pair: Models):
    rows = _rows(3, 2)
    rows[1] = Continuation("p1", rows[1].prompt_ids, [])
    alone, together = (
        alpha_sums(*pair, rows, SAMPLINGS[1], batch_size=size, marks={}) for size in (1, 3)
    )
    assert alone["positions"][1] == alone["alpha"][1] == 0
    assert alone["alpha"] == pytest.approx(together["alpha"], abs=1e-4)
