"""Which engines will take the draft that `align` is about to make, and what they take instead."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from draftsmith.alignment.config import AlignConfig
from draftsmith.core.tokenization import find_tokenizer
from draftsmith.drafts.config import DoctorConfig
from draftsmith.drafts.engine_commands import Support
from draftsmith.drafts.engine_rules import Pair
from draftsmith.drafts.engine_support import judge, loading, named, takers
from draftsmith.drafts.heads import HEADS
from draftsmith.drafts.load import LoadedModels, Source, kind_of
from draftsmith.train.config import VOCABULARY_KINDS


def support_of(config: AlignConfig, models: LoadedModels) -> dict[str, list[Support]]:
    """What each engine does with a draft of the target, by kind: of the draft that is given or
    asked for, else of both heads that `align` chooses from; and `lm`, a pruned copy.
    """
    model = named(config.target, models.target.config, models.tokenizer)
    start = str(config.directory.absolute() / "start")
    copy = replace(model, name=start)
    given = next(iter(models.drafts.values()), None)
    heads = []
    if isinstance(given, PreTrainedModel):
        own = find_tokenizer(str(config.draft), config.trust_remote_code)
        copy = named(str(config.draft), given.config, own)
    elif given is not None:
        heads.append(given)
    else:
        for kind in [config.kind] if config.kind else ["eagle3", "eagle"]:
            options: dict[str, Any] = {"draft_vocab": range(1)} if kind in VOCABULARY_KINDS else {}
            heads.append(HEADS[kind].fresh(models.target, **options))
    pairs = {"lm": Pair((model, copy))}
    for head in heads:
        source = Source(
            name=start,
            draft=head,
            dtype=models.target.dtype,
            tokenizer=models.tokenizer,
            target=models.target,
            target_name=config.target,
        )
        pairs[kind_of(head)] = Pair((model,), source)
    names = DoctorConfig(target=config.target, draft=config.draft or start)
    return {kind: judge(pair, names) for kind, pair in pairs.items()}


def in_words(support: Mapping[str, Sequence[Support]], kind: str) -> str:
    """Say which engines take a draft of this kind, and which only a pruned one."""
    line = takers(support[kind], "such a draft")
    others = [name for name in loading(support["lm"]) if name not in loading(support[kind])]
    if others:
        line += f"; a pruned one (--init prune) in {', '.join(others)}"
    return line
