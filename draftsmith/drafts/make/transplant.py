"""Move a donor of another tokenizer to the target's vocabulary: new embedding and output rows, all
other weights stay.

A token that both have, by its text or its role, takes the donor's rows. Any other token takes rows
of the donor's pieces of its text: their mean as its embedding, because all of them will have been
read; the first of them in the output, because that is what the donor would write first.
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.core.models import eos_ids, vocabulary_size
from draftsmith.core.tokenization import Tokenizer
from draftsmith.drafts.make.size import filled
from draftsmith.drafts.vocabulary import map_vocabulary, token_texts

_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Moved:
    """Number of rows by origin. `unmapped` are tokens without any partner; their rows are the
    donor's mean.
    """

    shared: int
    from_pieces: int
    unmapped: tuple[str, ...]
    padding: int


@torch.no_grad()
def transplant(
    donor: PreTrainedModel,
    donor_tokenizer: Tokenizer,
    target: PreTrainedModel,
    tokenizer: Tokenizer,
) -> tuple[PreTrainedModel, Moved]:
    """The donor with the target's vocabulary, and how its rows were found."""
    size = vocabulary_size(target)
    mapping = map_vocabulary(
        tokenizer,
        donor_tokenizer,
        size,
        vocabulary_size(donor),
        source=donor.name_or_path or type(donor).__name__,
    )
    pairs = dict(zip(mapping.target_ids.tolist(), mapping.draft_ids.tolist(), strict=True))
    texts = token_texts(tokenizer)
    names = {i: token for token, i in tokenizer.get_vocab().items()}
    # An end of turn of a chat target is the end of text to a donor without turns.
    eos = donor_tokenizer.eos_token_id
    ends = eos_ids(donor)[:1] or (() if eos is None else (eos,))
    ends_of_target = set(eos_ids(target)) if ends else set()
    rows = [
        mapping.in_draft[token] if token in pairs or token in texts else () for token in range(size)
    ]
    for token in ends_of_target - pairs.keys():
        if len(rows[token]) != 1:
            rows[token] = ends
    # Of special tokens and ends there is one row or none, so that several are the pieces of a text.
    from_pieces = sum(len(row) > 1 for row in rows)
    unmapped = tuple(names[token] for token, row in enumerate(rows) if not row and token in names)
    shared = sum(len(row) == 1 for row in rows)
    moved_to = _with_room(donor, target)
    embedding = moved_to.get_input_embeddings().get_parameter("weight")
    _fill(embedding, donor.get_input_embeddings().get_parameter("weight"), rows)
    output = moved_to.get_output_embeddings()
    firsts = [row[:1] for row in rows]
    for name, values in donor.get_output_embeddings().named_parameters():
        _fill(output.get_parameter(name), values, firsts)
    moved_to.generation_config = copy.deepcopy(target.generation_config)
    moved_to.eval()
    padding = size - shared - from_pieces - len(unmapped)
    return moved_to, Moved(shared, from_pieces, unmapped, padding)


def _with_room(donor: PreTrainedModel, target: PreTrainedModel) -> PreTrainedModel:
    """The donor with tables for the target's vocabulary, which are still to be filled."""
    config = copy.deepcopy(donor.config)
    taken = filled({"max_position_embeddings": 0, "rope_parameters": 0}, target.config)[1]
    # None too: the donor's own are ids of its vocabulary.
    taken |= {
        key: getattr(target.config.get_text_config(decoder=True), key, None) for key in _SPECIAL
    }
    for key, value in taken.items():
        setattr(config.get_text_config(decoder=True), key, value)
    # Tied before or not, the two sides of a row now come from different rows.
    config.tie_word_embeddings = False
    moved_to = type(donor)(config)
    nn.Module.to(moved_to, dtype=donor.dtype, device=donor.device)
    # Tensors of another size are those of the vocabulary.
    weights = moved_to.state_dict()
    for name, tensor in donor.state_dict().items():
        if tensor.shape == weights[name].shape:
            weights[name] = tensor
    moved_to.load_state_dict(weights)
    return moved_to


def _fill(new: Tensor, old: Tensor, rows: list[tuple[int, ...]]) -> None:
    # Each new row is the mean of its old rows, or of all old rows if it has none.
    mean = old.float().mean(0)
    for token, ids in enumerate(rows):
        new[token] = old[list(ids)].float().mean(0) if ids else mean
