"""What each engine and each format of `export` requires of a pair, in one table: `RULES`.

Rules for language models repeat what the engine checks when it loads a pair (its sources, November
2026). Rules for heads name what a layout cannot express: its engine would compute other logits
without an error.
"""

import re
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import transformers

from draftsmith.core.errors import InputError
from draftsmith.core.models import text_config
from draftsmith.core.tokenization import Tokenizer
from draftsmith.drafts.config import BLOCK_KINDS, Format
from draftsmith.drafts.layouts.gguf_file import ARCHITECTURES, ROPES, described
from draftsmith.drafts.layouts.mtp import written_for
from draftsmith.drafts.load import Source

# vLLM takes a draft for a head if its path contains one of these, whatever the files say.
PATH_TRAPS = ("eagle-", "eagle3", "dflash", "dspark")
# Sizes of attention heads that vLLM runs on a CPU (0.32: v1/attention/backends/cpu_attn.py).
_VLLM_CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
# Greatest difference of vocabulary sizes, and first token that is compared (llama.cpp,
# common/speculative.cpp).
_LLAMA_SIZES_APART, _LLAMA_FIRST_TEXT = 128, 5
# Types of rope that SafeAILab's code knows.
_AUTHORS_ROPES = ("default", "linear")


@dataclass(frozen=True)
class Model:
    """The parts of a language model that rules read."""

    name: str
    config: Any
    tokenizer: Tokenizer | None
    architecture: str | None = None
    """Class of the whole model, as config.json names it."""

    @property
    def names(self) -> tuple[str, ...]:
        """Its class, if config.json names one, and its model type."""
        kind = str(self.config.model_type)
        return (kind,) if self.architecture is None else (self.architecture, kind)

    @property
    def size(self) -> int:
        """Size of the vocabulary, padding included."""
        return int(self.config.vocab_size)

    @property
    def head_size(self) -> int | None:
        """Size of one attention head; None for a model without attention."""
        heads = getattr(self.config, "num_attention_heads", None)
        if not heads:
            return None
        return getattr(self.config, "head_dim", None) or self.config.hidden_size // heads


@dataclass(frozen=True)
class Pair:
    """The language models of a pair, target first. source: the head and its target, if the draft
    is a head.
    """

    models: tuple[Model, ...]
    source: Source | None = None

    @property
    def kind(self) -> str:
        """`draft` for a language model, else the kind of head."""
        return "draft" if self.source is None else self.source.kind

    @property
    def head(self) -> Any:
        assert self.source is not None
        return self.source.draft

    @property
    def states(self) -> list[int]:
        """Indices of the target's hidden states that the head reads."""
        return list(self.head.hidden_layers)

    @property
    def target_layers(self) -> int:
        assert self.source is not None and self.source.target is not None
        return int(text_config(self.source.target).num_hidden_layers)


def path_trap(path: str) -> str | None:
    """Return the word in the path that makes vLLM load the draft as a head."""
    whole = str(Path(path).resolve()).lower()
    return next((word for word in PATH_TRAPS if word in whole), None)


def _rope_type(config: Any) -> str:
    rope = getattr(config, "rope_parameters", None) or {}
    return str(rope.get("rope_type", "default"))


# Language models.


def _no_model_alone(pair: Pair) -> str | None:
    name = pair.models[1].architecture or ""
    if "Assistant" not in name:
        return None
    return f"the draft is a {name}, which reads its target's keys and values"


def _stateful(pair: Pair) -> str | None:
    model = getattr(transformers, pair.models[0].architecture or "", None)
    if not getattr(model, "_is_stateful", False):
        return None
    return f"the target, a {pair.models[0].architecture}, keeps a state that cannot go back"


def _sizes_differ(pair: Pair) -> str | None:
    target, draft = (model.size for model in pair.models)
    if target == draft:
        return None
    return f"the draft's vocabulary has {draft} tokens and the target's {target}"


def _path_of_a_head(pair: Pair) -> str | None:
    trap = path_trap(pair.models[1].name)
    return trap and f"the draft's path has '{trap}' in it, so vLLM would load it as a head"


def _no_cpu_kernel(pair: Pair) -> str | None:
    sizes = {model.name: model.head_size for model in pair.models}
    if pair.source is not None and pair.kind != "medusa":
        sizes[pair.source.name] = pair.head.config.head_dim
    known = ", ".join(map(str, _VLLM_CPU_HEADS))
    for name, size in sizes.items():
        if size is not None and size not in _VLLM_CPU_HEADS:
            return f"{name} has attention heads of size {size}; vLLM takes {known}"
    return None


def _not_written_as_gguf(pair: Pair) -> str | None:
    for model in pair.models:
        kind = model.config.model_type
        rope = _rope_type(model.config)
        layers = getattr(model.config, "layer_types", None) or ["full_attention"]
        window = kind == "mistral" and getattr(model.config, "sliding_window", None)
        if kind not in ARCHITECTURES:
            return f"{model.name} is a {kind} model, which export does not write as GGUF"
        if window or set(layers) != {"full_attention"}:
            return f"{model.name} has sliding attention"
        if kind != "qwen2" and getattr(model.config, "attention_bias", False):
            return f"{model.name} has biases in its attention"
        if rope not in ROPES:
            return f"{model.name}: export cannot write RoPE type '{rope}'"
    return None


def _no_gguf_tokenizer(pair: Pair) -> str | None:
    for model in pair.models:
        if error := _vocabulary_error(model, model.size):
            return error
    return None


def _vocabulary_error(model: Model | Source, size: int) -> str | None:
    if model.tokenizer is None:
        return f"{model.name} has no tokenizer, and a GGUF file holds one; give --target"
    try:
        described(model.tokenizer, size)
    except InputError as error:
        return str(error)
    return None


def _tokens_differ(pair: Pair) -> str | None:
    """How the vocabularies of target and draft differ by llama.cpp's rules."""
    target, draft = (described(m.tokenizer, m.size) for m in pair.models if m.tokenizer is not None)
    if target.model != draft.model:
        return f"vocabulary types differ: {target.model} (target), {draft.model} (draft)"
    for flag in ("bos", "eos"):
        if target.added[flag] != draft.added[flag]:
            return f"only one of them adds {flag.upper()} to a text, or they add different tokens"
    if abs(len(target.tokens) - len(draft.tokens)) > _LLAMA_SIZES_APART:
        return f"{_sizes_differ(pair)}; they may differ by {_LLAMA_SIZES_APART}"
    for i, (ours, theirs) in enumerate(zip(target.tokens, draft.tokens, strict=False)):
        if i >= _LLAMA_FIRST_TEXT and ours != theirs:
            return f"token {i} is {ascii(ours)} to the target and {ascii(theirs)} to the draft"
    return None


def _not_built_as_onnx(pair: Pair) -> str | None:
    for model in pair.models:
        size = model.head_size
        if size is None:
            return f"{model.name} has no attention heads, and the engine's builder needs them"
        if size % 16:
            heads = f"{model.name} has attention heads of size {size}"
            return f"{heads}; the engine needs a multiple of 16"
    return None


# Heads: what the target does to logits and embeddings.


def _logits_changed(pair: Pair) -> str | None:
    projection = pair.head.borrowed.projection
    if projection.softcap:
        return f"the target caps its logits at {projection.softcap}"
    if projection.scale != 1:
        return f"the target scales its logits by {projection.scale:g}"
    return None


def _logits_biased(pair: Pair) -> str | None:
    if pair.head.borrowed.projection.bias_V is None:
        return None
    return "the target has a bias in its output projection"


def _sglang_embedding(pair: Pair) -> str | None:
    if not pair.head.borrowed.scales_embedding:
        return None
    scaled = "the target scales its embedding (the Gemma family)"
    return f"{scaled}, and SGLang gives a head the unscaled one"


def _speculators_embedding(pair: Pair) -> str | None:
    if not pair.head.borrowed.scales_embedding:
        return None
    scaled = "the target scales its embedding (the Gemma family)"
    return f"{scaled}, and speculators gives a block the unscaled one"


# Heads: their variants.


def _windowed(pair: Pair) -> str | None:
    window = pair.head.config.window
    attends = f"the head attends to a window of {window} tokens"
    return window and f"{attends}, which this layout supports for causal blocks only"


def _norm_before_residual(pair: Pair) -> str | None:
    return _norm_moved(pair, "norm_before_residual")


def _other_norms(pair: Pair) -> str | None:
    return _norm_moved(pair, "norm_output", "norm_before_fc", "fc_norm")


def _norm_moved(pair: Pair, *options: str) -> str | None:
    for option in options:
        if getattr(pair.head.config, option):
            return f"the head sets '{option}', which moves a norm"
    return None


def _longrope(pair: Pair) -> str | None:
    if _rope_type(pair.head.config) != "longrope":
        return None
    return "the head's rope is longrope, whose factors an engine chooses by its longest text"


def _too_few_states(pair: Pair) -> str | None:
    if len(set(pair.states)) >= 3:
        return None
    return f"the head reads states {pair.states} of a target of {pair.target_layers} layers"


def _normed_last(pair: Pair) -> str | None:
    if pair.head.config.last_tap != "normed":
        return None
    return "the head was trained on the target's last state behind the final norm"


def _reads_last(pair: Pair) -> str | None:
    if max(pair.states) < pair.target_layers:
        return None
    return f"the head reads the output of the last layer (states {pair.states})"


def _reads_embedding(pair: Pair) -> str | None:
    if min(pair.states) >= 1:
        return None
    return f"the head reads states {pair.states}, and SGLang cannot give the embedding"


def _authors_head_size(pair: Pair) -> str | None:
    layer = pair.head.config
    if layer.head_dim * layer.num_attention_heads == layer.hidden_size:
        return None
    sizes = f"{layer.head_dim} is not {layer.hidden_size} / {layer.num_attention_heads}"
    return f"head size {sizes}, which SafeAILab's code assumes"


def _authors_rope(pair: Pair) -> str | None:
    rope = _rope_type(pair.head.config)
    if rope in _AUTHORS_ROPES:
        return None
    return f"rope of type '{rope}' is unknown to SafeAILab's code ({', '.join(_AUTHORS_ROPES)})"


def _authors_states(pair: Pair) -> str | None:
    layers = pair.target_layers
    fixed = [2, layers // 2, layers - 3]
    if pair.states == fixed:
        return None
    always = f"SafeAILab's code always gives {fixed} of {layers} layers"
    return f"the head reads states {pair.states} and {always}"


def _gguf_rope(pair: Pair) -> str | None:
    rope = _rope_type(pair.head.config)
    return None if rope in ROPES else f"export cannot write RoPE type '{rope}'"


def _no_gguf_tokens(pair: Pair) -> str | None:
    assert pair.source is not None
    return _vocabulary_error(pair.source, pair.head.vocab_size)


def _no_mtp_layer(pair: Pair) -> str | None:
    assert pair.source is not None and pair.source.target is not None
    family = text_config(pair.source.target).model_type
    written = written_for(family)
    if written is None:
        return f"no engine reads an MTP layer of a {family} model"
    head = pair.head.config
    same_layer = head.layer["model_type"] == (written.family or family)
    if not same_layer or head.hidden_first != written.hidden_first:
        return f"the head's layer is not one of a {family} model"
    return None


def _not_in_transformers(pair: Pair) -> str | None:
    """transformers finds the layer by the numbers that it has in published sizes."""
    assert pair.source is not None and pair.source.target is not None
    target = pair.source.target
    config = text_config(target)
    name = f"model.layers.{config.num_hidden_layers}.eh_proj.weight"
    patterns = target._keys_to_ignore_on_load_unexpected or ()
    known = [pattern for pattern in patterns if re.search(pattern, name)]
    if known and hasattr(config, "num_mtp_layers"):
        return None
    return f"generate(use_mtp=True) finds no MTP layer in this {config.model_type} model"


@dataclass(frozen=True)
class Rule:
    """`broken(pair)` says in which way the pair breaks the rule, and None if it does not."""

    where: Set[str]
    """Engines, and formats of `export` (`gguf-lm` for a language model as GGUF)."""
    kinds: Set[str]
    """Kinds of drafts, "draft" for a language model."""
    broken: Callable[[Pair], str | None]
    fix: str = ""


_LM, _EAGLE3, _EAGLES, _BLOCKS = {"draft"}, {"eagle3"}, {"eagle", "eagle3"}, set(BLOCK_KINDS)
_HEADS = {*_EAGLES, "medusa", *_BLOCKS}
_FORMATS = set(get_args(Format)) - {"hf"}
_LLAMA, _WITH_TARGET = {"llama.cpp", "gguf-lm"}, {"draft", "eagle3"}

# Engines that run a language model as a draft.
_ORDINARY = {"transformers", "vllm", "sglang", "llama.cpp", "openvino", "onnxruntime-genai"}

_TWO_TOKENIZERS = (
    "transformers then needs both tokenizers (universal assisted decoding, another method)"
)
_HETEROGENEOUS = 'vLLM needs equal sizes, or "use_heterogeneous_vocab": true'
_CONVERT = "use --format hf and llama.cpp's own convert_hf_to_gguf.py"
_NO_WORD = (
    "this layout cannot express it, so an engine would compute wrong logits; decode with "
    "draftsmith instead"
)
_OWN_TABLE = "use --format speculators for an EAGLE-3 head, which has a table of its own"
_THREE_STATES = "engines pass three distinct states; use a target of at least two layers"
_RAW_LAST = "engines pass the raw output of the last layer; train it again"
_BEFORE_LAST = "this engine passes states up to the input of the last layer only"
_OTHER = "use --format sglang, or speculators for an EAGLE-3 head"
_BLOCK = "use --format dflash"

RULES: tuple[Rule, ...] = (
    Rule(_ORDINARY, _LM, _no_model_alone, "serve it as the engine's own assistant of that target"),
    Rule({"transformers"}, _LM, _stateful),
    Rule({"transformers"}, _LM, _sizes_differ, _TWO_TOKENIZERS),
    Rule({"vllm"}, _LM, _path_of_a_head, "rename the directory"),
    Rule({"vllm"}, _LM, _sizes_differ, _HETEROGENEOUS),
    Rule({"vllm on a CPU"}, _LM | _HEADS, _no_cpu_kernel),
    Rule(_LLAMA, _WITH_TARGET, _not_written_as_gguf, _CONVERT),
    Rule(_LLAMA, _WITH_TARGET, _no_gguf_tokenizer),
    Rule({"llama.cpp"}, _LM, _tokens_differ),
    Rule({"onnxruntime-genai"}, _LM, _not_built_as_onnx),
    Rule({"sglang", "onnxruntime-genai"}, _LM, _sizes_differ, "the engine needs equal sizes"),
    Rule(_FORMATS, _HEADS, _logits_changed, _NO_WORD),
    Rule(_FORMATS, {"eagle", "medusa", *_BLOCKS}, _logits_biased, _NO_WORD),
    Rule({"sglang"}, _EAGLES, _sglang_embedding, _OWN_TABLE),
    Rule({"speculators"}, _BLOCKS, _speculators_embedding, _BLOCK),
    Rule({"speculators"}, _BLOCKS, _windowed, _BLOCK),
    Rule({"eagle", "sglang"}, _EAGLE3, _norm_before_residual, _NO_WORD),
    Rule(_FORMATS, _EAGLE3, _other_norms, _NO_WORD),
    Rule(_FORMATS, _EAGLE3, _too_few_states, _THREE_STATES),
    Rule(_FORMATS, {*_EAGLE3, *_BLOCKS}, _normed_last, _RAW_LAST),
    Rule({"sglang", "gguf", "sglang dflash"}, {*_EAGLE3, *_BLOCKS}, _reads_last, _BEFORE_LAST),
    Rule({"sglang"}, _EAGLE3, _reads_embedding, "use --format speculators"),
    Rule({"eagle"}, _EAGLES, _authors_head_size, _OTHER),
    Rule({"eagle"}, _EAGLES, _authors_rope, _OTHER),
    Rule({"eagle"}, _EAGLE3, _authors_states, _OTHER),
    Rule(_FORMATS, {*_EAGLES, *_BLOCKS}, _longrope, "decode with draftsmith instead"),
    Rule({"mtp"}, {"mtp"}, _no_mtp_layer, "decode with draftsmith instead"),
    Rule({"transformers mtp"}, {"mtp"}, _not_in_transformers),
    Rule({"gguf"}, _EAGLE3, _gguf_rope, _OTHER),
    Rule({"gguf"}, _EAGLE3, _no_gguf_tokens),
)


def first_broken(pair: Pair, where: Set[str]) -> str | None:
    """Message of the first rule of these engines and formats that a pair breaks, or None."""
    for rule in RULES:
        if not rule.where & where or pair.kind not in rule.kinds:
            continue
        broken = rule.broken(pair)
        if broken:
            return f"{broken}; {rule.fix}" if rule.fix else broken
    return None
