"""Predict what a server accepts along given texts, by replaying the draft on them.

Legend: P prompts, D depths, N positions, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from draftsmith.core.penalties import Seen, penalised
from draftsmith.core.sampling import Sampling, probs
from draftsmith.drafts.load import Draft
from draftsmith.eval.alpha import Reader
from draftsmith.eval.bootstrap import Floats, PromptSums
from draftsmith.eval.formulas import Continuation
from draftsmith.eval.method import Method
from draftsmith.eval.predict import predict

_BATCH = 8
_NONE = 1e-6


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
    the sum expected if the target wrote them; about 1 if it did. own_tokens: of each text, before
    the first one that the target never writes there.
    """

    tokens: PromptSums
    accepted_PD: Floats
    reached_PD: Floats
    likelihood: PromptSums
    own_tokens: list[float]


def replay(case: Case, tokens: int) -> Replay:
    """Predict drafting `tokens` at a time along the case's texts."""
    method = Method.of(f"chain:{tokens}", case.rule)
    reader = Reader(
        case.target,
        {"draft": case.draft},
        case.sampling,
        [method],
        batch_size=_BATCH,
        drafts_see_penalties=False,
    )
    traces = reader.read(case.rows)["draft"]
    counts = predict(method.shape, method.verifier, case.sampling, traces)
    assert counts is not None
    emitted = [len(row.output_ids) for row in case.rows]
    return Replay(
        tokens=PromptSums.of(emitted, counts["target_calls"]),
        accepted_PD=np.array(counts["accepted_by_depth"]),
        reached_PD=np.array(counts["reached_by_depth"]),
        likelihood=PromptSums.of(traces.sums("own"), traces.sums("own_expected")),
        own_tokens=(traces.values["own"][0] > 0).cumprod(1).sum(1).tolist(),
    )


@torch.inference_mode()
def log_likelihoods(case: Case, samplings: Sequence[Sampling]) -> list[float]:
    """Of the case's texts under each sampling; a token without probability counts as one of
    `_NONE`.
    """
    sums = [0.0] * len(samplings)
    for row in case.rows:
        prompt = len(row.prompt_ids)
        ids_T = torch.tensor(row.ids, device=case.target.device)
        x_N1 = ids_T[prompt:, None]
        out = case.target(input_ids=ids_T[None, :-1], use_cache=False, logits_to_keep=len(x_N1))
        logits_NV = out.logits[0, -len(x_N1) :]
        prompt -= row.answered
        seen = Seen.along(row.ids[:prompt], row.ids[prompt:], logits_NV)
        for number, sampling in enumerate(samplings):
            p_NV = probs(penalised(logits_NV, sampling, seen), sampling)
            sums[number] += float(p_NV.gather(1, x_N1).clamp(min=_NONE).log().sum())
    return sums
