"""The text that `--proposer retrieval` drafts from: its documents, their suffix index, and the file that keeps it."""

import hashlib
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from decode.suffix_index import SuffixIndex
from draftsmith_core.errors import InputError, first_line
from draftsmith_core.io import atomic_file, canonical_json, hash_json
from draftsmith_core.prompt_rows import KEYS, iterate_rows
from draftsmith_core.prompts import check_messages
from draftsmith_core.tokenization import Tokenizer, encode_messages, encode_text


def read_index(datastore: str, kept: str | None, tokenizer: Tokenizer) -> SuffixIndex:
    """The suffix index of a datastore. `kept` names the file that keeps it: it is read where it exists, and else
    written. InputError when that file was made from another text or tokenizer, or is damaged.
    """
    if kept is None:
        return SuffixIndex.build(read_documents(datastore, tokenizer))
    path, source = Path(kept), _source_hash(datastore, tokenizer)
    if path.exists():
        return load_index(path, source)
    index = SuffixIndex.build(read_documents(datastore, tokenizer))
    save_index(index, path, source)
    return index


def save_index(index: SuffixIndex, path: Path, source: str) -> None:
    """Write an index as safetensors; `source` is a hash of what it was built from (text and tokenizer)."""
    with atomic_file(path) as temporary:
        tensors = {"text": index.text_n, "positions": index.positions}
        save_file(tensors, temporary, metadata={"source": source, "digest": index.digest})


def load_index(path: Path, source: str) -> SuffixIndex:
    """Read an index; InputError when it was built from another source, or is damaged."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            index = SuffixIndex(file.get_tensor("text"), file.get_tensor("positions"))
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"{path}: no suffix index can be read from it ({first_line(error)}); remove it to build it again"
        ) from None
    if metadata.get("source") != source:
        raise InputError(f"{path}: was built from another text or tokenizer; name another file, or remove this one")
    if metadata.get("digest") != index.digest:
        raise InputError(f"{path}: its tokens are not those that were indexed; remove it to build it again")
    return index


def _source_hash(datastore: str, tokenizer: Tokenizer) -> str:
    """Hash of a datastore's rows and of everything that decides how they are tokenised."""
    digest = hashlib.sha256()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = tokenizer.get_vocab() if backend is None else backend.to_str()
    digest.update(hash_json([rules, getattr(tokenizer, "chat_template", None)]).encode())
    path = Path(datastore)
    if path.suffix == ".txt" and path.is_file():
        digest.update(path.read_bytes())
    else:
        for _, row in iterate_rows(datastore):
            digest.update(canonical_json(row).encode() + b"\n")
    return digest.hexdigest()


def read_documents(source: str, tokenizer: Tokenizer) -> list[list[int]]:
    """Documents of a corpus, tokenised: rows of a .jsonl or .parquet file or a dataset on the hub, or a .txt file
    as one document.

    A row has `text`, `messages` (a chat, read whole) or `prompt`; or, in a distilled set, `prompt_ids` and
    `response_ids`, which are taken as they are. Raises InputError that names file, row and key.
    """
    path = Path(source)
    if path.suffix == ".txt" and path.is_file():
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{source}: cannot be read as UTF-8 text ({error})") from None
        if not text.strip():
            raise InputError(f"{source}: holds no text")
        return [encode_text(tokenizer, text)]
    documents = [_document(row, f"{source}:{number}", tokenizer) for number, row in iterate_rows(source)]
    if not any(documents):
        raise InputError(f"{source}: holds no text; a row needs one of the keys {', '.join(KEYS)}")
    return documents


def _document(row: dict[str, Any], where: str, tokenizer: Tokenizer) -> list[int]:
    if "response_ids" in row:
        ids = [*(row.get("prompt_ids") or []), *(row["response_ids"] or [])]
        if not all(isinstance(token, int) and 0 <= token < len(tokenizer) for token in ids):
            raise InputError(f"{where}: key 'response_ids': holds tokens that the tokenizer does not have")
        return ids
    present = [key for key in ("text", "messages", "prompt") if row.get(key) is not None]
    if not present:
        raise InputError(f"{where}: needs one of the keys {', '.join(KEYS)}; found {', '.join(map(repr, row))}")
    key = present[0]
    value = row[key]
    if key == "messages":
        # A prompt ends before the last answer; a document has it. The empty turn is what is dropped instead.
        turns = [*value, {"role": "assistant", "content": ""}] if isinstance(value, list) and value else value
        return encode_messages(tokenizer, check_messages(turns, where), where)
    if not isinstance(value, str):
        raise InputError(f"{where}: key {key!r}: expected text, found {type(value).__name__}")
    return encode_text(tokenizer, value) if value.strip() else []
