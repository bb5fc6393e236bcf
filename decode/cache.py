"""A preallocated key/value cache: append a block of tree tokens, keep the accepted path, drop the
rest.

Legend: L layers, B rows, H key/value heads, C capacity in slots, E head size. A slot holds one
token.

Each row begins at slot 0, so that the slot of a kept token is its position. All rows write a new
block at one column, behind the longest row: an append is one slice assignment per layer, and the
attention mask hides the gap of shorter rows. Keeping a path copies its few slots to the end of the
row's prefix, for all layers in one call. The next step overwrites the rest of the block. A chain in
a batch of one moves nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.core.errors import InputError
from draftsmith.core.transformers_api import Cache, DynamicLayer
from draftsmith.decode.native.large_pages import zeros


@dataclass(frozen=True)
class CachePlace:
    """Keys and values of all layers, `[L, B, H, C, E]`, and the slot of the next token."""

    keys_LBHCE: Tensor
    values_LBHCE: Tensor
    column: int


class _Store:
    """Keys and values of layers that are alike, an allocation `[L, B, H, C, E]` each.

    `whole` are the allocations, `blocks` their rows that are still in the batch; keys come first.
    """

    def __init__(self, layers: int, rows: int, capacity: int, states: Sequence[Tensor]) -> None:
        self.members: list[tuple[_TreeLayer, int]] = []  # with their indices in the allocation
        # Zeros, not empty: a masked slot has weight 0 in the attention, and 0 * NaN would be NaN.
        self.whole: list[Tensor] = []
        for new in states:
            shape = (layers, rows, new.shape[1], capacity, new.shape[3])
            self.whole.append(zeros(shape, new))
        self.show(states[0].shape[0])

    def show(self, rows: int) -> None:
        """Use the first rows of the allocations."""
        self.blocks = [whole[:, :rows] for whole in self.whole]
        for layer, index in self.members:
            layer.keys, layer.values = (block[index] for block in self.blocks)

    def grow(self, rows: int, capacity: int) -> None:
        """Use `rows` rows of at least `capacity` slots, in a larger copy if necessary."""
        used = self.blocks[0].shape[1]
        for number, old in enumerate(self.whole):
            layers, most, heads, slots, size = old.shape
            if rows > most or capacity > slots:
                larger = zeros((layers, max(rows, most), heads, max(capacity, slots), size), old)
                larger[:, :used, :, :slots] = self.blocks[number]
                self.whole[number] = larger
        self.show(rows)

    def fits(self, states: Sequence[Tensor]) -> bool:
        """Whether a layer with these states fits (some models vary heads by layer or span
        devices).
        """
        sizes = [(old.shape[2], old.shape[4], old.device) for old in self.whole]
        given = [(new.shape[1], new.shape[3], new.device) for new in states]
        return sizes == given


class _TreeLayer(DynamicLayer):
    def __init__(self, owner: "TreeCache", index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owner = owner
        self.index = index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.owner.allocate(self, key_states, value_states)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        begin = self.owner.column
        end = begin + key_states.shape[2]
        assert self.keys is not None and self.values is not None
        self.keys[:, :, begin:end] = key_states
        self.values[:, :, begin:end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        return self.owner.column


class TreeCache(Cache):
    """Key/value cache of one model for one batch.

    The caller sets `column`, where the next forward writes. `capacity` is in slots per row.
    `bytes_moved` counts what `keep` and `select_rows` copied. With `buffer_rows`, memory for that
    many rows stays at one address and serves one batch after another (`reuse`).
    """

    def __init__(self, layers: int, capacity: int, buffer_rows: int | None = None) -> None:
        self.capacity = capacity
        self.buffer_rows = buffer_rows
        self.column = self.bytes_moved = 0
        self._stores: list[_Store] = []
        super().__init__(layers=[_TreeLayer(self, index) for index in range(layers)])

    def allocate(self, layer: _TreeLayer, keys: Tensor, values: Tensor) -> None:
        """Allocate a layer's memory, on the device and in the dtype of these states."""
        states = (keys, values)
        rows = keys.shape[0]
        # The first store serves all layers; an odd layer gets a store of its own.
        first = self._stores[0] if self._stores else None
        odd = first is not None and not first.fits(states)
        if odd or first is None:
            count = 1 if odd else len(self.layers)
            self._stores.append(_Store(count, self.buffer_rows or rows, self.capacity, states))
        store = self._stores[-1 if odd else 0]
        store.members.append((layer, 0 if odd else layer.index))
        store.show(rows)

    def reuse(self, rows: int) -> None:
        """Begin another batch of `rows` rows in the same memory. Masks hide the old states, which
        are finite.
        """
        self.column = 0
        for store in self._stores:
            store.show(rows)

    def buffers(self, rows: int, slots: int) -> tuple[Tensor, Tensor]:
        """Return keys and values `[L, rows, H, slots, E]` at a fixed address. InputError if layers
        differ.
        """
        if len(self._stores) != 1:
            raise InputError(
                "compile: layers of this model have caches of different shapes; leave compile out"
            )
        (store,) = self._stores
        keys, values = (whole[:, :rows, :, :slots] for whole in store.whole)
        return keys, values

    def place(self, rows: int, heads: int, size: int, like: Tensor) -> CachePlace:
        """Return all keys and values, and `column`, of a model whose layers are alike."""
        if not self._stores:
            states = like.new_empty(rows, heads, 0, size)
            for layer in self.layers:
                assert isinstance(layer, _TreeLayer)
                layer.lazy_initialization(states, states)
        (store,) = self._stores
        keys, values = store.blocks
        return CachePlace(keys, values, self.column)

    def keep(self, column: int, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copy slots inside rows: each move is (row, from, to), `from` counted from `column`, `to`
        from slot 0.

        Moves may overlap. Moves onto themselves cost nothing.
        """
        moves = [move for move in moves if column + move[1] != move[2]]
        if not moves:
            return
        for store in self._stores:
            keys = store.blocks[0]
            moves_n3 = torch.tensor(moves, device=keys.device)
            row_n, source_n, target_n = moves_n3.unbind(1)
            source_n = source_n + column
            for block in store.blocks:
                moved = block[:, row_n, :, source_n]
                block[:, row_n, :, target_n] = moved
                self.bytes_moved += moved.numel() * moved.element_size()

    def select_rows(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Keep only these rows, of which row b has `lengths[b]` slots. No row may move towards the
        end.
        """
        for store in self._stores:
            for block in store.blocks:
                for target, (source, slots) in enumerate(zip(rows, lengths, strict=True)):
                    if source != target:
                        block[:, target, :, :slots] = block[:, source, :, :slots]
                        slot = block[:, 0, :, 0]
                        self.bytes_moved += slots * slot.numel() * slot.element_size()
            store.show(len(rows))

    def repeat_rows(self, rows: Sequence[int]) -> None:
        """Put copies of row `rows[b]` in row b, for more rows than there are. None is numbered
        above its place, and they come from the last to the first, so that none is lost.
        """
        for store in self._stores:
            store.grow(len(rows), self.capacity)
            for block in store.blocks:
                for target, source in reversed(list(enumerate(rows))):
                    if source != target:
                        block[:, target] = block[:, source]

    def join(self, other: "TreeCache", lengths: Sequence[int]) -> None:
        """Append the rows of another cache of the same model, with `lengths[b]` slots in row b."""
        self.capacity = max(self.capacity, other.capacity)
        for index, store in enumerate(self._stores):
            first = store.blocks[0].shape[1]
            store.grow(first + len(lengths), self.capacity)
            # A cache of prompts without a token to forward has no memory yet.
            for theirs in other._stores[index : index + 1]:
                for mine, new in zip(store.blocks, theirs.blocks, strict=True):
                    for row, slots in enumerate(lengths):
                        mine[:, first + row, :, :slots] = new[:, row, :, :slots]
