"""The text that `--proposer retrieval` drafts from: its documents, their suffix index, and the file that keeps it."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from decode.suffix_index import SuffixIndex
from draftsmith_core.errors import InputError, first_line
from draftsmith_core.io import atomic_file, canonical_json, hash_json
from draftsmith_core.prompt_rows import KEYS, iterate_rows
from draftsmith_core.prompts import check_turns
from draftsmith_core.tokenization import Tokenizer, encode_messages, encode_text


def read_index(datastore: str, index_file: str | None, tokenizer: Tokenizer) -> SuffixIndex:
    """Index a datastore; with `index_file`, read the index from there if it exists, else write it.

    Raises InputError if the file is damaged or was made from another text or tokenizer.
    """
    if index_file is None:
        return SuffixIndex.build(read_documents(datastore, tokenizer))
    path, source = Path(index_file), _source_hash(datastore, tokenizer)
    if not path.exists():
        index = SuffixIndex.build(read_documents(datastore, tokenizer))
        with atomic_file(path) as temporary:
            save_file({"text": index.text_n, "positions": index.positions}, temporary, metadata={"source": source})
        return index
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            index = SuffixIndex(file.get_tensor("text"), file.get_tensor("positions"))
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: holds no suffix index ({first_line(error)}); remove it to build it again") from None
    if metadata.get("source") != source:
        raise InputError(f"{path}: was built from another text or tokenizer; name another file, or remove this one")
    return index


def _source_hash(datastore: str, tokenizer: Tokenizer) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = tokenizer.get_vocab() if backend is None else backend.to_str()
    digest = hashlib.sha256(hash_json([rules, getattr(tokenizer, "chat_template", None)]).encode())
    for _, row in _rows(datastore):
        digest.update(canonical_json(row).encode() + b"\n")
    return digest.hexdigest()


def read_documents(source: str, tokenizer: Tokenizer) -> list[list[int]]:
    """Tokenise the documents of a corpus: rows of a .jsonl or .parquet file or a hub dataset, or a whole .txt file.

    A row has `text`, `messages` (a chat, read whole) or `prompt`; or, in a distilled set, `prompt_ids` and
    `response_ids`, which are taken as they are.
    """
    documents = [_document(row, f"{source}:{number}", tokenizer) for number, row in _rows(source)]
    if not any(documents):
        raise InputError(f"{source}: holds no text; a row needs one of the keys {', '.join(KEYS)}")
    return documents


def _rows(source: str) -> Iterator[tuple[int, dict[str, Any]]]:
    path = Path(source)
    if path.suffix == ".txt" and path.is_file():
        return iter([(1, {"text": path.read_text(encoding="utf-8", errors="replace")})])
    return iterate_rows(source)


def _document(row: dict[str, Any], where: str, tokenizer: Tokenizer) -> list[int]:
    if row.get("response_ids") is not None:
        return [*(row.get("prompt_ids") or []), *row["response_ids"]]
    if row.get("messages") is not None:
        return encode_messages(tokenizer, check_turns(row["messages"], where), where)
    text = row.get("text") or row.get("prompt") or ""
    return encode_text(tokenizer, text) if text.strip() else []
