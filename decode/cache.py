"""A preallocated key/value cache: append a block of tree tokens, keep the accepted path, drop the rest.

Legend: L layers, B rows, H key/value heads, C capacity in slots, E head size. A slot holds one token.

Each row begins at slot 0, so that the slot of a kept token is its position. All rows write a new block at one column,
behind the longest row: an append is one slice assignment per layer, and the attention mask hides the gap of shorter
rows. Keeping a path copies its few slots to the end of the row's prefix, for all layers in one call. The next step
overwrites the rest of the block. A chain in a batch of one moves nothing.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from decode.native.large_pages import zeros
from draftsmith_core.errors import InputError


def _zeros(like: Tensor, shape: Sequence[int]) -> Tensor:
    # A forward reads all of a cache, as it does weights.
    return zeros(shape, like.dtype) if like.device.type == "cpu" else like.new_zeros(shape)


class _Store:
    """One allocation `[L, B, H, C, E]` for the keys and one for the values of all layers.

    `all_keys` and `all_values` are the allocation, `keys` and `values` its rows that are still in the batch.
    """

    def __init__(self, layers: int, rows: int, capacity: int, keys: Tensor, values: Tensor) -> None:
        # Zeros, not empty: a masked slot has weight 0 in the attention, and 0 * NaN would be NaN.
        self.all_keys = _zeros(keys, (layers, rows, keys.shape[1], capacity, keys.shape[3]))
        self.all_values = _zeros(values, (layers, rows, values.shape[1], capacity, values.shape[3]))
        self.narrow(keys.shape[0])

    def grow(self, rows: int, capacity: int) -> None:
        """Use `rows` rows of at least `capacity` slots, in a larger copy if necessary."""
        used = self.keys.shape[1]
        most, slots = self.all_keys.shape[1], self.all_keys.shape[3]
        if rows > most or capacity > slots:
            sizes = max(rows, most), max(capacity, slots)
            for name in ("all_keys", "all_values"):
                old = getattr(self, name)
                new = _zeros(old, (old.shape[0], sizes[0], old.shape[2], sizes[1], old.shape[4]))
                new[:, :used, :, :slots] = old[:, :used]
                setattr(self, name, new)
        self.narrow(rows)

    def narrow(self, rows: int) -> None:
        """Use the first rows of the allocation."""
        self.keys, self.values = self.all_keys[:, :rows], self.all_values[:, :rows]

    def fits(self, keys: Tensor, values: Tensor) -> bool:
        """Whether a layer with these states fits (some models vary heads by layer or span devices)."""
        return (
            self.keys.device == keys.device
            and (self.keys.shape[2], self.keys.shape[4]) == (keys.shape[1], keys.shape[3])
            and (self.values.shape[2], self.values.shape[4]) == (values.shape[1], values.shape[3])
        )


class _TreeLayer(CacheLayerMixin):
    is_sliding = False  # The full history is kept; windows are expressed by the mask.

    def __init__(self, owner: "TreeCache", index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owner, self.index = owner, index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.owner.allocate(self, key_states, value_states)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        begin = self.owner.column
        end = begin + key_states.shape[2]
        assert self.keys is not None and self.values is not None
        self.keys[:, :, begin:end] = key_states
        self.values[:, :, begin:end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.column + query_length, 0

    def get_seq_length(self) -> int:
        return self.owner.column

    def get_max_length(self) -> int:
        return self.owner.capacity


class TreeCache(Cache):
    """Key/value cache of one model for one batch.

    The caller sets `column`, where the next forward writes. `capacity` is in slots per row. `bytes_moved` counts what
    `keep` and `select_rows` copied. With `buffer_rows`, memory for that many rows stays at one address and
    serves one batch after another (`reuse`).
    """

    def __init__(self, layers: int, capacity: int, buffer_rows: int | None = None) -> None:
        self.capacity, self.buffer_rows = capacity, buffer_rows
        self.column = 0
        self.bytes_moved = 0
        self._stores: list[tuple[_Store, list[tuple[_TreeLayer, int]]]] = []
        super().__init__(layers=[_TreeLayer(self, index) for index in range(layers)])

    def allocate(self, layer: _TreeLayer, keys: Tensor, values: Tensor) -> None:
        """Allocate a layer's memory, on the device and in the dtype of these states."""
        if self._stores and self._stores[0][0].fits(keys, values):
            store, members = self._stores[0]
            place = layer.index
        else:
            # The first store serves all layers; an odd layer gets a store of its own.
            place = 0 if self._stores else layer.index
            rows = self.buffer_rows or keys.shape[0]
            store = _Store(1 if self._stores else len(self.layers), rows, self.capacity, keys, values)
            members = []
            self._stores.append((store, members))
        members.append((layer, place))
        layer.keys, layer.values = store.keys[place], store.values[place]

    def reuse(self, rows: int) -> None:
        """Begin another batch of `rows` rows in the same memory. Masks hide the old states, which are finite."""
        self.column = 0
        for store, members in self._stores:
            store.narrow(rows)
            self._show(store, members)

    def _show(self, store: _Store, members: "list[tuple[_TreeLayer, int]]") -> None:
        for layer, place in members:
            layer.keys, layer.values = store.keys[place], store.values[place]

    def buffers(self, rows: int, slots: int) -> tuple[Tensor, Tensor]:
        """Return keys and values `[L, rows, H, slots, E]` at a fixed address. InputError if layers differ."""
        if len(self._stores) != 1:
            raise InputError("compile: layers of this model have caches of different shapes; leave compile out")
        ((store, _),) = self._stores
        return store.all_keys[:, :rows, :, :slots], store.all_values[:, :rows, :, :slots]

    def views(
        self, rows: int, heads: int, size: int, queries: int, like: Tensor
    ) -> tuple[tuple[tuple[Tensor, ...], tuple[Tensor, ...]], tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
        """Return, by layer, keys and values of the new slots to fill in, `[B, H, queries, E]`, and of all slots."""
        keys, values = self.whole(rows, heads, size, like)
        new = (keys.narrow(3, self.column, queries), values.narrow(3, self.column, queries))
        end = self.column + queries
        old = (keys.narrow(3, 0, end), values.narrow(3, 0, end))
        return (new[0].unbind(0), new[1].unbind(0)), (old[0].unbind(0), old[1].unbind(0))

    def whole(self, rows: int, heads: int, size: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of all layers, `[L, B, H, C, E]`, of a model whose layers are alike."""
        if not self._stores:
            states = like.new_empty(rows, heads, 0, size)
            for layer in self.layers:
                assert isinstance(layer, _TreeLayer)
                layer.lazy_initialization(states, states)
        ((store, _),) = self._stores
        return store.keys, store.values

    def keep(self, column: int, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copy slots inside rows: each move is (row, from, to), `from` counted from `column`, `to` from slot 0.

        Moves may overlap. Moves onto themselves cost nothing.
        """
        moves = [move for move in moves if column + move[1] != move[2]]
        if not moves:
            return
        rows, sources, targets = zip(*moves, strict=True)
        for store, _ in self._stores:
            index = torch.tensor([rows, sources, targets], device=store.keys.device)
            row_n, source_n, target_n = index[0], index[1] + column, index[2]
            for block in (store.keys, store.values):
                moved = block[:, row_n, :, source_n]
                block[:, row_n, :, target_n] = moved
                self.bytes_moved += moved.numel() * moved.element_size()

    def select_rows(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Keep only these rows, of which row b has `lengths[b]` slots. No row may move towards the end."""
        for store, members in self._stores:
            for block in (store.keys, store.values):
                for target, (source, slots) in enumerate(zip(rows, lengths, strict=True)):
                    if source != target:
                        block[:, target, :, :slots] = block[:, source, :, :slots]
                        self.bytes_moved += slots * block[:, 0, :, 0].numel() * block.element_size()
            store.keys, store.values = store.keys[:, : len(rows)], store.values[:, : len(rows)]
            self._show(store, members)

    def join(self, other: "TreeCache", lengths: Sequence[int]) -> None:
        """Append the rows of another cache of the same model, with `lengths[b]` slots in row b."""
        self.capacity = max(self.capacity, other.capacity)
        for index, (store, members) in enumerate(self._stores):
            first = store.keys.shape[1]
            store.grow(first + len(lengths), self.capacity)
            # A cache of prompts without a token to forward has no memory yet.
            for theirs, _ in other._stores[index : index + 1]:
                for mine, new in ((store.keys, theirs.keys), (store.values, theirs.values)):
                    for row, slots in enumerate(lengths):
                        mine[:, first + row, :, :slots] = new[:, row, :, :slots]
            self._show(store, members)
