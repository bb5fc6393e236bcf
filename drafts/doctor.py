"""`draftsmith doctor`: each engine's own rules, applied to a pair.

A rule is what the engine itself checks when it loads a pair (its sources, November 2026); `tests/test_doctor.py` has
the engines that can be installed give their own verdicts on the same pairs. Of language models only configs and
tokenizers are read; of a head the target is loaded, because what its layouts cannot say depends on it.
"""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from drafts.doctor_config import DoctorConfig
from drafts.draft_vocabulary import read_draft_vocabulary
from drafts.heads import head_kind
from drafts.heads.eagle import EagleHead
from drafts.heads.eagle3 import Eagle3Head
from drafts.layouts import gguf_vocabulary
from drafts.layouts.config import ExportConfig
from drafts.layouts.eagle_heads import check_authors_code, eagle_head
from drafts.layouts.export import PATH_TRAPS, load_source
from drafts.layouts.gguf_file import ARCHITECTURES
from drafts.layouts.source import Source, check_plain
from drafts.load import first_difference
from draftsmith_core.engine_commands import SERVING
from draftsmith_core.errors import InputError
from draftsmith_core.io import read_json
from draftsmith_core.sources import check_source, why_not
from draftsmith_core.tokenization import Tokenizer, find_tokenizer

DRAFT_TOKENS = 4
# common/speculative.cpp of llama.cpp.
_LLAMA_SIZES_APART, _LLAMA_FIRST_TEXT = 128, 5


@dataclass(frozen=True)
class Verdict:
    """What one engine does with a pair. `loads`: without an error. `serves`: and the draft means what it drafts."""

    engine: str
    loads: bool
    serves: bool
    reason: str
    command: str | None = None
    exports: tuple[str, ...] = ()
    """Commands that write what the engine reads, in order, where it does not read these directories."""


@dataclass(frozen=True)
class Model:
    """What the rules look at in a language model."""

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
        if (size := getattr(self.config, "head_dim", None)) is not None:
            return int(size)
        heads = getattr(self.config, "num_attention_heads", None)
        return None if heads is None else int(self.config.hidden_size // heads)


def examine(config: DoctorConfig) -> dict[str, Any]:
    """The verdict of every engine; InputError, one line, for what is no target or no draft."""
    tokens = _planned(config.plan)
    kind = head_kind(config.draft)
    verdicts = _of_head(config, tokens) if kind else _of_language_model(config, tokens)
    return {
        "target": config.target,
        "draft": config.draft,
        "kind": kind or "draft",
        "plan": config.plan,
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }


def _planned(plan: str | None) -> Mapping[str, int]:
    """Drafted tokens by engine, of a plan."""
    if plan is None:
        return {}
    rows = read_json(Path(plan), "a plan of `draftsmith plan`").get("engines")
    try:
        return {str(row["engine"]): int(row["draft_tokens"]) for row in rows or []}
    except (TypeError, KeyError, ValueError):
        raise InputError(f"{plan}: key 'engines': has no 'engine' and 'draft_tokens' in a row; plan again") from None


def _model(name: str, trust_remote_code: bool) -> Model:
    check_source(name)
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise InputError(f"{name}: no model could be read from it: {why_not(name, error, 'model')}") from None
    text = config.get_text_config(decoder=True)
    if not isinstance(getattr(text, "vocab_size", None), int):
        raise InputError(f"{name}: its config.json says no 'vocab_size'; name a language model, or a head with it")
    return Model(name, text, find_tokenizer(name, trust_remote_code))


def _of_language_model(config: DoctorConfig, tokens: Mapping[str, int]) -> list[Verdict]:
    target, draft = (_model(name, config.trust_remote_code) for name in (config.target, config.draft))
    differs = None
    if target.tokenizer is not None and draft.tokenizer is not None:
        differs = first_difference(target.tokenizer, draft.tokenizer, min(target.size, draft.size))
    ids_D = read_draft_vocabulary(config.draft, draft.size)
    found = []
    for engine, rule in _RULES.items():
        refused = rule(target, draft)
        reason = refused or "its rules hold"
        if refused is None and differs is not None:
            reason = f"loads it without an error, but token {differs} is another one to the draft: nothing is accepted"
        elif refused is None and draft.size > target.size:
            reason += f"; the {draft.size - target.size} ids that only the draft has must be padding"
        if refused is None and ids_D is not None:
            reason += f"; it drafts all {draft.size} tokens, not only the {len(ids_D)} of the draft's own vocabulary"
        exports, command = _commands(config, engine, "draft", tokens)
        line = command if refused is None else None
        found.append(Verdict(engine, refused is None, refused is None and differs is None, reason, line, exports))
    return found


def _commands(config: DoctorConfig, engine: str, kind: str, tokens: Mapping[str, int]) -> tuple[tuple[str, ...], str]:
    names = shlex.quote(config.target), shlex.quote(config.draft)
    return SERVING[engine][kind].commands(kind, *names, tokens.get(engine, DRAFT_TOKENS))


def _sizes(target: Model, draft: Model) -> str:
    return f"the draft's vocabulary has {draft.size} tokens and the target's {target.size}"


def _equal_sizes(target: Model, draft: Model) -> str | None:
    return None if target.size == draft.size else f"{_sizes(target, draft)}; it wants equal sizes"


def _transformers(target: Model, draft: Model) -> str | None:
    if target.size != draft.size:
        return f"{_sizes(target, draft)}; it then wants both tokenizers (universal assisted decoding, another method)"
    return None


def _vllm(target: Model, draft: Model) -> str | None:
    trap = next((word for word in PATH_TRAPS if word in str(Path(draft.name).resolve()).lower()), None)
    if trap is not None:
        return f"the draft's path has '{trap}' in it, by which it takes it for such a head; rename the directory"
    if target.size != draft.size:
        return f'{_sizes(target, draft)}; it wants equal sizes, or "use_heterogeneous_vocab": true'
    return None


def _llama_cpp(target: Model, draft: Model) -> str | None:
    for model in (target, draft):
        if model.config.model_type not in ARCHITECTURES:
            return f"{model.name} is a {model.config.model_type} model, which export does not write as GGUF"
        if model.tokenizer is None:
            return f"{model.name} has no tokenizer, and a GGUF file holds one"
    try:
        there, here = (gguf_vocabulary.described(m.tokenizer, m.size) for m in (target, draft) if m.tokenizer)
    except InputError as error:
        return str(error).removeprefix("--format gguf: ")
    if there.model != here.model:
        return f"its vocabulary types are {there.model} (target) and {here.model} (draft); they must be equal"
    for flag in ("bos", "eos"):
        if there.added[flag] != here.added[flag]:
            return f"only one of them adds {flag.upper()} to a text, or they add different tokens"
    if abs(target.size - draft.size) > _LLAMA_SIZES_APART:
        return f"{_sizes(target, draft)}; they may differ by {_LLAMA_SIZES_APART}"
    for i in range(_LLAMA_FIRST_TEXT, min(target.size, draft.size)):
        if there.tokens[i] != here.tokens[i]:
            return f"token {i} is {ascii(there.tokens[i])} to the target and {ascii(here.tokens[i])} to the draft"
    return None


def _onnxruntime_genai(target: Model, draft: Model) -> str | None:
    for model in (target, draft):
        if model.head_size is None:
            return f"{model.name} has no attention heads, and its builder makes such models only"
        if model.head_size % 16:
            return f"{model.name} has attention heads of size {model.head_size}; its attention wants a multiple of 16"
    return _equal_sizes(target, draft)


# Engine: the first of its rules that a pair breaks, or None.
_RULES: dict[str, Callable[[Model, Model], str | None]] = {
    "transformers": _transformers,
    "vllm": _vllm,
    "sglang": _equal_sizes,
    "llama.cpp": _llama_cpp,
    "openvino": lambda target, draft: None,  # it compares no vocabularies, not even their sizes
    "onnxruntime-genai": _onnxruntime_genai,
}


def _of_head(config: DoctorConfig, tokens: Mapping[str, int]) -> list[Verdict]:
    """By the refusals of `export`, which are what an engine could not compute as we do."""
    options = ExportConfig(
        draft=config.draft,
        target=config.target,
        format="sglang",
        out="unused",
        trust_remote_code=config.trust_remote_code,
    )
    source = load_source(options)
    found = []
    for engine, kinds in SERVING.items():
        serving = kinds.get(source.kind)
        if serving is None:
            if engine in _RULES:
                found.append(Verdict(engine, False, False, f"reads no {source.kind} heads"))
            continue
        form = str(serving.draft_format)
        try:
            _check_head(source, form)
        except InputError as error:
            found.append(Verdict(engine, False, False, str(error).removeprefix(f"--format {form}: ")))
            continue
        exports, command = _commands(config, engine, source.kind, tokens)
        found.append(Verdict(engine, True, True, "its layout holds this head", command, exports))
    return found


def _check_head(source: Source, form: str) -> None:
    head = source.draft
    if isinstance(head, EagleHead | Eagle3Head):
        eagle_head(source, form)
        if form == "eagle":
            check_authors_code(source, head)
        if form == "sglang" and head.borrowed.scales_embedding:
            raise InputError("the target scales its embedding (the Gemma family), and it gives a head the bare table")
    else:
        check_plain(source, form, "it")
    if form == "gguf" and source.target is not None:
        text = source.target.config.get_text_config(decoder=True)
        if text.model_type not in ARCHITECTURES:
            raise InputError(f"the target is a {text.model_type} model, which export does not write as GGUF")
        if source.tokenizer is None:
            raise InputError("the target has no tokenizer, and a GGUF file holds one")
        gguf_vocabulary.described(source.tokenizer, text.vocab_size)
