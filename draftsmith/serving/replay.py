"""Predict what a server accepts along given texts, by replaying the draft on them.

Legend: P prompts, D depths, N positions, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from drafts.load import Draft
from draftsmith_core.sampling import Sampling
from eval.acceptance import Continuation, Positions
from eval.bootstrap import Floats, PromptSums
from eval.estimate import read_traces
from eval.method import Method
from eval.predict import predict

_BATCH = 8


@dataclass(frozen=True)
class Case:
    """What a prediction is made from.

    rows: the served texts. rule: verifier by which drafted tokens stay. read_ids: the prompts as
    the server read them. samplings: other samplings that the server may use.
    """

    target: PreTrainedModel
    draft: Draft
    rows: Sequence[Continuation]
    sampling: Sampling
    rule: str
    read_ids: Sequence[Sequence[int]]
    samplings: Sequence[Sampling]


@dataclass(frozen=True)
class Replay:
    """A prediction.

    tokens: emitted tokens over target calls. likelihood: the sum of the tokens' probabilities over
    the sum expected if the target wrote them; about 1 if it did.
    """

    tokens: PromptSums
    accepted_PD: Floats
    reached_PD: Floats
    likelihood: PromptSums


def replay(case: Case, tokens: int) -> Replay:
    """Predict drafting `tokens` at a time along the case's texts."""
    method = Method(f"chain:{tokens}", case.rule)
    traces, observed = read_traces(
        case.target,
        {"draft": case.draft},
        case.rows,
        case.sampling,
        [method],
        batch_size=_BATCH,
        observers={"likelihood": _likelihood},
    )
    likelihood = observed["draft"]["likelihood"]
    counts = predict(method.shape, method.verifier, case.sampling, traces["draft"])
    assert counts is not None
    emitted = [len(row.output_ids) for row in case.rows]
    return Replay(
        tokens=PromptSums.of(emitted, counts["target_calls"]),
        accepted_PD=np.array(counts["accepted_by_depth"]),
        reached_PD=np.array(counts["reached_by_depth"]),
        likelihood=PromptSums.of(likelihood["own"], likelihood["expected"]),
    )


def _likelihood(at: Positions) -> dict[str, list[float]]:
    """Sum over each text p(x), and its expectation under p, sum_x p(x)^2."""
    tokens = [at.texts[row].output_ids[n] for row, n in at.places]
    x_N = torch.tensor(tokens, device=at.p_NV.device)
    rows_N = torch.tensor([row for row, _ in at.places])

    def total(values_N: Tensor) -> list[float]:
        sums_B = torch.zeros(len(at.texts), dtype=torch.double)
        sums_B.index_add_(0, rows_N, values_N.double().cpu())
        return sums_B.tolist()

    own_N = at.p_NV.gather(1, x_N[:, None])[:, 0]
    expected_N = at.p_NV.square().sum(1)
    return {"own": total(own_N), "expected": total(expected_N)}
