"""The text that retrieval drafts from."""

from functools import partial
from pathlib import Path

from draftsmith.core.chats import Chat, encode_messages
from draftsmith.core.errors import InputError
from draftsmith.core.io import JsonObject
from draftsmith.core.prompt_rows import read_rows
from draftsmith.core.row_formats import KEYS
from draftsmith.core.tokenization import Tokenizer, encode_text


def _tokens(row: JsonObject, tokenizer: Tokenizer) -> list[int]:
    if row.get("input_ids") is not None:
        return list(row["input_ids"])
    if row.get("response_ids") is not None:
        return [*(row.get("prompt_ids") or []), *row["response_ids"]]
    if row.get("messages") is not None:
        return encode_messages(tokenizer, Chat.of(row))
    text = row.get("text") or row.get("prompt") or ""
    return encode_text(tokenizer, text) if text.strip() else []


def read_documents(source: str, tokenizer: Tokenizer) -> list[list[int]]:
    """Tokenise the text to retrieve from: rows of a .jsonl or .parquet file or a hub dataset, or a
    whole .txt file.

    A row has `text`, `messages` (a chat, read whole) or `prompt`; or, in a distilled set,
    `prompt_ids` and `response_ids`, which are taken as they are.
    """
    path = Path(source)
    documents = []
    if path.suffix == ".txt" and path.is_file():
        text = path.read_text(encoding="utf-8", errors="replace")
        documents.append(encode_text(tokenizer, text) if text.strip() else [])
    else:
        documents += read_rows(source, partial(_tokens, tokenizer=tokenizer))
    if not any(documents):
        raise InputError(f"{source}: holds no text; a row needs one of the keys {', '.join(KEYS)}")
    return documents
