"""The text that retrieval drafts from."""

from pathlib import Path

from draftsmith_core.chats import encode_messages
from draftsmith_core.errors import InputError
from draftsmith_core.io import JsonObject
from draftsmith_core.prompt_rows import iterate_rows
from draftsmith_core.row_formats import KEYS
from draftsmith_core.tokenization import Tokenizer, encode_text


def _tokens(row: JsonObject, tokenizer: Tokenizer, where: str) -> list[int]:
    if row.get("input_ids") is not None:
        return list(row["input_ids"])
    if row.get("response_ids") is not None:
        return [*(row.get("prompt_ids") or []), *row["response_ids"]]
    if row.get("messages") is not None:
        return encode_messages(tokenizer, row["messages"], where)
    text = row.get("text") or row.get("prompt") or ""
    return encode_text(tokenizer, text) if text.strip() else []


def read_documents(source: str, tokenizer: Tokenizer) -> list[list[int]]:
    """Tokenise the text to retrieve from: rows of a .jsonl or .parquet file or a hub dataset, or a
    whole .txt file.

    A row has `text`, `messages` (a chat, read whole) or `prompt`; or, in a distilled set,
    `prompt_ids` and `response_ids`, which are taken as they are.
    """
    path = Path(source)
    documents: list[list[int]] = []
    if path.suffix == ".txt" and path.is_file():
        text = path.read_text(encoding="utf-8", errors="replace")
        documents.append(encode_text(tokenizer, text) if text.strip() else [])
    else:
        for number, row in iterate_rows(source):
            documents.append(_tokens(row, tokenizer, f"{source}:{number}"))
    if not any(documents):
        raise InputError(f"{source}: holds no text; a row needs one of the keys {', '.join(KEYS)}")
    return documents
