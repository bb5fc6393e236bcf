"""Run a model over chains of tokens with the cache that the model itself makes, row by row.

For models that no tree can be run through: recurrent and convolution layers, whose state cannot
mask a sibling, attention that takes no mask or no positions. A recurrent layer may not read padding
either, so that each row has a cache of its own.

A chain is forwarded behind its root at once. Afterwards the cache goes back to the last token that
was accepted: cropped if it can be (keys and values, convolutions), else put back from a copy. The
tokens between that copy and the last accepted token are then *unread*; they are forwarded again
together with the next step's, so that a step stays one forward.

Legend: B rows, q tokens of a block, V vocabulary, H hidden size.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from draftsmith.core.hidden_states import forward_with_states, layout_of
from draftsmith.core.models import vocabulary_size
from draftsmith.core.transformers_api import Cache, DynamicLayer
from draftsmith.decode.kernel_forward import Forwarded, joined
from draftsmith.decode.runner import Block, Runner
from draftsmith.decode.supported_models import Reading, counts_positions

# Before more tokens than these are forwarded again, they are forwarded once without a chain, which
# moves the copy behind them.
MOST_UNREAD = 16
Scans = dict[Any, int]  # Mamba 2 layers, and how many tokens their scans pad to


class _Mark(NamedTuple):
    """A cache to which a row can go back, and the number of tokens that it has read."""

    cache: Any
    read: int


@dataclass
class _Row:
    """The text of a row, a cache that has read the first `read` tokens of it, and earlier ones of
    this step.
    """

    text: list[int]
    cache: Any = None
    read: int = 0
    records: bool = False  # whether `crop` takes the cache back
    marks: list[_Mark] = field(default_factory=list)


class OwnCacheRunner(Runner):
    """A `Runner` for causal chains; `lengths[b]` counts the tokens kept for row b, read or not.

    reading: how the model continues from its cache.
    """

    takes_absent = True

    def __init__(self, model: PreTrainedModel, limit: int | None, reading: Reading) -> None:
        super().__init__(model, {}, limit)
        self.reading = reading
        self.rows: list[_Row] = []
        self._arguments = frozenset(signature(model.forward).parameters)
        self._takes_positions = "position_ids" in self._arguments and not counts_positions(model)
        # On other devices scans have kernels, which accept some sizes only.
        self._scans: Scans = {}
        for module in model.modules() if self.device.type == "cpu" else ():
            size = getattr(module, "chunk_size", None)
            if isinstance(size, int):
                self._scans[module] = size

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        room: int,
        hidden_layers: Sequence[int] = (),
        features_BTH: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Cache all prompts. Return states `[B, T, H]` of `hidden_layers`, right-padded."""
        self.lengths = [len(prompt) for prompt in prompts]
        self.rows = [_Row(list(prompt)) for prompt in prompts]
        longest = max(self.lengths)
        states = []
        for row in self.rows:
            length = len(row.text)
            _, hidden = self._nothing(hidden_layers)
            if length and (self.reading != "whole" or hidden_layers):
                # The logits are not used: the last prompt token is forwarded in the first step.
                _, hidden = self._read(row, length if hidden_layers else 1, hidden_layers)
                self._record(row)
            states.append(_padded(hidden, 0, longest - length))
        return joined(states)

    def open(self, lead: Sequence[int] | None = None) -> None:
        """Begin a step whose first token is certain; see `Runner.open`."""
        self._lead = list(lead or [0] * len(self.rows))
        self._certain = 1
        self._fed = False

    def open_pending(self, pending: Sequence[Sequence[int]]) -> tuple[Tensor, list[int]]:
        """Begin a step with tokens that will all be kept; see `Runner.open_pending`."""
        tokens_BW, lead = super().open_pending(pending)
        self._certain = tokens_BW.shape[1]
        return tokens_BW, lead

    def forward(
        self,
        tokens_Bq: Tensor,
        block: Block,
        keep_logits: int = 0,
        hidden_layers: Sequence[int] = (),
        features_BqH: Tensor | None = None,
    ) -> Forwarded:
        """Forward the chain `tokens_Bq` without absent tokens, -1, whose logits and states are 0.

        See `Runner.forward`.
        """
        queries = tokens_Bq.shape[1]
        logits = []
        states = []
        for row, tokens in enumerate(tokens_Bq.tolist()):
            lead = 0 if self._fed else self._lead[row]
            present = self._present(row, tokens[lead:])
            certain = 0 if self._fed else self._certain
            logits_1nV, hidden = self._extend(self.rows[row], present, certain, hidden_layers)
            places = [place for place in range(lead, queries) if tokens[place] >= 0]
            places = places[: len(present)]
            if keep_logits:
                logits_1nV = logits_1nV[:, -keep_logits:]
                logits.append(logits_1nV)
            else:
                logits.append(_placed(logits_1nV, places, queries))
            states.append(tuple(_placed(state, places, queries) for state in hidden))
        self._fed = True
        return torch.cat(logits), joined(states)

    def keep(self, slots: Sequence[Sequence[int]]) -> None:
        """Keep the first tokens of each row's step, as many as it lists; go back behind them."""
        for row, path in enumerate(slots):
            kept = min(self.lengths[row] + len(path), len(self.rows[row].text))
            self.lengths[row] = kept
            self._go_back(self.rows[row], kept)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Continue with these rows, in this order."""
        self.lengths = [self.lengths[row] for row in rows]
        self.rows = [self.rows[row] for row in rows]

    def fresh(self) -> "OwnCacheRunner":
        """Return an empty runner of the same model; prefill new rows in it, then `join` it."""
        other = copy.copy(self)
        other.lengths = []
        other.rows = []
        return other

    def join(self, other: Runner) -> None:
        """Append the rows of another runner of the same model."""
        assert isinstance(other, OwnCacheRunner)
        self.lengths = self.lengths + other.lengths
        self.rows = self.rows + other.rows

    def _present(self, row: int, tokens: list[int]) -> list[int]:
        """Return the tokens that exist and fit the context. Predictions beyond it are discarded,
        and not every model can make them.
        """
        tokens = [token for token in tokens if token >= 0]
        if self.limit is not None:
            tokens = tokens[: max(self.limit - len(self.rows[row].text), 0)]
        return tokens

    def _nothing(self, hidden_layers: Sequence[int]) -> Forwarded:
        """Logits `[1, 0, V]` and states `[1, 0, H]` of no token."""
        empty = torch.zeros(1, 0, 1, dtype=self.model.dtype, device=self.device)
        logits_10V = empty.expand(-1, -1, vocabulary_size(self.model))
        if not hidden_layers:
            return logits_10V, ()
        states_10H = empty.expand(-1, -1, layout_of(self.model).width)
        return logits_10V, (states_10H,) * len(hidden_layers)

    def _extend(
        self, row: _Row, tokens: list[int], certain: int, hidden_layers: Sequence[int]
    ) -> Forwarded:
        """Append tokens to a row and read them; the first `certain` of them will be kept."""
        if not tokens:
            return self._nothing(hidden_layers)
        begin = len(row.text)
        row.text += tokens
        if self.reading == "whole":
            return self._read(row, len(tokens), hidden_layers)
        if self.reading == "single":
            return self._one_by_one(row, begin, hidden_layers)
        guessed = len(tokens) > certain
        if guessed and not row.records:
            if begin - row.read > MOST_UNREAD:
                self._read(row, 1, (), end=begin)
            row.marks.append(_Mark(_copy_of(row.cache), row.read))
        return self._read(row, len(tokens), hidden_layers)

    def _one_by_one(self, row: _Row, begin: int, hidden_layers: Sequence[int]) -> Forwarded:
        """Read single tokens, each from a state to which the row can go back."""
        logits = []
        states = []
        while row.read < len(row.text):
            row.marks.append(_Mark(_copy_of(row.cache), row.read))
            at = row.read
            logits_11V, hidden = self._read(row, 1, hidden_layers, end=at + 1)
            if at >= begin:
                logits.append(logits_11V)
                states.append(hidden)
        return torch.cat(logits, dim=1), joined(states, dim=1)

    def _read(
        self, row: _Row, last: int, hidden_layers: Sequence[int], end: int | None = None
    ) -> Forwarded:
        """Forward the text that a row has not read, up to `end`; return logits and states of the
        `last` tokens.
        """
        end = len(row.text) if end is None else end
        tokens_1n = torch.tensor([row.text[row.read : end]], device=self.device)
        options: dict[str, Any] = {}
        if self._trims_logits:
            options["logits_to_keep"] = last
        if "use_cache" in self._arguments:
            options["use_cache"] = self.reading != "whole"
        if self.reading == "whole" and "attention_mask" in self._arguments:
            # Without a mask some take a token that equals their padding for padding (XLM).
            options["attention_mask"] = torch.ones_like(tokens_1n)
        if self.reading != "whole":
            options[self._cache_name] = row.cache
            if self._takes_positions:
                # Not every model counts the tokens that its cache has read.
                positions_n = torch.arange(row.read, end, device=self.device)
                options["position_ids"] = positions_n.unsqueeze(0)
        with _short_scans(self._scans, end - row.read):
            output, hidden = forward_with_states(
                self.model, hidden_layers, input_ids=tokens_1n, **options
            )
        if self.reading != "whole":
            row.cache = getattr(output, self._cache_name)
            row.read = end
        return output.logits[:, -last:], tuple(state[:, -last:] for state in hidden)

    def _go_back(self, row: _Row, kept: int) -> None:
        """Keep the first `kept` tokens of a row and the latest cache that has read no others."""
        del row.text[kept:]
        marks = [mark for mark in row.marks if mark.read <= kept]
        row.marks = []
        if row.records:
            row.cache.crop(min(kept - row.read, 0))
            row.read = min(row.read, kept)
        elif row.read > kept:
            row.cache, row.read = marks[-1]
        self._record(row)

    def _record(self, row: _Row) -> None:
        """Let a cache that can be cropped record what it needs for that."""
        if row.records or not getattr(row.cache, "is_croppable", False):
            return
        # A layer that a model brings along keeps more than the layer that it is made from crops
        # (DeepSeek V4).
        kinds = {type(layer).__module__ for layer in getattr(row.cache, "layers", ())}
        if kinds <= {Cache.__module__}:
            row.cache.activate_past_recording()
            row.records = True


def _padded(states: Sequence[Tensor], before: int, behind: int) -> tuple[Tensor, ...]:
    return tuple(pad(state_1nH, (0, 0, before, behind)) for state_1nH in states)


def _placed(state_1nH: Tensor, places: Sequence[int], queries: int) -> Tensor:
    """Return states `[1, queries, H]`: these at their places, else 0."""
    placed = state_1nH.new_zeros(1, queries, state_1nH.shape[2])
    placed[:, places] = state_1nH
    return placed


@contextmanager
def _short_scans(scans: Scans, tokens: int) -> Iterator[None]:
    """In the block, let scans of few tokens pad to few: the sums are the same, in another order.

    A chain of four behind its root would be padded to 256 tokens.
    """
    least = 1 << max(tokens - 1, 7).bit_length()
    try:
        for module, size in scans.items():
            module.chunk_size = min(least, size)
        yield
    finally:
        for module, size in scans.items():
            module.chunk_size = size


def _copy_of(cache: Any) -> Any:
    """Copy a cache, but for keys and values: new ones are joined to them in new tensors."""
    shared: dict[int, Any] = {}
    for layer in getattr(cache, "layers", ()):
        if isinstance(layer, DynamicLayer):
            for states in (layer.keys, layer.values):
                shared[id(states)] = states
    return copy.deepcopy(cache, shared)
