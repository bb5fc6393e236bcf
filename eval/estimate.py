"""alpha: the expected acceptance of one draft token, from two teacher-forced forwards and no decoding loop.

Legend: B rows, T columns (tokens), C columns of one chunk, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.errors import RunError
from draftsmith.models import vocabulary_size
from draftsmith.progress import Tick, no_tick
from draftsmith.sampling import Sampling, acceptance, probs

# Logits held at once, as a number of elements (256 MiB in fp32). A chunk of columns is cut to fit.
MAX_LOGITS = 2**26


@dataclass(frozen=True)
class Continuation:
    """A prompt and what the target continued it with (new tokens only, EOS included when it came)."""

    id: str
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]


class AlphaCell(TypedDict):
    """Per prompt: the sum over response positions of sum_x min(p, q), and the number of those positions."""

    sum: list[float]
    count: list[int]


def _chunks(first: int, columns: int, width: int) -> list[tuple[int, int]]:
    """Column ranges: everything before `first` (whose logits nobody needs) at once, then `width` at a
    time."""
    edges = [0, first] if first else [0]
    while edges[-1] < columns:
        edges.append(min(columns, edges[-1] + width))
    return list(zip(edges[:-1], edges[1:], strict=True))


def _logits(
    model: PreTrainedModel,
    ids_BT: Tensor,
    mask_BT: Tensor,
    chunks: Sequence[tuple[int, int]],
    first: int,
) -> Iterator[Tensor]:
    """Logits `[B, C, V]` chunk by chunk on one growing cache; only the last column of the part before
    `first`."""
    cache: Any = None
    positions_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
    for start, stop in chunks:
        out = model(
            input_ids=ids_BT[:, start:stop],
            attention_mask=mask_BT[:, :stop],
            position_ids=positions_BT[:, start:stop],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1 if stop <= first else 0,
        )
        cache = out.past_key_values
        yield out.logits


@torch.inference_mode()
def _batch_sums(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    rows: Sequence[Continuation],
    sampling: Sampling,
    max_logits: int,
) -> list[float]:
    # The last token predicts nothing that is measured, so it is no input.
    tokens = [[*row.prompt_ids, *row.output_ids][:-1] for row in rows]
    columns = max(map(len, tokens))
    ids_BT = torch.zeros(len(rows), columns, dtype=torch.long)
    mask_BT = torch.zeros_like(ids_BT)
    wanted_BT = torch.zeros(len(rows), columns, dtype=torch.bool)
    for b, (row, row_tokens) in enumerate(zip(rows, tokens, strict=True)):
        ids_BT[b, : len(row_tokens)] = torch.tensor(row_tokens)
        mask_BT[b, : len(row_tokens)] = 1
        wanted_BT[b, len(row.prompt_ids) - 1 : len(row_tokens)] = True
    ids_BT, mask_BT = ids_BT.to(target.device), mask_BT.to(target.device)
    first = min(len(row.prompt_ids) for row in rows) - 1
    width = max(1, max_logits // (len(rows) * vocabulary_size(target)))
    chunks = _chunks(first, columns, width)
    sums_B = torch.zeros(len(rows), dtype=torch.float64)
    pair = zip(
        _logits(target, ids_BT, mask_BT, chunks, first),
        _logits(draft, ids_BT, mask_BT, chunks, first),
        strict=True,
    )
    for (start, stop), (target_BCV, draft_BCV) in zip(chunks, pair, strict=True):
        if stop <= first:
            continue
        accepted_BC = acceptance(probs(target_BCV, sampling), probs(draft_BCV, sampling))
        # A sum of fp32 probabilities may exceed 1 by its rounding; a chance may not.
        accepted_BC = accepted_BC.double().clamp(max=1.0).cpu()
        sums_B += accepted_BC.masked_fill(~wanted_BT[:, start:stop], 0.0).sum(-1)
    return [float(total) for total in sums_B]


def alpha_sums(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    rows: Sequence[Continuation],
    sampling: Sampling,
    *,
    batch_size: int,
    max_logits: int = MAX_LOGITS,
    tick: Tick = no_tick,
) -> AlphaCell:
    """Per row: the sum over response positions of sum_x min(p, q), in fp64, and the number of those
    positions.

    The positions are those that predict a response token, EOS included; `rows` hold target continuations, so
    the mean over them is over the target's own distribution. Never more than about `max_logits` logits
    a model are held at once. Raises RunError when a model's probabilities are not finite.
    """
    sums: list[float] = []
    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size]
        sums += _batch_sums(target, draft, batch, sampling, max_logits)
        tick(len(batch))
    for row, total in zip(rows, sums, strict=True):
        if total != total:
            raise RunError(f"alpha: probabilities are not finite on prompt {row.id}; try --dtype float32")
    return AlphaCell(sum=sums, count=[len(row.output_ids) for row in rows])
