"""What each engine does with a target and a draft, by the rules of
`draftsmith/drafts/engine_rules.py`.

For language models, only configs and tokenizers are read; a head is loaded with its target.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedModel

from draftsmith.core.errors import InputError
from draftsmith.core.hub import offline_if_unreachable, why_not
from draftsmith.core.io import JsonObject
from draftsmith.core.model_configs import read_config
from draftsmith.core.sources import check_source, no_model
from draftsmith.core.tokenization import Tokenizer, find_tokenizer
from draftsmith.drafts.config import BLOCK_KINDS, DoctorConfig
from draftsmith.drafts.draft_sources import JOINED, is_joined, model_of
from draftsmith.drafts.draft_vocabulary import read_draft_vocabulary
from draftsmith.drafts.engine_commands import DRAFT_TOKENS, SERVING, Serving, Support
from draftsmith.drafts.engine_rules import Model, Pair, first_broken
from draftsmith.drafts.heads import head_kind
from draftsmith.drafts.load import LoadedModels, Source, first_difference, load_source
from draftsmith.drafts.tables import read_table


@cache
def engine_classes() -> dict[str, JsonObject]:
    """By engine: its `version`, and lists of names of classes, or of model types, that it takes as
    a target by its own sources. Nothing is said of a class that is not there.

    `engine_classes.yaml` is printed by `tests/workers/engine_classes.py`, but for the engines whose
    sources name them together.
    """
    return dict(read_table("engine_classes.yaml"))


def read_pair(config: DoctorConfig) -> Pair:
    """The pair that the options name."""
    target = str(config.target)
    draft = model_of(config.draft)
    if head_kind(draft) is None:
        models = _model(target, config.trust_remote_code, config.revision)
        return Pair((models, _model(draft, config.trust_remote_code)))
    source = load_source(draft, target, "auto", config.trust_remote_code, config.revision)
    return _of_head(source)


def _of_head(source: Source) -> Pair:
    assert source.target is not None
    target = named(str(source.target_name), source.target.config, source.tokenizer)
    return Pair((target,), source)


def loaded_pair(loaded: LoadedModels, name: str, config: DoctorConfig) -> Pair:
    """The pair that the options name, whose draft is loaded under this name."""
    draft = loaded.drafts[name]
    if isinstance(draft, PreTrainedModel):
        return read_pair(config)
    target = loaded.target
    return _of_head(
        Source(
            name=config.draft,
            draft=draft,
            dtype=target.dtype,
            tokenizer=loaded.tokenizer,
            target=target,
            target_name=loaded.target_name,
        )
    )


def judge(pair: Pair, config: DoctorConfig) -> list[Support]:
    """What every engine does with a pair. config: names of the two, for commands."""
    at_best = Support("", "", loads=True, serves=True)
    if pair.kind == "draft":
        at_best = _compare_tokens(*pair.models)
    # A block is drafted whole.
    tokens = pair.head.depths if pair.kind in BLOCK_KINDS else DRAFT_TOKENS
    kind = JOINED + pair.kind if is_joined(config.draft) else pair.kind
    verdicts = []
    for engine, kinds in SERVING.items():
        serving = kinds.get(kind)
        if serving is not None and serving.refused:
            verdicts.append(Support(engine, serving.refused))
        elif serving is not None and serving.unwritten:
            verdicts.append(Support(engine, serving.unwritten, by_export=True))
        elif serving is not None:
            verdicts.append(_support(engine, serving, config, pair, at_best, tokens))
        elif "draft" in kinds:
            joins = "takes prompt lookup or a draft, not both"
            reason = joins if kind != pair.kind else f"reads no {kind} heads"
            verdicts.append(Support(engine, reason))
    return verdicts


def refused_by_all(verdicts: Sequence[Support]) -> str:
    """Say why no engine serves a head; empty if one does."""
    if any(each.serves for each in verdicts):
        return ""
    reasons = "; ".join(f"{each.engine}: {each.reason}" for each in verdicts)
    return f"no engine loads this head ({reasons}); decode it with draftsmith"


def _support(
    engine: str,
    serving: Serving,
    config: DoctorConfig,
    pair: Pair,
    at_best: Support,
    tokens: int,
) -> Support:
    """What the engine does with the pair: `at_best`, if neither a rule nor its sources object."""
    where = {engine}
    if pair.kind != "draft":
        # A head is judged by its layout; if the target must be exported as well, by the engine's
        # own rules too.
        where = {str(serving.draft_format), f"{engine} {pair.kind}"}
        where |= {engine} if serving.target_format else set()
    broken = first_broken(pair, where)
    if broken is not None:
        return Support(engine, broken.message, by_export=broken.by_export)
    classes = engine_classes().get(engine)
    for names in (model.names for model in pair.models):
        if classes is None or not set(names).isdisjoint(classes[serving.classes]):
            continue
        version = f"{engine} {classes['version']}"
        if serving.asked is not None and not set(names).isdisjoint(classes["text"]):
            return Support(engine, f"{names[0]} has no {serving.asked} in {version}")
        reason = f"the sources of {version} do not say so of {names[0]}"
        return Support(engine, reason, known=False)
    target = str(config.target)
    draft = model_of(config.draft)
    exports, command = serving.commands(pair.kind, target, draft, tokens)
    on_a_cpu = first_broken(pair, {f"{engine} on a CPU"})
    notes = [at_best.reason]
    if serving.norms and pair.norms_of_31():
        notes.append(f"EAGLE-3.1 needs {engine} {serving.norms} or later")
    if on_a_cpu:
        notes.append(f"not on a CPU: {on_a_cpu.message}")
    return replace(
        at_best,
        engine=engine,
        reason="; ".join(filter(None, notes)),
        gpu_only=on_a_cpu is not None,
        command=command,
        exports=exports,
    )


def _model(name: str, trust_remote_code: bool, revision: str | None = None) -> Model:
    check_source(name)
    directory = Path(name)
    if directory.is_dir() and not (directory / "config.json").exists():
        raise InputError(f"{name}: {no_model(directory)}")
    try:
        with offline_if_unreachable(name):
            config = read_config(name, trust_remote_code=trust_remote_code, revision=revision)
    except Exception as error:
        reason = why_not(name, error)
        raise InputError(f"{name}: no model could be read from it: {reason}") from None
    tokenizer = find_tokenizer(name, trust_remote_code, revision)
    return named(name, config, tokenizer)


def named(name: str, config: PretrainedConfig, tokenizer: Tokenizer | None) -> Model:
    """The parts of a model that rules read, from its config."""
    architecture = next(iter(config.architectures or ()), None)
    return Model(name, config.get_text_config(decoder=True), tokenizer, architecture)


def _compare_tokens(target: Model, draft: Model) -> Support:
    """What an engine does that loads both: whether token ids mean the same to them."""
    if target.tokenizer is not None and draft.tokenizer is not None:
        size = min(target.size, draft.size)
        token = first_difference(target.tokenizer, draft.tokenizer, size)
        if token is not None:
            differs = f"loads it without an error, but token {token} differs in the draft"
            return Support("", f"{differs}: nothing is accepted", loads=True)
    notes = []
    if Path(draft.name).absolute() == Path(target.name).absolute():
        notes.append("it is the target itself, so drafting with it cannot pay")
    if draft.size > target.size:
        notes.append(f"the {draft.size - target.size} ids that only the draft has must be padding")
    ids_D = read_draft_vocabulary(draft.name, draft.size)
    if ids_D is not None:
        drafts = f"it drafts all {draft.size} tokens"
        notes.append(f"{drafts}, not only the {len(ids_D)} of the draft's own vocabulary")
    return Support("", "; ".join(notes), loads=True, serves=True)
