"""The target's hidden states that drafts are trained on: from its forward in the step, from memory,
or from disk.

A document's states depend only on the target, the tokens, the layer and the dtype; the key of a
cached row is a hash of these four, so that drafts that read some of the same layers share them.
With a cache, each document is forwarded alone, outside autocast, and rounded to the cache's dtype,
also when it was not found. So a run trains on the same bits whatever was cached when it began, on a
like machine.

    DIR/<hash of (target, dtype)>/<sha256 of the content>.safetensors

One tensor [T, H] per document and layer.

Legend: B rows, T tokens, L layers, H hidden size.
"""

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.core.hidden_states import body_states, layout_of
from draftsmith.core.io import atomic_file, hash_json, remove_leftovers, sha256_file
from draftsmith.train.batch import IGNORE, Batch, forward_options, packing_method
from draftsmith.train.teacher import find_projection

log = logging.getLogger(__name__)

_SHARD_BYTES = 2**28


class FeatureCache:
    """Target states of documents, on disk, by content, never more than `max_bytes` of shards.

    directory: may be shared by runs, processes and targets. fingerprint: of the target. layers:
    names of its states (`state_names`). dtype: of what is stored and given back. processes: divide
    the room that is left at the start.

    A full cache takes nothing more in: rows come back once per epoch, so dropping the oldest would
    drop each just before it is needed. A shard that is damaged counts as absent.
    """

    def __init__(
        self,
        directory: str | Path,
        fingerprint: str,
        layers: Sequence[int | str],
        dtype: torch.dtype,
        max_bytes: int,
        process: int = 0,
        processes: int = 1,
    ) -> None:
        self.layers = tuple(layers)
        self.dtype = dtype
        self._identity = {"target": fingerprint, "dtype": str(dtype).removeprefix("torch.")}
        self._directory = Path(directory) / hash_json(self._identity)[:16]
        if process == 0:
            remove_leftovers(self._directory)
        shards = Path(directory).rglob("*.safetensors")
        used = sum(file.stat().st_size for file in shards)
        self._room = (max_bytes - used) // processes
        # At least eight shards fit, else much of a small cache would stay empty.
        self._shard_bytes = min(_SHARD_BYTES, max_bytes // (8 * processes))
        self._file_of: dict[str, Path] = {}
        self._readers: dict[Path, Any] = {}
        self._waiting: dict[str, Tensor] = {}
        for file in self._directory.glob("*.safetensors"):
            try:
                with safe_open(file, framework="pt") as opened:
                    self._file_of |= dict.fromkeys(opened.keys(), file)
            except (OSError, SafetensorError):
                self._forget(file)

    def key(self, ids: Sequence[int], layer: int | str) -> str:
        """64 hex digits of the target, the layer, the dtype and the tokens."""
        return hash_json([self._identity, layer, list(ids)])

    def get(self, ids: Sequence[int]) -> Tensor | None:
        """The states `[L, T, H]` of a document on the CPU; None if one is missing."""
        states = [self._state(self.key(ids, layer)) for layer in self.layers]
        kept = [state_TH for state_TH in states if state_TH is not None]
        return torch.stack(kept) if len(kept) == len(states) else None

    def _state(self, key: str) -> Tensor | None:
        file = self._file_of.get(key)
        if file is None:
            return self._waiting.get(key)
        try:
            if file not in self._readers:
                if sha256_file(file) != file.stem:
                    raise OSError
                # Kept open: it is memory-mapped, and opening it again would parse its whole index
                # again.
                self._readers[file] = safe_open(file, framework="pt")
            state_TH: Tensor = self._readers[file].get_tensor(key)
        except (OSError, SafetensorError):
            self._forget(file)
            return None
        return state_TH

    def _forget(self, file: Path) -> None:
        log.warning("%s: is damaged; its features are computed again", file)
        self._readers.pop(file, None)
        self._file_of = {key: other for key, other in self._file_of.items() if other != file}
        file.unlink(missing_ok=True)

    def put(self, ids: Sequence[int], states_LTH: Tensor) -> None:
        """Keep the states of a document, if there is room; write a shard when there is enough for
        one.
        """
        for layer, state_TH in zip(self.layers, states_LTH, strict=True):
            key = self.key(ids, layer)
            if self._room <= 0 or key in self._waiting or key in self._file_of:
                continue
            self._waiting[key] = state_TH.detach().to("cpu", copy=True).contiguous()
            if sum(waiting.nbytes for waiting in self._waiting.values()) >= self._shard_bytes:
                self.flush()

    def flush(self) -> None:
        """Write what is in memory as one shard; if it does not fit, drop it and take nothing more
        in.
        """
        if not self._waiting:
            return
        waiting = self._waiting
        self._waiting = {}
        content = save(waiting)
        self._room -= len(content)
        if self._room < 0:
            log.warning(
                "%s: the cache is full; other features are computed in every epoch", self._directory
            )
            return
        digest = hashlib.sha256(content).hexdigest()
        file = self._directory / f"{digest}.safetensors"
        with atomic_file(file) as temporary:
            temporary.write_bytes(content)
        self._file_of |= dict.fromkeys(waiting, file)


class StateMemory:
    """Last hidden states of the target, in memory, at the positions of a document whose label
    counts.

    Never more than `max_bytes`; a full memory takes nothing more in. training: whether the
    documents of training batches will come back, and are held; without it only those of held-out
    data are.
    """

    def __init__(self, max_bytes: int, training: bool) -> None:
        self.room = max_bytes
        self.training = training
        self._held: dict[Sequence[int], Tensor] = {}
        self.get = self._held.get

    def put(self, key: Sequence[int], states_LTH: Tensor) -> None:
        if states_LTH.nbytes <= self.room:
            self._held[key] = states_LTH
            self.room -= states_LTH.nbytes


def cached_layers(layers: Sequence[int]) -> tuple[int, ...]:
    """The layers that a cache must hold for a head that reads `layers`: the last gives the target's
    logits.
    """
    return tuple(layers) if -1 in layers else (*layers, -1)


def state_names(target: PreTrainedModel, layers: Sequence[int]) -> tuple[int | str, ...]:
    """What a cache calls the target's states. Caches of older versions held the normed last state
    under the number of the last.
    """
    last = layout_of(target).count - 1
    return tuple("raw last" if layer == last else layer for layer in layers)


class FrozenTarget:
    """A model that is read and never trained; a plain object, so that a trainee does not register
    its weights.

    layers: of its states. packing: whether batches will be packed. cache: made for this
    model with `cached_layers(layers)`. memory: for drafts that read the last layer only. Raise
    InputError if the model cannot be used so.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[int],
        packing: bool = False,
        cache: FeatureCache | None = None,
        memory: StateMemory | None = None,
    ) -> None:
        self.model = model.eval()
        self.layers = tuple(layers)
        self.cache = cache
        self.memory = memory
        self.projection = find_projection(model, "target")
        self.packing = packing_method(model, "target") if packing and cache is None else None

    @torch.no_grad()
    def read(self, batch: Batch, training: bool = True) -> tuple[list[Tensor], Tensor]:
        """States `[B, T, H]` of `layers`, in that order, and the last (after the final norm),
        without gradients.

        training: whether it is a training batch, for `memory`. From the cache states are zero where
        a batch is padding, from memory wherever no label counts.
        """
        if self.cache is not None:
            states = self._kept(batch, self.cache, self.cache.dtype)
        elif self.memory is not None and (self.memory.training or not training):
            states = self._kept(batch, self.memory, self.model.dtype)
        else:
            options = forward_options(batch, self.packing, self.model.dtype)
            states = self._forward(batch.ids_BT, options)
        by_layer = dict(zip(cached_layers(self.layers), states, strict=True))
        return [by_layer[layer] for layer in self.layers], by_layer[-1]

    def _forward(self, ids_BT: Tensor, options: dict[str, Any]) -> list[Tensor]:
        wanted = cached_layers(self.layers)
        return list(body_states(self.model, wanted, input_ids=ids_BT, use_cache=False, **options))

    def _kept(
        self, batch: Batch, kept: FeatureCache | StateMemory, dtype: torch.dtype
    ) -> list[Tensor]:
        shape = len(cached_layers(self.layers)), *batch.ids_BT.shape, layout_of(self.model).width
        states_LBTH = torch.zeros(shape, dtype=dtype, device=batch.ids_BT.device)
        for row, start, stop in documents(batch):
            ids_T = batch.ids_BT[row, start:stop]
            labels_T = batch.labels_BT[row, start:stop]
            key: Any = ids_T.tolist()
            first = 0
            if isinstance(kept, StateMemory):
                first = int((labels_T != IGNORE).nonzero()[0])
                key = first, *key
            states_LTH = kept.get(key)
            if states_LTH is None:
                # Alone: others in its batch would change its rounding.
                with torch.autocast(ids_T.device.type, enabled=False):
                    states = self._forward(ids_T[None], {})
                states_LTH = torch.stack([state[0, first:].to(dtype) for state in states])
                kept.put(key, states_LTH)
            states_LBTH[:, row, start + first : stop] = states_LTH.to(states_LBTH.device)
        return list(states_LBTH)


def documents(batch: Batch) -> list[tuple[int, int, int]]:
    """(row, first token, one past its last token) of every document of a batch."""
    spans = []
    if batch.documents_BT is None:
        for row, labels_T in enumerate(batch.labels_BT):
            valid = (labels_T != IGNORE).nonzero()
            if len(valid):
                # The last label is the document's last token, which stands one position after it.
                spans.append((row, 0, int(valid[-1]) + 2))
        return spans
    for row, documents_T in enumerate(batch.documents_BT.tolist()):
        for number in range(max(documents_T) + 1):
            start = documents_T.index(number)
            spans.append((row, start, start + documents_T.count(number)))
    return spans
