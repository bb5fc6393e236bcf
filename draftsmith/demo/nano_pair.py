"""The corpus as files, and the tokenizer of the nano pair that ships with the project."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from draftsmith.demo import corpus
from draftsmith_core.io import write_rows

VOCABULARY = 4096
BOS, EOS = "<s>", "</s>"


def write_corpus(directory: Path) -> None:
    """`DOMAIN.train.jsonl` and `DOMAIN.heldout.jsonl` for every domain of the corpus."""
    for domain in corpus.DOMAINS:
        sides = corpus.split(domain)
        write_rows(directory / f"{domain}.train.jsonl", corpus.passages(domain, sides.train))
        write_rows(directory / f"{domain}.heldout.jsonl", corpus.passages(domain, sides.heldout))


def train_tokenizer(texts: Iterable[str], length: int, model_max_length: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer (it can spell any text) of 4,096 tokens that puts BOS in front."""
    tokenizer = Tokenizer(models.BPE())
    # Digits one by one; indentation of code stays together as runs of spaces.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer, length=length)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=model_max_length,
        clean_up_tokenization_spaces=False,
    )
