"""The target's hidden states that drafts are trained on: from its forward in the step, from memory, or from disk.

A document's states depend only on the target, the tokens, the layers and the dtype; the key of a cached row is a hash
of these four. With a cache, states are made one document at a time, outside autocast and rounded to the cache's dtype,
whether or not they were found. So a run trains on the same bits whatever was cached when it began, as long as the cache
was filled on a like machine: another device or number of threads rounds otherwise. `StateMemory`, of one process, is
filled and read in the same way, and holds of a document only the positions that predict a token.

    DIR/<16 hex digits of (target, layers, dtype)>/p<process>/manifest.json
                                                             /00000.safetensors   one tensor [L, T, H] per document

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

from drafts.output_projection import OutputProjection
from draftsmith_core.errors import InputError
from draftsmith_core.io import atomic_file, hash_json, read_json, remove_leftovers, sha256_file, write_json_atomic
from train.batch import IGNORE, Batch
from train.packing import PackingMethod, forward_options, packing_method
from train.teacher import find_projection

log = logging.getLogger(__name__)

_FORMAT = 1
_SHARD_BYTES = 2**28


class FeatureCache:
    """Target states of documents, on disk, by content, never more than `max_bytes` of shards.

    directory: may be shared by runs and targets. fingerprint: of the target. layers: which of its `hidden_states`.
    dtype: of what is stored and given back. process, processes: each process writes a directory of its own and reads
    those of all processes that were there when it began.

    When full, it takes nothing more in: rows come back once per epoch, so dropping the oldest would drop each just
    before it is needed. Only shards of another target, other layers or another dtype are deleted for room, oldest
    first. A shard that cannot be read or is not what its manifest says counts as absent; a full disk ends the caching
    with a warning and not the run. What is still in memory is written by `flush`, and when the process ends.
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
        self.layers = tuple(layers)
        self.dtype = dtype
        self._identity = {
            "format": _FORMAT,
            "target": fingerprint,
            "layers": list(layers),
            "dtype": str(dtype).removeprefix("torch."),
        }
        self._shards = _Shards(Path(directory), self._identity, max_bytes, process, processes)
        weakref.finalize(self, self._shards.flush)

    def key(self, ids: Sequence[int]) -> str:
        """64 hex digits of the target, the layers, the dtype and the tokens."""
        return hash_json([self._identity, list(ids)])

    def get(self, ids: Sequence[int]) -> Tensor | None:
        """The states `[L, T, H]` of a document on the CPU, or None."""
        found = self._shards.find(self.key(ids))
        if found is None or found.shape[:2] != (len(self.layers), len(ids)) or found.dtype != self.dtype:
            return None
        return found

    def put(self, ids: Sequence[int], states_LTH: Tensor) -> None:
        """Keep the states of a document, if there is room."""
        assert states_LTH.dtype == self.dtype and states_LTH.shape[:2] == (len(self.layers), len(ids))
        self._shards.add(self.key(ids), states_LTH)

    def flush(self) -> None:
        """Write what is still in memory."""
        self._shards.flush()


class StateMemory:
    """Last hidden states of the frozen models of a run, in memory, never more than `max_bytes` of them.

    Of a document only the positions are held whose label counts: the others are read by no language model's loss. Like
    the cache on disk it takes nothing more in when it is full. training: whether the documents of training batches
    will come back, and are held; without it only those of held-out data are.
    """

    def __init__(self, max_bytes: int, training: bool) -> None:
        self.max_bytes, self.training = max_bytes, training
        self.bytes = 0
        self._held: dict[bytes, Tensor] = {}

    def states(self, name: str, ids_T: Tensor, first: int, make: Callable[[], Tensor]) -> Tensor:
        """What the model called `name` makes of a document from position `first` on: held from before, or made now."""
        tokens = ids_T.cpu().numpy().tobytes()
        key = hashlib.blake2b(b"%s %d %s" % (name.encode(), first, tokens), digest_size=16).digest()
        found = self._held.get(key)
        if found is None:
            found = make()
            if self.bytes + found.nbytes <= self.max_bytes:
                # A copy, because a part of a tensor keeps all of it.
                self._held[key] = found = found.clone()
                self.bytes += found.nbytes
        return found


class _Shards:
    """The files of one identity in a cache's directory. Each process writes its own `p<process>` and reads all."""

    def __init__(self, root: Path, identity: dict[str, Any], max_bytes: int, process: int, processes: int) -> None:
        self.root, self.identity, self.max_bytes, self.processes = root, identity, max_bytes, processes
        # The directory of all processes, and in it that of this one.
        self.shared = root / hash_json(identity)[:16]
        self.own = self.shared / f"p{process}"
        # At least eight shards fit, else much of a small cache would stay empty.
        self.shard_bytes = min(_SHARD_BYTES, max_bytes // (8 * processes))
        self.open_ = True
        self.listed: list[dict[str, Any]] = []
        self.where: dict[str, Path] = {}
        self.digests: dict[Path, str] = {}
        self.readers: dict[Path, Any] = {}
        self.waiting: dict[str, Tensor] = {}
        remove_leftovers(self.own)
        for directory in sorted(self.shared.glob("p*")):
            self._load(directory)
        for file in self.own.glob("*.safetensors"):
            # Not in the manifest: the run that wrote it was killed before it wrote the manifest.
            if file not in self.digests:
                file.unlink(missing_ok=True)

    def _load(self, directory: Path) -> None:
        path = directory / "manifest.json"
        if not path.exists():
            return
        try:
            manifest = read_json(path, "the manifest of cached features")
            shards = manifest["shards"] if manifest["identity"] == self.identity else []
            for shard in shards:
                file = directory / shard["file"]
                if not file.is_file() or file.stat().st_size != shard["bytes"]:
                    continue
                with safe_open(file, framework="pt") as opened:
                    keys = list(opened.keys())
                self.digests[file] = shard["sha256"]
                self.where |= dict.fromkeys(keys, file)
                if directory == self.own:
                    self.listed.append(shard)
        except (InputError, SafetensorError, OSError, KeyError, TypeError) as error:
            log.warning("%s: cannot be used (%s); these features are computed again", path, error)

    def find(self, key: str) -> Tensor | None:
        """A tensor by its key, from memory or from a shard that is what its manifest says."""
        if key in self.waiting:
            return self.waiting[key]
        file = self.where.get(key)
        if file is None:
            return None
        try:
            if file not in self.readers:
                if sha256_file(file) != self.digests[file]:
                    raise OSError("its content has changed")
                # Kept open: it is memory-mapped, and opening it again would parse its whole index again.
                self.readers[file] = safe_open(file, framework="pt")
            tensor: Tensor = self.readers[file].get_tensor(key)
        except (OSError, SafetensorError) as error:
            log.warning("%s: cannot be used (%s); its features are computed again", file, error)
            self._forget(file)
            return None
        return tensor

    def _forget(self, file: Path) -> None:
        self.readers.pop(file, None)
        self.digests.pop(file, None)
        self.where = {key: where for key, where in self.where.items() if where != file}
        if file.parent == self.own:
            file.unlink(missing_ok=True)
            self.listed = [shard for shard in self.listed if shard["file"] != file.name]

    def add(self, key: str, tensor: Tensor) -> None:
        """Keep a tensor in memory, and write a shard when there is enough for one."""
        if not self.open_ or key in self.waiting or key in self.where:
            return
        self.waiting[key] = tensor.detach().to("cpu", copy=True).contiguous()
        if sum(each.nbytes for each in self.waiting.values()) >= self.shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Write what is in memory as one shard; without room for it, drop it and take nothing more in."""
        if not self.waiting:
            return
        waiting, self.waiting = self.waiting, {}
        try:
            content = save(waiting)
            if not self._make_room(len(content)):
                self.open_ = False
                log.info("features: the cache is full; the others are computed in every epoch")
                return
            file = self.own / f"{max((int(shard['file'][:-12]) for shard in self.listed), default=-1) + 1:05d}"
            file = file.with_suffix(".safetensors")
            with atomic_file(file) as temporary:
                temporary.write_bytes(content)
            digest = sha256_file(file)
            self.listed.append({"file": file.name, "bytes": len(content), "sha256": digest, "documents": len(waiting)})
            write_json_atomic(self.own / "manifest.json", {"identity": self.identity, "shards": self.listed})
        except OSError as error:
            self.open_ = False
            log.warning("features: %s cannot be written (%s); no more are cached", self.own, error.strerror)
            return
        self.digests[file] = digest
        self.where |= dict.fromkeys(waiting, file)

    def _make_room(self, size: int) -> bool:
        """Whether a shard of this size may be written; deletes shards of other identities where room is short."""
        # Processes do not see each other's writes in time, so each assumes that all others hold as much as it will.
        # A directory that holds more already, from a run of fewer processes, is counted as it is.
        ours = [self.shared / f"p{process}" for process in range(self.processes)]
        held = [sum(map(_size, directory.glob("*.safetensors"))) for directory in ours]
        wanted = held[ours.index(self.own)] + size
        share = sum(max(each, wanted) for each in held)
        others = [file for file in self.root.glob("*/p*/*.safetensors") if file.parent not in ours]
        taken = sum(map(_size, others))
        deletable = sorted((f for f in others if f.parent.parent != self.shared), key=_age)
        while share + taken > self.max_bytes:
            if not deletable or share > self.max_bytes:
                return False
            oldest = deletable.pop(0)
            taken -= _size(oldest)
            oldest.unlink(missing_ok=True)
        return True


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def _age(file: Path) -> tuple[int, str]:
    try:
        return file.stat().st_mtime_ns, str(file)
    except FileNotFoundError:
        return 0, str(file)


def cached_layers(layers: Sequence[int]) -> tuple[int, ...]:
    """What a cache must hold for a head that reads `layers`: those, and the last, which gives the target's logits."""
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
            make = partial(self._alone_from, ids_T, first)
            last_BTH[row, start + first : stop] = memory.states(self.name, ids_T, first, make)
        return last_BTH

    def _alone_from(self, ids_T: Tensor, first: int) -> Tensor:
        return self._alone(ids_T)[-1][first:]

    def _cached(self, batch: Batch, cache: FeatureCache) -> list[Tensor]:
        states_LBTH = self._empty(batch, len(cache.layers), cache.dtype)
        for row, start, stop in documents(batch):
            ids_T = batch.ids_BT[row, start:stop]
            ids = ids_T.tolist()
            found_LTH = cache.get(ids)
            if found_LTH is None:
                found_LTH = torch.stack([state.to(cache.dtype) for state in self._alone(ids_T)])
                cache.put(ids, found_LTH)
            states_LBTH[:, row, start:stop] = found_LTH.to(states_LBTH.device)
        return list(states_LBTH)


def documents(batch: Batch) -> list[tuple[int, int, int]]:
    """(row, first token, one past its last token) of every document of a batch."""
    found = []
    if batch.documents_BT is None:
        for row, labels_T in enumerate(batch.labels_BT):
            valid = (labels_T != IGNORE).nonzero()
            if len(valid):
                # The last label is the document's last token, which stands one place after it.
                found.append((row, 0, int(valid[-1]) + 2))
        return found
    for row, documents_T in enumerate(batch.documents_BT.tolist()):
        for number in range(max(documents_T) + 1):
            start = documents_T.index(number)
            found.append((row, start, start + documents_T.count(number)))
    return found


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
