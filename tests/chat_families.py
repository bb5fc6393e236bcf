"""Twelve families of chat templates: special tokens, end tokens, and what a server sees and writes.

The templates in `chat_templates/` are written from the families' documentation, shortened where a
text is of no matter. `prompt` and `answer` of a case are written by hand, so they are the oracle.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

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
TOOL_JSON = (
    '{"type": "function", "function": {"name": "weather", "parameters": '
    '{"type": "object", "properties": {"city": {"type": "string"}}}}}'
)
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
    ends: tuple[str, ...]
    cases: dict[str, tuple[str, str] | str]
    specials: tuple[str, ...] = ()
    bos: str | None = None
    eos: str = ""
    sentencepiece: bool = False

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """A tokenizer of bytes, with this family's special tokens and template."""
        return _tokenizer(self)


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


def _tokenizer(family: Family) -> PreTrainedTokenizerFast:
    return _made(family.name)


NO_THINKING = "does not write the answer's thinking"
NO_CALLS = "does not write the answer's tool calls"
NO_EARLIER_CALLS = "does not write the tool calls of turn 2"


def _llama3() -> Family:
    def head(role: str) -> str:
        return f"<|start_header_id|>{role}<|end_header_id|>\n\n"

    begin, end, ask = "<|begin_of_text|>", "<|eot_id|>", head("assistant")
    indented = (
        '{\n    "type": "function",\n    "function": {\n        "name": "weather",\n'
        '        "parameters": {\n            "type": "object",\n            "properties": {\n'
        '                "city": {\n                    "type": "string"\n                }\n'
        "            }\n        }\n    }\n}"
    )
    tools = f"Answer with JSON to call one of these functions.\n\n{indented}\n\n"
    asked = f"{begin}{head('user')}{tools}Weather in Rome?{end}"
    call = f'{{"name": "weather", "parameters": {{"city": "Rome"}}}}{end}'
    colour = f"{head('user')}Name a colour.{end}{ask}"
    four = f"{begin}{head('user')}2+2?{end}{ask}"
    return Family(
        name="llama3",
        bos=begin,
        eos=end,
        ends=("<|end_of_text|>", "<|eom_id|>", end),
        specials=("<|start_header_id|>", "<|end_header_id|>"),
        cases={
            "plain": (begin + colour, f"Blue.{end}"),
            "system": (f"{begin}{head('system')}Be brief.{end}{colour}", f"Blue.{end}"),
            "multi-turn": (
                f"{begin}{head('user')}Hi{end}{ask}Hello!{end}{colour}",
                f"Blue.{end}",
            ),
            "tools": (asked + ask, call),
            "tool result": (
                f'{asked}{ask}{call}{head("ipython")}"clear"{end}{ask}',
                f"It is clear.{end}",
            ),
            "reasoning": NO_THINKING,
            "reasoning dropped": (four, f"4{end}"),
        },
    )


def _gemma3() -> Family:
    def turn(role: str, text: str) -> str:
        return f"<start_of_turn>{role}\n{text}<end_of_turn>\n"

    ask, end = "<start_of_turn>model\n", "<end_of_turn>"
    told = "Be brief.\n\nName a colour."
    return Family(
        name="gemma3",
        bos="<bos>",
        eos="<eos>",
        ends=("<eos>", end),
        specials=("<start_of_turn>",),
        cases={
            "plain": (f"<bos>{turn('user', 'Name a colour.')}{ask}", f"Blue.{end}"),
            "system": (f"<bos>{turn('user', told)}{ask}", f"Blue.{end}"),
            "multi-turn": (
                f"<bos>{turn('user', 'Hi')}{turn('model', 'Hello!')}"
                f"{turn('user', 'Name a colour.')}{ask}",
                f"Blue.{end}",
            ),
            "tools": NO_CALLS,
            "tool result": "user and assistant must alternate",
            "reasoning": NO_THINKING,
            "reasoning dropped": (f"<bos>{turn('user', '2+2?')}{ask}", f"4{end}"),
        },
    )


def _phi(
    name: str,
    *,
    opened: str,
    separator: str,
    close: str,
    ends: tuple[str, ...],
    eos: str,
    specials: tuple[str, ...],
) -> Family:
    def turn(role: str, text: str) -> str:
        return f"{opened.format(role)}{separator}{text}{close}"

    ask, end = opened.format("assistant") + separator, close.rstrip("\n")
    user = turn("user", "Name a colour.") + ask
    return Family(
        name=name,
        eos=eos,
        ends=ends,
        specials=specials,
        cases={
            "plain": (user, f"Blue.{end}"),
            "system": (turn("system", "Be brief.") + user, f"Blue.{end}"),
            "multi-turn": (turn("user", "Hi") + turn("assistant", "Hello!") + user, f"Blue.{end}"),
            "tools": NO_CALLS,
            "tool result": NO_EARLIER_CALLS,
            "reasoning": NO_THINKING,
            "reasoning dropped": (turn("user", "2+2?") + ask, f"4{end}"),
        },
    )


def _im(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


_IM_ASK = "<|im_start|>assistant\n"
_CALL_JSON = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def _qwen25() -> Family:
    default = _im("system", "You are a helpful assistant.")
    tools = f"You are a helpful assistant.\n\n# Tools\n\n<tools>\n{TOOL_JSON}\n</tools>"
    asked = _im("system", tools) + _im("user", "Weather in Rome?")
    colour = _im("user", "Name a colour.") + _IM_ASK
    result = _im("user", "<tool_response>\nclear\n</tool_response>")
    return Family(
        name="qwen25",
        eos="<|im_end|>",
        ends=("<|im_end|>", "<|endoftext|>"),
        specials=("<|im_start|>",),
        cases={
            "plain": (default + colour, "Blue.<|im_end|>"),
            "system": (_im("system", "Be brief.") + colour, "Blue.<|im_end|>"),
            "multi-turn": (
                default + _im("user", "Hi") + _im("assistant", "Hello!") + colour,
                "Blue.<|im_end|>",
            ),
            "tools": (asked + _IM_ASK, f"{_CALL_JSON}<|im_end|>"),
            "tool result": (
                asked + _im("assistant", _CALL_JSON) + result + _IM_ASK,
                "It is clear.<|im_end|>",
            ),
            "reasoning": NO_THINKING,
            "reasoning dropped": (default + _im("user", "2+2?") + _IM_ASK, "4<|im_end|>"),
        },
    )


def _qwen3() -> Family:
    empty = "<think>\n\n</think>\n\n"
    tools = f"\n\n# Tools\n\n<tools>\n{TOOL_JSON}\n</tools>"
    asked = _im("system", tools) + _im("user", "Weather in Rome?")
    colour = _im("user", "Name a colour.") + _IM_ASK
    result = _im("user", "<tool_response>\nclear\n</tool_response>")
    return Family(
        name="qwen3",
        eos="<|im_end|>",
        ends=("<|im_end|>", "<|endoftext|>"),
        specials=("<|im_start|>", "<think>", "</think>"),
        cases={
            "plain": (colour, f"{empty}Blue.<|im_end|>"),
            "system": (_im("system", "Be brief.") + colour, f"{empty}Blue.<|im_end|>"),
            # The thought of the earlier answer is dropped.
            "multi-turn": (
                _im("user", "Hi") + _im("assistant", "Hello!") + colour,
                f"{empty}Blue.<|im_end|>",
            ),
            "tools": (asked + _IM_ASK, f"{empty}{_CALL_JSON}<|im_end|>"),
            "tool result": (
                asked + _im("assistant", _CALL_JSON) + result + _IM_ASK,
                f"{empty}It is clear.<|im_end|>",
            ),
            "reasoning": (
                _im("user", "2+2?") + _IM_ASK,
                "<think>\n2 and 2 make 4.\n</think>\n\n4<|im_end|>",
            ),
            "reasoning dropped": (_im("user", "2+2?") + _IM_ASK + empty, "4<|im_end|>"),
        },
    )


def _qwen3_coder() -> Family:
    tools = (
        "\n\n# Tools\n\n<tools>\n<function>\n<name>weather</name>\n<parameters>\n<parameter>\n"
        "<name>city</name>\n<type>string</type>\n</parameter>\n</parameters>\n</function>\n</tools>"
    )
    call = (
        "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    asked = _im("system", tools) + _im("user", "Weather in Rome?")
    colour = _im("user", "Name a colour.") + _IM_ASK
    result = _im("user", "<tool_response>\nclear\n</tool_response>\n")
    return Family(
        name="qwen3_coder",
        eos="<|im_end|>",
        ends=("<|im_end|>", "<|endoftext|>"),
        specials=("<|im_start|>",),
        cases={
            "plain": (colour, "Blue.<|im_end|>"),
            "system": (_im("system", "Be brief.") + colour, "Blue.<|im_end|>"),
            "multi-turn": (
                _im("user", "Hi") + _im("assistant", "Hello!") + colour,
                "Blue.<|im_end|>",
            ),
            "tools": (asked + _IM_ASK, f"{call}<|im_end|>"),
            "tool result": (
                asked + _im("assistant", call) + result + _IM_ASK,
                "It is clear.<|im_end|>",
            ),
            "reasoning": NO_THINKING,
            "reasoning dropped": (_im("user", "2+2?") + _IM_ASK, "4<|im_end|>"),
        },
    )


def _deepseek() -> Family:
    begin, end = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
    user, ask = "<｜User｜>", "<｜Assistant｜></think>"
    schema = '{"type": "object", "properties": {"city": {"type": "string"}}}'
    tools = f"\n\n## Tools\n\n### weather\n{schema}"
    # The arguments are joined as the text that they came as.
    call = (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
        '{"city": "Rome"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    )
    asked = f"{begin}{tools}{user}Weather in Rome?{ask}"
    colour = f"{user}Name a colour.{ask}"
    return Family(
        name="deepseek_v31",
        bos=begin,
        eos=end,
        ends=(end,),
        specials=(user, "<｜Assistant｜>", "<think>", "</think>"),
        cases={
            "plain": (begin + colour, f"Blue.{end}"),
            "system": (f"{begin}Be brief.{colour}", f"Blue.{end}"),
            "multi-turn": (f"{begin}{user}Hi{ask}Hello!{end}{colour}", f"Blue.{end}"),
            "tools": (asked, call + end),
            "tool result": (
                f"{asked}{call}{end}<｜tool▁output▁begin｜>clear<｜tool▁output▁end｜>",
                f"It is clear.{end}",
            ),
            "reasoning": NO_THINKING,
            "reasoning dropped": (f"{begin}{user}2+2?{ask}", f"4{end}"),
        },
    )


def _mistral() -> Family:
    colour = "[INST]Name a colour.[/INST]"
    tools = f"[AVAILABLE_TOOLS][{TOOL_JSON}][/AVAILABLE_TOOLS]"
    call = '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}, "id": "abcdefghi"}]</s>'
    asked = f"<s>{tools}[INST]Weather in Rome?[/INST]"
    result = '[TOOL_RESULTS]{"content": "clear", "call_id": "abcdefghi"}[/TOOL_RESULTS]'
    return Family(
        name="mistral_v7",
        bos="<s>",
        eos="</s>",
        ends=("</s>",),
        specials=("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        cases={
            "plain": (f"<s>{colour}", "Blue.</s>"),
            "system": (f"<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT]{colour}", "Blue.</s>"),
            "multi-turn": (f"<s>[INST]Hi[/INST]Hello!</s>{colour}", "Blue.</s>"),
            "tools": (asked, call),
            "tool result": (asked + call + result, "It is clear.</s>"),
            "reasoning": NO_THINKING,
            "reasoning dropped": ("<s>[INST]2+2?[/INST]", "4</s>"),
        },
    )


def _glm() -> Family:
    begin, ask, empty = "[gMASK]<sop>", "<|assistant|>", "\n<think></think>"
    tools = f"<|system|>\n# Tools\n\n<tools>\n{TOOL_JSON}\n</tools>"
    asked = f"{begin}{tools}<|user|>\nWeather in Rome?"
    call = (
        "\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>"
    )
    colour = f"<|user|>\nName a colour.{ask}"
    result = "<|observation|>\n<tool_response>\nclear\n</tool_response>"
    return Family(
        name="glm45",
        eos="<|endoftext|>",
        ends=("<|endoftext|>", "<|user|>", "<|observation|>"),
        specials=("[gMASK]", "<sop>", "<|system|>", ask),
        cases={
            # The template ends no answer; the target ends it with the mark of who speaks next.
            "plain": (begin + colour, f"{empty}\nBlue.<|user|>"),
            "system": (f"{begin}<|system|>\nBe brief.{colour}", f"{empty}\nBlue.<|user|>"),
            "multi-turn": (
                f"{begin}<|user|>\nHi{ask}{empty}\nHello!{colour}",
                f"{empty}\nBlue.<|user|>",
            ),
            "tools": (asked + ask, f"{empty}{call}<|observation|>"),
            "tool result": (
                f"{asked}{ask}{empty}{call}{result}{ask}",
                f"{empty}\nIt is clear.<|user|>",
            ),
            "reasoning": (
                f"{begin}<|user|>\n2+2?{ask}",
                "\n<think>2 and 2 make 4.</think>\n4<|user|>",
            ),
            "reasoning dropped": (f"{begin}<|user|>\n2+2?/nothink{ask}{empty}", "\n4<|user|>"),
        },
    )


def _gpt_oss() -> Family:
    system = "<|start|>system<|message|>Reasoning: medium<|end|>"
    ask, final = "<|start|>assistant", "<|channel|>final<|message|>"
    colour = f"<|start|>user<|message|>Name a colour.<|end|>{ask}"
    told = "<|start|>developer<|message|># Instructions\n\nBe brief.<|end|>"
    tools = (
        "<|start|>developer<|message|># Tools\n\ntype weather = (_: any) => any;<|end|>"
        "<|start|>user<|message|>Weather in Rome?<|end|>"
    )
    call = ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>'
    result = '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"clear"<|end|>'
    four = f"{system}<|start|>user<|message|>2+2?<|end|>{ask}"
    return Family(
        name="gpt_oss",
        bos="<|startoftext|>",
        eos="<|return|>",
        ends=("<|return|>", "<|endoftext|>", "<|call|>"),
        specials=("<|start|>", "<|message|>", "<|channel|>", "<|end|>"),
        cases={
            "plain": (system + colour, f"{final}Blue.<|return|>"),
            "system": (system + told + colour, f"{final}Blue.<|return|>"),
            "multi-turn": (
                f"{system}<|start|>user<|message|>Hi<|end|>{ask}{final}Hello!<|end|>{colour}",
                f"{final}Blue.<|return|>",
            ),
            "tools": (system + tools + ask, call),
            "tool result": (
                f"{system}{tools}{ask}{call}{result}{ask}",
                f"{final}It is clear.<|return|>",
            ),
            "reasoning": (
                four,
                f"<|channel|>analysis<|message|>2 and 2 make 4.<|end|>{ask}{final}4<|return|>",
            ),
            "reasoning dropped": (four, f"{final}4<|return|>"),
        },
    )


def _chatml() -> Family:
    colour = _im("user", "Name a colour.") + _IM_ASK
    return Family(
        name="chatml",
        bos="<|im_start|>",
        eos="<|im_end|>",
        ends=("<|im_end|>",),
        cases={
            "plain": (colour, "Blue.<|im_end|>"),
            "system": (_im("system", "Be brief.") + colour, "Blue.<|im_end|>"),
            "multi-turn": (
                _im("user", "Hi") + _im("assistant", "Hello!") + colour,
                "Blue.<|im_end|>",
            ),
            "tools": NO_CALLS,
            "tool result": NO_EARLIER_CALLS,
            "reasoning": NO_THINKING,
            "reasoning dropped": (_im("user", "2+2?") + _IM_ASK, "4<|im_end|>"),
        },
    )


def _zephyr() -> Family:
    def turn(role: str, text: str) -> str:
        return f"<|{role}|>\n{text}</s>\n"

    ask = "<|assistant|>\n"
    colour = turn("user", "Name a colour.") + ask
    return Family(
        name="zephyr",
        bos="<s>",
        eos="</s>",
        ends=("</s>",),
        sentencepiece=True,
        cases={
            "plain": (colour, "Blue.</s>"),
            "system": (turn("system", "Be brief.") + colour, "Blue.</s>"),
            "multi-turn": (turn("user", "Hi") + turn("assistant", "Hello!") + colour, "Blue.</s>"),
            "tools": NO_CALLS,
            "tool result": NO_EARLIER_CALLS,
            "reasoning": NO_THINKING,
            "reasoning dropped": (turn("user", "2+2?") + ask, "4</s>"),
        },
    )


FAMILIES = {
    family.name: family
    for family in (
        _llama3(),
        _gemma3(),
        _phi(
            "phi3",
            opened="<|{}|>",
            separator="\n",
            close="<|end|>\n",
            ends=("<|endoftext|>", "<|assistant|>", "<|end|>"),
            eos="<|endoftext|>",
            specials=("<|user|>", "<|system|>"),
        ),
        _phi(
            "phi4",
            opened="<|im_start|>{}",
            separator="<|im_sep|>",
            close="<|im_end|>",
            ends=("<|endoftext|>", "<|im_end|>"),
            eos="<|endoftext|>",
            specials=("<|im_start|>", "<|im_sep|>"),
        ),
        _qwen25(),
        _qwen3(),
        _qwen3_coder(),
        _deepseek(),
        _mistral(),
        _glm(),
        _gpt_oss(),
        _chatml(),
        _zephyr(),
    )
}
