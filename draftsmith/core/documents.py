"""The text that retrieval drafts from."""

import logging
from pathlib import Path

from draftsmith.core.chats import encode_messages
from draftsmith.core.errors import InputError, without_place
from draftsmith.core.io import JsonObject
from draftsmith.core.prompt_rows import iterate_rows
from draftsmith.core.reasons import Reasons
from draftsmith.core.row_formats import ARGUMENTS, KEYS
from draftsmith.core.tokenization import Tokenizer, encode_text

log = logging.getLogger(__name__)


def _tokens(row: JsonObject, tokenizer: Tokenizer, where: str) -> list[int]:
    if row.get("input_ids") is not None:
        return list(row["input_ids"])
    if row.get("response_ids") is not None:
        return [*(row.get("prompt_ids") or []), *row["response_ids"]]
    if row.get("messages") is not None:
        tools, arguments = row.get("tools") or None, row.get(ARGUMENTS)
        return encode_messages(tokenizer, row["messages"], where, tools, arguments)
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
        skipped = Reasons()
        for number, row in iterate_rows(source):
            where = f"{source}:{number}"
            try:
                documents.append(_tokens(row, tokenizer, where))
            except InputError as error:
                skipped.add(number, without_place(error, where))
        for line in skipped.lines("rows skipped"):
            log.warning("%s: %s", source, line)
    if not any(documents):
        raise InputError(f"{source}: holds no text; a row needs one of the keys {', '.join(KEYS)}")
    return documents
