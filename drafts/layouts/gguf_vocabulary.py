"""A tokenizer inside a GGUF file, as llama.cpp needs it to turn text into the same tokens.

Avoids two traps of llama.cpp's own converter. For BPE with SentencePiece's spelling it writes one score for all tokens,
so that text is cut wrongly; here a token's score is minus the rank of its merge. And it knows a pre-tokenizer by a hash
of its output, so that it refuses tokenizers that it could serve; here the rules are compared.
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
# llama.cpp's name for the rules that cut text into words. "refact" cuts digits singly and then as GPT-2 does.
_RULES = {"gpt-2": ["bytes"], "refact": ["digits", "bytes"], "llama-bpe": [_LLAMA3], "qwen2": [_QWEN2]}


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer in llama.cpp's terms. `rules` names the rules that cut text into words."""

    model: str
    rules: str
    tokens: list[str]
    kinds: list[int]
    merges: list[str]
    added: dict[str, int | None]
    """The token that is added before (`bos`) and behind (`eos`) a text, if any."""
    adds_space: bool


def described(tokenizer: Tokenizer, size: int) -> Vocabulary:
    """A tokenizer in llama.cpp's terms; ids up to `size` that it lacks become unused ones.

    Raises InputError for a tokenizer whose text llama.cpp would cut differently.
    """
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        raise _unknown(tokenizer, "has no tokenizer.json")
    backend: dict[str, Any] = json.loads(fast.to_str())
    model = backend["model"]
    if model["type"] != "BPE":
        raise _unknown(tokenizer, f"its tokens come from a {model['type']} model")
    # Tokens of single bytes, <0x41>.
    spelled = any(_is_byte(token) for token in model["vocab"])
    kind, name = "llama", "default"
    if not (spelled and model.get("byte_fallback")):
        rules = _rules(backend["pre_tokenizer"])
        kind, name = "gpt2", next((name for name, known in _RULES.items() if known == rules), "")
        if not name:
            raise _unknown(tokenizer, f"its pre-tokenizer cuts text by {rules}")
        if (name == "llama-bpe") != bool(model.get("ignore_merges")):
            raise _unknown(tokenizer, f"its 'ignore_merges' is {bool(model.get('ignore_merges'))} beside these rules")
    empty, bos, eos = tokenizer("")["input_ids"], tokenizer.bos_token_id, tokenizer.eos_token_id
    added = {
        "bos": bos if empty and empty[0] == bos else None,
        "eos": eos if empty and empty[-1] == eos != bos else None,
    }
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    spaces = json.dumps([backend["normalizer"], backend["pre_tokenizer"]])
    adds_space = any(sign in spaces for sign in ('"Prepend"', '_scheme": "always"', '_scheme": "first"'))
    return Vocabulary(kind, name, *_tokens(tokenizer, size, spelled), merges, added, adds_space)


def add(writer: Any, tokenizer: Tokenizer, size: int) -> None:
    """Write the keys of a tokenizer."""
    vocabulary = described(tokenizer, size)
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.rules)
    if vocabulary.model == "llama":
        writer.add_token_scores(_scores(vocabulary))
        writer.add_add_space_prefix(vocabulary.adds_space)
    else:
        writer.add_token_merges(vocabulary.merges)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.kinds)
    for key, value in (("bos", tokenizer.bos_token_id), ("eos", tokenizer.eos_token_id)):
        if value is not None:
            getattr(writer, f"add_{key}_token_id")(value)
        getattr(writer, f"add_add_{key}_token")(vocabulary.added[key] is not None)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)


def _unknown(tokenizer: Tokenizer, what: str) -> InputError:
    return InputError(
        f"{tokenizer.name_or_path}: {what}, and no rules of llama.cpp that are known here do the same; "
        f"use --format hf and llama.cpp's own convert_hf_to_gguf.py"
    )


def _is_byte(token: str) -> bool:
    return token.startswith("<0x") and len(token) == 6


def _rules(pre: dict[str, Any] | None) -> list[str]:
    """A pre-tokenizer's rules in the words of `_RULES`."""
    steps = [] if pre is None else pre["pretokenizers"] if pre["type"] == "Sequence" else [pre]
    rules = []
    for step in steps:
        if step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            rules.append(step["pattern"].get("Regex", ""))
        elif step == _DIGITS:
            rules.append("digits")
        elif step["type"] == "ByteLevel" and not step["add_prefix_space"]:
            rules += ["bytes"] if step["use_regex"] else []
        else:
            rules.append(step["type"])
    return rules


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
            kinds.append(_BYTE if spelled and _is_byte(token) else _NORMAL)
    return tokens, kinds


def _scores(vocabulary: Vocabulary) -> list[float]:
    # llama.cpp joins the pair whose whole has the highest score; BPE joins the one whose merge stands first.
    rank: dict[str, int] = {}
    for i, merge in enumerate(vocabulary.merges):
        rank.setdefault(merge.replace(" ", ""), i)
    worst = float(len(vocabulary.merges) + 1)
    pairs = zip(vocabulary.tokens, vocabulary.kinds, strict=True)
    return [-float(rank.get(token, worst)) if kind == _NORMAL else 0.0 for token, kind in pairs]
