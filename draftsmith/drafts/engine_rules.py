"""What each engine and each format of `export` requires of a pair: `rules.yaml` is the table, and
the methods of `Pair` say in which way a pair breaks a rule.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import transformers
from transformers import PretrainedConfig, PreTrainedModel

from draftsmith.core.errors import InputError
from draftsmith.core.models import text_config
from draftsmith.core.tokenization import Tokenizer
from draftsmith.core.transformers_api import FULL, layer_kinds
from draftsmith.drafts.config import Format
from draftsmith.drafts.layouts.gguf_file import ARCHITECTURES, ROPES, described
from draftsmith.drafts.layouts.mtp import written_for
from draftsmith.drafts.load import Source
from draftsmith.drafts.tables import read_table

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
    config: PretrainedConfig
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


def path_trap(path: str) -> str | None:
    """Return the word in the path that makes vLLM load the draft as a head."""
    whole = Path(path).resolve()
    return next((word for word in PATH_TRAPS if word in str(whole).lower()), None)


def _rope_type(config: object) -> str:
    rope = getattr(config, "rope_parameters", None) or {}
    return str(rope.get("rope_type", "default"))


def _vocabulary_error(model: Model | Source, size: int) -> str:
    if model.tokenizer is None:
        return f"{model.name} has no tokenizer, and a GGUF file holds one; give --target"
    try:
        described(model.tokenizer, size)
    except InputError as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class Pair:
    """The language models of a pair, target first. source: the head and its target, if the draft
    is a head.

    A method named in `rules.yaml` says in which way the pair breaks that rule; "" if it does not.
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
    def target(self) -> PreTrainedModel:
        """The target of a head."""
        assert self.source is not None and self.source.target is not None
        return self.source.target

    @property
    def states(self) -> list[int]:
        """Indices of the target's hidden states that the head reads."""
        return list(self.head.hidden_layers)

    @property
    def target_layers(self) -> int:
        return int(text_config(self.target).num_hidden_layers)

    # Language models.

    def no_model_alone(self) -> str:
        name = self.models[1].architecture or ""
        reads = f"the draft is a {name}, which reads its target's keys and values"
        return reads if "Assistant" in name else ""

    def stateful(self) -> str:
        name = self.models[0].architecture
        model = getattr(transformers, name or "", None)
        if not getattr(model, "_is_stateful", False):
            return ""
        return f"the target, a {name}, keeps a state that cannot go back"

    def sizes_differ(self) -> str:
        target, draft = (model.size for model in self.models)
        if target == draft:
            return ""
        return f"the draft's vocabulary has {draft} tokens and the target's {target}"

    def path_of_a_head(self) -> str:
        trap = path_trap(self.models[1].name)
        takes = f"the draft's path has '{trap}' in it, so vLLM would load it as a head"
        return takes if trap else ""

    def no_cpu_kernel(self) -> str:
        sizes = {model.name: model.head_size for model in self.models}
        if self.source is not None and self.kind != "medusa":
            sizes[self.source.name] = self.head.config.head_dim
        known = ", ".join(map(str, _VLLM_CPU_HEADS))
        for name, size in sizes.items():
            if size is not None and size not in _VLLM_CPU_HEADS:
                return f"{name} has attention heads of size {size}; vLLM takes {known}"
        return ""

    def not_written_as_gguf(self) -> str:
        for model in self.models:
            kind = model.config.model_type
            rope = _rope_type(model.config)
            if kind not in ARCHITECTURES:
                return f"{model.name} is a {kind} model, which export does not write as GGUF"
            if set(layer_kinds(model.config)) != {FULL}:
                return f"{model.name} has sliding attention"
            if kind != "qwen2" and getattr(model.config, "attention_bias", False):
                return f"{model.name} has biases in its attention"
            if rope not in ROPES:
                return f"{model.name}: export cannot write RoPE type '{rope}'"
        return ""

    def no_gguf_tokenizer(self) -> str:
        errors = (_vocabulary_error(model, model.size) for model in self.models)
        return next(filter(None, errors), "")

    def tokens_differ(self) -> str:
        """How the vocabularies of target and draft differ by llama.cpp's rules."""
        target, draft = (described(m.tokenizer, m.size) for m in self.models if m.tokenizer)
        if target.model != draft.model:
            return f"vocabulary types differ: {target.model} (target), {draft.model} (draft)"
        for flag in ("bos", "eos"):
            if target.added[flag] != draft.added[flag]:
                return (
                    f"only one of them adds {flag.upper()} to a text, or they add different tokens"
                )
        if abs(len(target.tokens) - len(draft.tokens)) > _LLAMA_SIZES_APART:
            return f"{self.sizes_differ()}; they may differ by {_LLAMA_SIZES_APART}"
        for i, (ours, theirs) in enumerate(zip(target.tokens, draft.tokens, strict=False)):
            if i >= _LLAMA_FIRST_TEXT and ours != theirs:
                return f"token {i} is {ascii(ours)} to the target and {ascii(theirs)} to the draft"
        return ""

    def not_built_as_onnx(self) -> str:
        for model in self.models:
            size = model.head_size
            if size is None:
                return f"{model.name} has no attention heads, and the engine's builder needs them"
            if size % 16:
                heads = f"{model.name} has attention heads of size {size}"
                return f"{heads}; the engine needs a multiple of 16"
        return ""

    # Heads: what the target does to logits and embeddings.

    def logits_changed(self) -> str:
        projection = self.head.borrowed.projection
        if projection.softcap:
            return f"the target caps its logits at {projection.softcap}"
        if projection.scale != 1:
            return f"the target scales its logits by {projection.scale:g}"
        return ""

    def logits_biased(self) -> str:
        biased = self.head.borrowed.projection.bias_V is not None
        return "the target has a bias in its output projection" if biased else ""

    def _scaled_embedding(self, engine: str) -> str:
        if not self.head.borrowed.scales_embedding:
            return ""
        return f"the target scales its embedding (the Gemma family), and {engine} the unscaled one"

    def sglang_embedding(self) -> str:
        return self._scaled_embedding("SGLang gives a head")

    def speculators_embedding(self) -> str:
        return self._scaled_embedding("speculators gives a block")

    # Heads: their variants.

    def windowed(self) -> str:
        window = self.head.config.window
        attends = f"the head attends to a window of {window} tokens"
        return f"{attends}, which this layout supports for causal blocks only" if window else ""

    def _norm_moved(self, option: str) -> str:
        moved = getattr(self.head.config, option)
        return f"the head sets '{option}', which moves a norm" if moved else ""

    def norm_before_residual(self) -> str:
        return self._norm_moved("norm_before_residual")

    def several_layers(self) -> str:
        layers = self.head.config.num_hidden_layers
        return f"the head has {layers} layers" if layers > 1 else ""

    def norm_before_fc(self) -> str:
        return self._norm_moved("norm_before_fc")

    def norms_of_31(self) -> str:
        if not (self.head.config.fc_norm or self.head.config.norm_output):
            return ""
        return "the head has the norms of EAGLE-3.1 (train one with --head.norms eagle3)"

    def longrope(self) -> str:
        if _rope_type(self.head.config) != "longrope":
            return ""
        return "the head's rope is longrope, whose factors an engine chooses by its longest text"

    def too_few_states(self) -> str:
        if len(set(self.states)) >= 3:
            return ""
        return f"the head reads states {self.states} of a target of {self.target_layers} layers"

    def reads_last(self) -> str:
        if max(self.states) < self.target_layers:
            return ""
        return f"the head reads the output of the last layer (states {self.states})"

    def reads_embedding(self) -> str:
        if min(self.states) >= 1:
            return ""
        return f"the head reads states {self.states}, and SGLang cannot give the embedding"

    def authors_head_size(self) -> str:
        layer = self.head.config
        if layer.head_dim * layer.num_attention_heads == layer.hidden_size:
            return ""
        sizes = f"{layer.head_dim} is not {layer.hidden_size} / {layer.num_attention_heads}"
        return f"head size {sizes}, which SafeAILab's code assumes"

    def authors_rope(self) -> str:
        rope = _rope_type(self.head.config)
        if rope in _AUTHORS_ROPES:
            return ""
        return f"rope of type '{rope}' is unknown to SafeAILab's code ({', '.join(_AUTHORS_ROPES)})"

    def authors_states(self) -> str:
        layers = self.target_layers
        fixed = [2, layers // 2, layers - 3]
        if self.states == fixed:
            return ""
        always = f"SafeAILab's code always gives {fixed} of {layers} layers"
        return f"the head reads states {self.states} and {always}"

    def gguf_rope(self) -> str:
        rope = _rope_type(self.head.config)
        return "" if rope in ROPES else f"export cannot write RoPE type '{rope}'"

    def no_gguf_tokens(self) -> str:
        assert self.source is not None
        return _vocabulary_error(self.source, self.head.vocab_size)

    def no_mtp_layer(self) -> str:
        family = text_config(self.target).model_type
        written = written_for(family)
        if written is None:
            return f"no engine reads an MTP layer of a {family} model"
        head = self.head.config
        same_layer = head.layer["model_type"] == (written.family or family)
        if not same_layer or head.hidden_first != written.hidden_first:
            return f"the head's layer is not one of a {family} model"
        return ""

    def not_in_transformers(self) -> str:
        """transformers finds the layer by the numbers that it has in published sizes."""
        config = text_config(self.target)
        name = f"model.layers.{config.num_hidden_layers}.eh_proj.weight"
        patterns = self.target._keys_to_ignore_on_load_unexpected or ()
        known = any(re.search(pattern, name) for pattern in patterns)
        if known and hasattr(config, "num_mtp_layers"):
            return ""
        return f"generate(use_mtp=True) finds no MTP layer in this {config.model_type} model"


@dataclass(frozen=True)
class Rule:
    """A row of `rules.yaml`."""

    broken: str
    """The method of `Pair` that says in which way a pair breaks the rule."""
    kinds: Collection[str]
    """Kinds of drafts, "draft" for a language model."""
    where: Collection[str] = frozenset(get_args(Format)) - {"hf"}
    """Engines, and formats of `export` (`gguf-lm` for a language model as GGUF). Default: all
    formats of heads.
    """
    fix: str = ""


RULES = [Rule(**row) for row in read_table("rules.yaml")]


@dataclass(frozen=True)
class Broken:
    """Message of a broken rule. by_export: it is what `export` cannot write; an engine may load the
    pair all the same.
    """

    message: str
    by_export: bool


def first_broken(pair: Pair, where: set[str]) -> Broken | None:
    """The first rule of these engines and formats that a pair breaks, or None."""
    for rule in RULES:
        matched = where.intersection(rule.where)
        if not matched or pair.kind not in rule.kinds:
            continue
        if broken := getattr(pair, rule.broken)():
            message = f"{broken}; {rule.fix}" if rule.fix else str(broken)
            by_format = pair.kind != "draft" and bool(matched.intersection(get_args(Format)))
            return Broken(message, by_format or "gguf-lm" in rule.where)
    return None
