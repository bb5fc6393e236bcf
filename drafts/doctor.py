"""`draftsmith doctor`: each engine's own rules (`drafts/rules.py`), applied to a pair.

`tests/test_doctor.py` has the engines that can be installed give their own verdicts on the same pairs. Of language
models only configs and tokenizers are read; a head is loaded with its target.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from drafts.config import DoctorConfig
from drafts.draft_vocabulary import read_draft_vocabulary
from drafts.heads import head_kind
from drafts.layouts.source import load_source
from drafts.load import first_difference
from drafts.rules import Model, Pair, first_broken
from draftsmith_core.engine_commands import SERVING
from draftsmith_core.errors import InputError
from draftsmith_core.hub import check_source, why_not
from draftsmith_core.io import read_json
from draftsmith_core.models import text_config
from draftsmith_core.tokenization import find_tokenizer

DRAFT_TOKENS = 4


@dataclass(frozen=True)
class Verdict:
    """What one engine does with a pair. `loads`: without an error. `serves`: and the draft means what it drafts."""

    engine: str
    loads: bool
    serves: bool
    reason: str
    command: str | None = None
    exports: tuple[str, ...] = ()
    """Commands that write what the engine reads, in order, if it does not read these directories."""


def examine(config: DoctorConfig) -> dict[str, Any]:
    """The verdict of every engine on a target and a draft."""
    tokens = {}
    if config.plan is not None:
        plan = read_json(Path(config.plan), "a plan of `draftsmith plan`")
        if "engines" not in plan:
            raise InputError(f"{config.plan}: has no 'engines'; name a plan of `draftsmith plan`")
        tokens = {row["engine"]: row["draft_tokens"] for row in plan["engines"]}
    kind = head_kind(config.draft) or "draft"
    differs, reason = None, "its layout holds this head"
    if kind == "draft":
        target, draft = (_model(name, config.trust_remote_code) for name in (config.target, config.draft))
        pair = Pair((target, draft))
        differs, reason = _meaning(target, draft)
    else:
        source = load_source(config.draft, config.target, trust_remote_code=config.trust_remote_code)
        assert source.target is not None
        pair = Pair((Model(config.target, text_config(source.target), source.tokenizer),), source)
    verdicts = []
    for engine, kinds in SERVING.items():
        serving = kinds.get(kind)
        if serving is None:
            if "draft" in kinds:
                verdicts.append(Verdict(engine, False, False, f"reads no {kind} heads"))
            continue
        # A head is judged by the layout that the engine reads; its target, if it must be written too, by the engine.
        layout = {str(serving.draft_format)} | ({engine} if serving.target_format else set())
        if broken := first_broken(pair, {engine} if kind == "draft" else layout):
            verdicts.append(Verdict(engine, False, False, broken))
            continue
        exports, command = serving.commands(kind, config.target, config.draft, tokens.get(engine, DRAFT_TOKENS))
        verdicts.append(Verdict(engine, True, differs is None, differs or reason, command, exports))
    return {
        "target": config.target,
        "draft": config.draft,
        "kind": kind,
        "plan": config.plan,
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }


def _model(name: str, trust_remote_code: bool) -> Model:
    check_source(name)
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise InputError(f"{name}: no model could be read from it: {why_not(name, error)}") from None
    text = config.get_text_config(decoder=True)
    if not isinstance(getattr(text, "vocab_size", None), int):
        raise InputError(f"{name}: its config.json says no 'vocab_size'; name a language model, or a head with it")
    return Model(name, text, find_tokenizer(name, trust_remote_code))


def _meaning(target: Model, draft: Model) -> tuple[str | None, str]:
    """Why nothing would be accepted although an engine loads the pair, if so; else what holds and what else to know."""
    if target.tokenizer is not None and draft.tokenizer is not None:
        token = first_difference(target.tokenizer, draft.tokenizer, min(target.size, draft.size))
        if token is not None:
            return f"loads it without an error, but token {token} is another one to the draft: nothing is accepted", ""
    notes = ["its rules hold"]
    if draft.size > target.size:
        notes.append(f"the {draft.size - target.size} ids that only the draft has must be padding")
    if (ids_D := read_draft_vocabulary(draft.name, draft.size)) is not None:
        notes.append(f"it drafts all {draft.size} tokens, not only the {len(ids_D)} of the draft's own vocabulary")
    return None, "; ".join(notes)
