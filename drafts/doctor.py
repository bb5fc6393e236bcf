"""`draftsmith doctor`, and the refusals of `export`: what each engine requires of a pair, in one
table, `RULES`.

Rules for language models repeat what the engine checks when it loads a pair (its sources, November
2026). Rules for heads name what a layout cannot express: its engine would compute other logits
without an error. For language models, only configs and tokenizers are read; a head is loaded with
its target.
"""

from collections.abc import Callable, Collection, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from transformers import AutoConfig

from drafts.config import BLOCK_KINDS, DoctorConfig, Format
from drafts.draft_vocabulary import read_draft_vocabulary
from drafts.heads import head_kind
from drafts.layouts.gguf_file import ARCHITECTURES, ROPES, described
from drafts.load import Source, first_difference, load_source
from draftsmith_core.engine_commands import SERVING
from draftsmith_core.errors import InputError
from draftsmith_core.hub import check_source, why_not
from draftsmith_core.io import JsonObject, read_json
from draftsmith_core.models import text_config
from draftsmith_core.options import configured
from draftsmith_core.tokenization import Tokenizer, find_tokenizer

DRAFT_TOKENS = 4
# vLLM takes a draft for a head if its path contains one of these, whatever the files say.
PATH_TRAPS = ("eagle-", "eagle3", "dflash", "dspark")
# Sizes of attention heads that vLLM runs on a CPU (0.32: v1/attention/backends/cpu_attn.py).
_VLLM_CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
# Greatest difference of vocabulary sizes, and first token that is compared (llama.cpp,
# common/speculative.cpp).
_LLAMA_SIZES_APART, _LLAMA_FIRST_TEXT = 128, 5
# Types of rope that SafeAILab's code knows.
_AUTHORS_ROPES = ("default", "linear", "dynamic")


@dataclass(frozen=True)
class Model:
    """The parts of a language model that rules read."""

    name: str
    config: Any
    tokenizer: Tokenizer | None

    @property
    def size(self) -> int:
        """Size of the vocabulary, padding included."""
        return int(self.config.vocab_size)

    @property
    def head_size(self) -> int | None:
        """Size of one attention head; None for a model without attention."""
        heads = getattr(self.config, "num_attention_heads", None)
        return heads and (
            getattr(self.config, "head_dim", None) or self.config.hidden_size // heads
        )


@dataclass(frozen=True)
class Pair:
    """The language models of a pair, target first; source: the head and its target, if the draft is
    a head.
    """

    models: tuple[Model, ...]
    source: Any = None

    @property
    def sizes(self) -> str | None:
        """Both vocabulary sizes, in words, if they differ."""
        target = self.models[0].size
        draft = self.models[1].size
        return (
            None
            if target == draft
            else f"the draft's vocabulary has {draft} tokens and the target's {target}"
        )

    @property
    def head(self) -> Any:
        return self.source.draft

    @property
    def states(self) -> list[int]:
        """Indices of the target's hidden states that the head reads."""
        return list(self.head.hidden_layers)

    @property
    def target_layers(self) -> int:
        return int(text_config(self.source.target).num_hidden_layers)

    def first(self, breaks: Callable[[Model], Any]) -> tuple[Model, Any] | None:
        """Return the first language model with a truthy `breaks(model)`, and that value."""
        return next(((model, value) for model in self.models if (value := breaks(model))), None)


@dataclass(frozen=True)
class Rule:
    """`broken(pair)` is truthy if the pair breaks the rule; `message` shows that value as {x} and
    the pair as {p}.
    """

    where: Set[str]
    """Engines, and formats of `export` (`gguf-lm` for a language model as GGUF)."""
    kinds: Set[str]
    """Kinds of drafts, "draft" for a language model."""
    broken: Callable[[Pair], Any]
    message: str
    fix: str = ""


def first_broken(pair: Pair, where: Set[str]) -> str | None:
    """Message of the first rule of these engines and formats that a pair breaks, or None."""
    kind = "draft" if pair.source is None else pair.source.kind
    for rule in RULES:
        if rule.where & where and kind in rule.kinds and (x := rule.broken(pair)):
            return rule.message.format(x=x, p=pair) + (f"; {rule.fix}" if rule.fix else "")
    return None


def _vocabulary_error(model: Model | Source, size: int) -> str | None:
    if model.tokenizer is None:
        return f"{model.name} has no tokenizer, and a GGUF file holds one; give --target"
    try:
        described(model.tokenizer, size)
    except InputError as error:
        return str(error)
    return None


def _other_tokens(pair: Pair) -> str | None:
    """How the vocabularies of target and draft differ by llama.cpp's rules."""
    target, draft = (described(m.tokenizer, m.size) for m in pair.models if m.tokenizer is not None)
    if target.model != draft.model:
        return f"vocabulary types differ: {target.model} (target), {draft.model} (draft)"
    for flag in ("bos", "eos"):
        if target.added[flag] != draft.added[flag]:
            return f"only one of them adds {flag.upper()} to a text, or they add different tokens"
    if abs(len(target.tokens) - len(draft.tokens)) > _LLAMA_SIZES_APART:
        return f"{pair.sizes}; they may differ by {_LLAMA_SIZES_APART}"
    for i, (target_token, draft_token) in enumerate(zip(target.tokens, draft.tokens, strict=False)):
        if i >= _LLAMA_FIRST_TEXT and target_token != draft_token:
            return (
                f"token {i} is {ascii(target_token)} to the target and {ascii(draft_token)} "
                "to the draft"
            )
    return None


def _sliding(model: Model) -> bool:
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    window = model.config.model_type == "mistral" and getattr(model.config, "sliding_window", None)
    return kinds != {"full_attention"} or bool(window)


def _biased(model: Model) -> bool:
    return model.config.model_type != "qwen2" and bool(
        getattr(model.config, "attention_bias", False)
    )


def _variant(*keys: str) -> Callable[[Pair], str | None]:
    return lambda pair: next((key for key in keys if getattr(pair.head.config, key)), None)


def _rope(config: Any, known: Collection[str]) -> str | None:
    kind = str((getattr(config, "rope_parameters", None) or {}).get("rope_type", "default"))
    return None if kind in known else kind


def _fixed_states(pair: Pair) -> list[int] | None:
    """The states that the authors' code always gives, if the head reads others."""
    fixed = [2, pair.target_layers // 2, pair.target_layers - 3]
    return None if pair.states == fixed else fixed


def path_trap(path: str) -> str | None:
    """Return the word in the path that makes vLLM load the draft as a head."""
    whole = str(Path(path).resolve()).lower()
    return next((word for word in PATH_TRAPS if word in whole), None)


def _head_size(pair: Pair) -> tuple[int, int, int] | None:
    layer = pair.head.config
    sizes = (layer.head_dim, layer.hidden_size, layer.num_attention_heads)
    return None if sizes[0] * sizes[2] == sizes[1] else sizes


def _cpu_head_size(pair: Pair) -> tuple[str, int] | None:
    sizes = [(model.name, model.head_size) for model in pair.models]
    if pair.source is not None and pair.source.kind != "medusa":
        sizes.append((pair.source.name, pair.head.config.head_dim))
    return next(
        ((name, size) for name, size in sizes if size is not None and size not in _VLLM_CPU_HEADS),
        None,
    )


_LM, _EAGLE3, _EAGLES, _BLOCKS = {"draft"}, {"eagle3"}, {"eagle", "eagle3"}, set(BLOCK_KINDS)
_HEADS = {*_EAGLES, "medusa", *_BLOCKS}
_FORMATS = set(get_args(Format)) - {"hf"}
_LLAMA, _WITH_TARGET = {"llama.cpp", "gguf-lm"}, {"draft", "eagle3"}
_NO_WORD = (
    "this layout cannot express it, so an engine would compute wrong logits; decode with "
    "draftsmith instead"
)
_CONVERT = "use --format hf and llama.cpp's own convert_hf_to_gguf.py"
_OTHER = "use --format sglang, or speculators for an EAGLE-3 head"
_BLOCK = "use --format dflash"


RULES: tuple[Rule, ...] = (
    # Language models, by engine.
    Rule(
        {"transformers"},
        _LM,
        lambda p: p.sizes,
        "{x}",
        "transformers then needs both tokenizers (universal assisted decoding, another method)",
    ),
    Rule(
        {"vllm"},
        _LM,
        lambda p: path_trap(p.models[1].name),
        "the draft's path has '{x}' in it, so vLLM would load it as a head",
        "rename the directory",
    ),
    Rule(
        {"vllm"},
        _LM,
        lambda p: p.sizes,
        "{x}",
        'vLLM needs equal sizes, or "use_heterogeneous_vocab": true',
    ),
    Rule(
        {"vllm on a CPU"},
        _LM | _HEADS,
        _cpu_head_size,
        f"{{x[0]}} has attention heads of size {{x[1]}}; vLLM takes "
        f"{', '.join(map(str, _VLLM_CPU_HEADS))}",
    ),
    Rule(
        _LLAMA,
        _WITH_TARGET,
        lambda p: p.first(lambda m: m.config.model_type not in ARCHITECTURES),
        "{x[0].name} is a {x[0].config.model_type} model, which export does not write as GGUF",
        _CONVERT,
    ),
    Rule(
        _LLAMA,
        _WITH_TARGET,
        lambda p: p.first(_sliding),
        "{x[0].name} has sliding attention",
        _CONVERT,
    ),
    Rule(
        _LLAMA,
        _WITH_TARGET,
        lambda p: p.first(_biased),
        "{x[0].name} has biases in its attention",
        _CONVERT,
    ),
    Rule(
        _LLAMA,
        _WITH_TARGET,
        lambda p: p.first(lambda m: _rope(m.config, ROPES)),
        "{x[0].name}: export cannot write RoPE type '{x[1]}'",
        _CONVERT,
    ),
    Rule(_LLAMA, _WITH_TARGET, lambda p: p.first(lambda m: _vocabulary_error(m, m.size)), "{x[1]}"),
    Rule({"llama.cpp"}, _LM, _other_tokens, "{x}"),
    Rule(
        {"onnxruntime-genai"},
        _LM,
        lambda p: p.first(lambda m: m.head_size is None),
        "{x[0].name} has no attention heads, and the engine's builder needs them",
    ),
    Rule(
        {"onnxruntime-genai"},
        _LM,
        lambda p: p.first(lambda m: (m.head_size or 0) % 16),
        "{x[0].name} has attention heads of size {x[0].head_size}; the engine needs a multiple "
        "of 16",
    ),
    Rule(
        {"sglang", "onnxruntime-genai"},
        _LM,
        lambda p: p.sizes,
        "{x}",
        "the engine needs equal sizes",
    ),
    # Heads, by format: what the target does to logits and embeddings.
    Rule(
        _FORMATS,
        _HEADS,
        lambda p: p.head.borrowed.projection.softcap,
        "the target caps its logits at {x}",
        _NO_WORD,
    ),
    Rule(
        _FORMATS,
        _HEADS,
        lambda p: p.head.borrowed.projection.scale != 1 and p.head.borrowed.projection.scale,
        "the target scales its logits by {x:g}",
        _NO_WORD,
    ),
    Rule(
        _FORMATS,
        {"eagle", "medusa", *_BLOCKS},
        lambda p: p.head.borrowed.projection.bias_V is not None,
        "the target has a bias in its output projection",
        _NO_WORD,
    ),
    Rule(
        {"sglang"},
        _EAGLES,
        lambda p: p.head.borrowed.scales_embedding,
        "the target scales its embedding (the Gemma family), and SGLang gives a head the "
        "unscaled one",
        "use --format speculators for an EAGLE-3 head, which has a table of its own",
    ),
    Rule(
        {"speculators"},
        _BLOCKS,
        lambda p: p.head.borrowed.scales_embedding,
        "the target scales its embedding (the Gemma family), and speculators gives a block the "
        "unscaled one",
        _BLOCK,
    ),
    # Heads, by format: variants of the head.
    Rule(
        {"speculators"},
        _BLOCKS,
        lambda p: p.head.config.window,
        "the head attends to a window of {x} tokens, which this layout supports for causal "
        "blocks only",
        _BLOCK,
    ),
    Rule(
        {"eagle", "sglang"},
        _EAGLE3,
        _variant("norm_before_residual"),
        "the head sets '{x}', which moves a norm",
        _NO_WORD,
    ),
    Rule(
        _FORMATS,
        _EAGLE3,
        _variant("norm_output", "norm_before_fc", "fc_norm"),
        "the head sets '{x}', which moves a norm",
        _NO_WORD,
    ),
    Rule(
        _FORMATS,
        _EAGLE3,
        lambda p: len(set(p.states)) < 3 or max(p.states) >= p.target_layers,
        "the head reads states {p.states} of a target of {p.target_layers} layers",
        "engines pass three distinct states, each the input of a layer; use a target of at least "
        "five layers",
    ),
    Rule(
        {"sglang"},
        _EAGLE3,
        lambda p: min(p.states) < 1,
        "the head reads states {p.states}, and SGLang cannot give the embedding",
        "use --format speculators",
    ),
    Rule(
        {"eagle"},
        _EAGLES,
        _head_size,
        "head size {x[0]} is not {x[1]} / {x[2]}, which SafeAILab's code assumes",
        _OTHER,
    ),
    Rule(
        {"eagle"},
        _EAGLES,
        lambda p: _rope(p.head.config, _AUTHORS_ROPES),
        f"rope of type '{{x}}' is unknown to SafeAILab's code ({', '.join(_AUTHORS_ROPES)})",
        _OTHER,
    ),
    Rule(
        {"eagle"},
        _EAGLE3,
        _fixed_states,
        "the head reads states {p.states} and SafeAILab's code always gives {x} of "
        "{p.target_layers} layers",
        _OTHER,
    ),
    Rule(
        {"gguf"},
        _EAGLE3,
        lambda p: _rope(p.head.config, ROPES),
        "export cannot write RoPE type '{x}'",
        _OTHER,
    ),
    Rule(
        {"gguf"},
        _EAGLE3,
        lambda p: p.source and _vocabulary_error(p.source, p.head.vocab_size),
        "{x}",
    ),
)


def examine(config: DoctorConfig | None = None, **options: Any) -> JsonObject:
    """The verdict of every engine on a target and a draft.

    `loads`: whether it loads the pair without an error. `serves`: it loads, and token ids mean the
    same to both models. `exports`: commands that write what the engine reads, in order, if it does
    not read these directories.
    """
    config = configured(DoctorConfig, config, options)
    tokens = {}
    if config.plan is not None:
        plan = read_json(Path(config.plan), "a plan of `draftsmith plan`")
        tokens = {row["engine"]: row["draft_tokens"] for row in plan.get("engines") or ()}
    kind = head_kind(config.draft) or "draft"
    differs: str | None = None
    holds = "its layout holds this head"
    usual = DRAFT_TOKENS
    if kind == "draft":
        target = _model(config.target, config.trust_remote_code, config.revision)
        draft = _model(config.draft, config.trust_remote_code)
        pair = Pair((target, draft))
        differs, holds = _meaning(target, draft)
    else:
        source = load_source(
            config.draft, config.target, "auto", config.trust_remote_code, config.revision
        )
        assert source.target is not None
        pair = Pair((Model(config.target, text_config(source.target), source.tokenizer),), source)
        if kind in _BLOCKS:
            usual = pair.head.depths
            if not pair.head.config.causal:
                # A non-causal block drafts other tokens when shortened; use the whole block.
                tokens = {}
    verdicts = []
    for engine, kinds in SERVING.items():
        if not {kind, "draft"} & kinds.keys():
            continue
        verdict: JsonObject = {
            "engine": engine,
            "loads": False,
            "serves": False,
            "command": None,
            "exports": (),
        }
        if (serving := kinds.get(kind)) is None:
            verdict["reason"] = f"reads no {kind} heads"
        else:
            # A head is judged by its layout; if the target must be exported as well, by the
            # engine's own rules too.
            layout = {str(serving.draft_format)} | ({engine} if serving.target_format else set())
            verdict["reason"] = first_broken(pair, {engine} if kind == "draft" else layout)
            if verdict["reason"] is None:
                exports, command = serving.commands(
                    kind, config.target, config.draft, tokens.get(engine, usual)
                )
                here = first_broken(pair, {f"{engine} on a CPU"})
                reason = (differs or holds) + (f"; not on a CPU: {here}" if here else "")
                verdict |= {"loads": True, "serves": differs is None, "reason": reason}
                verdict |= {"command": command, "exports": exports}
        verdicts.append(verdict)
    return {
        "target": config.target,
        "draft": config.draft,
        "kind": kind,
        "plan": config.plan,
        "verdicts": verdicts,
    }


def _model(name: str, trust_remote_code: bool, revision: str | None = None) -> Model:
    check_source(name)
    try:
        config = AutoConfig.from_pretrained(
            name, trust_remote_code=trust_remote_code, revision=revision or "main"
        )
    except Exception as error:
        raise InputError(
            f"{name}: no model could be read from it: {why_not(name, error)}"
        ) from None
    return Model(
        name,
        config.get_text_config(decoder=True),
        find_tokenizer(name, trust_remote_code, revision),
    )


def _meaning(target: Model, draft: Model) -> tuple[str | None, str]:
    """Return why an engine would load the pair but accept nothing, or None; and, if None, notes on
    the pair.
    """
    if target.tokenizer is not None and draft.tokenizer is not None:
        token = first_difference(target.tokenizer, draft.tokenizer, min(target.size, draft.size))
        if token is not None:
            return (
                f"loads it without an error, but token {token} differs in the draft: nothing is "
                "accepted",
                "",
            )
    notes = ["its rules hold"]
    if draft.size > target.size:
        notes.append(f"the {draft.size - target.size} ids that only the draft has must be padding")
    if (ids_D := read_draft_vocabulary(draft.name, draft.size)) is not None:
        notes.append(
            f"it drafts all {draft.size} tokens, not only the {len(ids_D)} of the draft's own "
            "vocabulary"
        )
    return None, "; ".join(notes)
