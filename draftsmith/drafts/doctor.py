"""`draftsmith doctor`: which engines load a target with a draft, by the rules of
`draftsmith/drafts/engine_rules.py`.

For language models, only configs and tokenizers are read; a head is loaded with its target.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from draftsmith.core.errors import InputError
from draftsmith.core.hub import check_source, no_model, why_not
from draftsmith.core.io import JsonObject, read_json
from draftsmith.core.options import configured
from draftsmith.core.tokenization import Tokenizer, find_tokenizer
from draftsmith.drafts.config import BLOCK_KINDS, DoctorConfig
from draftsmith.drafts.draft_vocabulary import read_draft_vocabulary
from draftsmith.drafts.engine_commands import SERVING, Serving
from draftsmith.drafts.engine_rules import Model, Pair, first_broken
from draftsmith.drafts.heads import NATIVE, head_kind
from draftsmith.drafts.load import first_difference, load_source
from draftsmith.drafts.target_classes import objection

DRAFT_TOKENS = 4


@dataclass(frozen=True)
class Verdict:
    """What an engine does with a pair.

    loads: it loads the pair without an error. serves: it loads, and token ids mean the same to
    both models. known: whether that follows from its sources or a run; what is not known is not
    said to load. exports: commands that write what the engine reads, in order, if it does not read
    these directories.
    """

    engine: str
    reason: str
    loads: bool = False
    serves: bool = False
    known: bool = True
    command: str | None = None
    exports: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Meaning:
    """Whether token ids mean the same to both models, and the note of an engine that loads them."""

    same: bool
    note: str


def examine(config: DoctorConfig | None = None, **options: Any) -> JsonObject:
    """Return the `Verdict` of every engine on a target and a draft, as JSON, and whether a draft
    `pays` by the plan.
    """
    config = configured(DoctorConfig, config, options)
    kind = head_kind(config.draft) or "draft"
    plan: JsonObject = {}
    if config.plan is not None:
        plan = read_json(Path(config.plan), "a plan of `draftsmith plan`")
    tokens = {row["engine"]: row["draft_tokens"] for row in plan.get("engines") or ()}
    usual = DRAFT_TOKENS
    if kind == "draft":
        target = _model(config.target, config.trust_remote_code, config.revision)
        draft = _model(config.draft, config.trust_remote_code)
        pair = Pair((target, draft))
        meaning = _meaning(target, draft)
    else:
        pair = _pair_with_head(config)
        meaning = _Meaning(True, "its layout holds this head")
    if kind in BLOCK_KINDS:
        usual = pair.head.depths
        if not pair.head.config.causal:
            # A non-causal block drafts other tokens when shortened; use the whole block.
            tokens = {}
    verdicts = []
    for engine, kinds in SERVING.items():
        serving = kinds.get(kind)
        if serving is not None:
            count = tokens.get(engine, usual)
            verdicts.append(_verdict(engine, serving, config, pair, meaning, count))
        elif "draft" in kinds:
            verdicts.append(Verdict(engine, f"reads no {kind} heads"))
    return {
        "target": config.target,
        "draft": config.draft,
        "kind": kind,
        "plan": config.plan,
        "pays": plan.get("pays"),
        "speedup": plan.get("speedup"),
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }


def _verdict(
    engine: str,
    serving: Serving,
    config: DoctorConfig,
    pair: Pair,
    meaning: _Meaning,
    draft_tokens: int,
) -> Verdict:
    where = {engine}
    if pair.kind != "draft":
        # A head is judged by its layout; if the target must be exported as well, by the engine's
        # own rules too.
        where = {str(serving.draft_format), f"{engine} {pair.kind}"}
        where |= {engine} if serving.target_format else set()
    broken = first_broken(pair, where)
    if broken is not None:
        return Verdict(engine, broken)
    for model in pair.models:
        found = objection(engine, pair.kind, model.names)
        if found is not None:
            return Verdict(engine, found.reason, known=found.known)
    draft = config.draft
    if draft == NATIVE:
        # The engine reads the layer in the target's own checkpoint.
        serving = replace(serving, draft_format=None)
        draft = config.target
    exports, command = serving.commands(pair.kind, config.target, draft, draft_tokens)
    on_a_cpu = first_broken(pair, {f"{engine} on a CPU"})
    return Verdict(
        engine,
        reason=meaning.note + (f"; not on a CPU: {on_a_cpu}" if on_a_cpu else ""),
        loads=True,
        serves=meaning.same,
        command=command,
        exports=exports,
    )


def _model(name: str, trust_remote_code: bool, revision: str | None = None) -> Model:
    check_source(name)
    directory = Path(name)
    if directory.is_dir() and not (directory / "config.json").exists():
        raise InputError(f"{name}: {no_model(directory)}")
    try:
        config = AutoConfig.from_pretrained(
            name, trust_remote_code=trust_remote_code, revision=revision or "main"
        )
    except Exception as error:
        reason = why_not(name, error)
        raise InputError(f"{name}: no model could be read from it: {reason}") from None
    tokenizer = find_tokenizer(name, trust_remote_code, revision)
    return _named(name, config, tokenizer)


def _named(name: str, config: PretrainedConfig, tokenizer: Tokenizer | None) -> Model:
    architecture = next(iter(config.architectures or ()), None)
    return Model(name, config.get_text_config(decoder=True), tokenizer, architecture)


def _pair_with_head(config: DoctorConfig) -> Pair:
    source = load_source(
        config.draft, config.target, "auto", config.trust_remote_code, config.revision
    )
    assert source.target is not None
    return Pair((_named(config.target, source.target.config, source.tokenizer),), source)


def _meaning(target: Model, draft: Model) -> _Meaning:
    if target.tokenizer is not None and draft.tokenizer is not None:
        size = min(target.size, draft.size)
        token = first_difference(target.tokenizer, draft.tokenizer, size)
        if token is not None:
            loads = f"loads it without an error, but token {token} differs in the draft"
            return _Meaning(False, f"{loads}: nothing is accepted")
    notes = ["its rules hold"]
    if draft.size > target.size:
        notes.append(f"the {draft.size - target.size} ids that only the draft has must be padding")
    ids_D = read_draft_vocabulary(draft.name, draft.size)
    if ids_D is not None:
        drafts = f"it drafts all {draft.size} tokens"
        notes.append(f"{drafts}, not only the {len(ids_D)} of the draft's own vocabulary")
    return _Meaning(True, "; ".join(notes))
