"""Run one model over blocks of tokens behind cached prefixes: make masks and positions, keep the
cache.

Legend: B rows, P slots of the prefix, T slots of a block, q slots that are queries in this forward
(the last q of the T), V vocabulary, H hidden size, R = 1 when all rows share a block, else B. A
slot is the place of one token in the cache.

A block is stored behind each row's prefix. The *offset* of a slot is its position minus the row's
base; siblings of a tree share one. If all rows are equally long, a query's distance to a prefix
slot depends only on that slot's distance from the end of the prefix. The mask of a static tree is
therefore built once; each step takes a view.
"""

import copy
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.core.hidden_states import forward_with_states
from draftsmith.core.models import text_config
from draftsmith.core.transformers_api import Cache, cache_name
from draftsmith.decode.cache import TreeCache
from draftsmith.decode.head_forward import HeadForward, head_forward
from draftsmith.decode.kernel_forward import Forwarded, Masks, joined
from draftsmith.decode.llama_forward import LeanForward, lean_forward
from draftsmith.decode.packed_weights import Packs

# Tokens of a prompt per forward, which bounds the memory of masks and activations.
_CHUNK = 256
Result = TypeVar("Result")


def call_directly(name: Hashable, function: Callable[..., Result], *inputs: object) -> Result:
    """`Runner.call` where nothing is recorded."""
    return function(*inputs)


def additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where allowed, else the most negative finite value. Eager attention adds its mask, so a
    bool would be wrong.
    """
    least = torch.finfo(dtype).min
    zeros = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return zeros.masked_fill_(~allowed, least)


def block_positions(offsets_RT: Tensor, state_B3: Tensor) -> Tensor:
    """Positions of a block's slots in each row, whose `Runner.state_B3` this is."""
    length_B1 = state_B3[:, :1]
    lead_B1 = state_B3[:, 1:2]
    return offsets_RT + length_B1 - lead_B1


def seen_slots(
    position_BT: Tensor, sees_RqT: Tensor, state_B3: Tensor, slots: int, window: int | None
) -> Tensor:
    """Return which of the first `slots` slots (P) each query sees, `[B, q, P]`: a row's prefix,
    then the block as its tree says.
    """
    queries, total = sees_RqT.shape[1:]
    length_B1 = state_B3[:, :1]
    lead_B1 = state_B3[:, 1:2]
    slot_P = torch.arange(slots, device=state_B3.device)
    within_P = slot_P - state_B3[0, 2]
    inside_P = (within_P >= 0) & (within_P < total)
    within_P = within_P.clamp(0, total - 1)
    # A padding slot is seen by itself only: a query with nothing to see would give NaN.
    query_q = torch.arange(total - queries, total, device=state_B3.device)
    itself_qP = query_q.unsqueeze(1) == within_P
    unpadded_B1P = (within_P >= lead_B1).unsqueeze(1)
    block_BqP = sees_RqT.index_select(2, within_P) & inside_P & (unpadded_B1P | itself_qP)
    seen_BqP = block_BqP | (slot_P < length_B1).unsqueeze(1)
    if window is not None:
        position_BP = torch.where(inside_P, position_BT.index_select(1, within_P), slot_P)
        query_Bq = position_BT[:, total - queries :]
        distance_BqP = query_Bq.unsqueeze(2) - position_BP.unsqueeze(1)
        seen_BqP = seen_BqP & (distance_BqP < window)
    return seen_BqP


class Block:
    """Input of one forward: the offsets of all slots so far, and `sees_RqT`, what each query may
    attend to.

    Every query must see itself, else attention gives NaN. A static block (one tree for all steps)
    caches its masks.
    """

    def __init__(self, offsets_RT: Tensor, sees_RqT: Tensor, *, static: bool) -> None:
        self.sees_RqT = sees_RqT
        self.offsets_RT = offsets_RT
        self.queries = sees_RqT.shape[1]
        self.slots = offsets_RT.shape[1]
        self.offsets_Rq = offsets_RT[:, self.slots - self.queries :].contiguous()
        self.static = static
        self._views: dict[tuple[int | None, torch.dtype], tuple[int, Tensor]] = {}

    @cached_property
    def max_offset(self) -> int:
        return int(self.offsets_Rq.max())

    def aligned_mask(
        self, prefix: int, capacity: int, window: int | None, dtype: torch.dtype
    ) -> Tensor:
        """Return the mask `[1, 1, q, prefix + T]` of rows that all have `prefix` slots; cached per
        capacity.
        """
        room, mask = self._views.get((window, dtype), (-1, None))
        if mask is None or room < capacity:
            room = capacity
            state_13 = torch.tensor([[room, 0, room]], device=self.sees_RqT.device)
            position_1T = block_positions(self.offsets_RT, state_13)
            slots = room + self.slots
            seen_1qS = seen_slots(position_1T, self.sees_RqT, state_13, slots, window)
            mask = additive(seen_1qS.unsqueeze(1), dtype)
            self._views[window, dtype] = (room, mask)
        view = mask[..., room - prefix :]
        if view.device.type == "cpu":
            return view
        # CUDA's attention checks the strides of a mask but not the address that it begins at. A
        # copy begins at an aligned one; `contiguous` leaves a view of one query where it is.
        return view.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class BlockForward:
    """The forward of one block as a function of tensors, for `Runner.call`.

    run(tokens_Bq, inputs, features_BqH): as `Runner.forward`. name: differs if `run` differs in
    anything but the shapes of what it is given.
    """

    run: Callable[..., Forwarded]
    inputs: tuple[Tensor, ...] = ()
    name: tuple[object, ...] = ()


class Runner:
    """One model and its cache over the rows of one `generate` call.

    `lengths[b]` is the number of slots kept for row b. A step is `open`, one or more `forward`,
    then `keep`.
    """

    takes_absent = False
    """Whether `forward` takes -1 for tokens that a row lacks."""

    def __init__(
        self,
        model: PreTrainedModel,
        windows: dict[str, int | None],
        limit: int | None,
        packs: Packs | None = None,
    ) -> None:
        """packs: `packs_of(model)`; None for the model's own forward only."""
        self.model = model
        self.windows = windows
        self.limit = limit
        self.packs = packs
        embedding = model.get_input_embeddings()
        self.device: torch.device = next(embedding.parameters()).device
        self.dtype: torch.dtype = model.dtype  # of masks
        self.lengths: list[int] = []
        self._trims_logits = "logits_to_keep" in signature(model.forward).parameters
        self._cache_name = cache_name(model.forward)
        self._lean: LeanForward | HeadForward | None = None
        if packs is not None:
            lean = lean_forward if isinstance(model, PreTrainedModel) else head_forward
            self._lean = lean(model, packs)
            if self._lean is None:
                packs.prepare(model)
            else:
                self.dtype = self._lean.dtype

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        room: int,
        hidden_layers: Sequence[int] = (),
        features_BTH: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Cache all prompts and reserve `room` slots behind the longest. Return states `[B, T, H]`
        of `hidden_layers`. features_BTH: as for `forward`.

        Rows are left-aligned: padding comes after a row's tokens, where causal attention does not
        look, so that the model's own masks are right. A model reads equal prompts once.
        """
        self.lengths = [len(prompt) for prompt in prompts]
        longest = max(self.lengths)
        config = text_config(self.model)
        self.cache = self._new_cache(int(config.num_hidden_layers), longest + room)
        if longest == 0:
            shape = (len(prompts), 0, int(config.hidden_size))
            nothing = torch.zeros(shape, dtype=self.model.dtype, device=self.device)
            return (nothing,) * len(hidden_layers)
        read = list(prompts)
        step = longest
        # A head wrapped as a model takes its features for whole prompts at once, a row for each.
        if isinstance(self.model, PreTrainedModel):
            read = list(dict.fromkeys(map(tuple, prompts)))
            step = _CHUNK
        padded = [[*prompt, *[0] * (longest - len(prompt))] for prompt in read]
        tokens_BT = torch.tensor(padded, device=self.device)
        self.cache.reuse(len(read))
        parts = []
        for begin in range(0, longest, step):
            chunk_BT = tokens_BT[:, begin : begin + step]
            parts.append(self._prefill_chunk(chunk_BT, begin, hidden_layers, features_BTH))
        hidden = joined(parts, dim=1)
        if len(read) == len(prompts):
            return hidden
        rows = [read.index(tuple(prompt)) for prompt in prompts]
        self.cache.repeat_rows(rows)
        return tuple(states_BTH[rows] for states_BTH in hidden)

    def _new_cache(self, layers: int, capacity: int) -> TreeCache:
        return TreeCache(layers, capacity)

    def _prefill_chunk(
        self,
        tokens_BT: Tensor,
        begin: int,
        hidden_layers: Sequence[int],
        features_BTH: Tensor | None,
    ) -> tuple[Tensor, ...]:
        end = begin + tokens_BT.shape[1]
        self.cache.column = begin
        positions_1T = torch.arange(begin, end, device=self.device).unsqueeze(0)
        # The logits are not used: the last prompt token is forwarded in the first step.
        masks: Masks = {"": None}
        if self._lean is not None:
            masks = {
                kind: self._causal_mask(begin, end, window) for kind, window in self.windows.items()
            }
        _, hidden = self._run(
            tokens_BT,
            positions_1T,
            end - 1,
            masks,
            self.cache,
            1,
            hidden_layers,
            features_BTH,
            prefill=True,
        )
        return hidden

    def _causal_mask(self, begin: int, end: int, window: int | None) -> Tensor | None:
        if not begin and (window is None or end <= window):
            return None
        slots_C = torch.arange(end, device=self.device)
        distance_qC = slots_C[begin:].unsqueeze(1) - slots_C
        allowed_qC = distance_qC >= 0
        if window is not None:
            allowed_qC &= distance_qC < window
        return additive(allowed_qC[None, None], self.dtype)

    def open(self, lead: Sequence[int] | None = None) -> None:
        """Begin a step in which the first `lead[b]` slots of row b's blocks are padding (see
        `draft_model`).
        """
        self.column = max(self.lengths)
        leads = lead or [0] * len(self.lengths)
        self._aligned = not any(leads) and min(self.lengths) == self.column
        pairs = zip(self.lengths, leads, strict=True)
        # Of each row its length and its padding slots, and the column where blocks begin.
        state = [[length, ahead, self.column] for length, ahead in pairs]
        self.state_B3 = torch.tensor(state, device=self.device)

    def open_pending(self, pending: Sequence[Sequence[int]]) -> tuple[Tensor, list[int]]:
        """Begin a step with uncached tokens of each row. Return them right-aligned, `[B, W]`, and
        the number of padding slots of each row.
        """
        width = max(map(len, pending))
        lead = [width - len(tokens) for tokens in pending]
        self.open(lead)
        padded = [[0] * count + list(tokens) for count, tokens in zip(lead, pending, strict=True)]
        return torch.tensor(padded, device=self.device), lead

    def forward(
        self,
        tokens_Bq: Tensor,
        block: Block,
        keep_logits: int = 0,
        hidden_layers: Sequence[int] = (),
        features_BqH: Tensor | None = None,
    ) -> Forwarded:
        """Forward and cache the queries of `block`. Return logits `[B, keep_logits or q, V]` and
        hidden states.

        features_BqH: one feature per token; only for a head wrapped as a model.
        """
        self.cache.column = self.column + block.slots - block.queries
        if self._aligned:
            positions = block.offsets_Rq + self.column
        else:
            positions = block_positions(block.offsets_Rq, self.state_B3).clamp_(min=0)
        top = self.column + block.max_offset
        if self.limit is not None and top >= self.limit:
            # Predictions past the context limit are past max_new_tokens too and are discarded.
            # Clamp positions, so that a learned position table is not read past its end.
            top = self.limit - 1
            positions = positions.clamp(max=top)
        masks = {kind: self._mask(block, window) for kind, window in self.windows.items()}
        return self._run(
            tokens_Bq, positions, top, masks, self.cache, keep_logits, hidden_layers, features_BqH
        )

    def bind(
        self, block: Block, keep_logits: int = 0, hidden_layers: Sequence[int] = ()
    ) -> BlockForward:
        """Return `forward` of this block as a function that `call` can record."""

        def run(
            tokens_Bq: Tensor, _: tuple[Tensor, ...], features_BqH: Tensor | None = None
        ) -> Forwarded:
            return self.forward(
                tokens_Bq,
                block,
                keep_logits,
                hidden_layers=hidden_layers,
                features_BqH=features_BqH,
            )

        return BlockForward(run)

    # `decode.compiled` records a call under its name.
    call = staticmethod(call_directly)

    def keep(self, slots: Sequence[Sequence[int]]) -> None:
        """Append each row's listed slots to its prefix, in order; drop the step's other slots."""
        moves = []
        for row, path in enumerate(slots):
            length = self.lengths[row]
            moves += [(row, slot, length + index) for index, slot in enumerate(path)]
            self.lengths[row] = length + len(path)
        self.cache.keep(self.column, moves)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Continue with these rows, in this order. No row may move towards the end of the batch."""
        self.lengths = [self.lengths[row] for row in rows]
        self.cache.select_rows(rows, self.lengths)

    def remove(self, ended: Sequence[int]) -> list[int]:
        """Remove rows from the batch; the last rows move into the gaps. Return the old indices in
        the new order.
        """
        rows = len(self.lengths) - len(ended)
        movers = [row for row in range(rows, len(self.lengths)) if row not in ended]
        order = [movers.pop() if row in ended else row for row in range(rows)]
        self.select_rows(order)
        return order

    def fresh(self) -> "Runner":
        """Return an empty runner of the same model; prefill new rows in it, then `join` it."""
        other = copy.copy(self)
        other.lengths = []
        return other

    def join(self, other: "Runner") -> None:
        """Append a copy of the rows of another runner of the same model."""
        self.cache.join(other.cache, other.lengths)
        self.lengths += other.lengths

    def _mask(self, block: Block, window: int | None) -> Tensor | None:
        if self._aligned and block.slots == 1 and (window is None or self.column + 1 <= window):
            # One query that sees everything needs no mask, which allows the fastest kernel.
            return None
        if self._aligned and block.static:
            return block.aligned_mask(self.column, self.cache.capacity, window, self.dtype)
        position_BT = block_positions(block.offsets_RT, self.state_B3)
        slots = self.column + block.slots
        seen_BqP = seen_slots(position_BT, block.sees_RqT, self.state_B3, slots, window)
        return additive(seen_BqP.unsqueeze(1), self.dtype)

    def _run(
        self,
        tokens_Bq: Tensor,
        positions_Bq: Tensor,
        top: int,
        masks: Masks,
        cache: Cache,
        keep_logits: int,
        hidden_layers: Sequence[int],
        features_BqH: Tensor | None,
        prefill: bool = False,
    ) -> Forwarded:
        """The lean forward, else the model's own. top: the highest position. masks: by kind of
        layer. prefill: the logits are not used.
        """
        options: dict[str, Any] = {}
        if features_BqH is not None:
            # What a head wrapped as a model takes, and a language model does not.
            options["features_BTH"] = features_BqH
        if self._lean is not None:
            return self._lean.run(
                tokens_Bq,
                positions_Bq,
                top,
                masks,
                cache,
                keep_logits,
                hidden_layers,
                prefill=prefill,
                **options,
            )
        if self._trims_logits:
            options["logits_to_keep"] = keep_logits
        options[self._cache_name] = cache
        # A model with one kind of layer takes the mask itself.
        (mask, *others) = masks.values()
        output, hidden = forward_with_states(
            self.model,
            hidden_layers,
            input_ids=tokens_Bq,
            attention_mask=masks if others else mask,
            position_ids=positions_Bq,
            use_cache=True,
            **options,
        )
        return output.logits[:, -keep_logits:], hidden
