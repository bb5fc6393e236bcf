"""alpha: the expected acceptance of one draft token, from two teacher-forced forwards and no decoding loop.

A head is read as it drafts the first token below the root: at each position it gets the target's own state at the
position before and the token at it. What it makes of states that it predicted itself is measured by
decoding (accept@d).

Legend: B rows, T columns (tokens), C columns of one chunk, V vocabulary of the target, H hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypedDict

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from decode.propose.static_tree import fit_vocabulary
from drafts.heads.eagle import EagleHead
from drafts.heads.eagle3 import Eagle3Head
from drafts.heads.medusa import MedusaHeads
from drafts.load import Draft
from draftsmith_core.errors import RunError
from draftsmith_core.models import vocabulary_size
from draftsmith_core.progress import Tick, no_tick
from draftsmith_core.sampling import Sampling, acceptance, probs
from eval.headroom import RootMeasurement, RootStep, RootSums

# Logits held at once, as a number of elements (256 MiB in fp32). A chunk of columns is cut to fit.
MAX_LOGITS = 2**26


@dataclass(frozen=True)
class Continuation:
    """A prompt and what the target continued it with (new tokens only, EOS included when it came)."""

    id: str
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]


class AlphaMeasurement(TypedDict):
    """Per prompt: the sum over response positions of sum_x min(p, q), and the number of those positions.

    `roots`: by name of a root step, what `eval.headroom` found at some of these positions.
    """

    sum: list[float]
    count: list[int]
    roots: dict[str, RootMeasurement]


def _chunks(first: int, columns: int, width: int) -> list[tuple[int, int]]:
    """Column ranges: everything before `first`, whose logits are not needed, at once; then `width` at a time."""
    edges = [0, first] if first else [0]
    while edges[-1] < columns:
        edges.append(min(columns, edges[-1] + width))
    return list(zip(edges[:-1], edges[1:], strict=True))


class TargetOutput(Protocol):
    """The parts of a target forward that are used; `hidden_states` for heads only."""

    logits: Tensor
    hidden_states: tuple[Tensor, ...] | None


@dataclass
class ReadSoFar:
    """What a draft carries from one chunk of columns of a text to the next; a new one is for the first chunk.

    `alone_B` says which rows have a prompt of one token. Only in those does an EAGLE head read the first token, with a
    state of zeros, as in decoding; in the others it begins with the second.
    """

    alone_B: Tensor | None = None
    columns: int = 0
    cache: Any = None
    last: list[Tensor] | None = None  # the target's states at the last column so far


@torch.inference_mode()
def first_logits(
    draft: Draft, target_output: TargetOutput, ids_BT: Tensor, place: ReadSoFar | None = None, *, keep: int = 0
) -> Tensor:
    """The draft's logits `[B, T, V]` of the token after each of `ids_BT`, over the target's vocabulary: -inf for tokens
    that the draft does not have, without its padding beyond the vocabulary.

    `target_output` is the target's forward of the same tokens, for a head with `output_hidden_states`. A text may
    come in chunks of columns, with one `place` for all of them. Rows may be padded on the right. Logits of the last
    `keep` columns are returned, of all when it is 0.
    """
    place = ReadSoFar() if place is None else place
    vocabulary = target_output.logits.shape[-1]
    if isinstance(draft, PreTrainedModel):
        logits = _model_logits(draft, ids_BT, place, keep)
    else:
        assert target_output.hidden_states is not None
        states = [target_output.hidden_states[layer] for layer in draft.hidden_layers]
        before = [torch.zeros_like(state[:, :1]) for state in states] if place.last is None else place.last
        # A head pairs each token with the state it was predicted from, one position earlier.
        chosen_from = [torch.cat([b, state[:, :-1]], dim=1) for b, state in zip(before, states, strict=True)]
        place.last = [state[:, -1:] for state in states]
        if isinstance(draft, EagleHead | Eagle3Head):
            logits = _eagle_logits(draft, chosen_from, ids_BT, place)
        elif isinstance(draft, MedusaHeads):
            logits = draft(chosen_from[0])[:, :, 0]
        else:
            logits = draft(chosen_from[0], ids_BT.unsqueeze(2))
    place.columns += ids_BT.shape[1]
    return fit_vocabulary(logits[:, -keep:], vocabulary)


def _model_logits(draft: PreTrainedModel, ids_BT: Tensor, place: ReadSoFar, keep: int) -> Tensor:
    # A token that the draft has no embedding for is read as its last, as in decoding.
    ids_BT = ids_BT.to(draft.device).clamp(max=vocabulary_size(draft) - 1)
    end = place.columns + ids_BT.shape[1]
    out = draft(
        input_ids=ids_BT,
        # Padding is on the right, where causal attention never sees it, so that nothing need be masked.
        attention_mask=torch.ones(len(ids_BT), end, dtype=torch.long, device=ids_BT.device),
        position_ids=torch.arange(place.columns, end, device=ids_BT.device).expand_as(ids_BT),
        past_key_values=place.cache,
        use_cache=True,
        logits_to_keep=keep,
    )
    place.cache = out.past_key_values
    logits: Tensor = out.logits
    return logits


def _eagle_logits(head: EagleHead | Eagle3Head, states: list[Tensor], ids_BT: Tensor, place: ReadSoFar) -> Tensor:
    place.cache = DynamicCache() if place.cache is None else place.cache
    features_BTH = head.fuse(states) if isinstance(head, Eagle3Head) else states[0]
    rows, columns, past = *ids_BT.shape, place.columns
    query_T1 = torch.arange(past, past + columns, device=ids_BT.device).unsqueeze(1)
    key_P = torch.arange(past + columns, device=ids_BT.device)
    alone_B111 = torch.zeros(rows, dtype=torch.bool) if place.alone_B is None else place.alone_B
    alone_B111 = alone_B111.to(ids_BT.device).view(-1, 1, 1, 1)
    # Key 0 stays visible to query 0, because attention over no key at all is NaN.
    sees_B1TP = (key_P <= query_T1) & ((key_P > 0) | (query_T1 == 0) | alone_B111)
    logits, _ = head(ids_BT, features_BTH, sees_B1TP, query_T1.T, place.cache)
    return head.to_target(logits) if isinstance(head, Eagle3Head) else logits


@torch.inference_mode()
def _batch_sums(
    target: PreTrainedModel,
    draft: Draft,
    rows: Sequence[Continuation],
    sampling: Sampling,
    max_logits: int,
    look: Callable[[int, Tensor, Tensor], None],
    names: tuple[str, str],
) -> list[float]:
    """alpha summed over the response positions of each row; `look(first column, p_BCV, q_BCV)` sees every chunk."""
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
    # All Medusa heads are computed, though only the first is read.
    held = len(rows) * vocabulary_size(target) * (len(draft) if isinstance(draft, MedusaHeads) else 1)
    is_model = isinstance(draft, PreTrainedModel)
    # A head cannot leave out the logits of the part before `first`, which is chunked like the rest.
    chunks = _chunks(first if is_model else 0, columns, max(1, max_logits // held))
    sums_B = torch.zeros(len(rows), dtype=torch.float64)
    positions_BT = torch.arange(columns, device=ids_BT.device).expand_as(ids_BT)
    place = ReadSoFar(alone_B=torch.tensor([len(row.prompt_ids) == 1 for row in rows]))
    cache: Any = None
    for start, stop in chunks:
        keep = 1 if stop <= first else 0
        out = target(
            input_ids=ids_BT[:, start:stop],
            attention_mask=mask_BT[:, :stop],
            position_ids=positions_BT[:, start:stop],
            past_key_values=cache,
            use_cache=True,
            output_hidden_states=not is_model,
            logits_to_keep=keep,
        )
        cache = out.past_key_values
        draft_BCV = first_logits(draft, out, ids_BT[:, start:stop], place, keep=keep)
        if keep:
            continue
        for name, logits in zip(names, (out.logits, draft_BCV), strict=True):
            _check_finite(name, logits, wanted_BT[:, start:stop], rows)
        p_BCV, q_BCV = probs(out.logits, sampling), probs(draft_BCV.to(out.logits.device), sampling)
        look(start, p_BCV, q_BCV)
        # A sum of fp32 probabilities may exceed 1 by its rounding; a probability may not.
        accepted_BC = acceptance(p_BCV, q_BCV).double().clamp(max=1.0).cpu()
        sums_B += accepted_BC.masked_fill(~wanted_BT[:, start:stop], 0.0).sum(-1)
    return [float(total) for total in sums_B]


def _check_finite(name: str, logits_BCV: Tensor, wanted_BC: Tensor, rows: Sequence[Continuation]) -> None:
    """RunError that names model and prompt where a logit is NaN or +inf, or all of them are -inf.

    -inf alone is right: a token that the model does not have. At temperature 0 a NaN would pass unseen as the argmax.
    """
    # A NaN or +inf comes out of max() as itself; only its [B, C] results are looked at.
    broken_BC = ~logits_BCV.amax(-1).isfinite().cpu() & wanted_BC
    if broken_BC.any():
        row = rows[int(broken_BC.any(1).nonzero()[0])]
        raise RunError(f"{name}: not finite logits on prompt {row.id}; try --dtype float32, or check its weights")


def alpha_sums(
    target: PreTrainedModel,
    draft: Draft,
    rows: Sequence[Continuation],
    sampling: Sampling,
    *,
    batch_size: int,
    max_logits: int = MAX_LOGITS,
    roots: Sequence[RootStep] = (),
    seed: int = 0,
    names: tuple[str, str] = ("the target", "the draft"),
    tick: Tick = no_tick,
) -> AlphaMeasurement:
    """Per row: the sum over response positions of sum_x min(p, q), in fp64, and the number of those positions.

    The positions are those that predict a response token, EOS included; `rows` hold target continuations, so the mean
    over them is over the target's own distribution. Never more than about `max_logits` logits per model are held at
    once. `roots` are simulated at some of the positions (`eval.headroom`), from `seed`. Raises RunError with the
    model, of `names` (target, draft), and the prompt where logits are not finite.
    """
    lengths = [(len(row.prompt_ids), len(row.output_ids)) for row in rows]
    found = RootSums(roots, lengths, [row.id for row in rows], vocabulary_size(target), seed)
    sums: list[float] = []
    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size]
        sums += _batch_sums(target, draft, batch, sampling, max_logits, partial(found.add, start), names)
        tick(len(batch))
    return AlphaMeasurement(sum=sums, count=[len(row.output_ids) for row in rows], roots=found.sums)
