"""Text to tokens and back: chat templates for chats, and the special tokens that the tokenizer adds
by itself.
"""

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from draftsmith.core.errors import InputError, first_line, warn_once
from draftsmith.core.hub import offline_if_unreachable, quiet, why_not
from draftsmith.core.io import JsonObject, hash_json
from draftsmith.core.signals import limited
from draftsmith.core.sources import check_source, has_tokenizer, no_model

log = logging.getLogger(__name__)
# Marks of turns: <|im_start|>, <start_of_turn>.
_MARK = re.compile(r"<\|[^<>|\s]+\|>|<\w+_of_turn>")
# Templates take milliseconds.
_RENDER_S = 5
Tokenizer = PreTrainedTokenizerBase


@quiet()
def load_tokenizer(
    name: str,
    trust_remote_code: bool = False,
    chat_template: str | None = None,
    revision: str | None = None,
) -> Tokenizer:
    """The tokenizer in a local directory or on the hub; InputError if there is none.

    chat_template: a Jinja file, or its text, that takes the place of the chat template that comes
    with the tokenizer.
    """
    check_source(name)
    try:
        with offline_if_unreachable(name):
            tokenizer: Tokenizer = AutoTokenizer.from_pretrained(
                name, trust_remote_code=trust_remote_code, revision=revision or "main"
            )
    except Exception as error:
        directory = Path(name)
        reason = "it holds no tokenizer.json"
        if has_tokenizer(directory) or not directory.is_dir():
            reason = why_not(name, error)
        elif lacks := no_model(directory):
            raise InputError(f"{name}: {lacks}") from None
        raise InputError(f"{name}: no tokenizer could be loaded: {reason}") from None
    if chat_template is not None:
        tokenizer.chat_template = chat_template_of(chat_template)
    try:
        _check_marks(tokenizer, render(tokenizer, [{"role": "user", "content": "?"}]))
    except TimeoutError as error:
        raise InputError(f"{name}: {error}") from None
    except Exception as error:
        log.debug("%s: its chat template refuses a short chat (%s)", name, error)
    return tokenizer


def _check_marks(tokenizer: Tokenizer, rendered: object) -> None:
    """Warn of marks of turns that are no tokens, as in a template of another model."""
    for mark in dict.fromkeys(_MARK.findall(str(rendered))):
        if (count := len(encode(tokenizer, mark, add_special_tokens=False))) > 1:
            warn_once(
                f"the chat template marks turns with {mark}, which is {count} tokens to the "
                "tokenizer; is it the target's own? --chat_template names another"
            )
            return


def render(tokenizer: Tokenizer, turns: list[JsonObject], **options: Any) -> object:
    """Return what `apply_chat_template` makes of a chat; raise TimeoutError if it does not end."""
    try:
        with limited(_RENDER_S):
            return tokenizer.apply_chat_template(turns, tokenize=False, **options)
    except TimeoutError:
        raise TimeoutError(f"the chat template does not end within {_RENDER_S} s") from None


def chat_template_of(file_or_text: str) -> str:
    """Return a chat template from its Jinja file, or as it is if it holds Jinja's marks."""
    if "{{" in file_or_text or "{%" in file_or_text:
        return file_or_text
    try:
        return Path(file_or_text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--chat_template {file_or_text}: cannot be read ({error})") from None


def find_tokenizer(
    name: str, trust_remote_code: bool = False, revision: str | None = None
) -> Tokenizer | None:
    """`load_tokenizer`, or None: a draft may have no tokenizer of its own, and is then used with
    its target's.
    """
    try:
        return load_tokenizer(name, trust_remote_code, revision=revision)
    except InputError as error:
        if has_tokenizer(Path(name)):
            log.warning("%s; continuing without its tokenizer", error)
        return None


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """16 hex digits that change with the tokens of a text or chat, and not with where the tokenizer
    lies.
    """
    fast = getattr(tokenizer, "backend_tokenizer", None)
    # Calls change truncation and padding.
    calls: JsonObject = {"truncation": None, "padding": None}
    backend = tokenizer.get_vocab() if fast is None else json.loads(fast.to_str()) | calls
    specials = {key: str(value) for key, value in tokenizer.special_tokens_map.items()}
    return hash_json([backend, specials, tokenizer.chat_template])[:16]


def vocabulary_sample(tokenizer: Tokenizer) -> dict[str, str]:
    """About 128 tokens by id, spread over the vocabulary, by which another tokenizer can be
    compared.
    """
    size = len(tokenizer)
    ids = list(range(0, size, max(1, size // 128)))
    tokens = tokenizer.convert_ids_to_tokens(ids)
    return {str(i): str(token) for i, token in zip(ids, tokens, strict=True)}


def check_vocabulary(tokenizer: Tokenizer, sample: dict[str, str], where: str) -> None:
    """Raise InputError, beginning with `where`, if a token of a `vocabulary_sample` is another one
    here.
    """
    ids = [int(i) for i in sample if int(i) < len(tokenizer)]
    for i, token in zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True):
        if token != sample[str(i)]:
            differs = (
                f"its token {i} is {sample[str(i)]!r}, which is {token!r} to the tokenizer "
                "of this run"
            )
            raise InputError(f"{where}: {differs}; use the tokenizer of the target that wrote it")


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of a plain text, with the special tokens (such as BOS) that the tokenizer adds by
    itself.
    """
    ids = encode(tokenizer, text)
    # Some tokenizers end every text with EOS. A prompt must not: the model would take it for
    # finished.
    ends = bool(ids) and ids[-1] == tokenizer.eos_token_id
    return ids[:-1] if ends else ids


def encode(tokenizer: Tokenizer, text: str, **options: bool) -> list[int]:
    """Tokens of a text, as the tokenizer makes them; InputError if it fails."""
    try:
        ids: list[int] = tokenizer(text, verbose=False, **options)["input_ids"]
    except BaseException as error:
        # What panics in Rust, such as a regular expression without end, raises no Exception.
        if type(error).__name__ != "PanicException":
            raise
        raise InputError(f"the tokenizer cannot read it ({first_line(error)})") from None
    return ids


def text_with_specials(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Text of tokens, special ones too, with the spacing as it is."""
    return str(
        tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )


def decode_text(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Text of tokens, without special tokens and with the spacing as it is."""
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
