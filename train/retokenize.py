"""Rewrite the target's answers in the tokens of a draft with another tokenizer, for sequence-level KD.

Decoding translates each token of the target into the draft's own tokens (`drafts.vocabulary`). Training data is
translated in the same way, so that a response, and its loss, begin and end where they did.
"""

import datasets
import numpy as np
import numpy.typing as npt
from transformers import AutoConfig

from drafts.load import first_difference
from drafts.vocabulary import VocabularyMap, map_vocabulary
from draftsmith_core.prompts import prompt_hash
from draftsmith_core.tokenization import Tokenizer, load_tokenizer
from train.config import TrainConfig


def other_tokenizer(config: TrainConfig, data: Tokenizer | None) -> tuple[VocabularyMap | None, Tokenizer | None]:
    """Map the tokens of the data to the draft's; (None, `data`) if the tokenizers agree or the option is off."""
    if not config.heterogeneous_vocab:
        return None, data
    assert config.draft is not None and config.target is not None and data is not None
    tokenizer = load_tokenizer(config.draft, config.trust_remote_code)
    code, revision = config.trust_remote_code, config.revision or "main"
    models = ((config.target, revision), (config.draft, "main"))
    configs = [AutoConfig.from_pretrained(name, trust_remote_code=code, revision=commit) for name, commit in models]
    sizes = [int(model.get_text_config(decoder=True).vocab_size) for model in configs]
    if first_difference(data, tokenizer, min(sizes)) is None:
        return None, data
    return map_vocabulary(data, tokenizer, *sizes, source=config.draft), tokenizer


def retokenized(
    rows: datasets.Dataset, mapping: VocabularyMap, hash_column: str
) -> tuple[datasets.Dataset, npt.NDArray[np.int64]]:
    """Rewrite rows in the draft's tokens, and return the numbers of the rows that it can write.

    A response must be written without loss. A prompt may lose tokens without text (chat markers that the draft lacks),
    as in decoding. Prompts keep the hash of the target's tokens.
    """
    silent = mapping.lost - mapping.target_texts.keys()
    columns: dict[str, list[object]] = {"prompt_ids": [], "response_ids": [], hash_column: []}
    written: list[int] = []
    rows = rows.select_columns(list(columns))
    for number, row in enumerate(rows):
        prompt, response = row["prompt_ids"], row["response_ids"]
        if (mapping.lost - silent).isdisjoint(prompt) and mapping.lost.isdisjoint(response):
            written.append(number)
            columns["prompt_ids"].append(mapping.translate(prompt))
            columns["response_ids"].append(mapping.translate(response))
            columns[hash_column].append(row[hash_column] or f"{prompt_hash(prompt or response[:32]):016x}")
    return datasets.Dataset.from_dict(columns, features=rows.features), np.array(written, dtype=np.int64)
