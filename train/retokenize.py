"""Answers of a target for a draft of another tokenizer: sequence-level KD on what such a draft reads and writes.

Decoding gives the draft each token of the target in the draft's own tokens (`drafts.vocabulary`): one token where both
have it, else pieces of the same text. Training data is written in the same way, so that a response's tokens, and the
loss, begin and end exactly where they did. A row that these tokens cannot write is left out, and counted.
"""

import datasets
import numpy as np
import numpy.typing as npt
from transformers import AutoConfig

from drafts.load import first_difference
from drafts.vocabulary import VocabularyMap, map_vocabulary
from draftsmith_core.errors import InputError
from draftsmith_core.processes import say
from draftsmith_core.prompts import prompt_hash
from draftsmith_core.tokenization import Tokenizer, load_tokenizer
from train.config import TrainConfig


def other_tokenizer(config: TrainConfig, data: Tokenizer | None) -> tuple[VocabularyMap | None, Tokenizer | None]:
    """How the tokens of the data are written in the draft's, and the draft's tokenizer; (None, `data`) where the two
    tokenizers agree or the run is not asked to bring them together.
    """
    if not config.heterogeneous_vocab:
        return None, data
    assert config.draft is not None and config.target is not None and data is not None
    own = load_tokenizer(config.draft, config.trust_remote_code)
    sizes = [_size(name, config.trust_remote_code) for name in (config.target, config.draft)]
    if first_difference(data, own, min(sizes)) is None:
        return None, data
    return map_vocabulary(data, own, *sizes, source=config.draft), own


def _size(name: str, trust_remote_code: bool) -> int:
    config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    return int(config.get_text_config(decoder=True).vocab_size)


def retokenized(
    rows: datasets.Dataset, mapping: VocabularyMap, hash_column: str
) -> tuple[datasets.Dataset, npt.NDArray[np.int64]]:
    """The rows in the draft's tokens, and the numbers of those that could be written.

    A response must be written without loss. Of a prompt only tokens with a text must: those without one (chat markers
    that the draft lacks) are read as decoding has the draft read them. Prompts keep the hash of the target's tokens.
    """
    silent = mapping.lost - mapping.target_texts.keys()
    columns: dict[str, list[object]] = {"prompt_ids": [], "response_ids": [], hash_column: []}
    kept: list[int] = []
    number = -1
    for batch in rows.select_columns(list(columns)).iter(batch_size=1024):
        for prompt, response, known in zip(*(batch[name] for name in columns), strict=True):
            number += 1
            if max([*prompt, *response], default=0) >= mapping.target_size:
                raise InputError(
                    f"data: row {number} holds a token beyond the target's vocabulary of {mapping.target_size}; it was "
                    f"made with another tokenizer"
                )
            if not (mapping.lost - silent).isdisjoint(prompt) or not mapping.lost.isdisjoint(response):
                continue
            kept.append(number)
            columns["prompt_ids"].append(mapping.translate(prompt))
            columns["response_ids"].append(mapping.translate(response))
            columns[hash_column].append(known or f"{prompt_hash(prompt or response[:32]):016x}")
    features = rows.select_columns(list(columns)).features
    return datasets.Dataset.from_dict(columns, features=features), np.array(kept, dtype=np.int64)


def announce(written: int, left_out: int, mapping: VocabularyMap) -> None:
    """Say what became of the rows of the data."""
    say(
        f"train: data: the draft has another tokenizer, which shares {mapping.shared} tokens with the target's; "
        f"{written} rows are written in its tokens, {left_out} are left out, whose text they cannot write"
    )
