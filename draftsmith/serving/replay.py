"""Predict what a server accepts along given texts, by replaying the draft on them.

Legend: P prompts, D depths, N positions, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from draftsmith.core.sampling import Sampling, probs
from draftsmith.drafts.load import Draft
from draftsmith.eval.acceptance import Continuation, Positions
from draftsmith.eval.bootstrap import Floats, PromptSums
from draftsmith.eval.method import Method
from draftsmith.eval.predict import predict
from draftsmith.eval.reading import read_traces

_BATCH = 8
_NONE = 1e-6


@dataclass(frozen=True)
class Penalty:
    """What a server changes in the target's logits of tokens that are there already.

    repetition: divides those above 0 and multiplies the others, of prompt and answer. presence,
    frequency: taken off a token of the answer, once or for each time it is there.
    """

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    def changed(self, logits_CV: Tensor, ids_T: Tensor, prompt: int) -> Tensor:
        """The logits behind each of the last C tokens of a text; its first `prompt` are the
        prompt.
        """
        answer_A1 = ids_T[prompt:, None]
        rows, vocabulary = logits_CV.shape
        counts_AV = torch.zeros(len(answer_A1), vocabulary, dtype=torch.int, device=ids_T.device)
        counts_AV = counts_AV.scatter_(1, answer_A1, 1).cumsum(0)
        before = max(0, rows - len(answer_A1))
        counts_CV = pad(counts_AV, (0, 0, before, 0))[-rows:]
        seen_CV = counts_CV > 0
        off_CV = self.presence * seen_CV + self.frequency * counts_CV
        seen_CV[:, ids_T[:prompt]] = True
        divided_CV = torch.where(
            logits_CV > 0, logits_CV / self.repetition, logits_CV * self.repetition
        )
        return torch.where(seen_CV, divided_CV, logits_CV) - off_CV


@dataclass(frozen=True)
class Case:
    """What a prediction is made from.

    rows: the served texts. rule: verifier by which drafted tokens stay. read_ids: the prompts as
    the server read them. samplings: other samplings that the server may use. penalty: of the
    target's logits.
    """

    target: PreTrainedModel
    draft: Draft
    rows: Sequence[Continuation]
    sampling: Sampling
    rule: str
    read_ids: Sequence[Sequence[int]]
    samplings: Sequence[Sampling]
    penalty: Penalty | None = None


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
    with _penalised(case):
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


@contextmanager
def _penalised(case: Case) -> Iterator[None]:
    """While open, the target's logits have the case's penalty. Rows are read in order."""
    penalty = case.penalty
    if penalty is None:
        yield
        return
    # The last token of a row's prompt is the first of the answer.
    prompts = iter([len(row.prompt_ids) - 1 for row in case.rows])

    def change(_: object, args: object, options: dict[str, Tensor], output: Any) -> None:
        for ids_T, logits_CV in zip(options["input_ids"], output.logits, strict=True):
            logits_CV.copy_(penalty.changed(logits_CV, ids_T, next(prompts)))

    handle = case.target.register_forward_hook(change, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@torch.inference_mode()
def log_likelihoods(case: Case, penalties: Sequence[Penalty]) -> list[float]:
    """Of the case's texts under each penalty; a token without probability counts as one of
    `_NONE`.
    """
    sums = [0.0] * len(penalties)
    for row in case.rows:
        prompt = len(row.prompt_ids) - 1
        ids_T = torch.tensor([*row.prompt_ids, *row.output_ids], device=case.target.device)
        x_N1 = ids_T[prompt + 1 :, None]
        out = case.target(input_ids=ids_T[None, :-1], use_cache=False, logits_to_keep=len(x_N1))
        logits_NV = out.logits[0, -len(x_N1) :]
        for number, penalty in enumerate(penalties):
            p_NV = probs(penalty.changed(logits_NV, ids_T[:-1], prompt), case.sampling)
            sums[number] += float(p_NV.gather(1, x_N1).clamp(min=_NONE).log().sum())
    return sums


def _likelihood(at: Positions) -> dict[str, list[float]]:
    """Sum over each text p(x), and its expectation under p, sum_x p(x)^2."""
    tokens = list(chain.from_iterable(text.output_ids for text in at.texts))
    x_N = torch.tensor(tokens, device=at.p_NV.device)
    own_N = at.p_NV.gather(1, x_N[:, None])[:, 0]
    return {"own": at.sums(own_N), "expected": at.sums(at.p_NV.square().sum(1))}
