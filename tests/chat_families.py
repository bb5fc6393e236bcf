"""Twelve families of chat templates: special tokens, end tokens, and what a server sees and writes.

The templates in `chat_templates/` are written from the families' documentation, shortened where a
text is of no matter. Prompt and answer of a case, beside them, are written by hand, so they are the
oracle.
"""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "chat_templates"
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
_COLOUR = {"role": "user", "content": "Name a colour."}
_BLUE = {"role": "assistant", "content": "Blue."}
# Arguments are a JSON text on OpenAI's wire.
_CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "abcdefghi",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
        }
    ],
}
_ASK = {"role": "user", "content": "Weather in Rome?"}
_RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "content": "clear"}
CHATS: dict[str, list[dict[str, Any]]] = {
    "plain": [_COLOUR, _BLUE],
    "system": [{"role": "system", "content": "Be brief."}, _COLOUR, _BLUE],
    "multi-turn": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!", "reasoning_content": "A greeting."},
        _COLOUR,
        _BLUE,
    ],
    "tools": [_ASK, _CALL],
    "tool result": [_ASK, _CALL, _RESULT, {"role": "assistant", "content": "It is clear."}],
    "reasoning": [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4", "reasoning_content": "2 and 2 make 4."},
    ],
    "reasoning dropped": [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4", "reasoning_content": "2 and 2 make 4."},
    ],
}


@dataclass(frozen=True)
class Family:
    """A template, its tokens, and by case the prompt and the answer, or why there is none."""

    name: str
    ends: list[str]
    cases: dict[str, list[str] | str]
    specials: list[str] = field(default_factory=list)
    bos: str | None = None
    eos: str = ""
    sentencepiece: bool = False

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """A tokenizer of bytes, with this family's special tokens and template."""
        return _made(self.name)


def _bytes() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("Ġ", "B"), ("H", "e"), ("B", "l"), ("Ċ", "Ċ")]
    vocabulary = {token: number for number, token in enumerate([*alphabet, *map("".join, pairs)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece() -> Tokenizer:
    letters = [chr(code) for code in range(33, 127)]
    pairs = [("▁", "B"), ("▁", "H"), ("▁B", "l"), ("▁H", "e"), ("l", "u")]
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *letters]
    vocabulary = {token: number for number, token in enumerate([*tokens, *map("".join, pairs)])}
    model = models.BPE(
        vocab=vocabulary, merges=pairs, unk_token="<unk>", byte_fallback=True, fuse_unk=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return tokenizer


@cache
def _made(name: str) -> PreTrainedTokenizerFast:
    family = FAMILIES[name]
    base = _sentencepiece() if family.sentencepiece else _bytes()
    marks = dict.fromkeys([*filter(None, [family.bos, family.eos]), *family.ends, *family.specials])
    base.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    made = PreTrainedTokenizerFast(
        tokenizer_object=base, bos_token=family.bos, eos_token=family.eos or None
    )
    made.chat_template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return made


FAMILIES: dict[str, Family] = {}
for _file in sorted(TEMPLATES.glob("*.yaml")):
    FAMILIES[_file.stem] = Family(_file.stem, **yaml.safe_load(_file.read_text(encoding="utf-8")))
