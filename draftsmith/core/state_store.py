"""The target's hidden states of documents: `get(ids, layers)` and `put(ids, layers, states)`, in
files or in memory, each with a bound.

What is missing comes from a forward (`train.frozen_target`), from an engine that wrote it before
(`StoredStates`), or from servers that run ahead (`train.states_ahead`).

A document's states depend only on the target, the tokens, the layer and the dtype:

    DIR/<hash of (target, dtype)>/<hash of the tokens>.safetensors

A file has a tensor per layer: `[T, H]`, or `[T - 1, H]` from an engine, which never reads the last
token. Of n layers, layer n is the raw output of the last, and -1 the state behind the final norm.
In 8 bits a tensor is int8 `[T, H + 4]`: a token's values over its scale, and that, fp32.

Legend: T tokens, L layers, H hidden size.
"""

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

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
    atomic_file,
    canonical_json,
    hash_json,
    read_json,
    remove_leftovers,
    sha256_file,
)
from draftsmith.core.models import architecture
from draftsmith.core.ranks import is_main

log = logging.getLogger(__name__)

_WEIGHTS = "model.safetensors"
# Rows of a tensor that tell two checkpoints apart.
_SAMPLED = 4
_EIGHT_BITS = "int8"
_SCALE_BYTES = 4
# Before 2, the number of the last layer meant its normed state.
_VERSION = 2


class StateMemory:
    """States of the same layers of every document, in at most `room` bytes of memory.

    for_training: whether training batches are read from it too, not only held-out ones.
    """

    def __init__(self, room: int, dtype: torch.dtype, for_training: bool) -> None:
        self.dtype = dtype
        self.for_training = for_training
        self._room = room
        self._held: dict[tuple[int, ...], Tensor] = {}

    def get(self, ids: Sequence[int], layers: Sequence[int]) -> Tensor | None:
        """Return the states `[L, T, H]` of a document; None without them."""
        return self._held.get(tuple(ids))

    def put(self, ids: Sequence[int], layers: Sequence[int], states_LTH: Tensor) -> None:
        """Keep the states of a document, if there is room."""
        if states_LTH.nbytes <= self._room:
            self._held[tuple(ids)] = states_LTH
            self._room -= states_LTH.nbytes


class StateFiles:
    """States in files.

    directory: may be shared by runs, processes and targets. fingerprint: of the target
    (`checkpoint_digest`). dtype: of what is given back, and stored unless `eight_bits`. max_bytes:
    of all files below `directory`; `processes` divide the room that is left at the start. A full
    directory takes nothing more in: rows come back once per epoch, so dropping the oldest would
    drop each just before it is needed. A damaged file counts as absent.
    """

    for_training = True

    def __init__(
        self,
        directory: str | Path,
        fingerprint: str,
        dtype: torch.dtype,
        *,
        max_bytes: int | None = None,
        processes: int = 1,
        eight_bits: bool = False,
    ) -> None:
        self.dtype = dtype
        self._eight_bits = eight_bits
        stored = _EIGHT_BITS if eight_bits else _name_of(dtype)
        self._directory = _place_of(directory, fingerprint, stored)
        # Files that were whole when they were read.
        self._checked: set[Path] = set()
        if is_main():
            remove_leftovers(self._directory)
        self._room: int | None = None
        if max_bytes is not None:
            files = Path(directory).rglob("*.safetensors")
            used = sum(file.stat().st_size for file in files)
            self._room = (max_bytes - used) // processes

    def file(self, ids: Sequence[int]) -> Path:
        """The file of a document."""
        return self._directory / f"{hash_json(list(ids))}.safetensors"

    def layers_of(self, ids: Sequence[int]) -> set[int]:
        """The layers whose states of a document are kept."""
        return set(map(int, self._read(self.file(ids), check=False)))

    def get(self, ids: Sequence[int], layers: Sequence[int]) -> Tensor | None:
        """Return the states `[L, T, H]` of a document on the CPU; None if one is missing."""
        held = self._read(self.file(ids))
        states = []
        for layer in layers:
            state_TH = self._state(held, layer)
            if state_TH is None:
                return None
            # An engine never reads the last token, and no loss does.
            missing = max(0, len(ids) - len(state_TH))
            states.append(pad(state_TH[: len(ids)], (0, 0, 0, missing)))
        return torch.stack(states)

    def share(self, ids: Sequence[int]) -> float | None:
        """What was measured of a document when its states came; None if nothing was."""
        with (
            suppress(OSError, SafetensorError, KeyError),
            safe_open(self.file(ids), "pt") as opened,
        ):
            return float(opened.metadata()["share"])
        return None

    def put(
        self,
        ids: Sequence[int],
        layers: Sequence[int],
        states_LTH: Tensor,
        share: float | None = None,
    ) -> None:
        """Keep the states of a document, if there is room, beside those of other layers.

        share: of what the last states claim, what the tokens bear out (`drafts.state_likelihood`).
        """
        file = self.file(ids)
        if self._room == 0:
            return
        held = self._read(file)
        before = file.stat().st_size if held else 0
        for layer, state_TH in zip(layers, states_LTH.detach().cpu(), strict=True):
            held.setdefault(str(layer), self._packed(state_TH))
        measured = {} if share is None else {"share": repr(share)}
        content = save(held, {"sha256": _digest(held)} | measured)
        if self._room is not None:
            grown = len(content) - before
            if grown > self._room:
                log.warning("%s: is full; other states are computed in every epoch", file.parent)
                self._room = 0
                return
            self._room -= grown
        with atomic_file(file) as temporary:
            temporary.write_bytes(content)

    def _state(self, held: Mapping[str, Tensor], layer: int) -> Tensor | None:
        stored = held.get(str(layer))
        if stored is None or not self._eight_bits:
            return stored
        scale_T1 = stored[:, -_SCALE_BYTES:].contiguous().view(torch.float32)
        return (stored[:, :-_SCALE_BYTES] * scale_T1).to(self.dtype)

    def _packed(self, state_TH: Tensor) -> Tensor:
        if not self._eight_bits:
            return state_TH.contiguous()
        scale_T1 = state_TH.float().abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
        values_TH = (state_TH.float() / scale_T1).round().to(torch.int8)
        return torch.cat([values_TH, scale_T1.view(torch.int8)], dim=-1)

    def _read(self, file: Path, *, check: bool = True) -> dict[str, Tensor]:
        """The tensors of a file, which stay there until they are used; none without one.

        check: compare a file that is new here with its checksum.
        """
        try:
            with safe_open(file, framework="pt") as opened:
                held = {name: opened.get_tensor(name) for name in opened.keys()}
                if check and file not in self._checked:
                    if opened.metadata().get("sha256") != _digest(held):
                        raise OSError
                    self._checked.add(file)
                return held
        except FileNotFoundError:
            return {}
        except (OSError, SafetensorError):
            self._damaged(file)
            return {}

    def _damaged(self, file: Path) -> None:
        log.warning("%s: is damaged; its states are computed again", file)
        file.unlink(missing_ok=True)


StateStore: TypeAlias = StateMemory | StateFiles


def _place_of(directory: str | Path, fingerprint: str, dtype: str) -> Path:
    identity = {"target": fingerprint, "dtype": dtype, "version": _VERSION}
    return Path(directory) / hash_json(identity)[:16]


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class StoredStates(StateFiles):
    """`--states`: all that is known of a target whose layers are not here.

    target: loaded without its layers; its final norm gives the final state where files hold the raw
    last state alone.
    """

    def __init__(self, directory: str | Path, target: PreTrainedModel, fingerprint: str) -> None:
        own = _place_of(directory, fingerprint, _name_of(target.dtype))
        eight_bits = _place_of(directory, fingerprint, _EIGHT_BITS)
        packed = eight_bits.exists() and not own.exists()
        super().__init__(directory, fingerprint, target.dtype, eight_bits=packed)
        self._place = directory
        self._norm = final_norm(target)
        self._device = target.device
        self._last = layout_of(target).count - 1
        # By the file of a row that is cut, that of the whole row.
        self._whole: dict[Path, Path] = {}

    def require(
        self, rows: Iterable[Sequence[int]], layers: Sequence[int], length: int, option: str
    ) -> None:
        """Raise InputError unless the states of every row are here.

        rows: their tokens, of which the first `length` are read.
        """
        count = 0
        lacking = []
        for ids in rows:
            count += 1
            if not self.finds(ids, layers, length):
                lacking.append(ids)
        if lacking:
            missing = set(layers) - self.layers_of(lacking[0])
            raise InputError(
                f"states: {self._place}: {len(lacking)} of {count} rows of `{option}` lack those "
                f"of layers {sorted(missing)} in {_name_of(self.dtype)}; write them with "
                "draftsmith distill --states, or give the --dtype that was served"
            )

    def finds(self, ids: Sequence[int], layers: Sequence[int], length: int) -> bool:
        """Whether a row's states are here: of the tokens that are read, or of the whole row."""
        cut = ids[:length]
        if len(cut) < len(ids) and not self.layers_of(cut) >= set(layers):
            self._whole[super().file(cut)] = super().file(ids)
        return self.layers_of(cut) >= set(layers)

    def file(self, ids: Sequence[int]) -> Path:
        file = super().file(ids)
        return self._whole.get(file, file)

    def layers_of(self, ids: Sequence[int]) -> set[int]:
        kept = super().layers_of(ids)
        return kept | {-1} if self._last in kept else kept

    def get(self, ids: Sequence[int], layers: Sequence[int]) -> Tensor:
        """Return the states `[L, T, H]` of a row that `finds` found."""
        states_LTH = super().get(ids, layers)
        assert states_LTH is not None, "require() was not asked for this row"
        return states_LTH

    @torch.no_grad()
    def _state(self, held: Mapping[str, Tensor], layer: int) -> Tensor | None:
        if layer != -1 or "-1" in held:
            return super()._state(held, layer)
        raw_TH = super()._state(held, self._last)
        if raw_TH is None:
            return None
        with torch.autocast(self._device.type, enabled=False):
            final_TH: Tensor = self._norm(raw_TH.to(self._device)[None])[0]
        return final_TH.cpu()

    def _damaged(self, file: Path) -> None:
        raise InputError(f"states: {file}: is damaged; delete it and write its rows again")


def cached_layers(layers: Sequence[int]) -> tuple[int, ...]:
    """The layers that a store must give for a head that reads `layers`: the last gives the target's
    logits.
    """
    return tuple(layers) if -1 in layers else (*layers, -1)


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
