"""A tokenizer inside a GGUF file, as llama.cpp needs it to turn text into the same tokens.

Two traps of llama.cpp's own converter are avoided: for BPE with SentencePiece's spelling it writes one score for all
tokens, so that text is cut wrongly (here a token's score is minus the rank of its merge); and it knows a pre-tokenizer
by a hash of its output, so that it refuses tokenizers that it could serve (here its rules are compared).
"""

import json
from dataclasses import dataclass
from typing import Any

from draftsmith_core.errors import InputError
from draftsmith_core.tokenization import Tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_DIGITS = {"type": "Digits", "individual_digits": True}
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# llama.cpp's name of the rules that cut text into words, by what the tokenizer's own do. "refact" cuts digits singly
# and then as GPT-2 does.
_RULES = {"gpt-2": ["bytes"], "refact": ["digits", "bytes"], "llama-bpe": [_LLAMA3], "qwen2": [_QWEN2]}


def _rules(pre: dict[str, Any] | None) -> list[str]:
    """A tokenizer's rules in the words of `_RULES`."""
    steps = [] if pre is None else pre["pretokenizers"] if pre["type"] == "Sequence" else [pre]
    found = []
    for step in steps:
        if step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            found.append(step["pattern"].get("Regex", ""))
        elif step == _DIGITS:
            found.append("digits")
        elif step["type"] == "ByteLevel" and not step["add_prefix_space"]:
            found += ["bytes"] if step["use_regex"] else []
        else:
            found.append(step["type"])
    return found


def _backend(tokenizer: Tokenizer) -> dict[str, Any]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise InputError(f"--format gguf: {tokenizer.name_or_path}: has no tokenizer.json; use convert_hf_to_gguf.py")
    found: dict[str, Any] = json.loads(backend.to_str())
    return found


def _refuse(tokenizer: Tokenizer, what: str) -> InputError:
    return InputError(
        f"--format gguf: {tokenizer.name_or_path}: {what}, which llama.cpp would do otherwise under the names known "
        f"here; use --format hf and llama.cpp's own convert_hf_to_gguf.py"
    )


@dataclass(frozen=True)
class Vocabulary:
    """What llama.cpp is told of a tokenizer. `rules` names those that cut text into words."""

    model: str
    rules: str
    tokens: list[str]
    kinds: list[int]
    merges: list[str]
    added: dict[str, int | None]
    """The token that is added before (`bos`) and behind (`eos`) a text, if any."""
    backend: dict[str, Any]


def described(tokenizer: Tokenizer, size: int) -> Vocabulary:
    """A tokenizer in llama.cpp's terms; ids up to `size` that it does not have become unused ones.

    Raises InputError, one line, for a tokenizer whose text llama.cpp would cut differently.
    """
    backend = _backend(tokenizer)
    model = backend["model"]
    if model["type"] != "BPE":
        raise _refuse(tokenizer, f"its tokens come from a {model['type']} model")
    spelled = any(token.startswith("<0x") and len(token) == 6 for token in model["vocab"])
    tokens, kinds = _tokens(tokenizer, size, spelled)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    kind, name = "llama", "default"
    if not (spelled and model.get("byte_fallback")):
        rules = _rules(backend["pre_tokenizer"])
        kind, name = "gpt2", next((name for name, known in _RULES.items() if known == rules), "")
        if not name:
            raise _refuse(tokenizer, f"its pre-tokenizer cuts text by {rules}")
        if (name == "llama-bpe") != bool(model.get("ignore_merges")):
            raise _refuse(tokenizer, f"its 'ignore_merges' is {bool(model.get('ignore_merges'))} beside these rules")
    empty, bos, eos = tokenizer("")["input_ids"], tokenizer.bos_token_id, tokenizer.eos_token_id
    added = {
        "bos": bos if empty and empty[0] == bos else None,
        "eos": eos if empty and empty[-1] == eos != bos else None,
    }
    return Vocabulary(kind, name, tokens, kinds, merges, added, backend)


def add(writer: Any, tokenizer: Tokenizer, size: int) -> None:
    """Write the keys of a tokenizer; InputError as `described`."""
    found = described(tokenizer, size)
    writer.add_tokenizer_model(found.model)
    writer.add_tokenizer_pre(found.rules)
    if found.model == "llama":
        writer.add_token_scores(_scores(found.tokens, found.kinds, found.merges))
        writer.add_add_space_prefix(_adds_space(found.backend))
    else:
        writer.add_token_merges(found.merges)
    writer.add_token_list(found.tokens)
    writer.add_token_types(found.kinds)
    for key, value in (("bos", tokenizer.bos_token_id), ("eos", tokenizer.eos_token_id)):
        if value is not None:
            getattr(writer, f"add_{key}_token_id")(value)
        getattr(writer, f"add_add_{key}_token")(found.added[key] is not None)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)


def _tokens(tokenizer: Tokenizer, size: int, spelled: bool) -> tuple[list[str], list[int]]:
    by_id = {i: token for token, i in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    tokens, kinds = [], []
    for i in range(size):
        token = by_id.get(i)
        tokens.append(f"[PAD{i}]" if token is None else token)
        if token is None:
            kinds.append(_UNUSED)
        elif token == tokenizer.unk_token:
            kinds.append(_UNKNOWN)
        elif i in added:
            kinds.append(_CONTROL if added[i].special else _USER)
        else:
            kinds.append(_BYTE if spelled and token.startswith("<0x") and len(token) == 6 else _NORMAL)
    return tokens, kinds


def _scores(tokens: list[str], kinds: list[int], merges: list[str]) -> list[float]:
    """llama.cpp joins the pair whose whole has the highest score, as BPE joins the one whose merge stands first."""
    rank: dict[str, int] = {}
    for i, merge in enumerate(merges):
        rank.setdefault(merge.replace(" ", ""), i)
    worst = float(len(merges) + 1)
    return [-float(rank.get(t, worst)) if kind == _NORMAL else 0.0 for t, kind in zip(tokens, kinds, strict=True)]


def _adds_space(backend: dict[str, Any]) -> bool:
    """Whether a text gets a space before it: a normalizer that prepends one, or Metaspace that does."""
    return any(
        '"Prepend"' in text or '"prepend_scheme": "always"' in text or '"prepend_scheme": "first"' in text
        for text in (json.dumps(backend["normalizer"]), json.dumps(backend["pre_tokenizer"]))
    )
