"""Text to tokens: chat templates where the rows are chats, special tokens as the tokenizer wants them."""

import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import getproxies

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import logging as hub_logging
from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from draftsmith_core.errors import InputError

Tokenizer = PreTrainedTokenizerBase


def quiet() -> None:
    """Keep transformers from drawing bars and printing advice between our own lines; its errors still show."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    hub_logging.set_verbosity_error()


def check_source(name: str) -> None:
    """InputError for a name that can only be a local directory and is none; hub names are `owner/name` or `name`."""
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if Path(name).is_file():
        raise InputError(f"{name}: is a file; name the directory that it lies in")
    if Path(name).is_dir():
        if (Path(name) / "run" / "run.json").exists() and not (Path(name) / "config.json").exists():
            raise InputError(f"{name}: holds a training run that has not ended; the same train command continues it")
        return
    if looks_local:
        raise InputError(f"{name}: no such directory (a hub name is written owner/name)")
    try:
        cached = any(isinstance(try_to_load_from_cache(name, file), str) for file in ("config.json", "tokenizer.json"))
    except HFValidationError:
        raise InputError(f"{name}: no such directory, and not a name that the hub can have") from None
    if not cached and not hub_has_address():
        raise InputError(f"{name}: no such directory, not in the hub's cache, and the hub cannot be reached")


def hub_has_address() -> bool:
    """Whether asking the hub can lead anywhere; its client would retry for a minute before saying that it cannot."""
    if HF_HUB_OFFLINE or getproxies():
        return not HF_HUB_OFFLINE
    try:
        socket.getaddrinfo(urlparse(ENDPOINT).hostname, 443)
    except OSError:
        return False
    return True


def load_tokenizer(name: str, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer in a local directory or on the hub; InputError when there is none."""
    quiet()
    check_source(name)
    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:
        # transformers raises OSError, ValueError, KeyError or a JSON error for what is one mistake to the user.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"{name}: no tokenizer could be loaded from it ({reason})") from None
    return tokenizer


def vocabulary_sample(tokenizer: Tokenizer, count: int = 128) -> dict[str, str]:
    """Some tokens by id, spread over the vocabulary: what tells whether ids mean the same to another tokenizer."""
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
    # Some tokenizers close every text with EOS; a prompt that is to be continued must not end so.
    if ids and ids[-1] == tokenizer.eos_token_id and tokenizer.eos_token_id is not None:
        ids = ids[:-1]
    return ids


def encode_messages(tokenizer: Tokenizer, messages: list[dict[str, str]], where: str) -> list[int]:
    """Tokens of a chat up to where the assistant speaks: the tokenizer's template, or plain text without one.

    Raises InputError, beginning with `where`, for a chat that the template refuses.
    """
    if tokenizer.chat_template is None:
        return encode_text(tokenizer, "\n\n".join(m["content"] for m in messages) + "\n\n")
    try:
        encoded: Any = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True
        )
    except TemplateError as error:
        raise InputError(f"{where}: key 'messages': the chat template refuses it ({error})") from None
    ids: list[int] = list(encoded["input_ids"])
    return ids


def decode_text(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Text of tokens, special tokens left out, spacing untouched."""
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text
