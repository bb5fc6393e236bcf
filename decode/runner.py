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
from collections.abc import Mapping, Sequence
from functools import cached_property
from inspect import signature

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from decode.cache import TreeCache
from decode.llama_forward import lean_forward
from decode.packed_weights import Packs
from decode.recorded.steps import StaticForward, StaticSteps, additive, own_forward
from draftsmith_core.models import text_config

# Tokens of a prompt per forward, which bounds the memory of masks and activations.
_CHUNK = 256


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
        self.offsets_Rq = offsets_RT[:, offsets_RT.shape[1] - self.queries :].contiguous()
        self.static = static
        self._views: dict[tuple[int | None, torch.dtype], tuple[int, Tensor]] = {}

    @cached_property
    def max_offset(self) -> int:
        return int(self.offsets_Rq.max())

    def within(self, window: int | None) -> Tensor:
        """Return `sees_RqT` restricted to a sliding window."""
        if window is None:
            return self.sees_RqT
        distance_RqT = self.offsets_Rq.unsqueeze(2) - self.offsets_RT.unsqueeze(1)
        return self.sees_RqT & (distance_RqT < window)

    def aligned_mask(
        self, prefix: int, capacity: int, window: int | None, dtype: torch.dtype
    ) -> Tensor:
        """Return the mask `[1, 1, q, prefix + T]` of rows that all have `prefix` slots; cached per
        capacity.
        """
        room, mask = self._views.get((window, dtype), (-1, None))
        if mask is None or room < capacity:
            room = capacity
            far_1P = torch.arange(room, 0, -1, device=self.sees_RqT.device)
            near_qP = torch.ones(self.queries, room, dtype=torch.bool, device=far_1P.device)
            if window is not None:
                near_qP = self.offsets_Rq[0].unsqueeze(1) + far_1P < window
            mask = additive(torch.cat([near_qP, self.within(window)[0]], dim=1)[None, None], dtype)
            self._views[window, dtype] = (room, mask)
        view = mask[..., room - prefix :]
        # CUDA's memory-efficient attention checks the strides of a mask but not the address it
        # begins at.
        return view if view.device.type == "cpu" else view.contiguous()


class Runner:
    """One model and its cache over the rows of one `generate` call.

    `lengths[b]` is the number of slots kept for row b. A step is `open`, one or more `forward`,
    then `keep`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        windows: dict[str, int | None],
        limit: int | None,
        packs: Packs | None = None,
        steps: StaticSteps | None = None,
    ) -> None:
        """packs: `packs_of(model)`; None for the model's own forward only. steps: record or compile
        forwards.
        """
        self.model, self.windows, self.limit = model, windows, limit
        self.device: torch.device = next(model.get_input_embeddings().parameters()).device
        self.lengths: list[int] = []
        self._trims_logits = "logits_to_keep" in signature(model.forward).parameters
        self.steps = steps
        self.packs = packs if steps is None else None
        self._lean = None if self.packs is None else lean_forward(model, self.packs)
        if self.packs is not None:
            if self._lean is None:
                self.packs.prepare(model)
            self.packs.settle()
        self.dtype: torch.dtype = (
            model.dtype if self._lean is None else self._lean.dtype
        )  # of masks

    def prefill(
        self, prompts: Sequence[Sequence[int]], room: int, hidden_layers: Sequence[int] = ()
    ) -> tuple[Tensor, ...]:
        """Cache all prompts and reserve `room` slots behind the longest. Return states `[B, T, H]`
        of `hidden_layers`.

        Rows are left-aligned: padding comes after a row's tokens, where causal attention does not
        look, so that the model's own masks are right.
        """
        self.lengths = [len(prompt) for prompt in prompts]
        longest = max(self.lengths)
        layers = int(text_config(self.model).num_hidden_layers)
        if self.steps is None:
            self.cache = TreeCache(layers, longest + room)
        else:
            self.cache = self.steps.begin(len(prompts), layers, longest + room, self.limit)
            self._lean = self.steps.lean
        if longest == 0:
            shape = len(prompts), 0, int(text_config(self.model).hidden_size)
            return (torch.zeros(shape, dtype=self.model.dtype, device=self.device),) * len(
                hidden_layers
            )
        padded = [
            [*prompt, *[prompt[-1] if prompt else 0] * (longest - len(prompt))]
            for prompt in prompts
        ]
        tokens_BT = torch.tensor(padded, device=self.device)
        parts = []
        # A head wrapped as a model takes its features for the whole prompt at once.
        step = _CHUNK if isinstance(self.model, PreTrainedModel) else longest
        for begin in range(0, longest, step):
            end = min(begin + step, longest)
            self.cache.column = begin
            positions_1T = torch.arange(begin, end, device=self.device).unsqueeze(0)
            tokens = tokens_BT[:, begin:end]
            # The logits are not used: the last prompt token is forwarded in the first step.
            if self._lean is None:
                _, hidden = self._own(tokens, positions_1T, {"": None}, 1, hidden_layers)
            else:
                masks = {
                    kind: self._causal_mask(begin, end, window)
                    for kind, window in self.windows.items()
                }
                lean = self._lean.run(
                    tokens, positions_1T, end - 1, masks, self.cache, 1, hidden_layers, prefill=True
                )
                hidden = lean[1]
            parts.append(hidden)
        return (
            parts[0]
            if len(parts) == 1
            else tuple(torch.cat(layer, dim=1) for layer in zip(*parts, strict=True))
        )

    def _causal_mask(self, begin: int, end: int, window: int | None) -> Tensor | None:
        if not begin and (window is None or end <= window):
            return None
        slots_C = torch.arange(end, device=self.device)
        distance_qC = slots_C[begin:].unsqueeze(1) - slots_C
        allowed_qC = (
            (distance_qC >= 0) if window is None else (distance_qC >= 0) & (distance_qC < window)
        )
        return additive(allowed_qC[None, None], self.dtype)

    def open(self, lead: Sequence[int] | None = None) -> None:
        """Begin a step in which the first `lead[b]` slots of row b's blocks are padding (see
        `draft_model`).
        """
        self.column = max(self.lengths)
        self._prefix_B1P: Tensor | None = None
        self._lead = lead if lead is not None and any(lead) else None
        if self.steps is not None:
            leads = lead if lead is not None else [0] * len(self.lengths)
            state = [
                [length, ahead, self.column]
                for length, ahead in zip(self.lengths, leads, strict=True)
            ]
            self.state_B3 = torch.tensor(state, device=self.device)
            return
        self._aligned = self._lead is None and min(self.lengths) == self.column
        if not self._aligned:
            self._length_B11 = torch.tensor(self.lengths, device=self.device).view(-1, 1, 1)
            self._base_B1 = self._length_B11.view(-1, 1)
            if self._lead is not None:
                self._lead_B11 = torch.tensor(list(self._lead), device=self.device).view(-1, 1, 1)
                self._base_B1 = self._base_B1 - self._lead_B11.view(-1, 1)

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
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Forward and cache the queries of `block`. Return logits `[B, keep_logits or q, V]` and
        hidden states.

        features_BqH: one feature per token; only for a head wrapped as a model.
        """
        if self.steps is not None:
            run = self.static(block.offsets_RT.shape[1], keep_logits, hidden_layers)

            def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
                logits, hidden = run(*inputs)
                return (logits, *hidden)

            inputs = (
                tokens_Bq,
                *self.inputs(block),
                *(() if features_BqH is None else (features_BqH,)),
            )
            logits, *hidden = self.steps.call(
                ("forward", run.name), forward, len(self.lengths), *inputs
            )
            return logits, tuple(hidden)
        if features_BqH is not None:
            self.model.features_BTH = features_BqH
        total = block.offsets_RT.shape[1]
        self.cache.column = self.column + total - block.queries
        if self._aligned:
            positions = block.offsets_Rq + self.column
        else:
            positions = (block.offsets_Rq + self._base_B1).clamp_(min=0)
        top = self.column + block.max_offset
        if self.limit is not None and top >= self.limit:
            # Predictions past the context limit are past max_new_tokens too and are discarded.
            # Clamp positions, so that a learned position table is not read past its end.
            top = self.limit - 1
            positions = positions.clamp(max=top)
        masks = {kind: self._mask(block, window) for kind, window in self.windows.items()}
        if self._lean is not None:
            return self._lean.run(
                tokens_Bq, positions, top, masks, self.cache, keep_logits, hidden_layers
            )
        return self._own(tokens_Bq, positions, masks, keep_logits, hidden_layers)

    def static(
        self, total: int, keep_logits: int = 0, hidden_layers: Sequence[int] = ()
    ) -> StaticForward:
        """Return the forward of a block of `total` slots as a function of tensors: tokens, `inputs`
        and features.
        """
        assert self.steps is not None
        slots = self.steps.slots(self.column, total)
        return StaticForward(
            self.steps, slots, self.windows, self.limit, keep_logits, tuple(hidden_layers)
        )

    def inputs(self, block: Block) -> tuple[Tensor, Tensor, Tensor]:
        """Return a static forward's inputs: the block, expanded to the batch, and the rows'
        state.
        """
        rows = len(self.lengths)
        return block.offsets_RT.expand(rows, -1), block.sees_RqT.expand(rows, -1, -1), self.state_B3

    def keep(self, slots: Sequence[Sequence[int]]) -> None:
        """Append each row's listed slots to its prefix, in order; drop the step's other slots."""
        moves = [
            (row, slot, length + index)
            for row, (path, length) in enumerate(zip(slots, self.lengths, strict=True))
            for index, slot in enumerate(path)
        ]
        self.cache.keep(self.column, moves)
        self.lengths = [
            length + len(path) for path, length in zip(slots, self.lengths, strict=True)
        ]

    def select_rows(self, rows: Sequence[int]) -> None:
        """Continue with these rows, in this order. No row may move towards the end of the batch."""
        self.lengths = [self.lengths[row] for row in rows]
        self.cache.select_rows(rows, self.lengths)

    def remove(self, ended: Sequence[int]) -> list[int]:
        """Remove rows from the batch; the last rows move into the gaps. Return the old indices in
        the new order.
        """
        gone = set(ended)
        rows = len(self.lengths) - len(gone)
        movers = [row for row in range(rows, len(self.lengths)) if row not in gone]
        order = [movers.pop() if row in gone else row for row in range(rows)]
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
        total = block.offsets_RT.shape[1]
        if self._aligned and total == 1 and (window is None or self.column + 1 <= window):
            # One query that sees everything needs no mask, which allows the fastest kernel.
            return None
        if self._aligned and block.static:
            return block.aligned_mask(self.column, self.cache.capacity, window, self.dtype)
        sees_RqT = block.within(window)
        if self._lead is not None:
            slot_T = torch.arange(total, device=self.device)
            # A padding slot is seen by itself only: a query with nothing to see would give NaN.
            itself_qT = slot_T[total - block.queries :].unsqueeze(1) == slot_T
            sees_RqT = sees_RqT & ((slot_T >= self._lead_B11) | itself_qT)
        tree_RqT = additive(sees_RqT, self.dtype)
        if window is not None:
            # With a sliding window, the visible prefix slots depend on each query's position.
            query_Rq = block.offsets_Rq + (self.column if self._aligned else self._base_B1)
            slot_P = torch.arange(self.column, device=self.device)
            near_RqP = query_Rq.unsqueeze(2) - slot_P < window
            prefix_RqP = additive(
                near_RqP if self._aligned else near_RqP & (slot_P < self._length_B11), self.dtype
            )
        elif self._aligned:
            return F.pad(tree_RqT, (self.column, 0)).unsqueeze(1)
        else:
            if self._prefix_B1P is None:
                slot_P = torch.arange(self.column, device=self.device)
                self._prefix_B1P = additive(slot_P < self._length_B11, self.dtype)
            prefix_RqP = self._prefix_B1P
        rows = max(prefix_RqP.shape[0], tree_RqT.shape[0])
        parts = [part.expand(rows, block.queries, -1) for part in (prefix_RqP, tree_RqT)]
        return torch.cat(parts, dim=2).unsqueeze(1)

    def _own(
        self,
        tokens: Tensor,
        positions: Tensor,
        masks: Mapping[str, Tensor | None],
        keep: int,
        hidden: Sequence[int],
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        options = {"logits_to_keep": keep} if self._trims_logits else {}
        return own_forward(
            self.model, tokens, positions, masks, self.cache, keep, hidden, **options
        )
