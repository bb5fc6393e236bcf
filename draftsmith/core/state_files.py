"""Hidden states of a target in files, by content: the cache of a local run, and what an engine
wrote.

A document's states depend only on the target, the tokens, the layer and the dtype; the key of a
row is a hash of these four, so that drafts that read some of the same layers share them, and both
roads share files.

    DIR/<hash of (target, dtype)>/<sha256 of the content>.safetensors
    DIR/<hash of (target, dtype)>/identity.json

One tensor per document and layer: [T, H], or [T - 1, H] from an engine, which never reads the last
token. In 8 bits it is int8 [T, H + 4]: a token's values over its scale, and that, fp32.

Legend: T tokens, L layers, H hidden size.
"""

import hashlib
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from draftsmith.core.errors import InputError
from draftsmith.core.hidden_states import final_norm, layout_of
from draftsmith.core.hub import cached
from draftsmith.core.io import (
    JsonObject,
    atomic_file,
    canonical_json,
    hash_json,
    read_json,
    remove_leftovers,
    sha256_file,
    write_json_atomic,
)
from draftsmith.core.models import architecture

log = logging.getLogger(__name__)

_SHARD_BYTES = 2**28
_IDENTITY = "identity.json"
_WEIGHTS = "model.safetensors"
# Rows of a tensor that tell two checkpoints apart.
_SAMPLED = 4
_EIGHT_BITS = "int8"
_SCALE_BYTES = 4
RAW_LAST = "raw last"
"""The name of the last layer's output, before the final norm."""


class StateFiles:
    """Target states of documents in files, by content.

    directory: may be shared by runs, processes and targets. fingerprint: of the target
    (`checkpoint_digest`). layers: names of its states (`state_names`). dtype: of what is given
    back, and stored unless `eight_bits`. A shard that is damaged counts as absent.
    """

    def __init__(
        self,
        directory: str | Path,
        fingerprint: str,
        layers: Sequence[int | str],
        dtype: torch.dtype,
        *,
        eight_bits: bool = False,
    ) -> None:
        self.layers = tuple(layers)
        self.dtype = dtype
        self._eight_bits = eight_bits
        stored = _EIGHT_BITS if eight_bits else str(dtype).removeprefix("torch.")
        self._identity = {"target": fingerprint, "dtype": stored}
        self._directory = _place_of(directory, self._identity)
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

    def has(self, ids: Sequence[int]) -> bool:
        """Whether all states of a document are kept."""
        keys = {self.key(ids, layer) for layer in self.layers}
        return keys <= self._file_of.keys() | self._waiting.keys()

    def get(self, ids: Sequence[int]) -> Tensor | None:
        """The states `[L, T, H]` of a document on the CPU; None if one is missing."""
        states = [self._state(self.key(ids, layer)) for layer in self.layers]
        kept = [_of_length(state_TH, len(ids)) for state_TH in states if state_TH is not None]
        return torch.stack(kept) if len(kept) == len(states) else None

    def _state(self, key: str) -> Tensor | None:
        file = self._file_of.get(key)
        if file is None:
            return self._waiting.get(key)
        try:
            if file not in self._readers:
                # Kept open: it is memory-mapped, and opening it again would parse its whole index
                # again.
                self._readers[file] = self._open(file)
            state_TH: Tensor = self._readers[file].get_tensor(key)
        except (OSError, SafetensorError):
            self._forget(file)
            return None
        return _unpacked(state_TH, self.dtype) if self._eight_bits else state_TH

    def _stored(self, state_TH: Tensor) -> Tensor:
        """What a file holds of a state."""
        return _packed(state_TH) if self._eight_bits else state_TH.contiguous()

    def _open(self, file: Path) -> Any:
        if sha256_file(file) != file.stem:
            raise OSError
        return safe_open(file, framework="pt")

    def close(self) -> None:
        """Keep what is to be kept."""

    def _forget(self, file: Path) -> None:
        log.warning("%s: is damaged; its features are computed again", file)
        self._readers.pop(file, None)
        self._file_of = {key: other for key, other in self._file_of.items() if other != file}
        file.unlink(missing_ok=True)


def _place_of(place: str | Path, identity: JsonObject) -> Path:
    return Path(place) / hash_json(identity)[:16]


def _packed(state_TH: Tensor) -> Tensor:
    scale_T1 = state_TH.float().abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    values_TH = (state_TH.float() / scale_T1).round().to(torch.int8)
    return torch.cat([values_TH, scale_T1.view(torch.int8)], dim=-1)


def _unpacked(packed: Tensor, dtype: torch.dtype) -> Tensor:
    scale_T1 = packed[:, -_SCALE_BYTES:].contiguous().view(torch.float32)
    return (packed[:, :-_SCALE_BYTES] * scale_T1).to(dtype)


def _of_length(state_TH: Tensor, length: int) -> Tensor:
    # An engine never reads the last token, and no loss does.
    return pad(state_TH[:length], (0, 0, 0, max(0, length - len(state_TH))))


class FeatureCache(StateFiles):
    """Files that take in what a run computes, never more than `max_bytes` of shards.

    processes: divide the room that is left at the start. A full cache takes nothing more in: rows
    come back once per epoch, so dropping the oldest would drop each just before it is needed.
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
        *,
        eight_bits: bool = False,
    ) -> None:
        super().__init__(directory, fingerprint, layers, dtype, eight_bits=eight_bits)
        if process == 0:
            remove_leftovers(self._directory)
        shards = Path(directory).rglob("*.safetensors")
        used = sum(file.stat().st_size for file in shards)
        self._room = (max_bytes - used) // processes
        # At least eight shards fit, else much of a small cache would stay empty.
        self._shard_bytes = min(_SHARD_BYTES, max_bytes // (8 * processes))

    def put(self, ids: Sequence[int], states_LTH: Tensor) -> None:
        """Keep the states of a document, if there is room; write a shard when there is enough for
        one.
        """
        for layer, state_TH in zip(self.layers, states_LTH, strict=True):
            key = self.key(ids, layer)
            if self._room <= 0 or key in self._waiting or key in self._file_of:
                continue
            self._waiting[key] = self._stored(state_TH.detach().to("cpu", copy=True))
            if sum(waiting.nbytes for waiting in self._waiting.values()) >= self._shard_bytes:
                self.flush()

    def close(self) -> None:
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
        write_json_atomic(self._directory / _IDENTITY, self._identity)
        file = self._directory / f"{digest}.safetensors"
        with atomic_file(file) as temporary:
            temporary.write_bytes(content)
        self._file_of |= dict.fromkeys(waiting, file)


class StoredStates(StateFiles):
    """`--states`: all that is known of a target whose layers are not here; never written to.

    target: loaded without its layers. layers: the states that a draft reads. Where files hold the
    raw last state alone, the final norm gives the final one.
    """

    def __init__(
        self,
        directory: str | Path,
        target: PreTrainedModel,
        fingerprint: str,
        layers: Sequence[int],
    ) -> None:
        names = state_names(target, layers)
        dtype = str(target.dtype).removeprefix("torch.")
        eight_bits = not _place_of(directory, {"target": fingerprint, "dtype": dtype}).exists()
        eight_bits &= _place_of(directory, {"target": fingerprint, "dtype": _EIGHT_BITS}).exists()
        super().__init__(directory, fingerprint, names, target.dtype, eight_bits=eight_bits)
        self._place = directory
        self._check_any()
        self._norm = final_norm(target)
        self._target = target
        self._whole: dict[str, str] = {}

    def _check_any(self) -> None:
        if not self._file_of:
            raise InputError(f"states: {self._place}: {self._why_nothing()}")

    def _why_nothing(self) -> str:
        files = sorted(Path(self._place).glob(f"*/{_IDENTITY}"))
        kept = [read_json(file, "the identity of states", ("target", "dtype")) for file in files]
        for identity in kept:
            if identity["target"] == self._identity["target"]:
                dtype = identity["dtype"]
                return f"holds this target's states in {dtype}; give --dtype {dtype}"
        if kept:
            return "holds the states of another target; name the checkpoint that the engine served"
        return "holds no states; write them with draftsmith distill --states"

    def require(self, rows: Iterable[Sequence[int]], length: int, option: str) -> None:
        """Raise InputError that names what is missing unless the states of every row are here.

        rows: their tokens, of which the first `length` are read.
        """
        lacking = 0
        first = ""
        count = 0
        for ids in rows:
            count += 1
            missing = [layer for layer in self.layers if not self._find(ids, length, layer)]
            lacking += bool(missing)
            if missing and not first:
                layers = ", ".join("last" if layer == -1 else str(layer) for layer in missing)
                every = [*range(layout_of(self._target).count), RAW_LAST]
                kept = ", ".join(
                    str(name) for name in every if self.key(ids, name) in self._file_of
                )
                first = f"row {count} lacks {layers} and has {kept or 'none'}"
        if lacking:
            raise InputError(
                f"states: {self._place}: {lacking} of {count} rows of `{option}` lack states "
                f"({first}); write them with draftsmith distill --states"
            )

    def _find(self, ids: Sequence[int], length: int, layer: int | str) -> bool:
        """Whether a row's state is here: of the tokens that are read, or of the whole row."""
        for name in (layer, RAW_LAST) if layer == -1 else (layer,):
            key = self.key(ids[:length], name)
            whole = key if len(ids) <= length else self.key(ids, name)
            if key in self._file_of:
                return True
            if whole in self._file_of:
                self._whole[key] = whole
                return True
        return False

    @torch.no_grad()
    def get(self, ids: Sequence[int]) -> Tensor:
        """The states `[L, T, H]` of a row that `require` has found."""
        states = []
        for layer in self.layers:
            state_TH = self._state(self.key(ids, layer))
            if state_TH is None and layer == -1:
                raw_TH = self._state(self.key(ids, RAW_LAST))
                assert raw_TH is not None
                device = self._target.device
                with torch.autocast(device.type, enabled=False):
                    state_TH = self._norm(raw_TH.to(device)[None])[0].cpu()
            assert state_TH is not None, "require() was not asked for this row"
            states.append(_of_length(state_TH, len(ids)))
        return torch.stack(states)

    def _state(self, key: str) -> Tensor | None:
        return super()._state(self._whole.get(key, key))

    def _forget(self, file: Path) -> None:
        raise InputError(f"states: {file}: is damaged; delete it and write its rows again")


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
    return tuple(RAW_LAST if layer == last else layer for layer in layers)


def checkpoint_files(name: str, revision: str | None = None) -> list[Path]:
    """The config of a checkpoint and its weights: here, or in the hub's cache, where only what
    transformers reads is downloaded.
    """
    config = cached(name, "config.json", revision)
    if config is None:
        raise InputError(f"{name}: has no config.json")
    index = cached(name, f"{_WEIGHTS}.index.json", revision)
    names = {_WEIGHTS}
    if index is not None:
        names = set(read_json(index, "the index of weights", ["weight_map"])["weight_map"].values())
    found = [cached(name, each, revision) for each in sorted(names)]
    weights = [file for file in found if file is not None]
    weights = weights or sorted(config.parent.glob("*.bin"))
    if not weights:
        raise InputError(f"{name}: has no weights, by which states are known")
    return [config, *weights]


def checkpoint_digest(name: str, revision: str | None = None) -> str:
    """16 hex digits of a checkpoint, without reading the whole of it: its architecture, and some
    values of every tensor.

    However it is divided into files. Tell apart checkpoints that share embedding and output
    projection, as fine-tuned ones do.
    """
    config, *files = checkpoint_files(name, revision)
    values = read_json(config, "the config of a model")
    digest = hashlib.sha256(canonical_json(architecture(values)).encode())
    opened: dict[str, Any] = {}
    for file in files if files[0].suffix == ".safetensors" else ():
        tensors = safe_open(file, framework="pt")
        opened |= dict.fromkeys(list(tensors.keys()), tensors)  # type: ignore[no-untyped-call]
    for key in sorted(opened):
        tensor = opened[key].get_slice(key)
        shape = tensor.get_shape()
        digest.update(f"{key}{shape}{tensor.get_dtype()}".encode())
        inner = [slice(0, 1)] * (len(shape) - 2)
        for part in range(_SAMPLED + 1) if shape else ():
            row = part * (shape[0] - 1) // _SAMPLED
            sample = tensor[(slice(row, row + 1), *inner)]
            digest.update(sample.contiguous().view(torch.uint8).numpy().tobytes())
    for file in files if not opened else ():
        digest.update(sha256_file(file).encode())
    return digest.hexdigest()[:16]
