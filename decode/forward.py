"""Runs one model over blocks of tree cells behind cached prefixes: masks, positions, and nothing
else.

Legend: B rows, P prefix cells, T cells of a block, q cells that are queries in this forward (the
last q of the T), V vocabulary, H hidden size, R = 1 when all rows share a block, else B.

The cells of a block sit behind each row's prefix. A cell's *offset* is its position minus the row's
base, so that siblings share a position. While all rows are equally long (always, in a batch of one)
the distance between a query and a prefix cell depends only on how far from the end of the prefix
the cell is; the mask of a static tree is then one buffer built once, and a step takes a view of it.
"""

from collections.abc import Sequence
from inspect import signature

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.cache import TreeCache

_FULL = ("full_attention",)
_SLIDING = ("sliding_attention",)


def text_config(model: PreTrainedModel) -> object:
    """The language model's part of a configuration."""
    return model.config.get_text_config(decoder=True)


def attention_windows(model: PreTrainedModel) -> dict[str, int | None]:
    """Sliding window by kind of layer, None for full attention: `{"full_attention": None,
    "sliding_attention": 4096}`.

    Raises ValueError for models that a tree cannot be run through with a mask and positions alone.
    """
    config = text_config(model)
    name = type(model).__name__
    if model.training:
        raise ValueError(f"{name} is in training mode; call model.eval() first, dropout would change its outputs")
    if "position_ids" not in signature(model.forward).parameters or getattr(config, "alibi", False):
        raise ValueError(f"{name} does not take position_ids (ALiBi?); a token tree needs them, use another model")
    attention = getattr(config, "_attn_implementation", "eager")
    if attention not in ("eager", "sdpa"):
        raise ValueError(
            f"{name} uses attention '{attention}', which takes no tree mask; load it with attn_implementation='sdpa'"
        )
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        # Without layer_types a window applies to every layer (Mistral, Phi-3).
        return {"full_attention": None} if window is None else {"sliding_attention": window}
    for kind in kinds:
        if kind not in _FULL + _SLIDING:
            raise ValueError(f"{name} has layers of type '{kind}'; only full and sliding attention can verify a tree")
    return {kind: window if kind in _SLIDING else None for kind in sorted(set(kinds))}


class Block:
    """The shape of one forward: `offsets_RT` of all cells so far and `sees_RqT`, what each query
    may attend to.

    `sees_RqT` must let every query see itself. A static block (one tree for all steps) caches its
    masks.
    """

    def __init__(self, offsets_RT: Tensor, sees_RqT: Tensor, *, static: bool) -> None:
        self.sees_RqT = sees_RqT
        self.offsets_RT = offsets_RT
        self.queries = sees_RqT.shape[1]
        self.offsets_Rq = offsets_RT[:, offsets_RT.shape[1] - self.queries :].contiguous()
        self.max_offset = int(self.offsets_Rq.max())
        self.static = static
        self._views: dict[tuple[int | None, torch.dtype], tuple[int, Tensor]] = {}

    def within(self, window: int | None) -> Tensor:
        """`sees_RqT` restricted to a sliding window."""
        if window is None:
            return self.sees_RqT
        distance_RqT = self.offsets_Rq.unsqueeze(2) - self.offsets_RT.unsqueeze(1)
        return self.sees_RqT & (distance_RqT < window)

    def aligned_mask(self, prefix: int, capacity: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive mask `[1, 1, q, prefix + T]` when every row has `prefix` cells: a view, built
        once a capacity.
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
        # CUDA's memory-efficient attention checks the strides of a mask but not the address it begins at.
        return view if view.device.type == "cpu" else view.contiguous()


def additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where allowed, else the most negative finite value: eager attention adds its mask, a bool
    would be wrong.
    """
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, torch.finfo(dtype).min)


class Runner:
    """One model and its cache over the rows of one `generate` call.

    `lengths[b]` is the number of cells kept for row b. A step is `open`, one or more `forward`,
    then `keep`.
    """

    def __init__(self, model: PreTrainedModel, windows: dict[str, int | None], limit: int | None) -> None:
        self.model, self.windows, self.limit = model, windows, limit
        self.device: torch.device = next(model.get_input_embeddings().parameters()).device
        self.dtype: torch.dtype = model.dtype
        self.lengths: list[int] = []
        self._trims_logits = "logits_to_keep" in signature(model.forward).parameters

    def prefill(
        self, prompts: Sequence[Sequence[int]], room: int, hidden_layers: Sequence[int] = ()
    ) -> tuple[Tensor, ...]:
        """Cache all prompts; `room` cells are reserved behind the longest. Returns hidden states
        `[B, T, H]` if asked.

        Rows are left-aligned: padding comes after a row's tokens, where causal attention cannot see
        it, so the model's own causal (and sliding) masks are right as they are and no padding mask
        is built.
        """
        self.lengths = [len(prompt) for prompt in prompts]
        longest = max(self.lengths)
        layers = int(text_config(self.model).num_hidden_layers)  # type: ignore[attr-defined]
        self.cache = TreeCache(layers, longest + room)
        if longest == 0:
            size = int(text_config(self.model).hidden_size)  # type: ignore[attr-defined]
            return tuple(
                torch.zeros(len(prompts), 0, size, dtype=self.dtype, device=self.device) for _ in hidden_layers
            )
        padded = [[*prompt, *[prompt[-1] if prompt else 0] * (longest - len(prompt))] for prompt in prompts]
        tokens_BT = torch.tensor(padded, device=self.device)
        positions_1T = torch.arange(longest, device=self.device).unsqueeze(0)
        # Nobody reads these logits: the last prompt token goes in with the first step.
        return self._call(tokens_BT, positions_1T, None, 1, hidden_layers)[1]

    def open(self, lead: Sequence[int] | None = None) -> None:
        """Begin a step. `lead[b]` cells at the front of the blocks are padding in row b (see
        `DraftModelProposer`).
        """
        self.column = max(self.lengths)
        self._lead = lead if lead is not None and any(lead) else None
        self._aligned = self._lead is None and min(self.lengths) == self.column
        if not self._aligned:
            self._length_B11 = torch.tensor(self.lengths, device=self.device).view(-1, 1, 1)
            self._base_B1 = self._length_B11.view(-1, 1)
            if self._lead is not None:
                self._lead_B11 = torch.tensor(list(self._lead), device=self.device).view(-1, 1, 1)
                self._base_B1 = self._base_B1 - self._lead_B11.view(-1, 1)

    def forward(
        self,
        tokens_Bq: Tensor,
        block: Block,
        keep_logits: int = 0,
        hidden_layers: Sequence[int] = (),
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Logits `[B, keep_logits or q, V]` and hidden states for the queries of `block`, which are
        cached.
        """
        total = block.offsets_RT.shape[1]
        self.cache.column = self.column + total - block.queries
        if self._aligned:
            positions = block.offsets_Rq + self.column
        else:
            positions = (block.offsets_Rq + self._base_B1).clamp_(min=0)
        if self.limit is not None and self.column + block.max_offset >= self.limit:
            # Cells beyond the context limit are beyond max_new_tokens too (checked up front):
            # whatever is predicted there is cut, but a table of learned positions must not be read
            # past its end.
            positions = positions.clamp(max=self.limit - 1)
        masks = {kind: self._mask(block, window) for kind, window in self.windows.items()}
        mask = next(iter(masks.values())) if len(masks) == 1 else masks
        return self._call(tokens_Bq, positions, mask, keep_logits, hidden_layers)

    def keep(self, cells: Sequence[Sequence[int]]) -> None:
        """Append these cells of the step's blocks to each row's prefix, in order; all other cells
        are dropped.
        """
        moves = [
            (row, cell, length + place)
            for row, (path, length) in enumerate(zip(cells, self.lengths, strict=True))
            for place, cell in enumerate(path)
        ]
        self.cache.keep(self.column, moves)
        self.lengths = [length + len(path) for path, length in zip(cells, self.lengths, strict=True)]

    def finish(self, row: int) -> None:
        """Forget a row that has ended: it stays in the batch, with an empty prefix, until
        `select_rows`.
        """
        self.lengths[row] = 0

    def select_rows(self, rows: Sequence[int]) -> None:
        """Shrink the batch to these rows."""
        self.cache.select_rows(rows)
        self.lengths = [self.lengths[row] for row in rows]

    def _mask(self, block: Block, window: int | None) -> Tensor | None:
        total = block.offsets_RT.shape[1]
        if self._aligned and block.static:
            if total == 1 and (window is None or self.column + 1 <= window):
                # One query that may see everything: let the model take its fastest kernel, as in
                # plain decoding.
                return None
            return block.aligned_mask(self.column, self.cache.capacity, window, self.dtype)
        if self._aligned:
            length_B11: Tensor | int = self.column
            query_B1: Tensor = block.offsets_Rq + self.column
        else:
            length_B11, query_B1 = self._length_B11, block.offsets_Rq + self._base_B1
        cell_P = torch.arange(self.column, device=self.device)
        prefix_BqP = (cell_P < length_B11).expand(-1, block.queries, -1) if not self._aligned else None
        if window is not None or prefix_BqP is None:
            near_BqP = query_B1.unsqueeze(2) - cell_P < (window or self.column + total + 1)
            prefix_BqP = near_BqP if prefix_BqP is None else near_BqP & prefix_BqP
        tree_BqT = block.within(window)
        if self._lead is not None:
            cell_T = torch.arange(total, device=self.device)
            # A padding cell is seen by nobody but itself: a query with nothing to see would be NaN.
            itself_qT = cell_T[total - block.queries :].unsqueeze(1) == cell_T
            tree_BqT = tree_BqT & ((cell_T >= self._lead_B11) | itself_qT)
        rows = max(prefix_BqP.shape[0], tree_BqT.shape[0])
        allowed = torch.cat([prefix_BqP.expand(rows, -1, -1), tree_BqT.expand(rows, -1, -1)], dim=2)
        return additive(allowed.unsqueeze(1), self.dtype)

    def _call(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: object,
        keep_logits: int,
        hidden_layers: Sequence[int],
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        options: dict[str, object] = {"logits_to_keep": keep_logits} if self._trims_logits else {}
        if hidden_layers:
            options["output_hidden_states"] = True
        output = self.model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            **options,
        )
        logits = output.logits
        if keep_logits and not self._trims_logits:
            logits = logits[:, -keep_logits:]
        return logits, tuple(output.hidden_states[layer] for layer in hidden_layers)
