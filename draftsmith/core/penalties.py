"""Penalties of tokens that a text holds already: the one definition, for target and drafts.

Legend: B rows, N nodes or positions, M nodes of a tree with the root, V vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.core.sampling import Sampling


class Seen(NamedTuple):
    """The tokens before some logits `[..., V]`: whether the prompt holds each, and how often the
    answer does; each `[..., V]`.
    """

    prompt: Tensor
    answer: Tensor

    @staticmethod
    def of(
        prompts: Sequence[Sequence[int]], vocabulary: int, sampling: Sampling, device: torch.device
    ) -> "Seen | None":
        """Return `[B, V]` behind prompts; None if the sampling has no penalty."""
        if not sampling.penalises:
            return None
        prompt_BV = torch.zeros(len(prompts), vocabulary, dtype=torch.bool, device=device)
        for seen_V, prompt in zip(prompt_BV, prompts, strict=True):
            seen_V[list(prompt)] = True
        return Seen(prompt_BV, torch.zeros_like(prompt_BV, dtype=torch.int16))

    @staticmethod
    def along(prompt_ids: Sequence[int], answer_ids: Sequence[int], like_NV: Tensor) -> "Seen":
        """Return `[N, V]` before each of the last N tokens of an answer."""
        positions, vocabulary = like_NV.shape
        device = like_NV.device
        prompt_V = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        prompt_V[list(prompt_ids)] = True
        before_A1 = torch.tensor(answer_ids[:-1], dtype=torch.long, device=device).unsqueeze(1)
        counts_AV = torch.zeros(len(answer_ids), vocabulary, dtype=torch.int16, device=device)
        counts_AV[1:].scatter_(1, before_A1, 1)
        counts_AV = counts_AV.cumsum(0, dtype=torch.int16)
        return Seen(prompt_V.expand_as(like_NV), counts_AV[len(answer_ids) - positions :])

    def read(self, emitted: Sequence[Sequence[int]]) -> None:
        """Append tokens to the answers, by row."""
        for answer_V, tokens in zip(self.answer, emitted, strict=True):
            ids = torch.tensor(list(tokens), dtype=torch.long, device=answer_V.device)
            answer_V.index_add_(0, ids, torch.ones_like(ids, dtype=answer_V.dtype))

    def rows(self, rows: Sequence[int]) -> "Seen":
        """Return these rows, in this order."""
        return Seen(self.prompt[list(rows)], self.answer[list(rows)])

    def below(self, answer_BNV: Tensor, tokens_BNK: Tensor, exists: Tensor) -> "Seen":
        """Return `[B, N, V]` at nodes: what stands before each, and K tokens more where they
        exist.
        """
        counts_BNV = answer_BNV.scatter_add(
            2, tokens_BNK.clamp(min=0), exists.to(answer_BNV.dtype).expand_as(tokens_BNK)
        )
        return Seen(self.prompt.unsqueeze(1), counts_BNV)

    def in_tree(self, tokens_BM: Tensor, sees_RMM: Tensor) -> "Seen":
        """Return `[B, M, V]` at the nodes of a tree. Its root is the last token that was read."""
        nodes = tokens_BM.shape[1]
        path_BMM = tokens_BM.unsqueeze(1).expand(-1, nodes, -1)
        exists_BMM = sees_RMM & (path_BMM >= 0)
        return self.below(self.answer.unsqueeze(1).expand(-1, nodes, -1), path_BMM, exists_BMM)


def penalised(logits: Tensor, sampling: Sampling, seen: Seen | None) -> Tensor:
    """Return logits `[..., V]`, in fp32 if there is a penalty: transformers' repetition penalty for
    tokens of prompt and answer, then vLLM's presence and frequency penalties for those of the
    answer.
    """
    if seen is None:
        return logits
    logits = logits.float()
    factor = sampling.repetition_penalty
    divided = torch.where(logits > 0, logits / factor, logits * factor)
    logits = torch.where(seen.prompt | (seen.answer > 0), divided, logits)
    off = sampling.presence_penalty * (seen.answer > 0) + sampling.frequency_penalty * seen.answer
    return logits - off
