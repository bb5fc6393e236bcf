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

from decode.attention_masks import GrowingMask, additive, causal_mask
from decode.cache import TreeCache
from decode.llama_forward import lean_forward
from decode.packed_linear import Packs

# Prompts go in by so many cells at a time: the memory of a mask and of the activations is then bounded.
_CHUNK = 256

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
    if getattr(config, "attention_layers", None) is not None:
        raise ValueError(f"{name} masks by its own table of cells (GPT-Neo), which no tree fits; use another model")
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


class Runner:
    """One model and its cache over the rows of one `generate` call.

    `lengths[b]` is the number of cells kept for row b. A step is `open`, one or more `forward`,
    then `keep`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        windows: dict[str, int | None],
        limit: int | None,
        fast: bool | Packs = True,
    ) -> None:
        """`fast` chooses the lean forward where the model has one and packed weights for several rows
        where they help; False is the model's own forward and nothing else. Who makes many runners
        passes one `Packs` for all, so that weights are packed once and let go with their owner.
        """
        self.model, self.windows, self.limit = model, windows, limit
        self.device: torch.device = next(model.get_input_embeddings().parameters()).device
        self.dtype: torch.dtype = model.dtype
        self.lengths: list[int] = []
        self._trims_logits = "logits_to_keep" in signature(model.forward).parameters
        self._packs = (Packs(model) if fast is True else fast) or None
        self._lean = lean_forward(model, self._packs) if self._packs else None
        self._live: GrowingMask | None = None

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
        parts = []
        # What only looks like a model (a head that is fed with features) gets its prompt whole.
        step = _CHUNK if isinstance(self.model, PreTrainedModel) else longest
        for begin in range(0, longest, step):
            end = min(begin + step, longest)
            self.cache.column = begin
            positions_1T = torch.arange(begin, end, device=self.device).unsqueeze(0)
            # Nobody reads these logits: the last prompt token goes in with the first step.
            parts.append(self._prefill(tokens_BT[:, begin:end], positions_1T, begin, end, hidden_layers))
        return parts[0] if len(parts) == 1 else tuple(torch.cat(layer, dim=1) for layer in zip(*parts, strict=True))

    def _prefill(
        self, tokens: Tensor, positions: Tensor, begin: int, end: int, hidden_layers: Sequence[int]
    ) -> tuple[Tensor, ...]:
        if self._lean is None:
            return self._own(tokens, positions, None, 1, hidden_layers)[1]
        masks = {
            kind: causal_mask(begin, end, window, self.dtype, self.device)
            if begin or (window is not None and end > window)
            else None
            for kind, window in self.windows.items()
        }
        return self._lean.run(tokens, positions, end - 1, masks, self.cache, 1, hidden_layers, prefill=True)[1]

    def open(self, lead: Sequence[int] | None = None) -> None:
        """Begin a step. `lead[b]` cells at the front of the blocks are padding in row b (see
        `DraftModelProposer`).
        """
        self.column = max(self.lengths)
        self._advanced = False
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
        if self._lean is not None:
            top = self.column + block.max_offset if self.limit is None else self.limit - 1
            top = min(top, self.column + block.max_offset)
            return self._lean.run(tokens_Bq, positions, top, masks, self.cache, keep_logits, hidden_layers)
        mask = next(iter(masks.values())) if len(masks) == 1 else masks
        if self._packs is not None and self._packs.useful(tokens_Bq.numel()):
            with self._packs.inside(self.model):
                return self._own(tokens_Bq, positions, mask, keep_logits, hidden_layers)
        return self._own(tokens_Bq, positions, mask, keep_logits, hidden_layers)

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
        """Go on with these rows, in this order. Where the only rows that move come from behind the places that are
        left (see `remove`), just the cells that they hold are copied; any other order copies the whole cache.
        """
        moves = [(row, place, self.lengths[row]) for place, row in enumerate(rows) if row != place]
        if all(row >= len(rows) for row, _, _ in moves):
            self.cache.move_rows(moves, len(rows))
        else:
            self.cache.select_rows(rows)
        self.lengths = [self.lengths[row] for row in rows]
        self._live = None

    def remove(self, places: Sequence[int]) -> list[int]:
        """Take rows out of the batch; the last rows move into their places. Returns the old place of every row that
        is left, in the new order.
        """
        gone = set(places)
        rows = len(self.lengths) - len(gone)
        movers = [place for place in range(rows, len(self.lengths)) if place not in gone]
        order = [movers.pop() if place in gone else place for place in range(rows)]
        self.select_rows(order)
        return order

    def _mask(self, block: Block, window: int | None) -> Tensor | None:
        total = block.offsets_RT.shape[1]
        if self._aligned and total == 1 and (window is None or self.column + 1 <= window):
            # One query that may see everything: let the model take its fastest kernel, as in plain
            # decoding.
            return None
        if self._aligned and block.static:
            return block.aligned_mask(self.column, self.cache.capacity, window, self.dtype)
        tree_RqT = additive(self._tree_sees(block, window), self.dtype)
        if window is None:
            return self._live_mask(tree_RqT)
        # Which cells a window leaves out depends on every query's position; there is nothing to keep.
        query_Rq = block.offsets_Rq + (self.column if self._aligned else self._base_B1)
        cell_P = torch.arange(self.column, device=self.device)
        prefix_RqP = query_Rq.unsqueeze(2) - cell_P < window
        if not self._aligned:
            prefix_RqP = prefix_RqP & (cell_P < self._length_B11)
        rows = max(prefix_RqP.shape[0], tree_RqT.shape[0])
        parts = (additive(prefix_RqP, self.dtype).expand(rows, -1, -1), tree_RqT.expand(rows, -1, -1))
        return torch.cat(parts, dim=2).unsqueeze(1)

    def _tree_sees(self, block: Block, window: int | None) -> Tensor:
        sees_RqT = block.within(window)
        if self._lead is None:
            return sees_RqT
        total = sees_RqT.shape[2]
        cell_T = torch.arange(total, device=self.device)
        # A padding cell is seen by nobody but itself: a query with nothing to see would be NaN.
        itself_qT = cell_T[total - block.queries :].unsqueeze(1) == cell_T
        return sees_RqT & ((cell_T >= self._lead_B11) | itself_qT)

    def _live_mask(self, tree_RqT: Tensor) -> Tensor:
        rows = tree_RqT.shape[0] if self._aligned else len(self.lengths)
        queries = tree_RqT.shape[1]
        live = self._live
        if live is None or live.rows != rows or live.queries < queries:
            queries = queries if live is None else max(queries, live.queries)
            live = self._live = GrowingMask(rows, queries, self.cache.capacity, self.dtype, self.device)
            self._advanced = False
        if not self._advanced:
            live.advance([self.column] if rows == 1 else self.lengths, self.column)
            self._advanced = True
        mask = live.show(self.column, tree_RqT)
        # CUDA's memory-efficient attention wants rows that begin at aligned addresses.
        return mask if mask.device.type == "cpu" else mask.contiguous()

    def _own(
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
