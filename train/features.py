"""The target's hidden states that drafts are trained on: from its forward in the step, from memory,
or from disk.

With a cache (`core.state_files`), each document is forwarded alone, outside autocast, and rounded
to the cache's dtype, also when it was not found. So a run trains on the same bits whatever was
cached when it began, on a like machine.

Legend: B rows, T tokens, L layers, H hidden size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.core.divided_target import all_have
from draftsmith.core.hidden_states import body_states, layout_of
from draftsmith.core.state_files import FeatureCache, StoredStates, cached_layers
from draftsmith.train.batch import IGNORE, Batch, forward_options, packing_method
from draftsmith.train.teacher import find_projection


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
        cache: FeatureCache | StoredStates | None = None,
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
        self, batch: Batch, kept: FeatureCache | StoredStates | StateMemory, dtype: torch.dtype
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
            found = all_have(self.model, states_LTH is not None)
            if states_LTH is None or not found:
                assert not isinstance(kept, StoredStates)
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
