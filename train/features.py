"""The target's hidden states that drafts are trained on: from its forward in the step, from memory, or from disk.

A document's states depend only on the target, the tokens, the layers and the dtype; the key of a cached row is a hash
of these four. With a cache, states are made one document at a time, outside autocast and rounded to the cache's dtype,
whether or not they were found. So a run trains on the same bits whatever was cached when it began, as long as the cache
was filled on a like machine: another device or number of threads rounds otherwise. `StateMemory`, of one process, is
filled and read in the same way, and holds only the positions of a document that predict a token.

    DIR/<hash of (target, layers, dtype)>/<sha256 of the content>.safetensors    one tensor [L, T, H] per document

Legend: B rows, T tokens, L layers, H hidden size.
"""

import hashlib
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedModel

from drafts.heads.borrowed import OutputProjection
from draftsmith_core.io import atomic_file, hash_json, remove_leftovers, sha256_file
from train.batch import IGNORE, Batch
from train.packing import PackingMethod, forward_options, packing_method
from train.teacher import find_projection

log = logging.getLogger(__name__)

_SHARD_BYTES = 2**28


class FeatureCache:
    """Target states of documents, on disk, by content, never more than `max_bytes` of shards.

    directory: may be shared by runs, processes and targets. fingerprint: of the target. layers: which of its
    `hidden_states`. dtype: of what is stored and given back. processes: divide the room that is left at the start.

    A full cache takes nothing more in: rows come back once per epoch, so dropping the oldest would drop each just
    before it is needed. A shard that is damaged counts as absent; a full disk ends the caching with a warning and not
    the run. `flush` writes what is still in memory; it also runs when the process ends.
    """

    def __init__(
        self,
        directory: str | Path,
        fingerprint: str,
        layers: Sequence[int],
        dtype: torch.dtype,
        max_bytes: int,
        process: int = 0,
        processes: int = 1,
    ) -> None:
        self.layers, self.dtype = tuple(layers), dtype
        self._identity = {"target": fingerprint, "layers": list(layers), "dtype": str(dtype).removeprefix("torch.")}
        self._shards = _Shards(Path(directory) / hash_json(self._identity)[:16], max_bytes, process, processes)
        weakref.finalize(self, self._shards.flush)

    def key(self, ids: Sequence[int]) -> str:
        """64 hex digits of the target, the layers, the dtype and the tokens."""
        return hash_json([self._identity, list(ids)])

    def get(self, ids: Sequence[int]) -> Tensor | None:
        """The states `[L, T, H]` of a document on the CPU, or None."""
        return self._shards.find(self.key(ids))

    def put(self, ids: Sequence[int], states_LTH: Tensor) -> None:
        """Keep the states of a document, if there is room."""
        assert states_LTH.dtype == self.dtype and states_LTH.shape[:2] == (len(self.layers), len(ids))
        self._shards.add(self.key(ids), states_LTH)

    def flush(self) -> None:
        """Write what is still in memory."""
        self._shards.flush()


class _Shards:
    """The files of one identity; apart from `FeatureCache`, because its finalizer must not refer to it."""

    def __init__(self, directory: Path, max_bytes: int, process: int, processes: int) -> None:
        self.directory = directory
        if process == 0:
            remove_leftovers(directory)
        self.room = (
            max_bytes - sum(file.stat().st_size for file in directory.parent.rglob("*.safetensors"))
        ) // processes
        # At least eight shards fit, else much of a small cache would stay empty.
        self.shard_bytes = min(_SHARD_BYTES, max_bytes // (8 * processes))
        self.where: dict[str, Path] = {}
        self.readers: dict[Path, Any] = {}
        self.waiting: dict[str, Tensor] = {}
        for file in directory.glob("*.safetensors"):
            try:
                with safe_open(file, framework="pt") as opened:
                    self.where |= dict.fromkeys(opened.keys(), file)
            except (OSError, SafetensorError):
                self._forget(file)

    def find(self, key: str) -> Tensor | None:
        """A tensor by its key, from memory or from a shard that is what was written."""
        file = self.where.get(key)
        if file is None:
            return self.waiting.get(key)
        try:
            if file not in self.readers:
                if sha256_file(file) != file.stem:
                    raise OSError
                # Kept open: it is memory-mapped, and opening it again would parse its whole index again.
                self.readers[file] = safe_open(file, framework="pt")
            tensor: Tensor = self.readers[file].get_tensor(key)
        except (OSError, SafetensorError):
            self._forget(file)
            return None
        return tensor

    def _forget(self, file: Path) -> None:
        log.warning("%s: is damaged; its features are computed again", file)
        self.readers.pop(file, None)
        self.where = {key: where for key, where in self.where.items() if where != file}
        file.unlink(missing_ok=True)

    def add(self, key: str, tensor: Tensor) -> None:
        """Keep a tensor in memory, and write a shard when there is enough for one."""
        if self.room > 0 and key not in self.waiting and key not in self.where:
            self.waiting[key] = tensor.detach().to("cpu", copy=True).contiguous()
            if sum(waiting.nbytes for waiting in self.waiting.values()) >= self.shard_bytes:
                self.flush()

    def flush(self) -> None:
        """Write what is in memory as one shard; without room for it, drop it and take nothing more in."""
        if not self.waiting:
            return
        waiting, self.waiting = self.waiting, {}
        content = save(waiting)
        self.room -= len(content)
        if self.room < 0:
            log.warning("%s: the cache is full; other features are computed in every epoch", self.directory)
            return
        file = self.directory / f"{hashlib.sha256(content).hexdigest()}.safetensors"
        try:
            with atomic_file(file) as temporary:
                temporary.write_bytes(content)
        except OSError as error:
            self.room = 0
            log.warning("%s: cannot be written (%s); no more features are cached", self.directory, error.strerror)
            return
        self.where |= dict.fromkeys(waiting, file)


class StateMemory:
    """Last hidden states of the frozen models of a run, in memory, never more than `max_bytes` of them.

    Only the positions of a document are held whose label counts: no language model's loss reads the others. A full
    memory takes nothing more in. training: whether the documents of training batches will come back, and are held;
    without it only those of held-out data are.
    """

    def __init__(self, max_bytes: int, training: bool) -> None:
        self.max_bytes, self.training = max_bytes, training
        self.bytes = 0
        self._held: dict[bytes, Tensor] = {}

    def states(self, name: str, ids_T: Tensor, first: int, make: Callable[[], list[Tensor]]) -> Tensor:
        """Last states of a document from position `first` on, of the model `name`: held, or the last of `make`."""
        tokens = ids_T.cpu().numpy().tobytes()
        key = hashlib.blake2b(b"%s %d %s" % (name.encode(), first, tokens), digest_size=16).digest()
        states = self._held.get(key)
        if states is None:
            states = make()[-1][first:]
            if self.bytes + states.nbytes <= self.max_bytes:
                # A copy, because a part of a tensor keeps all of it.
                self._held[key] = states = states.clone()
                self.bytes += states.nbytes
        return states


def cached_layers(layers: Sequence[int]) -> tuple[int, ...]:
    """The layers that a cache must hold for a head that reads `layers`: the last gives the target's logits."""
    return tuple(layers) if -1 in layers else (*layers, -1)


@dataclass(frozen=True, eq=False)
class FrozenTarget:
    """A model that is read and never trained, in a plain object so that a trainee does not register its weights.

    cache and memory: where its states are kept, if anywhere; `memory` serves models of which only the last is read.
    """

    model: PreTrainedModel
    projection: OutputProjection
    layers: tuple[int, ...]
    packing: PackingMethod | None
    cache: FeatureCache | None
    memory: StateMemory | None
    name: str

    @torch.no_grad()
    def read(self, batch: Batch, training: bool = True) -> tuple[list[Tensor], Tensor]:
        """States `[B, T, H]` of `layers`, in that order, and the last (after the final norm), without gradients.

        training: whether it is a training batch, for `memory`. From the cache states are zero where a batch is padding,
        from memory wherever no label counts.
        """
        wanted = cached_layers(self.layers)
        if self.cache is not None:
            states = self._cached(batch, self.cache)
        elif self.memory is not None and (self.memory.training or not training):
            states = [self._remembered(batch, self.memory)]
        else:
            states = self._forward(batch.ids_BT, forward_options(batch, self.packing, self.model.dtype))
        by_layer = dict(zip(wanted, states, strict=True))
        return [by_layer[layer] for layer in self.layers], by_layer[-1]

    def _forward(self, ids_BT: Tensor, options: dict[str, Any]) -> list[Tensor]:
        wanted = cached_layers(self.layers)
        more = {"output_hidden_states": True} if wanted != (-1,) else {}
        out = self.model.base_model(input_ids=ids_BT, use_cache=False, **more, **options)
        return [out.last_hidden_state if layer == -1 else out.hidden_states[layer] for layer in wanted]

    def _alone(self, ids_T: Tensor) -> list[Tensor]:
        """States `[T, H]` of one document, forwarded alone: others in its batch would change its rounding."""
        with torch.autocast(ids_T.device.type, enabled=False):
            return [state[0] for state in self._forward(ids_T[None], {})]

    def _empty(self, batch: Batch, count: int, dtype: torch.dtype) -> Tensor:
        size = int(self.model.config.get_text_config(decoder=True).hidden_size)
        return torch.zeros(count, *batch.ids_BT.shape, size, dtype=dtype, device=batch.ids_BT.device)

    def _remembered(self, batch: Batch, memory: StateMemory) -> Tensor:
        last_BTH = self._empty(batch, 1, self.model.dtype)[0]
        for row, start, stop in documents(batch):
            ids_T = batch.ids_BT[row, start:stop]
            first = int((batch.labels_BT[row, start:stop] != IGNORE).nonzero()[0])
            last_BTH[row, start + first : stop] = memory.states(self.name, ids_T, first, partial(self._alone, ids_T))
        return last_BTH

    def _cached(self, batch: Batch, cache: FeatureCache) -> list[Tensor]:
        states_LBTH = self._empty(batch, len(cache.layers), cache.dtype)
        for row, start, stop in documents(batch):
            ids_T = batch.ids_BT[row, start:stop]
            ids = ids_T.tolist()
            states_LTH = cache.get(ids)
            if states_LTH is None:
                states_LTH = torch.stack([state.to(cache.dtype) for state in self._alone(ids_T)])
                cache.put(ids, states_LTH)
            states_LBTH[:, row, start:stop] = states_LTH.to(states_LBTH.device)
        return list(states_LBTH)


def documents(batch: Batch) -> list[tuple[int, int, int]]:
    """(row, first token, one past its last token) of every document of a batch."""
    spans = []
    if batch.documents_BT is None:
        for row, labels_T in enumerate(batch.labels_BT):
            valid = (labels_T != IGNORE).nonzero()
            if len(valid):
                # The last label is the document's last token, which stands one place after it.
                spans.append((row, 0, int(valid[-1]) + 2))
        return spans
    for row, documents_T in enumerate(batch.documents_BT.tolist()):
        for number in range(max(documents_T) + 1):
            start = documents_T.index(number)
            spans.append((row, start, start + documents_T.count(number)))
    return spans


def freeze(
    model: PreTrainedModel,
    layers: Sequence[int],
    packing: bool = False,
    cache: FeatureCache | None = None,
    memory: StateMemory | None = None,
    name: str = "target",
) -> FrozenTarget:
    """A target (or a reference draft) to read states from; InputError, one line, for one that cannot be used so.

    packing: whether batches will be packed. cache: made for this model with `cached_layers(layers)`. memory: may be
    shared by models that are read at their last layer. name: in `memory` and for errors.
    """
    model.eval()
    assert cache is None or cache.layers == cached_layers(layers), "this cache is of other layers"
    assert memory is None or tuple(layers) == (-1,), "memory is for the last layer"
    method = packing_method(model, name) if packing and cache is None else None
    return FrozenTarget(model, find_projection(model, name), tuple(layers), method, cache, memory, name)
