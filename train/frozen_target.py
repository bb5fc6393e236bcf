"""The target's hidden states that drafts are trained on: from its forward in the step, or from a
store (`core.state_store`) that a forward fills.

With a store each document is forwarded alone, outside autocast, and rounded to the store's dtype,
also when it was not found. So a run trains on the same bits whatever was kept when it began, on a
like machine.

Legend: B rows, T tokens, L layers, H hidden size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.core.hidden_states import body_states, layout_of
from draftsmith.core.large_target import all_have
from draftsmith.core.state_store import StateStore, cached_layers
from draftsmith.train.batch import IGNORE, Batch, forward_options, packing_method
from draftsmith.train.teacher import find_projection


class FrozenTarget:
    """A model that is read and never trained; a plain object, so that a trainee does not register
    its weights.

    layers: of its states. packing: whether batches will be packed. states: where those of documents
    are kept. Raise InputError if the model cannot be used so.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[int],
        packing: bool = False,
        states: StateStore | None = None,
    ) -> None:
        self.model = model.eval()
        self.layers = tuple(layers)
        self.states = states
        self.projection = find_projection(model, "target")
        forwards = states is None or not states.for_training
        self.packing = packing_method(model, "target") if packing and forwards else None

    @torch.no_grad()
    def read(self, batch: Batch, training: bool = True) -> tuple[list[Tensor], Tensor]:
        """States `[B, T, H]` of `layers`, in that order, and the last (after the final norm),
        without gradients.

        training: whether it is a training batch. From a store, states are zero where a batch is
        padding.
        """
        if self.states is not None and (self.states.for_training or not training):
            states = self._by_document(batch, self.states)
        else:
            options = forward_options(batch, self.packing, self.model.dtype)
            states = self._forward(batch.ids_BT, options)
        by_layer = dict(zip(cached_layers(self.layers), states, strict=True))
        return [by_layer[layer] for layer in self.layers], by_layer[-1]

    def _forward(self, ids_BT: Tensor, options: dict[str, Any]) -> list[Tensor]:
        wanted = cached_layers(self.layers)
        return list(body_states(self.model, wanted, input_ids=ids_BT, use_cache=False, **options))

    def _by_document(self, batch: Batch, store: StateStore) -> list[Tensor]:
        wanted = cached_layers(self.layers)
        shape = len(wanted), *batch.ids_BT.shape, layout_of(self.model).width
        states_LBTH = torch.zeros(shape, dtype=store.dtype, device=batch.ids_BT.device)
        for row, start, stop in documents(batch):
            ids_T = batch.ids_BT[row, start:stop]
            ids = ids_T.tolist()
            states_LTH = store.get(ids, wanted)
            found = all_have(self.model, states_LTH is not None)
            if states_LTH is None or not found:
                # Alone: others in its batch would change its rounding.
                with torch.autocast(ids_T.device.type, enabled=False):
                    states_LTH = torch.cat(self._forward(ids_T[None], {})).to(store.dtype)
                store.put(ids, wanted, states_LTH)
            states_LBTH[:, row, start:stop] = states_LTH.to(states_LBTH.device)
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
