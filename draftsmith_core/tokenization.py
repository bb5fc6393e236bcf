"""Text to tokens and back: chat templates for chats, and the special tokens that the tokenizer adds by itself."""

import logging
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from draftsmith_core.errors import InputError
from draftsmith_core.sources import announce_remote_code, check_source, quiet, why_not

log = logging.getLogger(__name__)

Tokenizer = PreTrainedTokenizerBase
# One of these is in every tokenizer's directory.
_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")


def load_tokenizer(name: str, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer in a local directory or on the hub; InputError when there is none."""
    quiet()
    check_source(name)
    if trust_remote_code:
        announce_remote_code(name)
    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:
        if Path(name).is_dir() and not any(any(Path(name).glob(file)) for file in _FILES):
            raise InputError(
                f"{name}: holds no tokenizer (tokenizer.json, tokenizer_config.json); "
                f"copy the files of the tokenizer that the model was trained with into it"
            ) from None
        raise InputError(f"{name}: no tokenizer could be loaded from it: {why_not(name, error, 'tokenizer')}") from None
    return tokenizer


def vocabulary_sample(tokenizer: Tokenizer, count: int = 128) -> dict[str, str]:
    """About `count` tokens by id, spread over the vocabulary, by which another tokenizer can be compared."""
    size = len(tokenizer)
    ids = range(0, size, max(1, size // count))
    return {str(i): str(token) for i, token in zip(ids, tokenizer.convert_ids_to_tokens(list(ids)), strict=True)}


def check_vocabulary(tokenizer: Tokenizer, sample: dict[str, str], where: str) -> None:
    """InputError, beginning with `where`, when the tokenizer has another token at an id of a `vocabulary_sample`."""
    ids = [int(i) for i in sample if int(i) < len(tokenizer)]
    for i, token in zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True):
        if token != sample[str(i)]:
            raise InputError(
                f"{where}: its token {i} is {sample[str(i)]!r}, which is {token!r} to the tokenizer of this run; "
                f"use that of the target that wrote it"
            )


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of a plain text, with the special tokens (such as BOS) that the tokenizer adds by itself."""
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    # Some tokenizers end every text with EOS. A prompt must not: the model would take it for finished.
    if ids and ids[-1] == tokenizer.eos_token_id and tokenizer.eos_token_id is not None:
        ids = ids[:-1]
    return ids


def encode_messages(tokenizer: Tokenizer, messages: list[dict[str, str]], where: str) -> list[int]:
    """Tokens of a chat up to where the assistant's answer begins, by the chat template, or as plain text without one.

    Raises InputError, beginning with `where`, for a chat that the template refuses.
    """
    if tokenizer.chat_template is None:
        _warn_no_template(tokenizer.name_or_path)
        return encode_text(tokenizer, "\n\n".join(m["content"] for m in messages) + "\n\n")
    try:
        encoded: Any = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True
        )
    except TemplateError as error:
        raise InputError(f"{where}: key 'messages': the chat template refuses it ({error})") from None
    ids: list[int] = list(encoded["input_ids"])
    return ids


@cache
def _warn_no_template(name: str) -> None:
    log.warning("%s: its tokenizer has no chat template; the turns of chats are joined as plain text", name)


def decode_text(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Text of tokens, without special tokens and with the spacing as it is."""
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text
