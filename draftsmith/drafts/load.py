"""A draft of any kind from its directory or hub name: a language model, or a head on the target's
features.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from draftsmith.core.errors import InputError, warn_once
from draftsmith.core.hub import cached
from draftsmith.core.io import JsonObject, read_json
from draftsmith.core.model_configs import own_dtype, read_config
from draftsmith.core.models import (
    DTYPES,
    Quantize,
    check_finite,
    check_tokenizer,
    context_length,
    dtype_name,
    fingerprint,
    hash_tensors,
    load_model,
    quantization,
    read_per_token,
    vocabulary_size,
)
from draftsmith.core.records import read_record
from draftsmith.core.sources import check_source
from draftsmith.core.tokenization import Tokenizer, find_tokenizer, load_tokenizer
from draftsmith.drafts.draft_sources import NATIVE
from draftsmith.drafts.draft_vocabulary import (
    FILE,
    attach_draft_vocabulary,
    draft_vocabulary,
    read_draft_vocabulary,
    trim,
)
from draftsmith.drafts.heads import Head, head_kind, load_head
from draftsmith.drafts.heads.block import BlockHead
from draftsmith.drafts.heads.medusa import HydraHeads, MedusaHeads
from draftsmith.drafts.layouts.table import foreign
from draftsmith.drafts.vocabulary import VocabularyMap, attach, map_vocabulary, vocabulary_map

Draft = PreTrainedModel | Head
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModels:
    """A target, its tokenizer and drafts that were checked against both. `drafts` by name, in the
    order given.
    """

    target_name: str
    target: PreTrainedModel
    tokenizer: Tokenizer
    drafts: dict[str, Draft]

    @property
    def models(self) -> list[PreTrainedModel]:
        """The language models, target first."""
        models = (self.target, *self.drafts.values())
        return [model for model in models if isinstance(model, PreTrainedModel)]

    @property
    def context(self) -> int | None:
        """Number of tokens that fit into every model; None without a limit."""
        return min(filter(None, map(context_length, self.models)), default=None)


def load_models(
    target: str,
    drafts: Mapping[str, str] | Sequence[str] = (),
    *,
    device: str = "auto",
    dtype: str = "auto",
    quantize: Quantize = "none",
    quantize_draft: Quantize | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    chat_template: str | None = None,
    tokenizer: Tokenizer | None = None,
    heterogeneous_vocab: bool = False,
    target_parallel: int = 1,
    target_device_map: str | None = None,
) -> LoadedModels:
    """Load a target and any number of drafts, and check that they belong together.

    target, drafts: local directories or hub names; drafts as `{name: source}`, or as sources, which
    are then their names (a second one of the same source is `SOURCE#2`). quantize_draft: default
    `quantize`; heads are never quantised. dtype: "auto" is as `load_model` says; drafts follow the
    target. target_parallel, target_device_map: as `load_model` says. revision: the target's branch,
    tag or commit on the hub. chat_template: a Jinja file in place of its own. tokenizer: the
    target's, if loaded. heterogeneous_vocab: accept draft language models of another tokenizer;
    they draft the tokens that both have. Raises InputError for what does not fit: a draft of
    another vocabulary, a head made for another target.
    """
    named = _by_name(drafts)
    for source in named.values():  # before a large target is loaded
        if source != NATIVE:
            check_source(source.removeprefix(f"{NATIVE}:"))
    if not isinstance(tokenizer, Tokenizer | None):
        raise InputError(f"tokenizer: expected a loaded tokenizer, got {tokenizer!r}")
    if tokenizer is None:
        tokenizer = load_tokenizer(target, trust_remote_code, chat_template, revision)
    options: JsonObject = {"device": device, "trust_remote_code": trust_remote_code}
    model = load_model(
        target,
        **options,
        dtype=dtype,
        quantize=quantize,
        revision=revision,
        target_parallel=target_parallel,
        target_device_map=target_device_map,
    )
    check_tokenizer(target, model, tokenizer)
    loaded: dict[str, Draft] = {}
    for name, source in named.items():
        draft = load_draft(
            source,
            model,
            **options,
            # Use the target's dtype for every draft, so that drafts are compared at one precision.
            dtype=dtype_name(model) if dtype == "auto" else dtype,
            quantize=quantize_draft or quantize,
        )
        loaded[name] = draft
        if isinstance(draft, PreTrainedModel):
            mapping = check_tokens_agree(
                source, draft, model, tokenizer, trust_remote_code, heterogeneous_vocab
            )
            if mapping is not None:
                _share_tokens(source, draft, mapping, tokenizer)
            _remark_size(source, draft, target, model)
    return LoadedModels(target, model, tokenizer, loaded)


def _share_tokens(
    source: str, draft: PreTrainedModel, mapping: VocabularyMap, tokenizer: Tokenizer
) -> None:
    attach(draft, mapping)
    shares = f"{mapping.shared} of the target's {len(tokenizer)} tokens"
    log.warning("%s: has another tokenizer; it shares %s, and drafts those only", source, shares)


def _by_name(drafts: Mapping[str, str] | Sequence[str]) -> Mapping[str, str]:
    """Sources of drafts by name; a second one of the same source is `SOURCE#2`."""
    if isinstance(drafts, Mapping):
        return drafts
    named: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for source in [drafts] if isinstance(drafts, str) else drafts:
        counts[source] += 1
        named[source if counts[source] == 1 else f"{source}#{counts[source]}"] = source
    return named


def _remark_size(
    source: str, draft: PreTrainedModel, target_name: str, target: PreTrainedModel
) -> None:
    """Warn of a draft that is not smaller than its target."""
    size = read_per_token(draft)
    whole = read_per_token(target)
    if Path(source).absolute() == Path(target_name).absolute():
        warn_once(f"{source}: is the target itself; drafting with it cannot pay")
    elif size >= whole:
        more = "more than" if size > whole else "as much as"
        warn_once(
            f"{source}: reads {more} the target ({size:,} and {whole:,} parameters per token); "
            "drafting cannot pay"
        )


def load_draft(
    name: str,
    target: PreTrainedModel,
    *,
    device: str,
    dtype: str,
    trust_remote_code: bool = False,
    quantize: Quantize | None = None,
) -> Draft:
    """The draft `name` for this target.

    A head takes the target's device and dtype and is never quantised. A language model with a draft
    vocabulary keeps only those rows of its output projection, with a warning.
    """
    if head_kind(name) is not None:
        head = load_head(name, target)
        check_finite(name, head)
        return head
    config = cached(name, "config.json")
    if config is not None and (what := foreign(read_json(config, "the config of a draft"))):
        raise InputError(f"{config}: describes {what}")
    model = load_model(
        name, device=device, dtype=dtype, trust_remote_code=trust_remote_code, quantize=quantize
    )
    size = vocabulary_size(model)
    if (ids_D := read_draft_vocabulary(name, size)) is not None:
        trim(model, ids_D)
        log.warning(
            "%s: drafts %d of its %d tokens, those that its %s names", name, len(ids_D), size, FILE
        )
    return model


def draft_kind(name: str) -> str:
    """ "draft" for a language model, else the kind of head. Either is also the name of the proposer
    that uses it.
    """
    return head_kind(name) or "draft"


def kind_of(draft: Draft) -> str:
    """`draft_kind` of a loaded draft."""
    return "draft" if isinstance(draft, PreTrainedModel) else draft.kind


def depth_limit(draft: Draft) -> int | None:
    """Number of tokens that a set of heads or a block drafts ahead; None for drafts without a
    limit.
    """
    if isinstance(draft, BlockHead):
        return draft.depths
    return draft.config.num_heads if isinstance(draft, MedusaHeads | HydraHeads) else None


def draft_fingerprint(draft: Draft) -> str:
    """16 hex digits of architecture and weights; of a head, without what it borrows from the
    target; of a draft of another vocabulary, with the map between the two.
    """
    if isinstance(draft, PreTrainedModel):
        words = vocabulary_map(draft)
        if words is not None:
            return hash_tensors({"model": fingerprint(draft), "words": words.in_draft}, [])
        ids_D = draft_vocabulary(draft)
        if ids_D is None:
            return fingerprint(draft)
        return hash_tensors({"model": fingerprint(draft)}, [("ids", ids_D)])
    return hash_tensors(
        {"kind": draft.kind, **draft.config.to_json()}, sorted(draft.state_dict().items())
    )


def other_targets(sources: Iterable[str], target: PreTrainedModel) -> list[str]:
    """Return a line for each draft whose record names other target weights than these.

    Targets of 4 bits and padded ones have fingerprints of their own, so they are not compared.
    """
    records = {source: read_record(Path(source)) for source in sources}
    recorded = {source: record.get("target_fingerprint") for source, record in records.items()}
    changed = quantization(target) != "none" or hasattr(target.config, "widened_from")
    if changed or not any(recorded.values()):
        return []
    # All of the target's weights are read for it, once.
    here = fingerprint(target)
    lines = []
    for source, other in recorded.items():
        if other not in (None, here):
            trained_for = f"{records[source].get('target')}, {other}"
            lines.append(
                f"draft {source} was trained for other target weights ({trained_for}); it may be "
                "accepted less here"
            )
    return lines


def check_tokens_agree(
    source: str,
    draft: PreTrainedModel,
    target: PreTrainedModel,
    tokenizer: Tokenizer,
    trust_remote_code: bool = False,
    heterogeneous: bool = False,
) -> VocabularyMap | None:
    """Raise InputError unless token ids mean the same to a draft language model as to the target.

    If `heterogeneous`, return the map between the two instead. Vocabularies may be padded to
    different sizes if both tokenizers agree on every id that both models have; a draft without a
    tokenizer must have the target's size. A head is checked by `load_draft`.
    """
    size = vocabulary_size(draft)
    whole = vocabulary_size(target)
    own = find_tokenizer(source, trust_remote_code)
    if own is None and size != whole:
        raise InputError(
            f"{source}: its vocabulary has {size} tokens and the target's has {whole}, and it has "
            "no tokenizer; use a draft with the target's vocabulary (docs/choosing-a-draft.md)"
        )
    if own is None or (token := first_difference(tokenizer, own, min(size, whole))) is None:
        return None
    if heterogeneous:
        return map_vocabulary(tokenizer, own, whole, size, source=source)
    texts = own.convert_ids_to_tokens(token), tokenizer.convert_ids_to_tokens(token)
    theirs, ours = ("nothing" if text is None else ascii(text) for text in texts)
    raise InputError(
        f"{source}: token {token} is {theirs} to it and {ours} to the target; use a draft with "
        "the target's tokenizer, "
        "draftsmith init --method transplant, or decode with --heterogeneous_vocab true "
        "(docs/choosing-a-draft.md)"
    )


def first_difference(a: Tokenizer, b: Tokenizer, size: int) -> int | None:
    """The first id below `size` that two tokenizers read as different tokens; None if there is
    none.

    Added tokens (padding, chat markers) may differ: fine-tuned models of one family rename those.
    """
    tokens_a = _tokens_below(a, size)
    tokens_b = _tokens_below(b, size)
    added = set(a.get_added_vocab().values()) | set(b.get_added_vocab().values())
    ids = sorted((tokens_a.keys() | tokens_b.keys()) - added)
    return next((i for i in ids if tokens_a.get(i) != tokens_b.get(i)), None)


def _tokens_below(tokenizer: Tokenizer, size: int) -> dict[int, str]:
    return {i: token for token, i in tokenizer.get_vocab().items() if i < size}


@dataclass(frozen=True)
class Source:
    """What an export starts from: a draft, its weights rounded to `dtype` and held in fp32.

    target: of a head; None for a language model.
    """

    name: str
    draft: Draft
    dtype: torch.dtype
    tokenizer: Tokenizer | None
    target: PreTrainedModel | None = None
    target_name: str | None = None

    @property
    def kind(self) -> str:
        """`draft` for a language model, else the kind of head."""
        return kind_of(self.draft)


@torch.no_grad()
def load_source(
    name: str,
    target_name: str | None = None,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> Source:
    """Load the draft, and the target of a head. dtype "auto" is the draft's own; of a head, its
    target's.
    """
    kind = head_kind(name)
    options: JsonObject = {
        "device": "cpu",
        "dtype": "float32",
        "trust_remote_code": trust_remote_code,
    }
    target = None
    tokenizer = None
    if not target_name and kind is not None:
        target_name = read_record(Path(name)).get("target")
    if target_name:
        target = load_model(target_name, **options, revision=revision)
        tokenizer = find_tokenizer(target_name, trust_remote_code, revision)
    draft: Draft
    if kind is not None:
        if target is None:
            raise InputError(
                f"--target: is missing; {name} is a head ({kind}), which belongs to one target"
            )
        draft = load_head(name, target)
    else:
        draft = load_model(name, **options, quantize="none")
        if (ids_D := read_draft_vocabulary(name, vocabulary_size(draft))) is not None:
            attach_draft_vocabulary(draft, ids_D)
        if target is not None and tokenizer is not None:
            check_tokens_agree(name, draft, target, tokenizer, trust_remote_code)
        tokenizer = find_tokenizer(name, trust_remote_code) or tokenizer
        target = None
    if dtype == "auto":
        model, commit = (name, None) if kind is None else (str(target_name), revision)
        weights_dtype = own_dtype(
            read_config(model, trust_remote_code=trust_remote_code, revision=commit)
        )
    else:
        weights_dtype = DTYPES[dtype]
    # Round to `dtype` but keep fp32: the check of an export then compares the written values.
    for parameter in draft.parameters():
        parameter.copy_(parameter.to(weights_dtype))
    return Source(name, draft, weights_dtype, tokenizer, target, target_name)
