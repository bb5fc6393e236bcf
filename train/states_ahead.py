"""States that servers write while training reads them.

A thread asks for the documents in the order in which training will read them, as far ahead as the
bound on disk allows. What was read stays while there is room. The documents that came last go
first: they come back once per epoch, so dropping the oldest would drop each just before it is
needed.
"""

import contextlib
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from draftsmith.core.errors import InputError
from draftsmith.core.hidden_states import layout_of
from draftsmith.core.io import hash_json, make_dir
from draftsmith.core.ranks import groups, own_group, say
from draftsmith.core.settings import loading
from draftsmith.core.state_store import StoredStates
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.states import ask, servers
from draftsmith.train.config import TrainConfig
from draftsmith.train.job import TrainingJob

# Documents that are asked for together.
_TOGETHER = 32
# Bytes of a file and of a token beside its states.
_FILE_BYTES = 1024
_TOKEN_BYTES = 8
# Once the directory is full, at most this part of it is for what was not read yet.
_AHEAD = 4
# A request reads a document and draws one token: a few fill an engine, and none takes long.
_CONCURRENCY = 16
_TIMEOUT_S = 120.0
# Seconds that requests have to end once nothing more is read.
_LEAVE_S = 5.0


@dataclass
class _Document:
    """size: bytes of its own file, 0 if it was here before. here: whether it can be read. reads:
    how often it will be, as far as was asked ahead.
    """

    size: int
    here: bool
    reads: int = 0


class StatesAhead(StoredStates):
    """`--states_from`: what the files of `--states` lack comes from servers.

    Own files are in a directory of this process, which is empty when it begins and gone when it
    ends; they, and what servers are writing, have this process's share of max_bytes. Raise
    InputError if the servers cannot be used.
    """

    def __init__(self, job: TrainingJob, layers: Sequence[int], max_bytes: int) -> None:
        config = job.config
        assert config.states is not None and job.target is not None
        super().__init__(config.states, job.target, job.identity["states"])
        layout = layout_of(job.target)
        last = layout.count - 1
        given = sorted({last if layer == -1 else layer for layer in layers})
        self._layers = tuple(layers)
        self._token_bytes = _TOKEN_BYTES + len(given) * layout.width * self.dtype.itemsize
        self._length = config.max_length
        self._limit = max_bytes // groups()
        longest = max(job.training.lengths.max(), job.heldout.lengths.max())
        if self._size(int(longest)) > self._limit:
            needed = groups() * self._size(int(longest)) / 2**30
            raise InputError(f"states_gib: a row of {longest} tokens takes {needed:.2g}; give more")
        run = f"online-{hash_json(str(Path(config.out).absolute()))[:16]}"
        self._own = Path(config.states) / run / str(own_group())
        # In the order of asking, by their own files.
        self._documents: dict[Path, _Document] = {}
        # Bytes of own files, and of those among them that are still to be read.
        self._used = self._ahead = 0
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._closed = False
        self._began = time.monotonic()
        self._waited_s = 0.0
        self._thread: threading.Thread | None = None
        try:
            self._servers = servers(_asking(config), given, self, job.training.longest())
        except InputError as error:
            reason = str(error).removeprefix("endpoint: ")
            raise InputError(f"states_from: {reason}") from None

    def begin(self, reads: Iterable[Sequence[int]]) -> None:
        """Let the servers work. reads: the tokens of documents, not cut, in the order of `get`."""
        # What a killed run left.
        shutil.rmtree(self._own, ignore_errors=True)
        make_dir(self._own, "states")
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._work, args=(reads,), daemon=True)
        self._thread.start()

    def waited(self) -> float:
        """The share of the time since `begin` that `get` waited."""
        return self._waited_s / (time.monotonic() - self._began)

    def file(self, ids: Sequence[int]) -> Path:
        own = self._own_file(ids)
        document = self._documents.get(own)
        return own if document is not None and document.size else super().file(ids)

    def get(self, ids: Sequence[int], layers: Sequence[int]) -> Tensor:
        """Return the states `[L, T, H]` of the next document, once they are here.

        Raise what ended the asking if they will not come.
        """
        own = self._own_file(ids)
        began = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._is_here(own) or self._error is not None)
            self._waited_s += time.monotonic() - began
            if self._error is not None and not self._is_here(own):
                raise self._error
        states_LTH = super().get(ids, layers)
        with self._changed:
            document = self._documents[own]
            document.reads -= 1
            if not document.reads:
                self._ahead -= document.size
        return states_LTH

    def put(
        self,
        ids: Sequence[int],
        layers: Sequence[int],
        states_LTH: Tensor,
        share: float | None = None,
    ) -> None:
        """Take in what a server wrote."""
        super().put(ids, layers, states_LTH, share)
        with self._changed:
            self._documents[self._own_file(ids)].here = True
            self._changed.notify_all()

    def close(self) -> None:
        """Ask no more, and delete what is left."""
        with self._changed:
            self._closed = True
        if self._thread is not None:
            self._thread.join(_LEAVE_S)
        say(f"train: waited for states {self.waited():.0%} of the time")
        shutil.rmtree(self._own, ignore_errors=True)
        with contextlib.suppress(OSError):
            # Other processes may have theirs.
            self._own.parent.rmdir()

    def _work(self, reads: Iterable[Sequence[int]]) -> None:
        error: BaseException = AssertionError("documents are read in another order")
        try:
            ask(self._servers, self._groups(reads))
        except BaseException as stopped:
            error = stopped
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _groups(self, reads: Iterable[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
        """What to ask for together; nothing while there is no room."""
        group: list[Sequence[int]] = []
        for whole in reads:
            while not self._expect(whole, group):
                if self._closed:
                    return
                yield group
                group = []
            if len(group) == _TOGETHER:
                yield group
                group = []
        yield group

    def _expect(self, whole: Sequence[int], group: list[Sequence[int]]) -> bool:
        """Count a document that will be read, and add it to `group` if it must be asked for; False
        if there is no room for it yet, or nothing more is read.
        """
        ids = whole[: self._length]
        own = self._own_file(ids)
        with self._changed:
            document = self._documents.get(own)
            if document is None:
                was_here = self.finds(whole, self._layers, self._length)
                size = 0 if was_here else self._size(len(ids))
                if self._closed or not self._make_room(size):
                    return False
                document = self._documents[own] = _Document(size, here=was_here)
                self._used += size
                if not was_here:
                    group.append(ids)
                self._changed.notify_all()
            if not document.reads:
                self._ahead += document.size
            document.reads += 1
        return True

    def _make_room(self, size: int) -> bool:
        if self._used + size <= self._limit:
            return True
        if self._ahead and self._ahead + size > self._limit // _AHEAD:
            return False
        for own, document in reversed(list(self._documents.items())):
            if document.here and document.size and not document.reads:
                del self._documents[own]
                self._used -= document.size
                own.unlink()
            if self._used + size <= self._limit:
                return True
        return False

    def _is_here(self, own: Path) -> bool:
        return own in self._documents and self._documents[own].here

    def _own_file(self, ids: Sequence[int]) -> Path:
        return self._own / f"{hash_json(list(ids))}.safetensors"

    def _size(self, tokens: int) -> int:
        return _FILE_BYTES + tokens * self._token_bytes


def _asking(config: TrainConfig) -> DistillConfig:
    assert config.target is not None
    return DistillConfig(
        target=config.target,
        prompts="",
        out=config.out,
        max_new_tokens=1,
        engine="openai",
        endpoint=config.states_from,
        states=config.states,
        concurrency=_CONCURRENCY,
        timeout_s=_TIMEOUT_S,
        **loading(config),
    )
